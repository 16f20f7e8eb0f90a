"""How long the phases of RRA configurations of one plan take.

Groups are not equal, and the pipeline waits for the slowest: of each round of steps, the slowest
group's and all others' together are told apart (xsimulator.pipeline).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from xgpt.core.lengths import FloatArray
from xsimulator.pipeline import StageWork, Timeline, sorted_timeline
from xsimulator.plans import Plan
from xsimulator.policies.figures import BoolArray
from xsimulator.policies.rra.phase_batches import (
    DecodeLoads,
    EncodeTokens,
    PhaseBatches,
    charged_context,
    moved_rows,
)

NEGLIGIBLE = 1e-4  # chance that a group has no query, below which that costs nothing
_Pair = tuple[FloatArray, FloatArray]  # seconds of the slowest group's step, and all others'


class PhaseTimes(NamedTuple):
    """`timeline` and the others mean nothing where the timing source did not answer for every
    step (`is_timed`)."""

    timeline: Timeline
    encode_s: FloatArray  # [configs] from the first to the last stage's end of encoding
    alone_s: FloatArray  # see _own_steps_s
    is_timed: BoolArray  # [configs]

    def latency_s(self, batches: PhaseBatches, seen_iterations: int) -> FloatArray:
        """A query of that many decode iterations, for which the blocks were made, takes so long
        [configs]."""
        if seen_iterations == 0:
            return self.timeline.encoded_s
        queries, rows = batches.queries, np.arange(len(batches.encode_batch))
        before, last = np.cumsum(self.alone_s * queries.widths, axis=1)
        finish = self.timeline.finish_s[rows, queries.seen] + last[queries.seen, rows]
        return np.asarray(queries.phases_before * (self.timeline.period_s + before[-1]) + finish)


def phase_times(plan: Plan, batches: PhaseBatches, loads: DecodeLoads,
                tokens: EncodeTokens) -> PhaseTimes:
    encode, encode_timed = _encode_s(plan, batches, tokens)
    decode, alone_s, decode_timed = _decode_s(plan, batches, loads)
    kinds = [StageWork(encode_s=e, encode_rest_s=er, decode_s=d, decode_rest_s=dr)
             for (e, er), (d, dr) in zip(encode, decode, strict=True)]
    timeline = sorted_timeline([kinds[kind] for kind in plan.steps.kind_of],
                               batches.queries.blocks, batches.queries.widths)
    counts = np.bincount(plan.steps.kind_of)
    through = np.sum([e * c for (e, _), c in zip(encode, counts, strict=True)], axis=0)
    return PhaseTimes(timeline, through + np.max([rest for _, rest in encode], axis=0), alone_s,
                      encode_timed & decode_timed)


def _encode_s(plan: Plan, batches: PhaseBatches,
              tokens: EncodeTokens) -> tuple[list[_Pair], BoolArray]:
    """The slowest group's encode step and all others' are given by kind of stage."""
    queries, usual, most = tokens.largest(batches)
    one = plan.times.mean_attention_s(queries)
    both = np.stack([most, usual])
    each = both / tokens.mean  # queries' worth of attention
    seconds = plan.steps.encode_s(both, np.broadcast_to(queries, both.shape), {
        degree: each * own for degree, own in one.items()})
    return _slowest_and_rest(seconds, batches.encode_groups)


def _decode_s(plan: Plan, batches: PhaseBatches,
              loads: DecodeLoads) -> tuple[list[_Pair], FloatArray, BoolArray]:
    """The decode steps [blocks, configs] are given by kind of stage, with what _own_steps_s
    says."""
    context = charged_context(batches.queries, loads)
    seconds = plan.steps.decode_s(loads.both, context)
    rows, share = moved_rows(batches, loads)
    for work, own in zip(seconds, plan.steps.compaction_s(rows, context[1]), strict=True):
        work += share * own
    pairs, is_timed = _slowest_and_rest(seconds, loads.steps)
    alone_s = _own_steps_s(plan, batches, loads, [own[1] for own in seconds])
    return pairs, alone_s, np.asarray(is_timed.all(axis=0))


def _own_steps_s(plan: Plan, batches: PhaseBatches, loads: DecodeLoads,
                 usual: Sequence[FloatArray]) -> FloatArray:
    """An iteration takes so many seconds [phases before the last, the last; blocks, configs] longer
    in the eyes of the latency bound's query, which is there for certain, than in the mean.
    If nobody else is, that is all of the iteration; if nobody else of its group, one step more for
    the slowest stage, as far as the stages are full."""
    blocks = batches.queries
    absent = np.exp(batches.group_batch * np.stack([blocks.own_before, blocks.own_last]))
    absent = np.maximum(absent - NEGLIGIBLE, 0.0)
    if not absent.any():
        return absent
    with np.errstate(invalid="ignore"):
        nobody = np.minimum(np.exp(batches.encode_batch * blocks.nobody), absent)
    counts = np.bincount(plan.steps.kind_of)
    usual = [np.where(np.isfinite(own), own, 0.0) for own in usual]  # refused: said elsewhere
    through = np.sum([own * count for own, count in zip(usual, counts, strict=True)], axis=0)
    crowd = np.minimum(loads.steps / counts.sum(), 1.0)
    longer: FloatArray = nobody * through + (absent - nobody) * crowd * np.max(usual, axis=0)
    return longer


def _slowest_and_rest(seconds: Sequence[FloatArray],
                      steps: FloatArray) -> tuple[list[_Pair], BoolArray]:
    """`steps` (expected number, fractional) steps, `seconds` [slowest and usual, ...] by kind of
    stage: the slowest one, and the others together; and where the source answered for all."""
    most = np.minimum(steps, 1.0)
    total = np.sum([one.sum(axis=0) for one in seconds], axis=0)
    is_timed: BoolArray = np.isfinite(total)
    if not is_timed.all():
        seconds = [np.where(is_timed, one, 0.0) for one in seconds]
    pairs = [(slowest * most, np.maximum(steps * usual - slowest, 0.0))
             for slowest, usual in seconds]
    return pairs, is_timed
