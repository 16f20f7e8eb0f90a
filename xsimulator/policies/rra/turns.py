"""Rounds of RRA in chunks, run: every group's step, with a chunk or without, in its turn.

Symbols: as in rra.chunked. What a round takes hangs on the one before. Of two phases' long steps
the later may come earlier in its round, and is then on its way before all of the earlier one's
round is through, so that two rounds take less than two ways through all stages (fewer queries than
groups, whose turn to encode goes round); in the other order they take both. A group that has
nothing to do any more still has its turn, once its tokens are back: a round without steps after one
with some lasts until the last of these is through. So some phases as they are dealt (rra.dealt),
with the queries that decode in each (rra.phase_walk), are run as a replay's steps are."""

from typing import NamedTuple

import numpy as np

from xgpt.core.lengths import BoolArray, FloatArray, IntArray
from xsimulator.occupancy import QueryFlow
from xsimulator.plans import StagePlan
from xsimulator.policies.rra.dealt import Dealt
from xsimulator.policies.rra.phases import EncodeTokens
from xsimulator.replay.stage_line import in_line

MOST_TURNS, MOST_STEPS = 1 << 14, 1 << 17  # of groups, and of stages
ALIKE = 4  # so many times fewer are enough where inputs are alike
LEAST_ROUNDS = 8
_SIZES, _CROWDS = 16, 8  # of chunks, and of decoding queries, that are told apart
_WARM_UP = 0.1  # of the rounds


class Rounds(NamedTuple):
    """What each group does in some of the rounds from the beginning of the phases on, those left
    out in which none does anything: their numbers [rounds + 1], and [rounds, groups] tokens of a
    chunk (0: none), queries whose encoding it ends, and queries that decode."""

    number: IntArray
    chunks: IntArray
    ended: IntArray
    decoding: IntArray
    longest: IntArray | None  # tokens of the longest context; None: that of so many queries

    @classmethod
    def of(cls, dealt: Dealt, edges: IntArray, queries: IntArray, stages: int,
           longest: IntArray | None, *, are_alike: bool) -> "Rounds":
        """`queries` [groups, stretches] decode between `edges`, with such a longest context."""
        groups = len(queries)
        most = min(MOST_TURNS, MOST_STEPS // stages) // (ALIKE if are_alike else 1)
        rows = _busy(dealt, edges, queries.sum(axis=0) > 0, max(most // groups, LEAST_ROUNDS))
        phase, place = np.divmod(rows, dealt.iterations)
        chunk, rest = np.divmod(place[:, None], dealt.every[phase, None])
        stretch = np.searchsorted(edges, rows, side="right") - 1
        chunks, tokens, each = dealt.chunks[phase], dealt.tokens[phase], np.maximum(
            dealt.chunks[phase], 1)
        has = (rest == 0) & (chunk < chunks)
        own = np.searchsorted(rows, dealt.joins)
        is_own = rows[np.minimum(own, len(rows) - 1)] == dealt.joins
        ended = np.bincount((own * groups + dealt.group)[is_own], minlength=has.size)
        return cls(np.append(rows, rows[-1:] + 1), np.where(
            has, (chunk + 1) * tokens // each - chunk * tokens // each, 0),
            ended.reshape(has.shape), np.ascontiguousarray(queries[:, stretch].T),
            None if longest is None else np.ascontiguousarray(longest[:, stretch].T))

    def run(self, plan: StagePlan, flow: QueryFlow, tokens: EncodeTokens, *,
            is_padded: bool) -> "Run | None":
        """None where the timing source does not answer."""
        seconds = self._steps_s(plan, flow, tokens, is_padded=is_padded)
        is_step: BoolArray = (self.chunks > 0) | (self.decoding > 0)
        rounds, groups = is_step.shape
        if not len(seconds) or not np.isfinite(seconds).all():
            return None
        # each turn waits for the tokens of its group's last step
        turns = np.where(is_step, np.arange(is_step.size).reshape(rounds, groups), -1)
        waits = np.full((rounds + 1, groups), -1)
        waits[1:] = np.maximum.accumulate(turns, axis=0)
        begun, _ = in_line(waits.ravel(), np.flatnonzero(is_step), seconds, 0.0)
        first = int(rounds * _WARM_UP)
        return Run(self.number[first:], begun.reshape(rounds + 1, groups)[first:])

    def _steps_s(self, plan: StagePlan, flow: QueryFlow, tokens: EncodeTokens, *,
                 is_padded: bool) -> FloatArray:
        """[steps, stages] in the order of rounds and groups."""
        sizes, of_sizes = _told_apart(self.chunks, _SIZES)
        crowds, of_crowds = _told_apart(self.decoding, _CROWDS)
        context = flow.charged_context(np.maximum(crowds, 1.0), padded=is_padded)
        if self.longest is not None:
            contexts, of_contexts = _told_apart(self.longest, _CROWDS)
            of_crowds = of_crowds * len(contexts) + of_contexts
            crowds, context = (own.ravel() for own in np.meshgrid(
                crowds, np.maximum(contexts, 1.0), indexing="ij"))
        ends, of_ends = _told_apart(self.ended, 1)
        shape = len(sizes) - 1, len(ends), len(crowds)  # the first of each is none
        chunk, ended, decoding = (np.broadcast_to(own, shape) for own in (
            sizes[1:, None, None], ends[:, None], crowds))
        mean = float(self.ended.sum()) / max(int((self.chunks > 0).sum()), 1)
        one = plan.times.mean_attention_s(np.array([max(mean, 1.0)]))
        mixed = plan.steps.mixed_s(
            chunk, ended, {degree: chunk / tokens.mean * own for degree, own in one.items()},
            decoding, np.broadcast_to(context, shape))
        # tables have no size of none: a chunk that ends no query's, beside no other, needs no head
        mixed[plan.steps.kind_of[-1]] -= np.where(
            ended + decoding > 0, 0.0, plan.steps.head_s(np.zeros(1)))
        plain = plan.steps.decode_s(np.maximum(crowds, 1.0), context)
        alone_s, mixed_s = np.stack(plain, axis=-1), np.stack(mixed, axis=-1)
        has, some = self.chunks > 0, (self.chunks > 0) | (self.decoding > 0)
        seconds = alone_s[of_crowds]
        seconds[has] = mixed_s[of_sizes[has] - 1, of_ends[has], of_crowds[has]]
        return np.asarray(seconds[some][:, plan.steps.kind_of])


class Run(NamedTuple):
    """Rounds that were run, the last of which is none any more: their numbers, and [rounds, groups]
    the second in which each group's turn begins."""

    number: IntArray
    begun_s: FloatArray

    @property
    def ends(self) -> tuple[IntArray, float]:
        """(the first round and the one after the last, seconds from the one to the other)"""
        return self.number[[0, -1]], float(self.begun_s[-1, 0] - self.begun_s[0, 0])

    def between_s(self, group: IntArray, begin: IntArray, end: IntArray) -> FloatArray:
        """[queries] seconds between their group's turns in two rounds; nan where these are not
        among those that were run."""
        rows = [np.searchsorted(self.number, at) for at in (begin, end)]
        is_known = (begin >= self.number[0]) & (end <= self.number[-1])
        first, last = (self.begun_s[np.minimum(row, len(self.number) - 1), group] for row in rows)
        return np.asarray(np.where(is_known, last - first, np.nan))


def _busy(dealt: Dealt, edges: IntArray, is_decode: BoolArray, most: int) -> IntArray:
    """The first rounds, so many at most, in which anything is done, or that come after one."""
    times = dealt.chunks.max(axis=1)
    phases = np.arange(min(int(np.searchsorted(np.cumsum(times), most)) + 1, len(times)))
    lengths = np.diff(edges) * is_decode
    until = int(np.searchsorted(np.cumsum(lengths), most)) + 1
    some = np.concatenate([
        _ranges(phases * dealt.iterations, times[phases], dealt.every[phases]),
        _ranges(edges[:-1][:until], lengths[:until], np.ones_like(lengths[:until]))])
    is_busy = np.zeros(max(int(some.max(initial=0)) + 2, int(edges[-1])), bool)
    is_busy[some] = is_busy[some + 1] = True
    return np.flatnonzero(is_busy[:edges[-1]])[:most]


def _ranges(begin: IntArray, count: IntArray, step: IntArray) -> IntArray:
    """So many numbers from each beginning on, so far apart."""
    place = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    return np.asarray(np.repeat(begin, count) + np.repeat(step, count) * place)


def _told_apart(values: IntArray, parts: int) -> tuple[FloatArray, IntArray]:
    """(the means of so many equal parts of what is above 0, after a 0; in which each one is)."""
    number = np.bincount(values.ravel())
    number[0] = 0
    some = np.flatnonzero(number)
    if len(some) > parts:
        until = np.cumsum(number[some])
        some = some[np.unique(np.searchsorted(
            until, until[-1] * np.arange(1, parts + 1) / parts))]
    of_value = np.searchsorted(some, np.arange(len(number))) + 1
    of_value[0] = 0
    each = np.bincount(of_value, number, len(some) + 1)
    total = np.bincount(of_value, number * np.arange(len(number)), len(some) + 1)
    return total / np.maximum(each, 1), of_value[values]
