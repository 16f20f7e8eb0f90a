"""What no configuration of RRA that encodes in chunks can better, over ranges of B_E / N_D.

With r = B_E / N_D queries encoded in each round of iterations, all groups together work in a round

    rows r (E[D] + mean input), of which heads r (E[D] + 1), and the attention of both

whatever chunks they are divided into. A step of x rows takes no less than x times the least a row
takes in any step up to the largest: all that may decode right after a chunk, and a chunk's tokens.
Nor does a round take less than it would if it decoded alone.
Both are in relation to r least at the largest r of a range, and themselves least at its smallest r:
so throughput is bounded at the one, latency at the other. Step times are those of an envelope
(xsimulator.envelope), so that this holds for times that are not monotone. It is coarse where steps
are far smaller than the chunk allows; single points are evaluated."""

from functools import cache, partial
from typing import NamedTuple

import numpy as np

from xgpt.core.lengths import FloatArray, IntArray
from xrunner.rules.batch_sizer import LEAST_ADJUSTED
from xsimulator.attention_envelope import attention_envelope
from xsimulator.layer_times import TOGETHER
from xsimulator.plans import StagePlan
from xsimulator.policies.rra.closed_form import Rra
from xsimulator.policies.rra.config import RateRanges
from xsimulator.policies.rra.native_tables import PlanRows
from xsimulator.policies.rra.packed_blocks import OWN
from xsimulator.policies.rra.phase_walk import are_scattered
from xsimulator.policies.rra.phases import PhaseBatches

TOLERANCE = 0.01  # of throughput and latency: the timeline is watched for two small phases


class _Work(NamedTuple):
    """Seconds [boxes] of a round, at least: in the mean, and where it decodes alone."""

    round_s: FloatArray
    plain_s: FloatArray


class ChunkBounds:
    """The bounds are for one Rra."""

    def __init__(self, rra: Rra) -> None:
        self._rra = rra
        self._attention = cache(partial(attention_envelope, rra.plans.layers))
        self._mean_input = rra.encode_tokens.mean
        self._context = float(rra.flow.context.sum())  # tokens that a query reads while it decodes

    def limits(self, plans: PlanRows, ranges: RateRanges, *, is_latency: bool) -> FloatArray:
        """[boxes] throughput_qps or latency_s over boxes of several plans, each one's in a row."""
        native, bound = self._rra.native, self.latency_s if is_latency else self.throughput_qps
        if native is None:
            return np.concatenate([bound(plan, ranges.take(rows)) for plan, rows in plans])
        limits, is_sure = native.chunks(
            self._attention, plans, ranges, self._crowd(ranges), is_latency=is_latency,
            context=self._context, tolerance=TOLERANCE)
        if not is_sure.all():
            for plan, part in plans:
                rows = part.start + np.flatnonzero(~is_sure[part])
                if len(rows):
                    limits[rows] = bound(plan, ranges.take(rows))
        return limits

    def dealt(self, rate: FloatArray, held: FloatArray, fewest: FloatArray) -> FloatArray:
        """[boxes] so many queries at least are encoded in each round where `rate` are asked for,
        chunks hold `held`, and a group's batch has `fewest` queries or more.

        A group that is dealt nothing in a phase fills its chunks in this one or did in the one
        before, and each phase of full chunks encodes what they hold: of every query two such phases
        come at most. Where even batches of inputs that scatter are cut short by those longer than
        the whole batch, each of these ends two at most."""
        tokens, inputs = self._rra.encode_tokens, self._rra.problem.lengths.inputs
        is_evened = tokens.sizer.most(LEAST_ADJUSTED) > LEAST_ADJUSTED
        if not are_scattered(tokens):
            return np.where(is_evened & (fewest >= LEAST_ADJUSTED), np.minimum(rate, held),
                            rate / (1 + 2 * rate / held))
        no_less = np.cumsum(inputs.pmf[::-1])[::-1]
        is_long = inputs.support > LEAST_ADJUSTED * inputs.mean
        cut = float((inputs.support / inputs.mean * no_less)[is_long].max(initial=0.0))
        return np.asarray(rate / (1 + 2 * rate / held + 2 * cut * is_evened))

    def throughput_qps(self, plan: StagePlan, ranges: RateRanges) -> FloatArray:
        """No configuration of a box has more; infinite where the sizes are refused."""
        work = self._work(plan, ranges, ranges.high)
        is_known = np.isfinite(work.round_s) & (work.round_s > 0)
        return np.where(is_known, ranges.high * (1 + TOLERANCE) / np.where(
            is_known, work.round_s, 1.0), np.inf)

    def latency_s(self, plan: StagePlan, ranges: RateRanges) -> FloatArray:
        """No configuration of a box has less; 0 where the sizes are refused. A query goes through
        all rounds of its iterations but for those of one small phase, which may decode alone."""
        work, d = self._work(plan, ranges, ranges.low), float(self._rra.seen_iterations)
        tokens = ranges.low / ranges.groups * self._mean_input  # of a group, in each round
        every = np.maximum(1.25 * ranges.chunk / tokens, 2.0)  # small phases are whole iterations
        least_s = np.maximum((d + 1) * work.plain_s, np.maximum(d - every, 0.0) * work.round_s)
        return np.where(np.isfinite(least_s), least_s / (1 + TOLERANCE), 0.0)

    def _work(self, plan: StagePlan, ranges: RateRanges, rate: FloatArray) -> _Work:
        """Of rounds at `rate`, whose steps are no larger than those at the largest."""
        rra, tables, groups = self._rra, plan.least_steps, ranges.groups
        mean = self._mean_input
        crowd = self._batches(self._crowd(ranges), groups)
        largest = np.maximum(crowd.decode_loads().both[0, 0], 1.0)
        most_rows, most_heads = largest + ranges.chunk, largest + ranges.chunk / mean
        decoded = rate * rra.flow.mean_iterations
        rows, heads = decoded + rate * mean, decoded + rate
        read = rate * self._context
        longest = np.full(len(rate), rra.flow.largest_context)
        round_s, plain_s = np.zeros((2, len(rate)))
        through_s, plain_through_s = np.zeros((2, len(rate)))
        counts = np.bincount(tables.kind_of)
        parts = zip(tables.rows_s(largest), tables.rows_s(most_rows), strict=True)
        heads_alone_s = decoded * tables.head_s(largest) / largest
        heads_s = np.maximum(heads_alone_s, heads * tables.head_s(most_heads) / most_heads)
        encode = plan.times.mean_attention_s(np.asarray(TOGETHER, float))
        for kind, (row_s, most_s) in enumerate(parts):
            degree = tables.degrees[kind]
            layers = plan.times.decoder_layers[plan.steps.kind_of.index(kind)]
            attention = layers * read * self._attention(degree).least_rate(largest, longest)
            encoded = layers * rate * float(encode[degree].min())
            alone = decoded * row_s / largest
            whole = np.maximum(alone, rows * most_s / most_rows) + attention + encoded
            if kind == tables.kind_of[-1]:  # no other stage has the head
                alone, whole = alone + heads_alone_s, whole + heads_s
            np.maximum(round_s, whole, out=round_s)
            np.maximum(plain_s, alone, out=plain_s)
            through_s += counts[kind] * whole / groups
            plain_through_s += counts[kind] * alone / groups
        return _Work(np.maximum(round_s, through_s), np.maximum(plain_s, plain_through_s))

    def _crowd(self, ranges: RateRanges) -> FloatArray:
        """[boxes] right after a chunk its queries decode besides those that do in the mean: as many
        as if so many were encoded in each round. Where inputs scatter these may be short ones."""
        inputs = self._rra.encode_tokens
        of_token = inputs.most_of_token if are_scattered(inputs) else 1 / inputs.mean
        joining = np.minimum(np.maximum(1.25 * ranges.chunk * of_token * ranges.groups,
                                        2 * ranges.high), ranges.batch)
        return ranges.high + joining / max(self._rra.flow.mean_iterations, 1e-9)

    def _batches(self, rate: FloatArray, groups: FloatArray) -> PhaseBatches:
        """A phase is one iteration: see rra.chunked."""
        ones: IntArray = np.ones(len(rate), np.int64)
        columns = self._rra.blocks.columns(ones, np.full(len(rate), 1 << 10))
        return PhaseBatches(encode_batch=rate, groups=groups, queries=self._rra.blocks.take(
            columns, rate / groups, OWN))
