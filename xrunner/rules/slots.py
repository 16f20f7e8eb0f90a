"""Slots: which request has which row of a group's KV cache, and when it gives it up.

Free of torch. A pool's head and its stages each keep a `GroupSlots` and update it by the same
messages. The head and XSimulator's replay ask the same `Departures` whose results are due. Slots
0..n-1 of a group hold its n requests."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from enum import Enum
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class SlotUse(Enum):
    """Use of the slot of a finished request."""

    COMPACTED = "compacted"  # another request's KV is moved into it before the next step
    REUSED = "reused"  # a joining request takes it; compacted if none joins
    KEPT = "kept"  # decoded on until its whole batch is done: no early termination


class Departures:
    """Decides which finished requests depart: each at once or, with KEPT slots, a batch at once."""

    def __init__(self, use: SlotUse) -> None:
        self._keeps = use is SlotUse.KEPT
        self._num_unfinished = 0
        self._kept: list[int] = []  # finished, in an unfinished batch

    def join(self, count: int) -> None:
        """Counts `count` more active requests."""
        self._num_unfinished += count

    def leave(self, count: int = 1) -> None:
        """Counts `count` fewer: they are evicted, or handed to another pool."""
        self._num_unfinished -= count

    def finish(self, queries: Sequence[int]) -> Sequence[int]:
        """Records requests with their last token; returns the requests that depart now."""
        self._num_unfinished -= len(queries)
        if not self._keeps:
            return queries
        self._kept += queries
        if self._num_unfinished or not self._kept:
            return ()
        due, self._kept = sorted(self._kept), []
        return due


class Span(NamedTuple):
    """Tokens first .. first + tokens - 1 of the input of the request in `slot`, within one step.
    The last span yields its next token."""

    slot: int
    first: int
    tokens: int
    is_last: bool


class Seat(NamedTuple):
    """A slot of a group, numbered as after the group's last step."""

    group: int
    slot: int


class Seating(NamedTuple):
    """Changes of a group's slots before a step. Slots `removed` are compacted away, the first
    joining requests take the slots `replaced`, and the others are appended."""

    removed: tuple[int, ...]
    replaced: tuple[int, ...]


class GroupSlots(Generic[T]):
    """A group's requests by slot (T: their numbers, or records of them)."""

    def __init__(self) -> None:
        self.seats: list[T] = []
        self._vacated: set[T] = set()  # seats whose requests leave with the next step

    def vacate(self, seats: Iterable[T]) -> None:
        """Marks seats whose requests leave with the group's next step."""
        self._vacated.update(seats)

    def seat(self, joining: Sequence[T], *, is_reused: bool) -> Seating:
        """Seats `joining`, in vacated slots if these are reused, and compacts the rest away."""
        removed: list[int] = []
        if self._vacated:
            removed = [slot for slot, seat in enumerate(self.seats) if seat in self._vacated]
            self._vacated.clear()
        count = len(joining) if is_reused else 0
        seating = Seating(removed=tuple(removed[count:]), replaced=tuple(removed[:count]))
        self.compact(seating.removed)
        self.fill(joining, seating.replaced)
        return seating

    def compact(self, removed: Collection[int]) -> list[Move]:
        """Removes slots and returns the moves that make the others contiguous."""
        if not removed:
            return []
        moves = compaction_moves(len(self.seats), removed)
        apply_moves(self.seats, moves, len(removed))
        return moves

    def fill(self, joining: Sequence[T], replaced: Sequence[int] = ()) -> int:
        """Puts the first of `joining` into the slots `replaced` and appends the others. Returns the
        first appended slot."""
        first = len(self.seats)
        for slot, seat in zip(replaced, joining, strict=False):
            self.seats[slot] = seat
        self.seats += joining[len(replaced):]
        return first


class Move(NamedTuple):
    """Copy of cache row `source` onto row `target`."""

    source: int
    target: int


def compaction_moves(num_active: int, removed: Iterable[int]) -> list[Move]:
    """Moves that make the survivors of slots 0..num_active-1 contiguous again. Only rows behind the
    new end move, each into a hole before it: the fewest copies possible."""
    holes = sorted(set(removed))
    assert all(0 <= slot < num_active for slot in holes), f"{holes = } {num_active = }"
    remaining = num_active - len(holes)
    gone = set(holes)
    movers = [slot for slot in range(remaining, num_active) if slot not in gone]
    return [Move(source, target) for source, target in zip(movers, holes, strict=False)]


def apply_moves(items: list[T], moves: Iterable[Move], num_removed: int) -> None:
    """Compacts `items`, a list by slot, in place."""
    for source, target in moves:
        items[target] = items[source]
    del items[len(items) - num_removed:]
