"""Upper bounds on what static batches answer, and lower ones on their latency, over boxes of their
configurations: B = encode_batch, G = decode_micro_batches, p = encode steps of a group.

A box is told by its queries a group x = B / G and by ranges of G and p. With e_k and d_k(u), the
seconds that stage k takes for an encode step and for a decode step of round u, from lower envelopes
(xsimulator.envelope), which rise with the size and fall in relation to it, the closed form's
recurrence (static.closed_form) is bounded, M the largest number of iterations in a batch, by

    begin of round 1  >=  max(E e_0, sum of e_k + (p - 1) max e_k)         E = p G encode steps
    round 1 .. 3      >=  max(G d_0, sum of d_k)
    a later one       >=  max(G max d_k, sum of d_k)
    the last token    >=  begin of round M, G d_0, and half the other stages' d_k (G > 1)

Per query each of these falls with x and G but for P(M >= u) = 1 - F(u - 1)^B, which rises with B:
so they are taken at the largest batch of a box with the chances of its smallest. A latency's are
all at the smallest batch. Kind `sequence` has from its own encoding, half of the batch's later in
the mean, at least (E + 1) / 2 e_0 left of the first; others the latest place and the largest
scatter of a batch's tokens. From the first token to the last, of kind `sequence`, pass the rounds
less half of the first (of an encoder-decoder model, whose first token is decoded, less one more):
it is taken up in the middle of them, and round 2 begins after the last group's turn in round 1.

What is assumed of the step tables is that between two nodes, a thirty-second of an octave apart, no
step is quicker than the line between them by TOLERANCE: the closed form asks for each size, and a
jump of the times there would be one."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache, partial
from typing import NamedTuple

import numpy as np

from xgpt.core.lengths import FloatArray
from xsimulator.attention_envelope import attention_envelope
from xsimulator.layer_times import TOGETHER
from xsimulator.plans import StagePlan
from xsimulator.policies.static.boxes import StaticBoxes
from xsimulator.policies.static.chances import RoundChances
from xsimulator.policies.static.closed_form import Static
from xsimulator.policies.static.rounds import NODES, PLACES, SCATTER_Z
from xsimulator.step_table import StepTable

TOLERANCE = 1e-3
UNEVEN = 1.25  # times the usual encoding: no batch's takes longer, where tokens scatter
HALF = 0.5  # of a round: the place of the last group of several, at least


class _Steps(NamedTuple):
    """Of sizes [...]: stage 0, the slowest stage, and all stages after each other."""

    first_s: FloatArray
    slowest_s: FloatArray
    through_s: FloatArray


class _Least(NamedTuple):
    """Of batches [...], at least: all encode steps on stage 0, one of the first rounds, and the
    rounds that the query sees whose latency is bounded."""

    encode_s: FloatArray
    round_s: FloatArray
    decode_s: FloatArray


class StaticBounds:
    """The bounds of one problem's configurations, of FT and of DSI."""

    def __init__(self, form: Static) -> None:
        self.form, self._inputs = form, form.problem.lengths.inputs
        self._layers = form.plans.layers
        self._chances = RoundChances(form)
        self._envelope = cache(partial(attention_envelope, self._layers))
        self._mean_attention = cache(lambda degree: self._layers.mean_attention_s(
            np.asarray(TOGETHER, float), degree))
        self.kept: dict[Hashable, object] = {}  # what others derive from these
        self._is_sequence = form.problem.constraint.kind == "sequence"
        self._decoded = int(form.problem.model.is_encoder_decoder)  # the first token is

    def throughput_qps(self, plan: StagePlan, of: StaticBoxes) -> FloatArray:
        """Queries/s that no configuration of a plan's boxes exceeds; infinite where the times say
        nothing of the largest."""
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            return 1 / self._surely(self._seconds_a_query(plan, of))

    def latency_s(self, plan: StagePlan, of: StaticBoxes) -> FloatArray:
        """Seconds that no latency goes below; 0 where the times say nothing."""
        with np.errstate(invalid="ignore", over="ignore"):
            return self._surely(self._least_latency_s(plan, of))

    @staticmethod
    def _surely(seconds: FloatArray) -> FloatArray:
        return np.where(np.isfinite(seconds), (1 - TOLERANCE) * seconds, 0.0)

    def _seconds_a_query(self, plan: StagePlan, of: StaticBoxes) -> FloatArray:
        """Of a query of any batch, at least."""
        parts, x = of.parts, of.most
        together, alone = np.maximum(x / parts, 1.0), np.maximum(x / of.most_parts, 1.0)
        most = x * of.highest  # no batch of steps of that size has more
        own = self._encode(plan, np.stack(np.broadcast_arrays(together, alone)), together)
        steps = np.where(of.batch >= of.highest * parts, parts - 1, 0.0)
        encode_s = np.maximum(own.first_s[0] / together,
                              (own.through_s[1] + steps * own.slowest_s[1]) / most)
        rounds, chances = self._decode(plan, x, of, of_more=False), self._chances.of(of.batch)
        first_s, through_s = rounds.first_s / x[..., None], rounds.through_s / most[..., None]
        later_s = (chances.later * np.maximum(rounds.slowest_s / x[..., None], through_s)).sum(
            axis=-1)
        exact_s = chances.exact * np.maximum(first_s, through_s)[..., 0]
        place = np.where((of.fewest > 1) & (of.batch > 1), HALF, 0.0)
        tail_s = chances.exact * first_s[..., 0] + place * chances.any * (
            rounds.through_s - rounds.first_s)[..., 0] / most
        return np.asarray(encode_s + np.maximum(exact_s, tail_s) + later_s)

    def first_token_s(self, plan: StagePlan, of: StaticBoxes) -> FloatArray:
        """Seconds that no time to the first token goes below, of a query in the middle of its
        batch; 0 where the times say nothing."""
        with np.errstate(invalid="ignore", over="ignore"):
            least = self._least(plan, of)
            return self._surely(least.encode_s / 2 + self._decoded * least.round_s)

    def per_token_s(self, plan: StagePlan, of: StaticBoxes) -> FloatArray:
        """Seconds that no time per token after the first goes below; 0 where that is not known."""
        tokens = self.form.watched - self._decoded
        if not self._is_sequence or tokens <= 0:
            return np.zeros(np.broadcast_shapes(*(own.shape for own in of)))
        with np.errstate(invalid="ignore", over="ignore"):
            least = self._least(plan, of)
            # the first token is taken up before half of its round is over: the next one begins
            # after the last group's turn
            after_s = least.decode_s - (0.5 + self._decoded) * least.round_s
            return self._surely(np.maximum(after_s, 0.0) / tokens)

    def _least_latency_s(self, plan: StagePlan, of: StaticBoxes) -> FloatArray:
        least = self._least(plan, of)
        if self._is_sequence:
            return np.asarray(least.encode_s / 2 + least.decode_s)
        places = (PLACES - 0.5) / PLACES
        return np.asarray(np.maximum(
            (1 - places) * least.encode_s + least.decode_s - self._scatter_s(plan, of), 0.0))

    def _least(self, plan: StagePlan, of: StaticBoxes) -> _Least:
        x, parts = of.least, of.parts
        together = np.maximum(x / parts, 1.0)
        largest = np.maximum(of.most / parts, 1.0)
        whole_s = x * of.fewest * self._encode(plan, together, largest).first_s / together
        rounds, chances = self._decode(plan, x, of, of_more=True), self._chances.seen(of.batch)
        turns = of.fewest[..., None]
        exact_s = np.maximum(turns * rounds.first_s, rounds.through_s)[..., 0]
        later_s = np.maximum(turns * rounds.slowest_s, rounds.through_s)
        decode_s = chances.exact * exact_s + (chances.later * later_s).sum(axis=-1)
        return _Least(whole_s, exact_s, decode_s)

    def _scatter_s(self, plan: StagePlan, of: StaticBoxes) -> FloatArray:
        """By so much a batch's encoding may be quicker than usual, of kinds that ask for that."""
        size = np.maximum(of.most / of.most_parts, 1.0)
        steps = of.highest * of.most_parts
        own = self._encode(plan, size, size, plan.steps)
        usual_s = UNEVEN * (steps * own.slowest_s + own.through_s)
        return np.asarray(SCATTER_Z.max() * usual_s * self._inputs.std / (
            self._inputs.mean * np.sqrt(of.batch)))

    def _encode(self, plan: StagePlan, queries: FloatArray, largest: FloatArray,
                table: StepTable | None = None) -> _Steps:
        """Encode steps of so many queries, where the attention of each is no more than in steps of
        any number up to `largest`."""
        times, tables = plan.times, table or plan.least_steps
        nodes, each = np.asarray(TOGETHER, float), {}
        for degree in times.degrees:
            least = np.minimum.accumulate(self._mean_attention(degree))
            each[degree] = queries * np.interp(largest, nodes, least)
        queries = np.broadcast_to(queries, each[times.degrees[0]].shape)
        return _summed(tables, tables.encode_s(queries * self._inputs.mean, queries, each))

    def _decode(self, plan: StagePlan, queries: FloatArray, of: StaticBoxes, *,
                of_more: bool) -> _Steps:
        """[..., NODES] decode steps of so many queries at the rounds' nodes: no steps of more are
        quicker (`of_more`), or none of fewer a query."""
        tables, context = plan.least_steps, self._context(of)
        lengths = np.broadcast_to(context, queries.shape)[..., None] + self.form.rounds.nodes
        counts = np.broadcast_to(queries[..., None], lengths.shape)
        attention = {}
        for degree, own in plan.times.decode_attention_s(counts, lengths).items():
            factor = self._envelope(degree).factor
            least = own * factor(counts, lengths, of_more=True)
            if not of_more:
                least = np.minimum(least, own * factor(counts, lengths, of_more=False))
            attention[degree] = np.maximum.accumulate(least, axis=-1) if of_more else least
        bare = [seconds[..., None] + np.zeros(NODES) for seconds in tables.decode_bare_s(
            np.ascontiguousarray(queries))]
        tables.add_attention(bare, attention)
        return _summed(tables, bare)

    def _context(self, of: StaticBoxes) -> FloatArray:
        """Tokens of input that a decode step reads of each row, at least."""
        if not self.form.timing.facts.is_padded:
            return np.full(of.least.shape, self._inputs.mean)
        below = np.minimum(np.cumsum(self._inputs.pmf)[:-1], 1.0)
        return np.asarray(1 + (1 - below ** of.least[..., None]).sum(axis=-1))


def _summed(tables: StepTable, seconds: list[FloatArray]) -> _Steps:
    number = np.bincount(tables.kind_of)
    slowest, through = seconds[0], number[0] * seconds[0]
    for count, own in zip(number[1:], seconds[1:], strict=True):
        slowest, through = np.maximum(slowest, own), through + count * own
    return _Steps(seconds[tables.kind_of[0]], slowest, through)


def shared_bounds(form: Static) -> StaticBounds:
    """Those of the problems asked for last are kept: FT and DSI have the same."""
    known = next((one for one in _latest if one.form.plans is form.plans), None)
    if known is None:
        known = StaticBounds(form)
        _latest.append(known)
        del _latest[:-_MOST_KEPT]
    return known


_latest: list[StaticBounds] = []
_MOST_KEPT = 16
