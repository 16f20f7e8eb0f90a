"""RRA in chunks where few queries decode: what a phase takes is that of a few phases, walked.

Symbols: as in rra.chunked. Where groups are often empty, what a round takes hangs on who happens to
be there: an iteration in which nobody decodes takes no time at all, one with a query in one group
as long as one with a query in each of several (the way through all stages), and a group's only
query of a phase joins with the phase's last chunk whatever its length. So some phases of queries
whose lengths are spread evenly over their distribution are laid out on a circle of M N_D
iterations, each query's way by the rule (xrunner.rules.chunks):

    first chunk   of its group's tokens before it, over those of a chunk
    last chunk    of its group's tokens up to its own, likewise
    decoding      D iterations from the round after that one on

Rounds between two of these events are alike, so that the work hangs on the number of queries, not
of iterations. A round of k groups takes max(through all stages, k steps of the slowest), one with
chunks as the group of the most tokens makes it. What follows is exact for these queries up to
the rounds' overlap; the latency bound's query, of a given length, is put in every one's place."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from xgpt.core.lengths import BoolArray, FloatArray, IntArray, JointLengths
from xrunner.rules.batch_sizer import BatchSizer
from xsimulator.occupancy import QueryFlow
from xsimulator.plans import StagePlan
from xsimulator.policies.rra.phases import EncodeTokens

QUERIES = 256  # on the circle, at least
_SEED = 3  # of the order of the queries: the same wherever it is computed


class Walked(NamedTuple):
    """Seconds of one configuration: of a phase in the mean, of a query's encoding, and of the
    latency bound's query from its first token to its last. nan: the timing source has no answer."""

    phase_s: float
    encode_s: float
    decode_s: float


class FewQueries(NamedTuple):
    """What is walked for one problem. `seen`: iterations of the latency bound's query; `quantile`:
    of all latencies, where that is asked for."""

    lengths: JointLengths
    flow: QueryFlow
    tokens: EncodeTokens
    is_padded: bool
    seen: int
    quantile: float | None
    sizer: BatchSizer

    def are_among(self, batch: FloatArray, taken: FloatArray, groups: FloatArray,
                  iterations: FloatArray) -> BoolArray:
        """[configs] whether fewer queries decode than there are groups. Where chunks hold no more
        than `taken` queries of a group's share of `batch`, every round is full of chunks."""
        decoding = batch * self.flow.mean_iterations / iterations
        is_all = taken * groups > batch * (1 - 1e-9)
        return np.asarray(is_all & (decoding < groups))

    def walk(self, plan: StagePlan, batch: int, iterations: int, chunk: int,
             groups: int) -> Walked:
        """The phases of one configuration are walked."""
        phases = max(-(-QUERIES // batch), -(-self.flow.max_iterations // iterations))
        dealt = _Dealt.of(self, phases, batch, groups)
        circle = _Circle.of(self, dealt, iterations, chunk)
        seconds = circle.seconds(self, plan)
        if seconds is None:
            return Walked(np.nan, np.nan, np.nan)
        edges, passed_s, own_s = seconds
        length, total_s = edges[-1], passed_s[-1]

        def at(places: IntArray, clock: FloatArray) -> FloatArray:  # seconds passed there
            turns, rest = np.divmod(places, length)
            return np.asarray(turns * clock[-1] + np.interp(rest, edges, clock))

        first = at(circle.joins + 1, passed_s)
        encode_s = first - at(circle.begins, passed_s)
        if self.quantile is not None:
            latency_s = encode_s + at(circle.joins + 1 + circle.stays, passed_s) - first
            all_s = float(np.quantile(latency_s, self.quantile))
        else:
            until = circle.joins + 1 + np.minimum(circle.stays, self.seen)
            alone_s = at(circle.joins + 1 + self.seen, own_s) - at(until, own_s)
            all_s = float((encode_s + at(until, passed_s) - first + alone_s).mean())
        return Walked(float(total_s) * batch / len(dealt.inputs), float(encode_s.mean()),
                      all_s - float(encode_s.mean()))


class _Dealt(NamedTuple):
    """[queries], in the order in which they come, tokens of the input, decode iterations, and the
    phase and group of each; [phases, groups] how many."""

    inputs: FloatArray
    stays: IntArray
    phase: IntArray
    group: IntArray
    quotas: IntArray

    @classmethod
    def of(cls, few: FewQueries, phases: int, batch: int, groups: int) -> "_Dealt":
        """Of larger batches the workload adjustment takes more or fewer (batch_sizer)."""
        base, odd = divmod(batch, groups)
        places = np.arange(groups) + np.arange(phases)[:, None] * odd
        quotas = base + (places % groups < odd)
        inputs, stays = _spread(few.lengths, int(quotas.sum()), few.flow.iterations_fewer)
        if few.sizer.most(base + 1) > base + 1:
            quotas = _adjusted(few.sizer, quotas, inputs)
            places = np.arange(quotas.sum()) % len(inputs)
            inputs, stays = inputs[places], stays[places]
        cells = np.repeat(np.arange(quotas.size), quotas.ravel())
        return cls(inputs, stays, *np.divmod(cells, groups), quotas)


def _adjusted(sizer: BatchSizer, quotas: IntArray, inputs: FloatArray) -> IntArray:
    """How many of each batch's inputs the sizer takes, the first again after the last."""
    tokens, place = inputs.astype(np.int64).tolist(), 0
    tokens, found = tokens + tokens[:sizer.most(int(quotas.max()))], quotas.ravel().copy()
    for cell, quota in enumerate(found.tolist()):
        if quota:
            found[cell] = sizer.count(tokens[place:place + sizer.most(quota)], quota)
            place = (place + int(found[cell])) % len(inputs)
    return found.reshape(quotas.shape)


class _Circle(NamedTuple):
    """Where on a circle of iterations each query [queries] begins to be encoded, and joins; how
    many iterations it decodes; and the rounds with chunks."""

    length: int
    groups: int
    group: IntArray
    begins: IntArray
    joins: IntArray
    stays: IntArray
    rounds: IntArray  # [chunks] iterations, in order
    tokens: FloatArray  # [2, chunks] of the largest group's chunk, and of one in the mean
    encoding: FloatArray  # [chunks] groups that have one
    ended: FloatArray  # [chunks] queries of a group whose encoding ends, in the mean

    @classmethod
    def of(cls, few: FewQueries, dealt: _Dealt, iterations: int, chunk: int) -> "_Circle":
        inputs = dealt.inputs
        phases, groups = dealt.quotas.shape
        cells, counts = dealt.phase * groups + dealt.group, dealt.quotas.ravel()
        ends, so_far = np.cumsum(counts), np.append(0.0, np.cumsum(inputs))
        until = so_far[1:] - so_far[ends - counts][cells]
        of_phase = (so_far[ends] - so_far[ends - counts]).reshape(phases, groups)
        every = np.clip(chunk * iterations // np.maximum(of_phase.max(axis=1), 1), 1,
                        iterations).astype(np.int64)
        times = -(-iterations // every)
        wanted = np.ceil(of_phase / times[:, None])
        size = np.minimum(wanted, chunk)  # what is more goes on beside the next phases' chunks
        of_cell = np.maximum(size.ravel()[cells], 1.0)
        first = np.floor((until - inputs) / of_cell).astype(np.int64)
        last = np.ceil(until / of_cell).astype(np.int64) - 1
        own = every[dealt.phase]
        whole = dealt.phase * iterations
        of_chunk = np.repeat(np.arange(phases), times)
        place = np.arange(len(of_chunk)) - np.repeat(np.cumsum(times) - times, times)
        of_groups = (counts > 0).reshape(phases, groups).sum(axis=1)
        encoding = of_groups * wanted.sum(axis=1) / np.maximum(size.sum(axis=1), 1.0)
        return cls(length=phases * iterations, groups=groups, group=dealt.group,
                   begins=whole + own * first, joins=whole + own * last, stays=dealt.stays,
                   rounds=of_chunk * iterations + place * every[of_chunk],
                   tokens=np.stack([size.max(axis=1), size.sum(axis=1) / np.maximum(
                       of_groups, 1)])[:, of_chunk],
                   encoding=np.minimum(encoding, groups)[of_chunk],
                   ended=(dealt.quotas.sum(axis=1) / np.maximum(of_groups, 1) / times)[of_chunk])

    def seconds(self, few: FewQueries,
                plan: StagePlan) -> tuple[IntArray, FloatArray, FloatArray] | None:
        """(edges of rounds that are alike, seconds passed there, and what would have if one query
        more decoded in each of them); None where the timing source does not answer."""
        first, last = self.joins + 1, self.joins + 1 + self.stays
        some = last > first
        group, turn = self.group[some], first[some] // self.length * self.length
        first, last = first[some] - turn, last[some] - turn
        # who stays beyond the circle's end was there before its beginning
        first = np.append(first, np.zeros((last > self.length).sum(), np.int64))
        group = np.append(group, group[last > self.length])
        last = np.concatenate([np.minimum(last, self.length), last[last > self.length]
                               - self.length])
        edges = np.unique(np.concatenate([[0, self.length], self.rounds, self.rounds + 1, first,
                                          last]))
        queries = _number(edges, first, last)
        there = _number(edges, *_joined(group, first, last, self.length + 1))
        plain, own = self._plain_s(few, plan, queries, there)
        places = np.searchsorted(edges, self.rounds)
        mixed = self._mixed_s(few, plan, queries[places], there[places])
        plain[places], own[places] = mixed, mixed
        if not (np.isfinite(plain).all() and np.isfinite(own).all()):
            return None
        widths = np.diff(edges)
        return (edges, np.append(0.0, np.cumsum(plain * widths)),
                np.append(0.0, np.cumsum(own * widths)))

    def _plain_s(self, few: FewQueries, plan: StagePlan, queries: FloatArray,
                 there: FloatArray) -> tuple[FloatArray, FloatArray]:
        # one more query may be in a group that works anyway
        steps = np.stack([there, there + 1 - there / self.groups])
        each = np.maximum(np.stack([queries, queries + 1]) / np.maximum(steps, 1.0), 1.0)
        step = plan.steps.decode_s(each, few.flow.charged_context(each, padded=few.is_padded))
        plain, own = _round_s(plan, step, [(steps - 1) * one for one in step])
        return np.where(there > 0, plain, 0.0), own

    def _mixed_s(self, few: FewQueries, plan: StagePlan, queries: FloatArray,
                 there: FloatArray) -> FloatArray:
        decoding = np.broadcast_to(queries / self.groups, self.tokens.shape)
        one = plan.times.mean_attention_s(np.maximum(self.ended, 1.0))
        step = plan.steps.mixed_s(
            self.tokens, np.broadcast_to(self.ended, self.tokens.shape),
            {degree: self.tokens / few.tokens.mean * own for degree, own in one.items()},
            decoding, few.flow.charged_context(np.maximum(decoding, 1.0), padded=few.is_padded))
        each = np.maximum(queries / np.maximum(there, 1.0), 1.0)
        plain = plan.steps.decode_s(each, few.flow.charged_context(each, padded=few.is_padded))
        more = np.maximum(self.encoding - 1, 0.0), there * (1 - self.encoding / self.groups)
        return _round_s(plan, [own[0] for own in step], [
            more[0] * own[1] + more[1] * alone for own, alone in zip(step, plain, strict=True)])


def _round_s(plan: StagePlan, slowest: Sequence[FloatArray],
             others: Sequence[FloatArray]) -> FloatArray:
    """A round of the slowest group's step and all others', by kind of stage."""
    counts = np.bincount(plan.steps.kind_of)
    through = np.sum([own * count for own, count in zip(slowest, counts, strict=True)], axis=0)
    return np.asarray(np.maximum(through, np.max([
        one + rest for one, rest in zip(slowest, others, strict=True)], axis=0)))


def _number(edges: IntArray, first: IntArray, last: IntArray) -> FloatArray:
    """[edges - 1] how many of the ranges hold what is between two edges."""
    more = np.bincount(np.searchsorted(edges, first), minlength=len(edges))
    fewer = np.bincount(np.searchsorted(edges, last), minlength=len(edges))
    return np.cumsum(more - fewer)[:-1].astype(float)


def _joined(group: IntArray, first: IntArray, last: IntArray,
            length: int) -> tuple[IntArray, IntArray]:
    """The ranges in which a group has any query: unions of those of its queries."""
    order = np.lexsort((first, group))
    away = group[order] * length
    first, last = first[order] + away, last[order] + away
    reach = np.maximum.accumulate(last)
    ends = np.append(first[1:] > reach[:-1], np.ones(min(len(first), 1), bool))
    begins = np.roll(ends, 1)
    return first[begins] - away[begins], reach[ends] - away[ends]


def _spread(lengths: JointLengths, count: int, fewer: int) -> tuple[FloatArray, IntArray]:
    """(inputs, decode iterations) of so many queries, spread evenly over their distribution, in an
    order that is random, but always the same."""
    rng, places = np.random.default_rng(_SEED), (np.arange(count) + 0.5) / count
    if lengths.pairs is None:
        inputs, outputs = (own.support[np.searchsorted(np.cumsum(own.pmf), places).clip(
            0, len(own.support) - 1)] for own in (lengths.inputs, lengths.outputs))
        outputs = outputs[rng.permutation(count)]
    else:
        order = np.lexsort(lengths.pairs.T)
        inputs, outputs = lengths.pairs[order[(places * len(order)).astype(np.int64)]].T
    shuffled = rng.permutation(count)
    return inputs[shuffled].astype(float), np.maximum(outputs[shuffled] - fewer, 0)
