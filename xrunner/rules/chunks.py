"""Chunks of inputs that are encoded beside decoding (docs/running.md): in RRA's phases, and in
WAA's decode pool while the encode pool is behind.

In each group at most one request is partly encoded; the next starts after its last chunk.

Symbols: c = `limit`, most input tokens that a group's step encodes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from xrunner.rules.prefixes import Unshared
from xrunner.rules.room import Rooms, Waiting
from xrunner.rules.steps import Chunk

Encoded = tuple[tuple[Chunk, ...], tuple[int, ...]]  # a step's chunks, requests that end with it


class PartialInput(NamedTuple):
    """A request of whose input `done` tokens are encoded."""

    query: int
    tokens: int
    done: int = 0

    @classmethod
    def of(cls, new: Waiting, prefixes: Unshared) -> PartialInput:
        """The input of an admitted request, of which the tokens that it shares are encoded."""
        return cls(new.query, new.tokens + new.shared, prefixes.first.get(new.query, 0))

    @property
    def is_whole(self) -> bool:
        return self.done == self.tokens

    def next(self, most: int) -> tuple[Chunk, PartialInput]:
        """The next chunk, of at most `most` tokens, and the input's state after it."""
        size = min(most, self.tokens - self.done)
        return (Chunk(query=self.query, first=self.done, tokens=size),
                self._replace(done=self.done + size))


def whole_input(new: Waiting, prefixes: Unshared) -> tuple[Chunk, ...]:
    """An admitted request's input as one chunk; () where steps encode whole inputs."""
    if not prefixes.is_shared:
        return ()
    part = PartialInput.of(new, prefixes)
    return (prefixes.encode(part.next(part.tokens)[0]),)


class _Parts:
    """Each group's partly encoded request."""

    def __init__(self, limit: int, num_groups: int) -> None:
        assert limit >= 1, f"{limit = }"
        self.limit = limit
        self._parts: list[PartialInput | None] = [None] * num_groups

    def _encoded(self, group: int, left: int, waiting: deque[Waiting],
                 begin: Callable[[Waiting], bool], prefixes: Unshared) -> Encoded:
        """Chunks of a step of at most `left` tokens, and the requests completed by them. `begin`:
        admits the first waiting request, or returns False if there is no room."""
        chunks, joined, part = list[Chunk](), list[int](), self._parts[group]
        while left > 0:
            if part is None:
                if not waiting or not begin(waiting[0]):
                    break  # keep the input's order: a smaller request behind does not overtake
                new = waiting.popleft()
                part = PartialInput.of(new, prefixes)
            chunk, part = part.next(left)
            chunks.append(prefixes.encode(chunk))
            left -= chunk.tokens
            if part.is_whole:
                joined.append(part.query)
                part = None
        self._parts[group] = part
        return tuple(chunks), tuple(joined)


class PhaseChunks(_Parts):
    """Chunks of all RRA groups, spread evenly over a phase of N_D decode iterations.

    A group encodes in every e-th iteration, with e as large as chunks of c tokens allow. All groups
    use the same iterations, since one long step holds up every group behind it. Tokens beyond N_D
    chunks are left to the next phase."""

    def __init__(self, limit: int, num_groups: int) -> None:
        super().__init__(limit, num_groups)
        self._assigned: list[deque[Waiting]] = [deque() for _ in range(num_groups)]  # not begun
        self._sizes = [0] * num_groups  # largest chunk of each group
        self._every = 1

    def waiting(self, group: int | None = None) -> list[Waiting]:
        """Requests assigned to a group (None: to any) that are not begun."""
        groups = self._assigned if group is None else [self._assigned[group]]
        return [query for own in groups for query in own]

    def has_waiting(self) -> bool:
        return any(self._assigned)

    def assign(self, group: int, queries: Sequence[Waiting]) -> None:
        """Assigns requests to the group, behind those it has."""
        self._assigned[group] += queries

    def begin_phase(self, iterations: int, rooms: Rooms) -> None:
        """Sets chunk sizes and their spacing for a phase of so many iterations."""
        left = [rooms.to_encode(*own) + (0 if part is None else part.tokens - part.done)
                for own, part in zip(self._assigned, self._parts, strict=True)]
        most = max(left)
        self._every = min(max(self.limit * iterations // max(most, 1), 1), iterations)
        times = -(-iterations // self._every)
        self._sizes = [min(-(-tokens // times), self.limit) for tokens in left]

    def take(self, group: int, iteration: int, begin: Callable[[Waiting], bool],
             prefixes: Unshared) -> Encoded:
        """Chunks and completed requests of the group in this iteration, counted from 1."""
        if (iteration - 1) % self._every:
            return (), ()
        return self._encoded(group, self._sizes[group], self._assigned[group], begin, prefixes)

    def drop(self, group: int, evicted: Collection[int]) -> None:
        """Forgets the group's partly encoded request if it is among the evicted."""
        part = self._parts[group]
        if part is not None and part.query in evicted:
            self._parts[group] = None


class DecodePoolInputs(_Parts):
    """Inputs that WAA's decode pool encodes, in order; each goes to the group whose turn it is."""

    def __init__(self, limit: int, num_groups: int) -> None:
        super().__init__(limit, num_groups)
        self._waiting: deque[Waiting] = deque()

    def __len__(self) -> int:
        """Number of requests that are not begun."""
        return len(self._waiting)

    def add(self, waiting: Waiting) -> None:
        self._waiting.append(waiting)

    def take(self, group: int, begin: Callable[[Waiting], bool], prefixes: Unshared) -> Encoded:
        """Chunks and completed requests of the group's next step."""
        return self._encoded(group, self.limit, self._waiting, begin, prefixes)
