"""Step times that no configuration of a box of RRA's space goes below (rra.bounds says why)."""

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import numpy as np

from xgpt.core.lengths import FloatArray, IntArray
from xsimulator.attention_envelope import attention_envelope
from xsimulator.envelope import PairEnvelope
from xsimulator.layer_times import TOGETHER
from xsimulator.occupancy import expected_maximum_z
from xsimulator.plans import StagePlan
from xsimulator.policies.rra.closed_form import Rra
from xsimulator.policies.rra.config import RraConfigs
from xsimulator.policies.rra.phases import DecodeLoads, PhaseBatches

# The chances that a group has a query, and that nobody has one, come to one in the closed form,
# within 0.7 % in any block of the paper's tasks.
OWN_TOLERANCE = 0.02


class StageSteps(NamedTuple):
    """One kind of stage takes so many seconds for one group's step, and for all groups'."""

    encode_one: FloatArray  # [configs]
    encode_all: FloatArray
    decode_one: FloatArray  # [blocks, configs] in the mean, with the chance that there is a step
    decode_all: FloatArray
    decode_own: FloatArray  # for a group of which a query is there for certain


_Decode = tuple[FloatArray, FloatArray, FloatArray]  # the last three of StageSteps


class RangeOf(NamedTuple):
    """Over a range of N_D these are least: the `variance` [blocks, boxes] of the number of active
    queries, and the tokens of context [boxes] that are `read`."""

    variance: FloatArray
    read: FloatArray


class LeastSteps:
    """The least step times are derived for one Rra.

    For throughput they are those of `batches`, in relation to which no smaller batch's are less;
    for latency (`largest` given: queries of a group in the box's largest batch) no larger batch's
    are less."""

    def __init__(self, rra: Rra) -> None:
        self._rra = rra
        layers = rra.plans.layers
        # envelopes of a layer's seconds (count, length), by degree
        self.attention_of = cache(partial(attention_envelope, layers))
        self.compaction_of = cache(partial(_envelope, layers.compaction_s))
        self._least: dict[tuple[int, int, int], FloatArray] = {}  # variances, see range_of

    def on_line(self, plan: StagePlan, batches: PhaseBatches, small: PhaseBatches, *,
                largest: FloatArray | None = None) -> list[StageSteps]:
        """The steps are given by kind of stage, at one N_D; `small` are the smallest batches of
        the boxes, whose contexts count. All else is as in the closed form."""
        tables, loads, is_least_latency = (
            plan.least_steps, batches.decode_loads(), largest is not None)
        context = batches.charged_context(loads if small is batches else small.decode_loads())
        attention = {
            degree: own * self.attention_of(degree).factor(loads.both, context,
                                                         of_more=is_least_latency)
            for degree, own in plan.times.decode_attention_s(loads.both, context).items()}
        seconds = tables.decode_rows_s(loads.both, attention)
        own = _own(seconds, loads) if is_least_latency else None
        rows, share = batches.moved_rows(loads)
        for work, moved, degree in zip(seconds, tables.compaction_s(rows, context[1]),
                                       tables.degrees, strict=True):
            if np.ndim(moved):  # it has been measured
                work += share * moved * self.compaction_of(degree).factor(
                    rows, context[1], of_more=is_least_latency)
        return self._with_encoding(plan, batches, largest,
                                   _one_and_all(seconds, loads, own))

    def over_range(self, plan: StagePlan, batches: PhaseBatches, over: RangeOf, *,
                   largest: FloatArray | None = None) -> list[StageSteps]:
        """The steps are given by kind of stage, for any N_D of a range. Attention is spread evenly
        over the tokens of a phase (throughput) or over a query's iterations (latency: `largest`
        given), at the least time for a token of context."""
        rra, loads = self._rra, batches.decode_loads(over.variance)
        queries = loads.both
        most = queries.max(axis=(0, 1))
        if largest is None:
            each = queries * (over.read / max(rra.flow.mean_iterations, 1e-9))
        else:
            most = most * np.maximum(largest / batches.group_batch, 1.0)
            per_step = batches.group_batch * over.read / max(rra.seen_iterations, 1)
            usual = np.where(queries[1] > 0, queries[1], 1.0)  # blocks that a phase lacks
            each = queries / usual * (per_step / loads.chance)
        longest = np.full(most.shape, rra.flow.largest_context)
        attention = {degree: each * self.attention_of(degree).least_rate(most, longest)
                     for degree in plan.times.degrees}
        seconds = plan.least_steps.decode_bare_s(queries)
        bare = [slowest.copy() for slowest, _ in seconds]
        own = _own(seconds, loads) if largest is not None else None
        plan.least_steps.add_attention(seconds, attention)
        if own is not None:  # attention is spread over steps by their chance
            for least, (slowest, _), without in zip(own, seconds, bare, strict=True):
                least += (slowest - without) * loads.anyone
        return self._with_encoding(plan, batches, largest,
                                   _one_and_all(seconds, loads, own))

    def range_of(self, corners: RraConfigs, others: IntArray, rows: IntArray, *,
                 is_least_latency: bool) -> RangeOf:
        """The corners are at one end of the boxes' ranges of N_D, `others` at the other."""
        rra, own = self._rra, corners.decode_iterations[rows]
        columns = rra.blocks.columns(own, corners.encode_batch[rows])
        variance = np.zeros((int(rra.blocks.packed.counts[columns].max(initial=1)), len(rows)))
        for place, key in enumerate(zip(columns.tolist(), own.tolist(), others[rows].tolist(),
                                        strict=True)):
            least = self._least.get(key)
            if least is None:
                least = self._least[key] = self._variance_by_block(*key, is_least_latency)
            variance[: len(least), place] = least
        if not is_least_latency:
            return RangeOf(variance, np.full(len(rows), float(rra.flow.context.sum())))
        until = rra.flow.context_read_until(max(rra.seen_iterations, 1))
        return RangeOf(variance, np.array([until[low - 1:up].min() for low, up in zip(
            others[rows], own, strict=True)]))

    def _with_encoding(self, plan: StagePlan, batches: PhaseBatches, largest: FloatArray | None,
                       decode: list[_Decode]) -> list[StageSteps]:
        """What an uneven split of an encode batch costs is left out: that falls and rises again."""
        inputs, groups = self._rra.encode_tokens, batches.encode_groups
        queries = batches.encode_batch / groups
        tokens = queries * inputs.mean
        most = queries if largest is None else np.maximum(queries, largest)
        spread = inputs.adjusted(np.sqrt(queries) * inputs.std, tokens, most)
        both = np.stack([tokens + expected_maximum_z(groups) * spread, tokens])
        attention = self._encode_attention(plan, queries, largest is not None)
        each = both / inputs.mean
        seconds = plan.least_steps.encode_s(both, np.broadcast_to(queries, both.shape), {
            degree: each * own for degree, own in attention.items()})
        return [StageSteps(slowest, np.maximum(groups * usual, slowest), *steps)
                for (slowest, usual), steps in zip(seconds, decode, strict=True)]

    def _encode_attention(self, plan: StagePlan, queries: FloatArray,
                          is_least_latency: bool) -> dict[int, FloatArray]:
        """A query's ENCODE_ATTENTION is the least of any smaller batch's, or of any larger
        one's."""
        nodes = np.asarray(TOGETHER, float)
        attention = {}
        for degree, own in plan.times.mean_attention_s(nodes).items():
            if is_least_latency:  # between two nodes the lower one bounds
                least = np.minimum.accumulate(own[::-1])[::-1]
                attention[degree] = least[np.minimum(np.searchsorted(
                    nodes, queries, side="right"), len(nodes)) - 1]
            else:
                attention[degree] = np.interp(queries, nodes, np.minimum.accumulate(own))
        return attention

    def _variance_by_block(self, column: int, own: int, other: int,
                           is_least_latency: bool) -> FloatArray:
        """The least variance [blocks] is QueryFlow.least_variance's."""
        ends = self._rra.blocks.ends[column]
        least = self._rra.flow.least_variance(min(own, other), max(own, other), own)
        if is_least_latency:  # of that iteration and any before it
            return np.asarray(np.minimum.accumulate(least)[ends - 1])
        first = np.append(0, ends[:-1])
        return np.asarray(np.add.reduceat(least, first) / (ends - first))


def _envelope(seconds: Callable[[FloatArray, FloatArray, int], FloatArray],
              degree: int) -> PairEnvelope:
    return PairEnvelope(lambda count, length: seconds(count, length, degree))


def _own(seconds: list[FloatArray], loads: DecodeLoads) -> list[FloatArray]:
    """A group of which a query is there for certain takes no less by kind of stage: its usual step,
    which the closed form has with the chance of a step and, where nobody else is there, besides."""
    return [np.maximum(slowest * loads.anyone, usual * (1 - OWN_TOLERANCE))
            for slowest, usual in seconds]


def _one_and_all(seconds: list[FloatArray], loads: DecodeLoads,
                 own: list[FloatArray] | None) -> list[_Decode]:
    """One step takes the slowest of `seconds` [slowest and usual] where there is any, and all no
    less than these in turn; `own` is the same where it is not asked for: by kind of stage."""
    decode = []
    for kind, (slowest, usual) in enumerate(seconds):
        one = slowest * loads.anyone
        least = one if own is None else own[kind]
        decode.append((one, np.maximum(loads.steps * usual, one), least))
    return decode
