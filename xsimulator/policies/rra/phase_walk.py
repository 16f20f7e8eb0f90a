"""RRA in chunks where phases are unlike each other: what a phase takes is that of some, walked.

Symbols: as in rra.chunked. Where few queries decode, groups are often empty, and what a round takes
hangs on who happens to be there: an iteration in which nobody decodes takes no time at all, one
with a query in one group as long as one with a query in each of several (the way through all
stages), and a group's only query of a phase joins with the phase's last chunk whatever its length.
Where inputs scatter far, phases have chunks of different sizes in more or fewer of their rounds,
and groups are dealt less than is asked for (rra.dealt). So some phases of queries whose lengths are
spread evenly over their distribution are laid out on a circle of M N_D iterations: each is encoded
from its first chunk to its last, and decodes D iterations from the round after that one on.

Rounds between two of these events are of two kinds, with chunks and without, so that the work hangs
on the number of queries, not of iterations. A round of k groups takes max(through all stages, k
steps of the slowest); one without chunks right after one with them waits until the last group's
long step has gone through. That is so up to how rounds overlap: some of them are run as a replay's
(rra.turns), and all times are in relation to these. The latency bound's query, of a given length,
is put in every one's place."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import NamedTuple

import numpy as np

from xgpt.core.lengths import BoolArray, FloatArray, IntArray, JointLengths
from xrunner.rules.batch_sizer import LEAST_ADJUSTED
from xsimulator.occupancy import QueryFlow
from xsimulator.plans import StagePlan
from xsimulator.policies.rra.dealt import Dealt, Rule, spread
from xsimulator.policies.rra.phases import EncodeTokens
from xsimulator.policies.rra.turns import Rounds

MOST_ITERATIONS = 32  # of a phase whose groups encode in turns: rounds of longer ones are alike
QUERIES, PHASES = 256, 16  # on the circle, at least
SCATTERED = 0.9  # standard deviation of the inputs over their mean, from which on they are unlike
SCATTERED_QUERIES = 2048  # on the circle then
MOST_QUERIES = 4096
FEWEST = 8  # queries whose rounds tell how much longer or shorter all others' are
# Chunks hold no more than so many standard deviations above a group's tokens of a phase in the
# mean; of few queries that do not scatter, which the workload adjustment leaves as they come.
_SPREADS, _FEW_SPREADS = 3.0, 2.0
# Shares of all tokens that are of single queries beyond a group's chunks of a phase, or beyond all
# tokens of the mean batch, which no others can make up for.
_BEYOND_CHUNKS, _BEYOND_BATCH = 0.005, 0.1
_OFTEN_EMPTY, _SELDOM_EMPTY = 2.0, 1.5  # queries of a group in the mean


def are_scattered(tokens: EncodeTokens) -> bool:
    """Whether inputs are so unlike each other that phases are."""
    return tokens.std > SCATTERED * tokens.mean


class Walked(NamedTuple):
    """Seconds of one configuration: of a phase in the mean, of a query's encoding, and of the
    latency bound's query from its first token to its last. nan: the timing source has no answer."""

    phase_s: float
    encode_s: float
    decode_s: float


class PhaseWalk(NamedTuple):
    """What is walked for one problem. `seen`: iterations of the latency bound's query; `quantile`:
    of all latencies, where that is asked for."""

    lengths: JointLengths
    flow: QueryFlow
    tokens: EncodeTokens
    is_padded: bool
    seen: int
    quantile: float | None
    queries: Callable[[int], tuple[IntArray, IntArray]]  # so many, spread (rra.dealt), remembered

    @classmethod
    def of(cls, lengths: JointLengths, flow: QueryFlow, tokens: EncodeTokens, *, is_padded: bool,
           seen: int, quantile: float | None) -> "PhaseWalk":
        return cls(lengths, flow, tokens, is_padded, seen, quantile,
                   cache(partial(spread, lengths, fewer=flow.iterations_fewer)))

    def is_needed(self, batch: FloatArray, groups: FloatArray, iterations: FloatArray,
                  chunk: FloatArray) -> BoolArray:
        """[configs] whether so few queries decode that groups are often empty, or phases are
        unlike since inputs scatter."""
        are_few = batch * self.flow.mean_iterations / iterations < _OFTEN_EMPTY * groups
        each, most = np.maximum(batch / groups, 1.0), chunk * iterations
        room = (most - each * self.tokens.mean) / np.sqrt(each)
        if not are_scattered(self.tokens):
            return np.asarray(are_few | (room < _FEW_SPREADS * self.tokens.std) & (
                each < LEAST_ADJUSTED))
        return np.asarray(are_few | (room < _SPREADS * self.tokens.std) | (
            self._beyond(most) > _BEYOND_CHUNKS) | (
            self._beyond(each * self.tokens.mean) > _BEYOND_BATCH))

    def are_in_turns(self, batch: FloatArray, groups: FloatArray,
                     iterations: FloatArray) -> BoolArray:
        """[configs] whether fewer queries are encoded than there are groups, so that others encode
        in one phase than in the last, phases are so short that it matters (rra.turns), and phases
        are alike and groups seldom empty."""
        decoding = batch * self.flow.mean_iterations / iterations
        is_alike = (decoding >= _SELDOM_EMPTY * groups) & (not are_scattered(self.tokens))
        return np.asarray(is_alike & (batch < groups) & (iterations <= MOST_ITERATIONS))

    def walk(self, plan: StagePlan, rule: Rule, taken: float) -> Walked:
        """The phases of one configuration; its phase_s is that of so many queries `taken`."""
        inputs, stays = self.queries(self._number(rule))
        dealt = Dealt.of(inputs, stays, self.tokens.sizer, rule)
        if not len(dealt.joins):
            return Walked(np.nan, np.nan, np.nan)
        circle = _Circle.of(dealt, rule.groups)
        seconds = circle.seconds(self, plan)
        if seconds is None:
            return Walked(np.nan, np.nan, np.nan)
        edges, passed_s, own_s = seconds
        length, total_s = edges[-1], passed_s[-1]

        def at(places: IntArray, clock: FloatArray) -> FloatArray:  # seconds passed there
            turns, rest = np.divmod(places, length)
            return np.asarray(turns * clock[-1] + np.interp(rest, edges, clock))

        is_scattered = are_scattered(self.tokens)
        # where rows are read to the longest, one of these makes its group's steps long
        longest = circle.longest() if (
            self.is_padded and is_scattered) else None
        run = Rounds.of(dealt, edges, circle.each, len(plan.steps.kind_of), longest,
                        are_alike=not is_scattered).run(
                            plan, self.flow, self.tokens, is_padded=self.is_padded)
        if run is None:
            return Walked(np.nan, np.nan, np.nan)
        joined = dealt.joins + 1
        first, last = at(joined, passed_s), at(joined + dealt.stays, passed_s)
        encode_s = first - at(dealt.begins, passed_s)
        ends, seconds_s = run.ends
        share = seconds_s / float(np.diff(np.interp(ends, edges, passed_s))[0])
        encode_s *= _share(run.between_s(dealt.group, dealt.begins, joined), encode_s, share)
        decoded = _share(run.between_s(dealt.group, joined, joined + dealt.stays), last - first,
                         share)
        if self.quantile is not None:
            all_s = float(np.quantile(encode_s + decoded * (last - first), self.quantile))
        else:
            until = joined + np.minimum(dealt.stays, self.seen)
            alone_s = at(joined + self.seen, own_s) - at(until, own_s)
            all_s = float((encode_s + decoded * (at(until, passed_s) - first + alone_s)).mean())
        queries, encode_mean_s = (
            float(dealt.tokens.sum()) / self.tokens.mean, float(encode_s.mean()))
        return Walked(share * float(total_s) * taken / queries, encode_mean_s,
                      all_s - encode_mean_s)

    def _number(self, rule: Rule) -> int:
        """Queries on the circle: of pairs that were observed each as often as any, if it may be."""
        least = SCATTERED_QUERIES if are_scattered(self.tokens) else QUERIES
        phases = max(-(-least // rule.batch), PHASES,
                     -(-self.flow.max_iterations // rule.iterations))
        number, pairs = min(phases * rule.batch, max(MOST_QUERIES, rule.batch)), self.lengths.pairs
        if are_scattered(self.tokens) and pairs is not None and len(pairs) <= MOST_QUERIES:
            number = -(-number // len(pairs)) * len(pairs)
        return number

    def _beyond(self, most: FloatArray) -> FloatArray:
        """[configs] the share of all tokens that is of single queries beyond so many."""
        inputs = self.lengths.inputs
        first = np.searchsorted(inputs.support, most, side="right")
        chance, tokens = (np.append(np.cumsum(own[::-1])[::-1], 0.0)[first] for own in (
            inputs.pmf, inputs.pmf * inputs.support))
        return np.asarray(np.maximum(tokens - most * chance, 0.0) / inputs.mean)


class _Circle(NamedTuple):
    """Stretches of iterations [edges - 1] between two events of the queries or phases of a circle:
    its phase, how many of its rounds have chunks and whether its last has; queries decoding
    [groups, edges - 1], of all, of the largest group, and groups that have any."""

    dealt: Dealt
    groups: int
    edges: IntArray
    phase: IntArray
    mixed: IntArray
    ends_mixed: BoolArray
    each: IntArray
    queries: FloatArray
    largest: FloatArray
    there: FloatArray

    @classmethod
    def of(cls, dealt: Dealt, groups: int) -> "_Circle":
        begins = np.arange(len(dealt.every)) * dealt.iterations
        length = len(dealt.every) * dealt.iterations
        first, turns = (dealt.joins + 1) % length, dealt.stays // length
        last = first + dealt.stays % length
        edges = np.unique(np.concatenate([begins, [length], first, last % length]))
        always, cells = np.bincount(dealt.group, turns, groups), dealt.group * len(edges)

        def changes(at: IntArray) -> IntArray:
            return np.bincount(cells + np.searchsorted(edges, at), minlength=groups * len(edges))

        # who stays beyond the circle's end was there before its beginning
        is_over = last > length
        change = (changes(first) - changes(np.where(is_over, last - length, last))).reshape(
            groups, -1).astype(float)
        change[:, 0] += np.bincount(dealt.group, is_over, groups)
        queries = np.cumsum(change, axis=1)[:, :-1] + always[:, None]
        phase = np.searchsorted(begins, edges[:-1], side="right") - 1
        every, until = dealt.every[phase], edges[1:] - begins[phase]
        before = -(-(edges[:-1] - begins[phase]) // every)  # rounds with chunks
        return cls(dealt, groups, edges, phase, -(-until // every) - before,
                   (until - 1) % every == 0, np.rint(queries).astype(np.int64),
                   queries.sum(axis=0), queries.max(axis=0),
                   (queries > 0.5).sum(axis=0).astype(float))

    def longest(self) -> IntArray:
        """[groups, edges - 1] tokens of the longest context in a group, in the middle of its time
        there; 0 where nobody decodes."""
        dealt, length = self.dealt, self.edges[-1]
        found = np.zeros((self.groups, len(self.edges) - 1), np.int64)
        first = (dealt.joins + 1) % length
        last = first + np.minimum(dealt.stays, length)
        context = dealt.inputs + dealt.stays // 2
        order = np.argsort(context, kind="stable")  # who is longer comes later, and stays
        columns = (dealt.group, np.searchsorted(self.edges, first), np.searchsorted(
            self.edges, np.minimum(last, length)), np.searchsorted(
            self.edges, np.maximum(last - length, 0)), context)
        for group, begin, end, over, tokens in zip(*(own[order].tolist() for own in columns),
                                                   strict=True):
            found[group, begin:end] = tokens
            found[group, :over] = tokens
        return found

    def seconds(self, walk: PhaseWalk,
                plan: StagePlan) -> tuple[IntArray, FloatArray, FloatArray] | None:
        """(edges, seconds passed there, and what would have if one query more decoded in each
        stretch); None where the timing source does not answer."""
        (plain_s, own_s), usual = self._plain_s(walk, plan)
        mixed_s, lag_s = self._mixed_s(walk, plan, usual)
        if not (np.isfinite(plain_s).all() and np.isfinite(own_s).all()
                and np.isfinite(mixed_s).all()):
            return None
        # the round without chunks that follows on one with them is of the next stretch, at an end
        plain_s, there = np.where(self.there > 0, plain_s, 0.0), self.there
        late_s = np.max(usual, axis=0) - plain_s
        there, late_s = (np.where(self.ends_mixed, np.roll(own, -1), own)
                         for own in (there, late_s))
        is_followed = (there > 0) & (self.dealt.every[self.phase] > 1)
        chunks_s = self.mixed * (mixed_s + np.where(
            is_followed, np.maximum(lag_s + late_s, 0.0), 0.0))
        plain = np.diff(self.edges) - self.mixed
        return (self.edges, np.append(0.0, np.cumsum(plain_s * plain + chunks_s)),
                np.append(0.0, np.cumsum(own_s * plain + chunks_s)))

    def _plain_s(self, walk: PhaseWalk,
                 plan: StagePlan) -> tuple[FloatArray, list[FloatArray]]:
        """Of a round without chunks [2: and with one query more, edges - 1]; and of the step of a
        usual group, by kind of stage."""
        # one more query may be in a group that works anyway
        steps = np.stack([self.there, self.there + 1 - self.there / self.groups])
        each = np.maximum(np.stack([self.queries, self.queries + 1]) / np.maximum(steps, 1.0), 1.0)
        step = _decode_s(walk, plan, each)
        slowest = step if self.groups == 1 else _decode_s(
            walk, plan, np.maximum(self.largest, each))
        return (_round_s(plan, slowest, [(steps - 1) * own for own in step])[0],
                [own[0] for own in step])

    def _mixed_s(self, walk: PhaseWalk, plan: StagePlan,
                 plain: Sequence[FloatArray]) -> tuple[FloatArray, FloatArray]:
        """Of a round with chunks, where others take a step of `plain`; and how long after the first
        group its last one is done."""
        dealt, phase, groups = self.dealt, self.phase, self.groups
        times = -(-dealt.iterations // dealt.every)
        encoding = np.minimum(dealt.chunks / times[:, None], 1.0).sum(axis=1)  # groups, in a round
        chunks = np.maximum(encoding * times, 1e-9)
        usual = dealt.tokens.sum(axis=1) / chunks
        largest = np.maximum(dealt.tokens.max(axis=1) / times, usual)
        # the group of the largest chunk is seldom that of the most queries
        more, decoding = (largest - usual)[phase], self.queries / groups
        queries = self.largest - decoding
        part = np.hypot(more, queries) / np.maximum(more + queries, 1e-9)
        tokens = np.stack([usual[phase] + part * more, usual[phase]])
        decoding = np.stack([decoding + part * queries, decoding])
        ended = np.full(len(phase), len(dealt.joins) / chunks.sum())
        one = plan.times.mean_attention_s(np.maximum(ended, 1.0))
        step = plan.steps.mixed_s(
            tokens, np.broadcast_to(ended, tokens.shape),
            {degree: tokens / walk.tokens.mean * own for degree, own in one.items()}, decoding,
            walk.flow.charged_context(np.maximum(decoding, 1.0), padded=walk.is_padded))
        others = (np.maximum(encoding[phase] - 1, 0.0),
                  self.there * (1 - encoding[phase] / groups))
        return _round_s(plan, [own[0] for own in step], [
            others[0] * own[1] + others[1] * alone
            for own, alone in zip(step, plain, strict=True)])


def _share(run_s: FloatArray, passed_s: FloatArray, otherwise: float) -> float:
    """What some queries took where their rounds were run, over what they take by rounds."""
    known = np.isfinite(run_s)
    whole_s = float(passed_s[known].sum())
    return float(run_s[known].sum()) / whole_s if known.sum() >= FEWEST and whole_s else otherwise


def _decode_s(walk: PhaseWalk, plan: StagePlan, queries: FloatArray) -> list[FloatArray]:
    return plan.steps.decode_s(queries, walk.flow.charged_context(queries, padded=walk.is_padded))


def _round_s(plan: StagePlan, slowest: Sequence[FloatArray],
             others: Sequence[FloatArray]) -> tuple[FloatArray, FloatArray]:
    """A round of the slowest group's step and all others', by kind of stage; and how long after the
    first group's return the last one's step is still under way."""
    counts = np.bincount(plan.steps.kind_of)
    through = np.sum([own * count for own, count in zip(slowest, counts, strict=True)], axis=0)
    return (np.asarray(np.maximum(through, np.max([
        one + rest for one, rest in zip(slowest, others, strict=True)], axis=0))),
        np.minimum(np.max(others, axis=0), through - np.max(slowest, axis=0)))
