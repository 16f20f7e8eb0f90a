"""Shared prefixes in the KV cache of one replica: which are there, who encodes them, and which go.
Free of torch, and without a clock.

The first request of a prefix encodes it, and all others read it. It lives as long as there is room.
If room lacks, the prefix without a request at work goes whose next request is farthest in line
(Belady's rule). It is encoded again if a request of it comes. Budgets count a request's own tokens,
and each living prefix once."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from xgpt.core.prefixes import Prefixes
from xrunner.rules.steps import BatchingRule, Chunk, Start

StepParts = tuple[tuple[Start, ...], tuple[int, ...]]  # (Step.starts, Step.released)


class Unshared:
    """Stands for the shared prefixes of requests that share none."""

    is_shared = False

    def __init__(self) -> None:
        self.tokens = 0  # of all prefixes in the cache
        self.first: dict[int, int] = {}  # of requests at work: tokens shared, if they share any
        # most prefixes that are in a cache of so many tokens at a time
        self.most_within: Callable[[int], int] = lambda tokens: 0

    def shared(self, query: int, fits: Callable[[int], bool] = lambda _: True) -> int:
        """Tokens of a submitted request's longest prefix; 0 from now on if it does not fit beside
        so many."""
        return 0

    def submit(self, query: int) -> None:
        """Puts a request at the end of the line."""

    def to_encode(self, queries: Iterable[int]) -> int:
        """Tokens of their prefixes that these waiting requests would encode now."""
        return 0

    def make_room(self, query: int, fits: Callable[[int], bool]) -> bool:
        """Lets idle prefixes go until those left fit, with what the request adds. `fits`: tells
        whether prefixes of so many tokens do. Returns whether it succeeds; else all stay. The
        request must also wait while another has encoded a prefix of both in part."""
        return fits(0)

    def let_go(self) -> bool:
        """Lets the idle prefix go that is needed last; returns whether there was one."""
        return False

    def admit(self, query: int) -> None:
        """Lets a waiting request begin with the step that is being decided."""

    def encode(self, chunk: Chunk) -> Chunk:
        """Records that the step encodes the chunk; returns it."""
        return chunk

    def finish(self, query: int) -> None:
        """Records that a request at work has its last token."""

    def evict(self, query: int) -> None:
        """Puts a request at work back in front of the line. A prefix that it has encoded in part
        goes."""

    def end_step(self) -> StepParts:
        """Ends the decision on a step; returns its parts about prefixes."""
        return (), ()


class PrefixLine:
    """The line of submitted requests, by prefix."""

    def __init__(self, prefixes: Prefixes) -> None:
        self.nodes: list[int] = prefixes.nodes.tolist()
        self._prefixes = prefixes
        self._chains: dict[int, Sequence[int]] = {-1: ()}
        # (place, request) of those that wait for each prefix, in order; some have begun since
        self._waiting: dict[int, deque[tuple[int, int]]] = {}
        self._places: dict[int, int] = {}  # of waiting requests
        self._first = self._next = 0  # places of the next request at either end

    def chain(self, query: int) -> Sequence[int]:
        """The request's prefixes, each within the next."""
        node = self.nodes[query]
        chain = self._chains.get(node)
        if chain is None:
            chain = self._chains[node] = self._prefixes.chain(node)
        return chain

    def append(self, query: int) -> None:
        """Puts a request at the end."""
        self._places[query] = self._next
        for node in self.chain(query):
            self._waiting.setdefault(node, deque()).append((self._next, query))
        self._next += 1

    def begin(self, query: int) -> None:
        """Takes a request out of the line."""
        del self._places[query]

    def put_back(self, query: int) -> None:
        """Puts a request that had begun at the front."""
        self._first -= 1
        self._places[query] = self._first
        for node in self.chain(query):
            self._waiting[node].appendleft((self._first, query))

    def next_use(self, node: int) -> float:
        """Place in line of the prefix's next request; infinite without one."""
        line = self._waiting[node]
        while line and self._places.get(line[0][1]) != line[0][0]:
            line.popleft()
        return line[0][0] if line else math.inf


@dataclass(slots=True)
class Living:
    """A prefix in the cache. `at_work`: its requests at work. `is_encoded`: all its tokens are.
    `end`: up to which token requests that begin now can share it."""

    end: int
    at_work: int = 0
    is_encoded: bool = False


class _Idle:
    """Living prefixes without a request at work, in the order in which they are needed."""

    def __init__(self) -> None:
        self.order: list[tuple[float, int]] = []  # (place in line of its next request, prefix)
        self._places: dict[int, float] = {}

    def put(self, node: int, place: float | None) -> None:
        """Puts a prefix where it belongs now; None: it is not idle."""
        if node in self._places:
            del self.order[bisect_left(self.order, (self._places.pop(node), node))]
        if place is not None:
            self._places[node] = place
            insort(self.order, (place, node))


class SharedPrefixes(Unshared):
    """The prefixes of one replica."""

    is_shared = True

    def __init__(self, prefixes: Prefixes) -> None:
        super().__init__()
        self.most_within = prefixes.most_within
        self.line, self.living, self._idle = PrefixLine(prefixes), dict[int, Living](), _Idle()
        self._own: list[int] = prefixes.own_tokens.tolist()
        self._ends: list[int] = prefixes.ends.tolist()
        # what a step writes can be read by it in whole blocks, but not copied
        size = prefixes.block_tokens
        self._ends_now = [end // size * size for end in self._ends]
        self._ends_later = self._ends_now if prefixes.is_whole else self._ends
        self._writing: dict[int, tuple[tuple[int, int], ...]] = {}  # (prefix, end) by request
        self._new: list[int] = []  # encoded by the step that is being decided
        self._starts: list[Start] = []
        self._released: list[int] = []

    def shared(self, query: int, fits: Callable[[int], bool] = lambda _: True) -> int:
        node = self.line.nodes[query]
        if node >= 0 and not fits(self._ends[node]):
            self.line.nodes[query] = node = -1
        return self._ends[node] if node >= 0 else 0

    def submit(self, query: int) -> None:
        self.line.append(query)
        self._note_idle(query)

    def withdraw(self, query: int) -> None:
        """Takes a waiting request out of the line."""
        self.line.begin(query)
        self._note_idle(query)

    def to_encode(self, queries: Iterable[int]) -> int:
        missing, rests = set[int](), 0
        for query in queries:
            chain = self.line.chain(query)
            there = [node for node in chain if node in self.living]
            missing.update(chain[len(there):])
            if there:  # the rest of a block that cannot be copied yet
                rests += self._ends[there[-1]] - max([self.living[node].end for node in there])
        return rests + sum([self._own[node] for node in missing])

    def make_room(self, query: int, fits: Callable[[int], bool]) -> bool:
        chain = self.line.chain(query)
        if any(one is not None and not one.is_encoded for one in map(self.living.get, chain)):
            return False
        tokens, gone = self.tokens, list[int]()
        tokens += sum([self._own[node] for node in chain if node not in self.living])
        # a prefix comes after those that continue it
        idle = (node for _, node in reversed(self._idle.order) if node not in chain)
        while not fits(tokens):
            node = next(idle, None)
            if node is None:
                return False
            tokens -= self._own[node]
            gone.append(node)
        self._release(gone)
        return True

    def let_go(self) -> bool:
        last = [node for _, node in self._idle.order[-1:]]
        self._release(last)
        return bool(last)

    def admit(self, query: int) -> None:
        self.line.begin(query)
        chain, first, source, writes = self.line.chain(query), 0, -1, []
        for node in chain:
            one = self.living.get(node)
            if one is None:
                one = self.living[node] = Living(self._ends_later[node])
                self.tokens += self._own[node]
                writes.append((node, self._ends[node]))
            elif one.end > first:
                first, source = one.end, node
            one.at_work += 1
        if chain:
            self.first[query] = first
            self._starts.append(Start(query, first, source, tuple(writes)))
        if writes:
            self._writing[query] = tuple(writes)
        self._note_idle(query)

    def encode(self, chunk: Chunk) -> Chunk:
        end, left = chunk.first + chunk.tokens, []
        for node, last in self._writing.pop(chunk.query, ()):
            if last > end:
                left.append((node, last))
                continue
            self.living[node].is_encoded, self.living[node].end = True, self._ends_now[node]
            self._new.append(node)
        if left:
            self._writing[chunk.query] = tuple(left)
        return chunk

    def finish(self, query: int) -> None:
        self._leave(query)
        self._note_idle(query)

    def evict(self, query: int) -> None:
        self._leave(query)
        self.line.put_back(query)
        self._release([node for node, _ in reversed(self._writing.pop(query, ()))])
        self._note_idle(query)

    def end_step(self) -> StepParts:
        for node in self._new:
            if node in self.living:
                self.living[node].end = self._ends_later[node]
        found = tuple(self._starts), tuple(self._released)
        for one in (self._new, self._starts, self._released):
            one.clear()
        return found

    def _leave(self, query: int) -> None:
        self.first.pop(query, None)
        for node in self.line.chain(query):
            self.living[node].at_work -= 1

    def _release(self, nodes: Iterable[int]) -> None:
        """Gives up those of the prefixes that are in the cache."""
        for node in nodes:
            if self.living.pop(node, None) is not None:
                self._idle.put(node, None)
                self.tokens -= self._own[node]
                self._released.append(node)

    def _note_idle(self, query: int) -> None:
        """Notes which of the request's prefixes are idle, and when they are needed next."""
        for node in self.line.chain(query):
            if (one := self.living.get(node)) is not None:
                self._idle.put(node, None if one.at_work else self.line.next_use(node))


def set_prefixes(rule: BatchingRule, prefixes: Prefixes | None) -> None:
    """Lets the rule share prefixes, if there are any and it can. Call it before any `submit`."""
    share = getattr(rule, "share_prefixes", None)
    if prefixes is not None and share is not None:
        share(SharedPrefixes(prefixes))
