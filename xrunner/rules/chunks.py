"""Inputs that are encoded beside decoding, in chunks: those of RRA's phases, and those that WAA's
decode pool encodes itself while the encode pool is behind (docs/running.md).

In each group one query, at most, is encoded in part; the next is begun when its last chunk is in.

Symbols: c = `limit`, tokens of inputs that a group's step encodes at most."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from xrunner.rules.steps import Chunk, Waiting

Encoded = tuple[tuple[Chunk, ...], tuple[int, ...]]  # chunks of a step, queries whose last are in


class Part(NamedTuple):
    """A query of which `done` tokens are encoded."""

    query: int
    tokens: int
    done: int = 0

    @property
    def is_whole(self) -> bool:
        return self.done == self.tokens

    def next(self, most: int) -> tuple[Chunk, Part]:
        """The next chunk, of so many tokens at the most, and what then is encoded."""
        size = min(most, self.tokens - self.done)
        return (Chunk(query=self.query, first=self.done, tokens=size),
                self._replace(done=self.done + size))


class _Parts:
    """The queries that are encoded in part."""

    def __init__(self, limit: int, num_groups: int) -> None:
        assert limit >= 1, f"{limit = }"
        self.limit = limit
        self._parts: list[Part | None] = [None] * num_groups

    def num_begun(self, group: int) -> int:
        """Queries of the group that are encoded in part: none or one."""
        return int(self._parts[group] is not None)

    def _encoded(self, group: int, left: int, waiting: deque[Waiting],
                 begin: Callable[[Waiting], bool]) -> Encoded:
        """What a step encodes that has `left` tokens for it. `begin` says whether there is room for
        the first that waits, which is then begun."""
        chunks, joined, part = list[Chunk](), list[int](), self._parts[group]
        while left > 0:
            if part is None:
                if not waiting or not begin(waiting[0]):
                    break  # keep the input's order: a smaller query behind does not overtake
                first = waiting.popleft()
                part = Part(first.query, first.tokens)
            chunk, part = part.next(left)
            chunks.append(chunk)
            left -= chunk.tokens
            if part.is_whole:
                joined.append(part.query)
                part = None
        self._parts[group] = part
        return tuple(chunks), tuple(joined)


class PhaseChunks(_Parts):
    """The chunks of all RRA's groups, spread evenly over a phase of N_D decode iterations.

    A group's tokens of a phase are encoded in every e-th of its iterations, the most seldom that
    chunks of c tokens can be; all groups keep to the same iterations, since one long step holds up
    those of every group behind it. Tokens beyond N_D chunks are left to the next phase."""

    def __init__(self, limit: int, num_groups: int) -> None:
        super().__init__(limit, num_groups)
        self._dealt: list[deque[Waiting]] = [deque() for _ in range(num_groups)]  # not begun
        self._tokens, self._sizes = [0] * num_groups, [0] * num_groups  # left; of a chunk, at most
        self._every = 1

    def waiting(self, group: int | None = None) -> list[Waiting]:
        """The queries dealt to a group (None: to any) that are not begun."""
        groups = self._dealt if group is None else [self._dealt[group]]
        return [query for own in groups for query in own]

    def has_waiting(self) -> bool:
        return any(self._dealt)

    def deal(self, group: int, queries: Sequence[Waiting]) -> None:
        """The group encodes these after what it has."""
        self._dealt[group] += queries
        self._tokens[group] += sum(query.tokens for query in queries)

    def begin_phase(self, iterations: int) -> None:
        """How often, and how much at a time, is encoded in so many iterations."""
        most = max(self._tokens)
        self._every = min(max(self.limit * iterations // max(most, 1), 1), iterations)
        times = -(-iterations // self._every)
        self._sizes = [min(-(-tokens // times), self.limit) for tokens in self._tokens]

    def take(self, group: int, iteration: int, begin: Callable[[Waiting], bool]) -> Encoded:
        """What the group encodes in this iteration, counted from 1."""
        if (iteration - 1) % self._every:
            return (), ()
        chunks, joined = self._encoded(group, self._sizes[group], self._dealt[group], begin)
        self._tokens[group] -= sum(chunk.tokens for chunk in chunks)
        return chunks, joined


class TakenInputs(_Parts):
    """What WAA's decode pool has to encode, in the order in which it was left to it: each query in
    the group whose turn it is."""

    def __init__(self, limit: int, num_groups: int) -> None:
        super().__init__(limit, num_groups)
        self._waiting: deque[Waiting] = deque()

    def __len__(self) -> int:
        """Queries that are not begun."""
        return len(self._waiting)

    def add(self, waiting: Waiting) -> None:
        self._waiting.append(waiting)

    def take(self, group: int, begin: Callable[[Waiting], bool]) -> Encoded:
        """What the group's next step encodes."""
        return self._encoded(group, self.limit, self._waiting, begin)
