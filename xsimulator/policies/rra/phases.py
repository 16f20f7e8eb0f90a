"""Phases of RRA configurations of one plan: what they hold, and how long they take.

Groups are not equal, and the pipeline waits for the slowest: of each round of steps, the slowest
group's and all others' together are told apart (xsimulator.pipeline)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from xgpt.core.lengths import BoolArray, FloatArray, IntArray, Lengths
from xrunner.rules.batch_sizer import LEAST_ADJUSTED, BatchSizer
from xsimulator.longest_context import expected_maximum
from xsimulator.occupancy import expected_maximum_z
from xsimulator.pipeline import StageWork, Timeline, sorted_timeline
from xsimulator.plans import StagePlan
from xsimulator.policies.rra.phase_blocks import PhaseBlocks

MANY_STEPS = 8.0  # expected in a round: that there is none has a chance of less than 1 in 2,900
NEGLIGIBLE = 1e-4  # chance that a group has no query, below which that costs nothing
Pair = tuple[FloatArray, FloatArray]  # seconds of the slowest group's step, and all others'
_Scattered = tuple[FloatArray, FloatArray, FloatArray, FloatArray]


class DecodeLoads(NamedTuple):
    """Each iteration of a block works such groups [blocks, configs]."""

    both: FloatArray  # [2, blocks, configs] queries of the largest group, and of any that has some
    steps: FloatArray  # groups that have any
    chance: FloatArray  # that a group has any
    anyone: FloatArray  # that some group has: 1 where more than MANY_STEPS are expected


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PhaseBatches:
    """The phases of configurations of one plan, in falling order of their blocks, hold these."""

    encode_batch: FloatArray  # [configs]
    groups: FloatArray
    queries: PhaseBlocks

    def take(self, rows: IntArray) -> PhaseBatches:
        """The batches of some of the configurations."""
        chosen: dict[str, Any] = {}
        most = int(self.queries.blocks[rows].max(initial=1))
        for name in self.queries.__slots__:
            value = getattr(self.queries, name)
            chosen[name] = value if value is None else value[rows] if value.ndim == 1 else (
                value[:most].take(rows, axis=1))
        return PhaseBatches(encode_batch=self.encode_batch[rows], groups=self.groups[rows],
                            queries=PhaseBlocks(**chosen))

    @property
    def group_batch(self) -> FloatArray:
        return self.encode_batch / self.groups

    @property
    def encode_groups(self) -> FloatArray:
        return np.minimum(self.groups, self.encode_batch)

    def decode_loads(self, variance: FloatArray | None = None) -> DecodeLoads:
        """The loads follow from the number of active queries; `variance` [blocks, configs] stands
        in place of its own."""
        blocks, group_batch = self.queries, self.group_batch
        variance = blocks.variance_active if variance is None else variance
        mean = group_batch * blocks.active
        is_possible = mean > 0
        # NOTE: expm1 keeps a tiny chance of a step, which 1 - exp would round to none
        chance = np.minimum(-np.expm1(group_batch * blocks.log_absent), mean)
        # a chance too small for the logarithm of its opposite is the mean itself
        chance[chance <= 0] = mean[chance <= 0]
        chance[~is_possible] = 1.0
        queries = mean / chance
        square = (group_batch * variance + mean * mean) / chance
        spread = np.sqrt(np.maximum(square - queries * queries, 0.0))
        steps = self.groups * chance * is_possible
        both = np.array([queries + expected_maximum_z(steps) * spread, queries])
        anyone = np.minimum(steps, 1.0)
        if (few := (steps < MANY_STEPS) & is_possible).any():
            some = -np.expm1(np.full(few.shape, self.encode_batch)[few] * blocks.nobody[few])
            anyone[few] = np.fmin(anyone[few], some)
        return DecodeLoads(both, steps, chance, anyone)

    def charged_context(self, loads: DecodeLoads) -> FloatArray:
        """Each query of the largest group, and of a usual one, is charged so many tokens of context
        [2, blocks, configs]."""
        context: FloatArray = np.full(loads.both.shape, self.queries.context)
        table = self.queries.maximum_context  # [blocks, configs, doublings + 1]
        if table is None:
            return context
        flat = expected_maximum(table.reshape(-1, table.shape[-1]), loads.both.reshape(2, -1))
        return np.maximum(context, flat.reshape(context.shape))

    def moved_rows(self, loads: DecodeLoads) -> tuple[FloatArray, FloatArray]:
        """A group moves so many rows of the cache [blocks, configs] where queries of it end, and
        that happens to this share of its steps."""
        moved = self.group_batch * self.queries.moved
        happens = -np.expm1(-moved)
        return moved / np.where(happens > 0, happens, 1.0), np.minimum(happens / loads.chance, 1.0)


class EncodeTokens:
    """The tokens of encode micro-batches scatter as far as the workload adjustment (paper section
    5.2) lets them."""

    def __init__(self, inputs: Lengths, adjustment: float) -> None:
        self.mean, self.std = inputs.mean, inputs.std
        self.adjustment = adjustment
        self.sizer = BatchSizer(mean_input=inputs.mean, adjustment=adjustment)
        before = np.cumsum(inputs.pmf) - inputs.pmf
        short = np.clip(0.5 - before, 0.0, inputs.pmf)
        # inputs for a token of a chunk, as many as a group has room for: of the shorter half of all
        # whose mean is far below that of all where these scatter. As each has a row where caches
        # are rows, these are twelve times as many as of mean inputs at most
        of_short = float(short.sum()) / float(short @ inputs.support)
        self.most_of_token = min(max(2 / inputs.mean, of_short), 12 / inputs.mean)

    def largest(self, batches: PhaseBatches) -> tuple[FloatArray, FloatArray, FloatArray]:
        """A micro-batch has so many queries and tokens [configs], the largest of a phase so many
        tokens."""
        return self.scattered(batches.encode_batch, batches.encode_groups)[:3]

    def scattered(self, encode_batch: FloatArray, groups: FloatArray) -> _Scattered:
        """The same for a batch divided into so many groups, and the standard deviation of one
        group's tokens."""
        queries = encode_batch / groups
        odd = queries - np.floor(queries)  # that share of the groups encodes one query more
        tokens = queries * self.mean
        spread = np.sqrt(queries * self.std**2 + odd * (1 - odd) * self.mean**2)
        spread = self.adjusted(spread, tokens, queries)
        return queries, tokens, tokens + expected_maximum_z(groups) * spread, spread

    def adjusted(self, spread: FloatArray, tokens: FloatArray, queries: FloatArray) -> FloatArray:
        """This standard deviation [configs] of the tokens is left of `spread` where micro-batches
        of that many queries are adjusted."""
        if self.adjustment <= 0:
            return spread
        # within the band wherever (uniform), or as near to the mean as whole inputs allow: half of
        # one, that a cut falls into with a chance in proportion to its length
        band = self.adjustment * tokens / np.sqrt(3)
        cut = (self.mean + self.std**2 / self.mean) / np.sqrt(12)
        share = np.clip(queries - (LEAST_ADJUSTED - 1), 0.0, 1.0)  # of the groups, is adjusted
        return np.asarray(spread + share * (np.minimum(spread, np.maximum(band, cut)) - spread))


class PhaseTimes(NamedTuple):
    """`timeline` and the others mean nothing where the timing source did not answer for every
    step (`is_timed`)."""

    timeline: Timeline
    encode_s: FloatArray  # [configs] from the first to the last stage's end of encoding
    alone_s: FloatArray  # see own_steps_s
    is_timed: BoolArray  # [configs]

    def first_token_s(self, is_decoded: bool) -> FloatArray:
        """A query has its first token so long [configs] after the start of its encoding: from that
        or, `is_decoded`, from its first iteration."""
        return self.timeline.finish_s[:, 0] if is_decoded else self.timeline.encoded_s

    def latency_s(self, batches: PhaseBatches, seen_iterations: int) -> FloatArray:
        """A query of that many decode iterations, for which the blocks were made, takes so long
        [configs]."""
        if seen_iterations == 0:
            return self.timeline.encoded_s
        queries, rows = batches.queries, np.arange(len(batches.encode_batch))
        before, last = np.cumsum(self.alone_s * queries.widths, axis=1)
        finish = self.timeline.finish_s[rows, queries.seen] + last[queries.seen, rows]
        return np.asarray(queries.phases_before * (self.timeline.period_s + before[-1]) + finish)


    def iteration_s(self, batches: PhaseBatches) -> FloatArray:
        """A decode iteration that has any query takes so long [configs], in the mean over the
        tokens that iterations yield: those without a query take no time, and count for nothing."""
        queries, finish = batches.queries, self.timeline.finish_s.T
        seconds = np.diff(finish, axis=0, prepend=self.timeline.encoded_s[None])  # of each block
        nobody = np.exp(batches.encode_batch * queries.nobody)
        worked = np.where(nobody < 1, seconds / np.where(nobody < 1, 1 - nobody, 1.0), 0.0)
        tokens = (queries.widths * queries.active).sum(axis=0)
        mean = (queries.active * worked).sum(axis=0) / np.where(tokens > 0, tokens, 1.0)
        return np.where(self.is_timed, mean, np.inf)


def phase_times(plan: StagePlan, batches: PhaseBatches, loads: DecodeLoads,
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


def _encode_s(plan: StagePlan, batches: PhaseBatches,
              tokens: EncodeTokens) -> tuple[list[Pair], BoolArray]:
    """The slowest group's encode step and all others' are given by kind of stage."""
    queries, usual, most = tokens.largest(batches)
    one = plan.times.mean_attention_s(queries)
    both = np.array([most, usual])
    each = both / tokens.mean  # queries' worth of attention
    seconds = plan.steps.encode_s(both, np.broadcast_to(queries, both.shape), {
        degree: each * own for degree, own in one.items()})
    return slowest_and_rest(seconds, batches.encode_groups)


def _decode_s(plan: StagePlan, batches: PhaseBatches,
              loads: DecodeLoads) -> tuple[list[Pair], FloatArray, BoolArray]:
    """The decode steps [blocks, configs] are given by kind of stage, with what own_steps_s
    says."""
    context = batches.charged_context(loads)
    seconds = plan.steps.decode_s(loads.both, context)
    rows, share = batches.moved_rows(loads)
    for work, own in zip(seconds, plan.steps.compaction_s(rows, context[1]), strict=True):
        work += share * own
    pairs, is_timed = slowest_and_rest(seconds, loads.steps, loads.anyone)
    alone_s = own_steps_s(plan, batches, loads, [own[1] for own in seconds])
    return pairs, alone_s, np.asarray(is_timed.all(axis=0))


def own_steps_s(plan: StagePlan, batches: PhaseBatches, loads: DecodeLoads,
                 usual: Sequence[FloatArray]) -> FloatArray:
    """An iteration takes so many seconds [phases before the last, the last; blocks, configs] longer
    in the eyes of the latency bound's query, which is there for certain, than in the mean.
    If nobody else is, that is all of the iteration; if nobody else of its group, one step more for
    the slowest stage, as far as the stages are full."""
    blocks = batches.queries
    absent: FloatArray = np.exp(
        batches.group_batch * np.array([blocks.own_before, blocks.own_last]))
    absent = np.maximum(absent - NEGLIGIBLE, 0.0)
    if not absent.any():
        return absent
    with np.errstate(invalid="ignore"):
        nobody = np.minimum(np.exp(batches.encode_batch * blocks.nobody), absent)
    counts = np.bincount(plan.steps.kind_of)
    usual = [np.where(np.isfinite(own), own, 0.0) for own in usual]  # refused: said elsewhere
    through = np.sum([own * count for own, count in zip(usual, counts, strict=True)], axis=0)
    crowd = np.minimum(loads.steps / counts.sum(), 1.0)
    return np.asarray(nobody * through + (absent - nobody) * crowd * np.max(usual, axis=0))


def slowest_and_rest(seconds: Sequence[FloatArray], steps: FloatArray,
                     anyone: FloatArray | None = None) -> tuple[list[Pair], BoolArray]:
    """`steps` (expected number, fractional) steps, `seconds` [slowest and usual, ...] by kind of
    stage: the slowest one, and the others together; and where the source answered for all.
    `anyone`: the chance of any step at all, by default that of which there is one at most."""
    most = np.minimum(steps, 1.0) if anyone is None else anyone
    total = np.sum([one.sum(axis=0) for one in seconds], axis=0)
    is_timed: BoolArray = np.isfinite(total)
    if not is_timed.all():
        seconds = [np.where(is_timed, one, 0.0) for one in seconds]
    pairs = [(slowest * most, np.maximum(steps * usual - slowest * most, 0.0))
             for slowest, usual in seconds]
    return pairs, is_timed
