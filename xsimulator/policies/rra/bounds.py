"""What no RRA configuration of a box can better: bounds for branch and bound (paper section 5.1).

A box holds the batches B_E of a range and, on a *line*, one N_D; else every N_D of a range too. Its
corners bound it:

    throughput at the largest B_E and the smallest N_D, latency at the smallest B_E and largest N_D

once step times are replaced by their envelope (policies.envelope), which is what makes a corner
right for the whole box although measured times are only nearly monotone. Why it holds:

- A period is no shorter than any stage's work, nor than what a group's own steps take one after
  the other; nor is a latency shorter than any path from a query's encoding to its last token.
  These are sums of step times, in relation to the batch falling as the batch grows.
- n(u), the queries active at iteration u, falls with N_D at every u, while the sum over a phase,
  E[D] per query, stays: with more N_D the same tokens are made in smaller steps. A query with d
  iterations goes through fewer phases, and its k-th smallest n(u) is no larger. So throughput
  falls with N_D and so does latency, in these sums, for step times that rise with the batch and
  fall in relation to it. Attention counts there by the least time for a token of context that any
  such step could have.
- On a line the timeline itself (xsimulator.pipeline) is followed too: it is a longest path over
  sums of one group's and of all groups' steps, so lower ones never make a period longer.

What rests on the closed form's own approximations (iterations taken in blocks, a period watched for
two phases) is covered by tolerances: LINE_TOLERANCE, RANGE_TOLERANCE; one group a stage never took
more than half of them. More groups than stages, which only a job can ask for, take the pipeline
longer to settle than the closed form watches it: throughput came out up to 13 % above what the
busiest stage can do, latency up to 9 % too low (CROWDED_TOLERANCE). Where there are fewer queries
than such groups, the chance that a group has one is interpolated up to a fifth too high, and
throughput was up to 35 % above the bound of a larger batch (SPARSE_TOLERANCE).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from xgpt.core.lengths import FloatArray, IntArray
from xrunner.rules.batch_sizer import LEAST_ADJUSTED
from xsimulator.layer_times import TOGETHER
from xsimulator.occupancy import expected_maximum_z
from xsimulator.pipeline import Work, least_timeline, sorted_timeline
from xsimulator.policies.envelope import PairEnvelope
from xsimulator.policies.rra.closed_form import (
    Batch,
    PlanTables,
    Rra,
    RraConfigs,
    decode_loads,
    expected_context,
)
from xsimulator.policies.rra.phase_blocks import SMALL_BATCH
from xsimulator.step_table import StepTable

LINE_TOLERANCE = 0.001  # of throughput and latency, on a line
RANGE_TOLERANCE = 0.005  # and over several N_D: iterations are taken in other blocks
CROWDED_TOLERANCE = 0.2  # of more groups than stages
SPARSE_TOLERANCE = 0.5  # of more groups than stages, and than queries in a batch
# Batches on either side are worked out in other blocks: a box lies on one side (phase_blocks).
SIDES = SMALL_BATCH
_REFUSED = np.errstate(invalid="ignore")  # sizes are infinite


class _Steps(NamedTuple):
    """Seconds of one kind of stage: of one group's step, and of all groups'."""

    encode_one: FloatArray  # [configs]
    encode_all: FloatArray
    decode_one: FloatArray  # [blocks, configs]
    decode_all: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Lowered:
    """What depends on a plan alone: tables of lower bounds."""

    plan: PlanTables
    tables: StepTable
    attention: dict[int, PairEnvelope]  # per degree
    compaction: dict[int, PairEnvelope]


def _encode_through(kinds: Sequence[_Steps], counts: IntArray) -> FloatArray:
    """One group's encode step on every stage."""
    return np.asarray(np.sum([k.encode_one * c for k, c in zip(kinds, counts, strict=True)],
                             axis=0))


def _encode_all(kinds: Sequence[_Steps], counts: IntArray) -> FloatArray:
    """All groups' encode steps on one stage, and one group's on the others."""
    most = np.max([k.encode_all - k.encode_one for k in kinds], axis=0)
    return np.asarray(_encode_through(kinds, counts) + most)


def _work(kinds: Sequence[_Steps], lowered: _Lowered) -> list[Work]:
    """By stage."""
    work = [Work(encode_s=k.encode_one, encode_rest_s=k.encode_all - k.encode_one,
                 decode_s=k.decode_one, decode_rest_s=k.decode_all - k.decode_one) for k in kinds]
    return [work[kind] for kind in lowered.tables.kind_of]


def _tolerance(plan: PlanTables, batch: Batch, is_range: bool) -> FloatArray:
    """[configs] share by which the closed form may be off a bound."""
    is_crowded = batch.groups > len(plan.stages)
    return np.select([is_crowded & (batch.encode_batch < batch.groups), is_crowded],
                     [SPARSE_TOLERANCE, CROWDED_TOLERANCE],
                     RANGE_TOLERANCE if is_range else LINE_TOLERANCE)


def _rate(batch: Batch, period_s: FloatArray) -> FloatArray:
    """[configs] queries a second; infinite where the period is not known."""
    is_known = np.isfinite(period_s) & (period_s > 0)
    return np.where(is_known, batch.encode_batch / np.where(is_known, period_s, 1.0), np.inf)


def _known(seconds: FloatArray) -> FloatArray:
    """0 where nothing is known."""
    return np.where(np.isfinite(seconds), seconds, 0.0)


class RraBounds:
    """Bounds for one Rra."""

    def __init__(self, rra: Rra) -> None:
        self._rra = rra
        self._known: dict[int, _Lowered] = {}
        self._of_degree: dict[tuple[str, int], PairEnvelope] = {}
        self._least: dict[tuple[int, int, int], FloatArray] = {}  # variances, see _least_variance

    @_REFUSED
    def throughput_qps(self, corners: RraConfigs, smallest: IntArray,
                       last: IntArray | None = None) -> FloatArray:
        """[boxes] no configuration with a batch of `smallest` up to the corner's, and the corner's
        N_D (a line) or any up to `last`, has more. Infinite where the corner's own sizes are
        refused: that says nothing of the others."""
        found = np.empty(len(corners))
        for plan, rows in self._rra.by_plan(corners):
            lowered = self._lowered(plan)
            batch = self._rra.batch_of(plan, corners, rows)
            if last is None:
                kinds = self._steps(lowered, batch,
                                    self._smallest(plan, corners, smallest, rows))
            else:
                variance = self._least_variance(corners, last, rows, len(batch.queries.widths),
                                                is_least_latency=False)
                read = np.full(len(rows), self._rra.flow.mean_context_read)
                kinds = self._steps(lowered, batch, None, over=(variance, read))
            found[rows] = _rate(batch, self._least_period_s(plan, batch, kinds)) * (
                1 + _tolerance(plan, batch, last is not None))
        return found

    @_REFUSED
    def line_throughput_qps(self, corners: RraConfigs, smallest: IntArray) -> FloatArray:
        """As throughput_qps on lines, but tighter, and slower to find: by the timeline."""
        found = np.empty(len(corners))
        for plan, rows in self._rra.by_plan(corners):
            lowered = self._lowered(plan)
            batch = self._rra.batch_of(plan, corners, rows)
            kinds = self._steps(lowered, batch, self._smallest(plan, corners, smallest, rows))
            timeline = sorted_timeline(_work(kinds, lowered), batch.queries.blocks,
                                       batch.queries.widths)
            found[rows] = _rate(batch, timeline.period_s) * (1 + _tolerance(plan, batch, False))
        return found

    @_REFUSED
    def line_latency_s(self, corners: RraConfigs, largest: IntArray) -> FloatArray:
        """As latency_s on lines, but tighter, and slower to find: by the timeline."""
        found = np.empty(len(corners))
        for plan, rows in self._rra.by_plan(corners):
            lowered = self._lowered(plan)
            batch = self._rra.batch_of(plan, corners, rows)
            kinds = self._steps(lowered, batch, batch,
                                largest=largest[rows] / batch.encode_groups)
            queries = batch.queries
            timeline = least_timeline(_work(kinds, lowered), queries.blocks, queries.widths)
            finish = (timeline.encoded_s if self._rra.seen_iterations == 0 else
                      timeline.finish_s[np.arange(len(rows)), queries.seen])
            found[rows] = (finish + queries.phases_before * timeline.period_s) / (
                1 + _tolerance(plan, batch, False))
        return _known(found)

    @_REFUSED
    def latency_s(self, corners: RraConfigs, largest: IntArray,
                  first: IntArray | None = None) -> FloatArray:
        """[boxes] no configuration with a batch of the corner's up to `largest`, and the corner's
        N_D (a line) or any down to `first`, has less. 0 where the corner's own sizes are
        refused."""
        found = np.empty(len(corners))
        for plan, rows in self._rra.by_plan(corners):
            lowered = self._lowered(plan)
            batch = self._rra.batch_of(plan, corners, rows)
            most = largest[rows] / batch.encode_groups
            if first is None:
                kinds = self._steps(lowered, batch, batch, largest=most)
            else:
                variance = self._least_variance(corners, first, rows, len(batch.queries.widths),
                                                is_least_latency=True)
                kinds = self._steps(lowered, batch, None, largest=most,
                                    over=(variance, self._read(corners, first, rows)))
            found[rows] = self._least_latency_s(plan, batch, kinds, is_line=first is None) / (
                1 + _tolerance(plan, batch, first is not None))
        return _known(found)

    def _smallest(self, plan: PlanTables, corners: RraConfigs, smallest: IntArray,
                  rows: IntArray) -> Batch:
        """The same lines at the other end of the box; the same order of rows."""
        return self._rra.batch_of(plan, replace(corners, encode_batch=smallest), rows)

    # --- steps --------------------------------------------------------------------------------

    def _steps(self, lowered: _Lowered, batch: Batch, small: Batch | None, *,
               largest: FloatArray | None = None,
               over: tuple[FloatArray, FloatArray] | None = None) -> list[_Steps]:
        """By kind of stage: for throughput, of `batch`, in relation to it no more than those of any
        smaller batch down to `small`; for latency (`largest` given: queries of a group in the
        largest one), no more than those of any larger batch. On a line, or over a range of N_D
        (`over`: variance and context read, see _range_decode)."""
        encode = self._encode(lowered, batch, largest)
        if over is not None:
            decode = self._range_decode(lowered, batch, *over, largest)
        else:
            assert small is not None
            decode = self._line_decode(lowered, batch, small, largest is not None)
        return [_Steps(*e, *d) for e, d in zip(encode, decode, strict=True)]

    def _encode(self, lowered: _Lowered, batch: Batch,
                largest: FloatArray | None) -> list[tuple[FloatArray, FloatArray]]:
        """As Rra._encode_s without what an uneven split costs: that falls and rises again."""
        rra, groups = self._rra, batch.encode_groups
        queries = batch.encode_batch / groups
        tokens = queries * rra.input_mean
        spread = np.sqrt(queries) * rra.input_std
        if rra.adjustment > 0:
            band = rra.adjustment * tokens / np.sqrt(3)
            cut = (rra.input_mean + rra.input_std**2 / rra.input_mean) / np.sqrt(12)
            most = queries if largest is None else np.maximum(queries, largest)
            share = np.clip(most - (LEAST_ADJUSTED - 1), 0.0, 1.0)
            spread += share * (np.minimum(spread, np.maximum(band, cut)) - spread)
        both = np.stack([tokens + expected_maximum_z(groups) * spread, tokens])
        attention = self._encode_attention(lowered, queries, largest is not None)
        each = both / rra.input_mean
        seconds = lowered.tables.encode_s(both, np.broadcast_to(queries, both.shape), {
            degree: each * own for degree, own in attention.items()})
        return [(slowest, np.maximum(groups * usual, slowest)) for slowest, usual in seconds]

    def _encode_attention(self, lowered: _Lowered, queries: FloatArray,
                          is_least_latency: bool) -> dict[int, FloatArray]:
        """ENCODE_ATTENTION of a query: the least of any smaller batch's, or of any larger one's."""
        times, nodes = lowered.plan.plan.times, np.asarray(TOGETHER, float)
        found = {}
        for degree, own in times.mean_attention_s(nodes).items():
            least = (np.minimum.accumulate(own[::-1])[::-1] if is_least_latency
                     else np.minimum.accumulate(own))
            if is_least_latency:  # between two nodes the lower one bounds
                found[degree] = least[np.minimum(np.searchsorted(nodes, queries, side="right"),
                                                 len(nodes)) - 1]
            else:
                found[degree] = np.interp(queries, nodes, least)
        return found

    def _line_decode(self, lowered: _Lowered, batch: Batch, small: Batch,
                     is_least_latency: bool) -> list[tuple[FloatArray, FloatArray]]:
        """As policies.rra._decode_s; contexts are those of the smallest batch."""
        blocks, tables = batch.queries, lowered.tables
        loads = decode_loads(batch)
        queries = np.stack([loads.most, loads.queries])
        context = np.broadcast_to(blocks.context, queries.shape)
        if blocks.maximum_context is not None:
            of_small = loads if small is batch else decode_loads(small)
            context = np.maximum(context, expected_context(
                blocks.maximum_context, np.stack([of_small.most, of_small.queries])))
        attention = {}
        for degree, own in lowered.plan.plan.times.decode_attention_s(queries, context).items():
            envelope = lowered.attention[degree]
            attention[degree] = own * (envelope.of_more if is_least_latency else envelope.of_fewer)(
                queries, context)
        seconds = tables.decode_rows_s(queries, attention)
        happens = -np.expm1(-batch.group_batch * blocks.moved)
        rows = batch.group_batch * blocks.moved / np.where(happens > 0, happens, 1.0)
        share = np.minimum(happens / loads.chance, 1.0)
        for work, moved, degree in zip(seconds, tables.compaction_s(rows, context[1]),
                                       tables.degrees, strict=True):
            if np.ndim(moved):  # it has been measured
                envelope = lowered.compaction[degree]
                work += share * moved * (envelope.of_more if is_least_latency else
                                         envelope.of_fewer)(rows, context[1])
        most = np.minimum(loads.steps, 1.0)
        return [(slowest * most, np.maximum(loads.steps * usual, slowest * most))
                for slowest, usual in seconds]

    def _range_decode(self, lowered: _Lowered, batch: Batch, variance: FloatArray,
                      read: FloatArray, largest: FloatArray | None,
                      ) -> list[tuple[FloatArray, FloatArray]]:
        """Attention is spread evenly over the tokens of a phase (throughput) or over a query's
        iterations (latency: `largest` given), at the least time for a token of context. `variance`
        [blocks, boxes], `read` [boxes] tokens of context: no more than at any N_D of the range."""
        rra, loads = self._rra, decode_loads(batch, variance)
        queries = np.stack([loads.most, loads.queries])
        most = queries.max(axis=(0, 1))
        if largest is None:
            each = queries * (read / max(rra.flow.mean_iterations, 1e-9))
        else:
            most = most * np.maximum(largest / batch.group_batch, 1.0)
            per_step = batch.group_batch * read / max(rra.seen_iterations, 1)
            usual = np.where(loads.queries > 0, loads.queries, 1.0)  # blocks that a phase lacks
            each = queries / usual * (per_step / loads.chance)
        longest = np.full(most.shape, rra.flow.largest_context)
        attention = {degree: each * envelope.least_rate(most, longest)
                     for degree, envelope in lowered.attention.items()}
        seconds = lowered.tables.decode_rows_s(queries, attention)
        most_steps = np.minimum(loads.steps, 1.0)
        return [(slowest * most_steps, np.maximum(loads.steps * usual, slowest * most_steps))
                for slowest, usual in seconds]

    def _read(self, corners: RraConfigs, others: IntArray, rows: IntArray) -> FloatArray:
        """[boxes] least tokens of context read until the latency bound's query ends."""
        until = self._rra.flow.context_read_until(max(self._rra.seen_iterations, 1))
        first, last = others[rows], corners.decode_iterations[rows]
        return np.array([until[low - 1:up].min() for low, up in zip(first, last, strict=True)])

    def _least_variance(self, corners: RraConfigs, others: IntArray, rows: IntArray,
                        blocks: int, *, is_least_latency: bool) -> FloatArray:
        """[blocks, boxes] see QueryFlow.least_variance. The corners are at one end of the boxes'
        ranges of N_D, `others` at the other."""
        found = np.zeros((blocks, len(rows)))
        own = corners.decode_iterations[rows]
        columns = self._rra.blocks.columns(own, corners.encode_batch[rows])
        for place, key in enumerate(zip(columns.tolist(), own.tolist(), others[rows].tolist(),
                                        strict=True)):
            least = self._least.get(key)
            if least is None:
                least = self._least[key] = self._least_by_block(*key, is_least_latency)
            found[: len(least), place] = least
        return found

    def _least_by_block(self, column: int, own: int, other: int,
                        is_least_latency: bool) -> FloatArray:
        ends = self._rra.blocks.ends(column)
        least = self._rra.flow.least_variance(min(own, other), max(own, other), own)
        if is_least_latency:  # of that iteration and any before it
            return np.asarray(np.minimum.accumulate(least)[ends - 1])
        first = np.append(0, ends[:-1])
        return np.asarray(np.add.reduceat(least, first) / (ends - first))

    # --- sums ---------------------------------------------------------------------------------

    def _least_period_s(self, plan: PlanTables, batch: Batch,
                        kinds: Sequence[_Steps]) -> FloatArray:
        """The busiest stage's work; a group's own steps one after the other; or all groups' encode
        steps on one stage and the last one's way on, then the first group's iterations."""
        widths = batch.queries.widths
        counts = np.bincount(plan.tables.kind_of)
        decode: FloatArray = np.zeros(len(batch.encode_batch))
        period: FloatArray = np.zeros(len(batch.encode_batch))
        for kind, count in zip(kinds, counts, strict=True):
            decode += count * (widths * kind.decode_one).sum(axis=0)
            np.maximum(period, kind.encode_all + (widths * kind.decode_all).sum(axis=0),
                       out=period)
        np.maximum(period, decode + _encode_through(kinds, counts), out=period)
        first = np.sum([k.decode_one[0] * c for k, c in zip(kinds, counts, strict=True)], axis=0)
        behind = _encode_all(kinds, counts) + kinds[plan.tables.kind_of[-1]].decode_one[0]
        return np.asarray(np.maximum(period, behind + decode - first))

    def _least_latency_s(self, plan: PlanTables, batch: Batch, kinds: Sequence[_Steps], *,
                         is_line: bool) -> FloatArray:
        """The longest of: own steps one after the other, the first group's behind all groups'
        encode steps; and through the stages up to one, all groups' steps there, and on through the
        others; in the mean of first and last group."""
        blocks, rows = batch.queries, np.arange(len(batch.encode_batch))
        kind_of, counts = plan.tables.kind_of, np.bincount(plan.tables.kind_of)
        through = _encode_through(kinds, counts)
        if self._rra.seen_iterations == 0:
            return np.asarray(through)
        last_one = [k.decode_one[blocks.seen, rows] for k in kinds]
        until = [np.cumsum(blocks.widths * k.decode_one, axis=0)[blocks.seen, rows] for k in kinds]
        own = np.sum([u * c for u, c in zip(until, counts, strict=True)], axis=0)
        first = np.sum([k.decode_one[0] * c for k, c in zip(kinds, counts, strict=True)], axis=0)
        behind = _encode_all(kinds, counts) + kinds[kind_of[-1]].decode_one[0] - first
        longest = own + 0.5 * (through + np.maximum(through, behind))
        before: FloatArray = np.zeros(len(rows))
        after = np.sum([one * c for one, c in zip(last_one, counts, strict=True)], axis=0)
        for place, kind in enumerate(kind_of):
            after = after - last_one[kind]
            # a kind's first and last stage are enough
            if kind not in kind_of[:place] or kind not in kind_of[place + 1:]:
                k = kinds[kind]
                all_s = np.cumsum(blocks.widths * k.decode_all, axis=0)[blocks.seen, rows]
                last_all = k.decode_all[blocks.seen, rows]
                if is_line:
                    path = (before + 0.5 * (k.encode_all + k.encode_one) + all_s
                            - 0.5 * (last_all - last_one[kind]) + after)
                else:
                    path = k.encode_one + all_s - last_all
                longest = np.maximum(longest, path)
            before = before + kinds[kind].encode_one
        return np.asarray(longest + blocks.phases_before
                          * self._least_period_s(plan, batch, kinds))

    def _lowered(self, plan: PlanTables) -> _Lowered:
        if id(plan) not in self._known:
            times = plan.plan.times

            self._known[id(plan)] = _Lowered(
                plan=plan, tables=plan.plan.least_steps,
                attention={degree: self._of_layer(
                    "attention", times.layers.decode_attention_s, degree)
                    for degree in times.degrees},
                compaction={degree: self._of_layer("compaction", times.layers.compaction_s, degree)
                            for degree in times.degrees})
        return self._known[id(plan)]

    def _of_layer(self, what: str, seconds: Callable[[FloatArray, FloatArray, int], FloatArray],
                  degree: int) -> PairEnvelope:
        """A layer of one degree takes as long in every plan."""
        key = (what, degree)
        if key not in self._of_degree:
            self._of_degree[key] = PairEnvelope(
                lambda count, length: seconds(count, length, degree))
        return self._of_degree[key]
