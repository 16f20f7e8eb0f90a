"""What no RRA configuration of a box can better: bounds for branch and bound (paper section 5.1).

A box holds the batches B_E of a range and, on a *line*, one N_D; else every N_D of a range too. Its
corners bound it:

    throughput at the largest B_E and the smallest N_D, latency at the smallest B_E and largest N_D

once step times are replaced by their envelope (xsimulator.envelope), which is what makes a corner
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
- The query whose latency is asked for is there for certain. An iteration takes, in its eyes, the
  chance of a step times the slowest one, and one of its own where nobody is there in the mean: the
  chances come to one (least_steps.OWN_TOLERANCE), so it is no less than its group's usual step.
- On a line the timeline itself (xsimulator.pipeline) is followed too: it is a longest path over
  sums of one group's and of all groups' steps, so lower ones never make a period longer.

What rests on the closed form's own approximations (iterations taken in blocks, a period watched for
two phases) is covered by tolerances: LINE_TOLERANCE, RANGE_TOLERANCE; one group a stage never took
more than half of them, but where a phase has fewer iterations than there are stages: there a line
took up to 0.5 % (SHORT_TOLERANCE). More groups than stages, which only a job can ask for, take the
pipeline longer to settle than the closed form watches it: throughput came out up to 13 % above what
the busiest stage can do, latency up to 9 % too low (CROWDED_TOLERANCE). Where there are fewer
queries than such groups, the chance that a group has one is interpolated up to a fifth too high,
and throughput was up to 35 % above the bound of a larger batch (SPARSE_TOLERANCE)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from xgpt.core.constraint import Metric
from xgpt.core.lengths import FloatArray, IntArray
from xsimulator.pipeline import StageWork, least_timeline, sorted_timeline
from xsimulator.plans import StagePlan
from xsimulator.policies.rra.closed_form import Rra
from xsimulator.policies.rra.config import RraConfigs
from xsimulator.policies.rra.least_steps import OWN_TOLERANCE, LeastSteps, StageSteps
from xsimulator.policies.rra.native import OF_METRIC, Of
from xsimulator.policies.rra.packed_blocks import OWN
from xsimulator.policies.rra.phase_blocks import SMALL_BATCH
from xsimulator.policies.rra.phases import PhaseBatches

LINE_TOLERANCE = 0.001  # of throughput and latency, on a line
RANGE_TOLERANCE = 0.005  # and over several N_D: iterations are taken in other blocks
SHORT_TOLERANCE = 0.01  # of phases with fewer iterations than there are stages
CROWDED_TOLERANCE = 0.2  # of more groups than stages
SPARSE_TOLERANCE = 0.5  # of more groups than stages, and than queries in a batch
# Batches on either side are worked out in other blocks: a box lies on one side (phase_blocks).
SIDES = SMALL_BATCH
# (plan, corners of it in falling order of their blocks, which corners these are)
_OfPlan = Callable[[StagePlan, PhaseBatches, IntArray], FloatArray]


class RraBounds:
    """The bounds are for one Rra, of boxes given by a corner of each: its batch and its N_D."""

    def __init__(self, rra: Rra) -> None:
        self._rra, self._steps = rra, LeastSteps(rra)
        self._tolerances: FloatArray = np.array([
            OWN_TOLERANCE, SPARSE_TOLERANCE, CROWDED_TOLERANCE, SHORT_TOLERANCE, RANGE_TOLERANCE,
            LINE_TOLERANCE])

    def throughput_qps(self, corners: RraConfigs, smallest: IntArray,
                       last: IntArray | None = None) -> FloatArray:
        """No configuration of a box [boxes] has more: it has a batch of `smallest` up to the
        corner's, and the corner's N_D (a line) or any up to `last`. The bound is infinite where the
        corner's own sizes are refused: that says nothing of the others."""

        def bound(plan: StagePlan, batches: PhaseBatches, rows: IntArray) -> FloatArray:
            if last is None:
                kinds = self._from_smallest(plan, batches, corners, smallest, rows)
            else:
                kinds = self._steps.over_range(plan, batches, self._steps.range_of(
                    corners, last, rows, is_least_latency=False))
            period_s = least_period_s(kinds, plan.least_steps.kind_of, batches)
            return _rate(batches, period_s) * (1 + _tolerance(plan, batches, last is not None))

        return self._limits(Of.RATE, corners, bound, {"smallest": smallest, "other": last})

    def line_throughput_qps(self, corners: RraConfigs, smallest: IntArray) -> FloatArray:
        """On lines this is tighter than throughput_qps, and slower to find: by the timeline."""

        def bound(plan: StagePlan, batches: PhaseBatches, rows: IntArray) -> FloatArray:
            kinds = self._from_smallest(plan, batches, corners, smallest, rows)
            timeline = sorted_timeline(_work(kinds, plan), batches.queries.blocks,
                                       batches.queries.widths)
            return _rate(batches, timeline.period_s) * (1 + _tolerance(plan, batches, False))

        return self._limits(Of.LINE_RATE, corners, bound, {"smallest": smallest})

    def latency_s(self, corners: RraConfigs, largest: IntArray, first: IntArray | None = None, *,
                  of: Metric = "latency") -> FloatArray:
        """No configuration of a box [boxes] has less: it has a batch of the corner's up to
        `largest`, and the corner's N_D (a line) or any down to `first`. The bound is 0 where the
        corner's own sizes are refused. `of`: of the time to the first token, or of all of that
        query's later ones together (tpot)."""

        def bound(plan: StagePlan, batches: PhaseBatches, rows: IntArray) -> FloatArray:
            most = largest[rows] / batches.encode_groups
            if first is None:
                kinds = self._steps.on_line(plan, batches, batches, largest=most)
            else:
                kinds = self._steps.over_range(plan, batches, self._steps.range_of(
                    corners, first, rows, is_least_latency=True), largest=most)
            least_s = _LEAST_SECONDS[of](
                kinds, plan.least_steps.kind_of, batches, is_line=first is None,
                seen_iterations=self._rra.seen_iterations)
            return least_s / (1 + _tolerance(plan, batches, first is not None))

        return _known(self._limits(OF_METRIC[of], corners, bound,
                                   {"largest": largest, "other": first}))

    def line_latency_s(self, corners: RraConfigs, largest: IntArray) -> FloatArray:
        """On lines this is tighter than latency_s, and slower to find: by the timeline."""

        def bound(plan: StagePlan, batches: PhaseBatches, rows: IntArray) -> FloatArray:
            kinds = self._steps.on_line(plan, batches, batches,
                                        largest=largest[rows] / batches.encode_groups)
            queries = batches.queries
            timeline = least_timeline(_work(kinds, plan), queries.blocks, queries.widths)
            finish = (timeline.encoded_s if self._rra.seen_iterations == 0 else
                      timeline.finish_s[np.arange(len(rows)), queries.seen])
            finish = finish + queries.phases_before * timeline.period_s
            by_sums = least_latency_s(kinds, plan.least_steps.kind_of, batches, is_line=True,
                                      seen_iterations=self._rra.seen_iterations)
            return np.maximum(finish, by_sums) / (1 + _tolerance(plan, batches, False))

        return _known(self._limits(Of.LINE_LATENCY, corners, bound, {"largest": largest}))

    def _limits(self, of: Of, corners: RraConfigs, bound: _OfPlan,
                others: Mapping[str, IntArray | None]) -> FloatArray:
        """[boxes] natively where it can be had, else by arrays: `bound`."""
        if self._rra.native is None or not len(corners):
            return self._by_arrays(corners, bound, np.arange(len(corners)))
        limits, is_sure = self._rra.native.bounds(of, self._steps, self._tolerances, corners,
                                                  **others)
        if not is_sure.all():
            rows = np.flatnonzero(~is_sure)
            limits[rows] = self._by_arrays(corners, bound, rows)
        return limits

    def _by_arrays(self, corners: RraConfigs, bound: _OfPlan, of: IntArray) -> FloatArray:
        """[of] the bounds of some boxes."""
        limits = np.empty(len(of))
        # refused sizes are infinite; so is a limit by next to no chance, which says nothing
        with np.errstate(invalid="ignore", over="ignore"):
            for plan, places in self._rra.by_plan(corners.take(of)):
                rows = of[places]
                limits[places] = bound(plan, self._rra.batches_of(
                    plan, corners, rows, without=OWN), rows)
        return limits

    def _from_smallest(self, plan: StagePlan, batches: PhaseBatches, corners: RraConfigs,
                       smallest: IntArray, rows: IntArray) -> list[StageSteps]:
        """The least steps of lines whose other end of the box is at the `smallest` batches."""
        other = self._rra.batches_of(plan, replace(corners, encode_batch=smallest), rows,
                                     without=OWN)
        return self._steps.on_line(plan, batches, other)


def _tolerance(plan: StagePlan, batches: PhaseBatches, is_range: bool) -> FloatArray:
    """The closed form may be off a bound by this share [configs]."""
    is_crowded = batches.groups > len(plan.stages)
    is_short = batches.queries.widths.sum(axis=0) < len(plan.stages)
    return np.select([is_crowded & (batches.encode_batch < batches.groups), is_crowded, is_short],
                     [SPARSE_TOLERANCE, CROWDED_TOLERANCE, SHORT_TOLERANCE],
                     RANGE_TOLERANCE if is_range else LINE_TOLERANCE)


def _rate(batches: PhaseBatches, period_s: FloatArray) -> FloatArray:
    """The queries a second [configs] are infinite where the period is not known."""
    is_known = np.isfinite(period_s) & (period_s > 0)
    return np.where(is_known, batches.encode_batch / np.where(is_known, period_s, 1.0), np.inf)


def _known(seconds: FloatArray) -> FloatArray:
    """Seconds are 0 where nothing is known."""
    return np.where(np.isfinite(seconds), seconds, 0.0)


def _work(kinds: Sequence[StageSteps], plan: StagePlan) -> list[StageWork]:
    """The steps are given by stage, as xsimulator.pipeline takes them."""
    work = [StageWork(encode_s=k.encode_one, encode_rest_s=k.encode_all - k.encode_one,
                      decode_s=k.decode_one, decode_rest_s=k.decode_all - k.decode_one)
            for k in kinds]
    return [work[kind] for kind in plan.least_steps.kind_of]


def least_period_s(kinds: Sequence[StageSteps], kind_of: Sequence[int],
                   batches: PhaseBatches) -> FloatArray:
    """A period is no shorter than the busiest stage's work; a group's own steps one after the
    other; or all groups' encode steps on one stage and the last one's way on, then the first
    group's iterations."""
    widths, counts = batches.queries.widths, np.bincount(kind_of)
    decode: FloatArray = np.zeros(len(batches.encode_batch))
    period: FloatArray = np.zeros(len(batches.encode_batch))
    for kind, count in zip(kinds, counts, strict=True):
        decode += count * (widths * kind.decode_one).sum(axis=0)
        np.maximum(period, kind.encode_all + (widths * kind.decode_all).sum(axis=0), out=period)
    np.maximum(period, decode + _encode_through(kinds, counts), out=period)
    first = np.sum([k.decode_one[0] * c for k, c in zip(kinds, counts, strict=True)], axis=0)
    behind = _encode_all(kinds, counts) + kinds[kind_of[-1]].decode_one[0]
    return np.asarray(np.maximum(period, behind + decode - first))


def least_ttft_s(kinds: Sequence[StageSteps], kind_of: Sequence[int], batches: PhaseBatches,
                 **_: object) -> FloatArray:
    """A first token is no sooner than one group's encode step is through all stages."""
    return _encode_through(kinds, np.bincount(kind_of))


def least_decoding_s(kinds: Sequence[StageSteps], kind_of: Sequence[int], batches: PhaseBatches, *,
                     seen_iterations: int, is_line: bool) -> FloatArray:
    """From its first token to its last a query takes its own steps through all stages, one after
    the other, and whole periods before its last phase. The first of them is not counted: an
    encoder-decoder model's first token comes from it."""
    blocks, rows, counts = batches.queries, np.arange(len(batches.encode_batch)), np.bincount(
        kind_of)
    if seen_iterations == 0:
        return np.zeros(len(rows))
    own = np.sum([c * (np.cumsum(blocks.widths * k.decode_own, axis=0)[blocks.seen, rows]
                       - k.decode_own[0]) for k, c in zip(kinds, counts, strict=True)], axis=0)
    return np.asarray(own + blocks.phases_before * _least_phase_s(kinds, kind_of, batches))


def least_latency_s(kinds: Sequence[StageSteps], kind_of: Sequence[int], batches: PhaseBatches, *,
                    seen_iterations: int, is_line: bool) -> FloatArray:
    """A latency is no shorter than own steps one after the other, of a group that has the query for
    certain, the first group's behind all groups' encode steps; nor than the way through the stages
    up to one, all groups' steps there, and on through the others; in the mean of first and last
    group."""
    blocks, rows, counts = batches.queries, np.arange(len(batches.encode_batch)), np.bincount(
        kind_of)
    through = _encode_through(kinds, counts)
    if seen_iterations == 0:
        return np.asarray(through)
    last_one = [k.decode_one[blocks.seen, rows] for k in kinds]
    until = [np.cumsum(blocks.widths * k.decode_own, axis=0)[blocks.seen, rows] for k in kinds]
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
    return np.asarray(longest + blocks.phases_before * _least_phase_s(kinds, kind_of, batches))


def _least_phase_s(kinds: Sequence[StageSteps], kind_of: Sequence[int],
                   batches: PhaseBatches) -> FloatArray:
    """A phase is no shorter than a period in the eyes of a query that is there all the while, nor
    than its group's steps one after the other."""
    counts = np.bincount(kind_of)
    own = np.sum([c * (batches.queries.widths * k.decode_own).sum(axis=0)
                  for k, c in zip(kinds, counts, strict=True)], axis=0)
    return np.asarray(np.maximum(least_period_s(kinds, kind_of, batches),
                                 own + _encode_through(kinds, counts)))


_LEAST_SECONDS: Mapping[Metric, Callable[..., FloatArray]] = {
    "latency": least_latency_s, "ttft": least_ttft_s, "tpot": least_decoding_s}


def _encode_through(kinds: Sequence[StageSteps], counts: IntArray) -> FloatArray:
    """One group's encode step goes through every stage."""
    return np.asarray(np.sum([k.encode_one * c for k, c in zip(kinds, counts, strict=True)],
                             axis=0))


def _encode_all(kinds: Sequence[StageSteps], counts: IntArray) -> FloatArray:
    """All groups' encode steps pass one stage, and one group's the others."""
    most = np.max([k.encode_all - k.encode_one for k in kinds], axis=0)
    return np.asarray(_encode_through(kinds, counts) + most)
