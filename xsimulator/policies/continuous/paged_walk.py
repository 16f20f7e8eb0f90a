"""Admission by free blocks or by a token budget, step by step, over arrays of configurations.

Where KV in blocks runs out, queries are admitted as others end and evicted as those present grow:
how often depends on how both scatter, which no mean tells. The walk keeps, for each configuration,
the number of queries that run, the free tokens, and the latest admitted (who are evicted first);
who ends, and how much it frees, is drawn once for all configurations. Ages are not followed: a
query ends with chance 1 / E[D] per step, and frees more where those present hold more.

Groups of a pipeline share the queries that wait: one that a group evicts is encoded again by the
next that has room, and while none has, no group begins a new one. So several groups are walked
together, in turn: one by itself encodes half as often where memory is scarce.

Where there is a C++ compiler, or an installed wheel's library, csrc/planning.cpp takes the steps,
to the bit as they are taken here (xsimulator.native).

The replay (xsimulator.replay) tells the same with ages and the rule itself, but of one
configuration at a time. Planning OPT-13B on four A40 walks 26 to 33 points for vLLM and 500 to 800
for Sarathi, in 0.1 and 0.4 s by these arrays; replays of 2,000 queries each would take 1 to 4 s and
45 to 170 s."""

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np

from xgpt.core.lengths import FloatArray, IntArray
from xrunner.rules.paged import BLOCK_TOKENS, WATERMARK
from xsimulator.native import Native, native
from xsimulator.policies.continuous.size_stack import SizeStack
from xsimulator.policies.continuous.size_stream import SizeStream

STEPS = 448
_WARM_UP = 64
_AT_ONCE = 128  # most queries that are evicted or come back at one step
_HALF_BLOCK = (BLOCK_TOKENS - 1) / 2  # what a query's last block leaves empty, in the mean
_SEED = 3
_REPEATS = 64  # of the sizes that are drawn, before they come again
_NO_LIMIT = 1e12  # tokens of a step
_ENSURED_STEPS = 16  # of which it is known before what they draw at most


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WalkedQueries:
    """A walk's queries are described by these sizes."""

    iterations: float  # E[D]
    held: float  # tokens of a query present, in the mean
    input_sizes: FloatArray  # equally likely
    last_sizes: FloatArray  # what a query holds when it ends, equally likely
    is_chunked: bool  # inputs are encoded in parts, beside decoding


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Walk:
    """A walk's result is in means over steps that decode, [configs] unless said."""

    running: FloatArray
    again: FloatArray  # tokens encoded again, per token encoded for the first time
    evicted: FloatArray  # queries that wait to be encoded again, of all groups
    evictions: FloatArray  # of a query
    chunks: FloatArray  # steps that a query's encoding takes
    share: FloatArray  # of steps that encode, beside decoding or after it
    tokens: FloatArray  # [configs, sizes] encoded at such a step, equally likely, rising
    joined: FloatArray  # [configs, sizes] queries whose encoding ends, likewise


@lru_cache(maxsize=8)
def _streams(queries: WalkedQueries) -> tuple[SizeStream, SizeStream, SizeStream, SizeStream]:
    """Inputs, the same in blocks, what queries hold when they end, and gaps between their ends."""
    rng = np.random.default_rng(_SEED)
    inputs, lasts = (np.concatenate([rng.permutation(sizes) for _ in range(_REPEATS)])
                     for sizes in (queries.input_sizes, queries.last_sizes))
    gaps = -np.log1p(-(rng.permutation(lasts.size) + 0.5) / lasts.size)
    return (SizeStream(inputs), SizeStream(inputs + _HALF_BLOCK), SizeStream(lasts + _HALF_BLOCK),
            SizeStream(gaps))


class _Group:
    """One group of each configuration: [configs] queries that run, free tokens, what is left to
    encode of an input and the whole of it, and the sizes of the latest admitted."""

    def __init__(self, running: FloatArray, free: FloatArray) -> None:
        self.running, self.free = running.copy(), free.copy()
        self.part, self.whole = np.zeros(len(free)), np.zeros(len(free))
        self.latest = SizeStack(len(free))


class _Walker:
    """The walker keeps the state of all configurations, and takes their steps."""

    def __init__(self, queries: WalkedQueries, slots: FloatArray, room: FloatArray,
                 budget: FloatArray, together: int) -> None:
        """The arguments are those of `walk`."""
        self.is_chunked, self.iterations, self.held = (
            queries.is_chunked, queries.iterations, queries.held)
        self.inputs, self.blocks, self.lasts, self.gaps = _streams(queries)
        self.slots, self.room, self.budget = np.maximum(np.rint(slots), 1.0), room, budget
        running = np.minimum(self.slots, 0.95 * room / self.held)
        if self.is_chunked:  # no more than the budget keeps supplied
            running = np.minimum(running, budget * self.iterations / (
                self.iterations + queries.input_sizes.mean()))
        self.running = np.maximum(np.floor(running), 1.0)
        self.free = room - self.running * self.held
        self.groups = [_Group(self.running, self.free) for _ in range(together)]
        self.watermark = np.floor(WATERMARK * room / BLOCK_TOKENS) * BLOCK_TOKENS
        configs = len(slots)
        self.waiting = SizeStack(configs)
        self.drawn, self.ended = np.zeros(configs, np.int64), np.zeros(configs, np.int64)
        self.hazard = np.zeros(configs)
        self.anew, self.pieces, self.done, self.evictions = (np.zeros(configs) for _ in range(4))
        self.tokens, self.joined, self.left = (np.zeros(configs) for _ in range(3))
        self.may_admit = np.ones(configs, bool)
        self._most_slots = int(self.slots.max(initial=1.0))
        # what the streams come to before those drawn and ended
        self._blocks_drawn, self._inputs_drawn, self._lasts_ended = (
            np.zeros(configs) for _ in range(3))

    def step(self, number: int, group: _Group) -> tuple[FloatArray, FloatArray]:
        """A group's step returns the queries that decode at it, and those that wait evicted."""
        self.may_admit[:] = True
        self._evict(number, group)
        group.free -= group.running
        decoding, waits = group.running.copy(), self.waiting.count.astype(float)
        self.tokens, self.joined = np.zeros(self.room.size), np.zeros(self.room.size)
        self.hazard += group.running / self.iterations
        if self.is_chunked:
            self.left = np.maximum(self.budget - group.running, 0.0)  # more may decode than it has
            self._admit(number, group)
            self._end(group)
        else:  # encodes once those are gone that this step ends
            self.left = np.full(self.room.size, _NO_LIMIT)
            self._end(group)
            self._admit(number, group)
        np.minimum(group.free, self.room, out=group.free)
        group.latest.count = np.minimum(group.latest.count, group.running.astype(np.int64))
        return decoding, waits

    def ensure(self) -> None:
        """Streams have what the next _ENSURED_STEPS may draw: at each step no more begin, nor end,
        than there are slots."""
        more = (_ENSURED_STEPS + 1) * (self._most_slots + 2) * len(self.groups)
        for streams, index in (((self.inputs, self.blocks), self.drawn),
                               ((self.lasts, self.gaps), self.ended)):
            for stream in streams:
                stream.ensure(int(index.max(initial=0)) + more)

    def _evict(self, number: int, group: _Group) -> None:
        """The latest admitted are evicted until all others can grow by a token."""
        rows = ((group.free < group.running) & (group.running > 1)).nonzero()[0]
        for _ in range(_AT_ONCE):
            if not rows.size:
                break
            self.may_admit[rows] = not self.is_chunked
            is_partly = group.part[rows] > 0
            partly, wholly = rows[is_partly], rows[~is_partly]
            group.free[partly] += group.whole[partly] + _HALF_BLOCK
            self.waiting.push(partly, group.whole[partly])
            group.part[partly] = 0.0
            size = np.where(group.latest.count[wholly] > 0, group.latest.top(wholly) + number,
                            self.held)
            group.free[wholly] += size
            group.running[wholly] -= 1
            self.evictions[wholly] += 1
            group.latest.pop(wholly)
            self.waiting.push(wholly, size - _HALF_BLOCK + 1)
            rows = rows[(group.free[rows] < group.running[rows]) & (group.running[rows] > 1)]

    def _admit(self, number: int, group: _Group) -> None:
        self._encode(number, group)
        rows = ((self.waiting.count > 0) & self.may_admit).nonzero()[0]
        for _ in range(_AT_ONCE):
            if not rows.size:
                break
            rows = self._come_back(rows, number, group)
        self._begin(number, group)

    def _encode(self, number: int, group: _Group) -> None:
        """Inputs that are encoded in part go on, where the step has tokens left."""
        take = np.minimum(group.part, self.left)
        is_going = take > 0
        self.tokens += take
        self.left -= take
        group.part -= take
        self.pieces += is_going
        ready = (is_going & (group.part <= 0)).nonzero()[0]
        if ready.size:
            self.done[ready] += 1
            group.running[ready] += 1
            self.joined[ready] += 1
            group.latest.push(ready, group.whole[ready] + _HALF_BLOCK - (number + 1))

    def _come_back(self, rows: IntArray, number: int, group: _Group) -> IntArray:
        """The latest evicted is first in line; the result is the rows where another may follow."""
        size, running = self.waiting.top(rows), group.running[rows]
        fits = (group.free[rows] - size - _HALF_BLOCK >= self.watermark[rows]) | (running == 0)
        starts = (group.part[rows] <= 0) & (self.left[rows] > 0) & fits
        starts &= running < self.slots[rows]
        rows, size = rows[starts], size[starts]
        self.waiting.pop(rows)
        self.anew[rows] += size
        group.free[rows] -= size + _HALF_BLOCK
        group.part[rows] = group.whole[rows] = size
        self.hazard[rows] += 1 / self.iterations  # its encoding yields a token
        self._encode(number, group)  # all others' parts, or what is left, are used up
        return rows[self.waiting.count[rows] > 0]

    def _begin(self, number: int, group: _Group) -> None:
        """New queries begin, as many as slots, blocks and budget hold; the last perhaps in part."""
        left, drawn = self.left, self.drawn
        can = self.may_admit & (self.waiting.count == 0) & (group.part <= 0) & (left > 0)
        held = self._blocks_drawn
        most = self.blocks.reach(held + np.maximum(group.free - self.watermark, 0.0)) - drawn
        most = np.maximum(most, group.running == 0)
        room = np.maximum(np.minimum(most, self.slots - group.running), 0.0)
        most = np.where(can, room, 0).astype(np.int64)
        before = self._inputs_drawn
        ready = most if not self.is_chunked else np.minimum(
            self.inputs.reach(before + left) - drawn, most)
        after = drawn + np.minimum(ready + 1, most)
        self._inputs_drawn = self.inputs.until(after)
        self._blocks_drawn = self.blocks.until(after)
        whole = self._inputs_drawn - before
        self.tokens += np.minimum(whole, left)
        begun = after - drawn
        is_partly = begun > ready
        if is_partly.any():
            group.part = np.where(is_partly, whole - left, group.part)
            group.whole = np.where(is_partly, self.inputs.at(drawn + ready), group.whole)
        group.free -= self._blocks_drawn - held
        self.pieces += begun
        self.done += ready
        self.joined += ready
        group.running += ready
        group.latest.push_many(ready, drawn, self.blocks, number + 1)
        self.drawn = after

    def _end(self, group: _Group) -> None:
        number = np.minimum(self.gaps.reach(self.hazard) - self.ended,
                            group.running.astype(np.int64))
        after = self.ended + number
        used = (self.room - group.free) / np.maximum(group.running, 1.0) / self.held
        lasts = self.lasts.until(after)
        group.free += (lasts - self._lasts_ended) * np.minimum(np.maximum(used, 0.5), 2.0)
        self._lasts_ended = lasts
        group.running -= number
        self.hazard = np.minimum(self.hazard, self.gaps.until(after + 1))
        self.ended = after


def walk(queries: WalkedQueries, slots: FloatArray, room: FloatArray, budget: FloatArray,
         sizes: int, together: int = 1) -> Walk:
    """The walk is that of `together` groups of each configuration, which take turns and share the
    queries that wait: each one's slots, room (tokens), and budget (tokens a step, where inputs are
    encoded in parts) are [configs]; `sizes` of steps that encode stand for their distribution."""
    walker = _Walker(queries, slots, room, budget, together)
    walked = (walked_in_numpy if (library := native()) is None else partial(
        _walked_natively, library))(walker)
    share, of_tokens, of_joined = equally_likely(walked.tokens, walked.joined, sizes)
    number = walked.tokens.shape[1]
    return Walk(
        running=walked.running / number, again=walked.anew / np.maximum(walked.first, 1e-12),
        evicted=walked.waits / number, evictions=walked.evictions / walked.drawn,
        chunks=walked.pieces / np.maximum(walked.done, 1.0), share=share, tokens=of_tokens,
        joined=of_joined)


class _Walked(NamedTuple):
    """What the steps after the warm-up came to: sums [configs] of queries that decode and that
    wait; tokens encoded anew, and for the first time; evictions, parts and ends of encodings, and
    queries drawn; [configs, steps] tokens and queries of each step's encoding."""

    running: FloatArray
    waits: FloatArray
    anew: FloatArray
    first: FloatArray
    evictions: FloatArray
    pieces: FloatArray
    done: FloatArray
    drawn: FloatArray
    tokens: FloatArray
    joined: FloatArray


def walked_in_numpy(walker: _Walker) -> _Walked:
    """All configurations step by step together."""
    configs, groups = len(walker.slots), len(walker.groups)
    turns = (STEPS - _WARM_UP) * groups
    tokens, joined = (np.empty((turns, configs)) for _ in range(2))
    running, waits = np.zeros(configs), np.zeros(configs)
    for turn in range(-_WARM_UP * groups, turns):
        step, group = divmod(turn + _WARM_UP * groups, groups)
        if group == 0 and step % _ENSURED_STEPS == 0:
            walker.ensure()
        decoding, waiting = walker.step(step, walker.groups[group])
        if turn >= 0:
            running += decoding
            waits += waiting
            tokens[turn], joined[turn] = walker.tokens, walker.joined
    drawn = np.maximum(walker.drawn, 1)
    return _Walked(running, waits, walker.anew, walker.inputs.until(drawn), walker.evictions,
                   walker.pieces, walker.done, drawn.astype(float), tokens.T, joined.T)


def _walked_natively(library: Native, walker: _Walker) -> _Walked:
    """The same by csrc/planning.cpp."""
    streams = [one.once for one in (walker.inputs, walker.blocks, walker.lasts, walker.gaps)]
    means, tokens, joined = library.walks(
        streams, np.array([walker.iterations, walker.held, _HALF_BLOCK]),
        np.stack([walker.slots, walker.room, walker.budget, walker.watermark, walker.running,
                  walker.free]), is_chunked=walker.is_chunked, groups=len(walker.groups),
        count=STEPS, warm_up=_WARM_UP)
    named = dict(zip(_Walked._fields, means, strict=False))
    return _Walked(**named, tokens=tokens, joined=joined)


def equally_likely(tokens: FloatArray, joined: FloatArray,
                   sizes: int) -> tuple[FloatArray, FloatArray, FloatArray]:
    """The steps that encode have this share [configs], and `sizes` equally likely sizes in rising
    order: tokens and queries [configs, sizes]."""
    configs, steps = tokens.shape
    row = np.arange(configs)[:, None]
    order = np.argsort(tokens, axis=1) + row * steps  # among all numbers
    number = (tokens > 0).sum(axis=1)
    edges = steps - number[:, None] * (1 - np.arange(sizes + 1) / sizes)  # [configs, sizes + 1]
    low = np.minimum(edges.astype(np.int64), steps - 1)
    place, share = low + row * (steps + 1), edges - low
    sizes_of = []
    for values in (tokens, joined):
        sums = np.zeros((configs, steps + 1))
        np.cumsum(values.ravel().take(order), axis=1, out=sums[:, 1:])
        at, after = sums.ravel().take(place), sums.ravel().take(place + 1)
        between = at + share * (after - at)
        sizes_of.append((between[:, 1:] - between[:, :-1]) * sizes
                        / np.maximum(number, 1)[:, None])
    return number / steps, sizes_of[0], sizes_of[1]
