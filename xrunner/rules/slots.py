"""Who sits in which slot of a group, and when a query that is done gives its slot up. This is the
one account of it, free of torch: a pool's head and its stages keep `GroupSlots`, each for itself,
by the same messages; the head and XSimulator's replay ask the same `Departures` whose results are
due.

Slots 0..n-1 of a group hold its n queries; a slot is a row of the group's KV cache on every stage.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from enum import Enum
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class SlotUse(Enum):
    """What becomes of the slot of a query that is done."""

    COMPACTED = "compacted"  # another query's entries are moved into it before the next step
    REUSED = "reused"  # a query that joins takes it as it is; compacted where none does
    KEPT = "kept"  # it is decoded on until its whole batch is done: no early termination


class Departures:
    """Decides, of a pool's queries that have their last tokens, whose results are due and whose
    slots are free: each at once, or, where slots are KEPT, all of a batch together."""

    def __init__(self, use: SlotUse) -> None:
        self._keeps = use is SlotUse.KEPT
        self._num_unfinished = 0
        self._kept: list[int] = []  # done, in a batch that is not

    def join(self, count: int) -> None:
        """So many queries are at work from now on."""
        self._num_unfinished += count

    def leave(self, count: int = 1) -> None:
        """So many go before they are done: they are evicted, or handed to another pool."""
        self._num_unfinished -= count

    def finish(self, queries: Sequence[int]) -> Sequence[int]:
        """These have their last tokens. Returns the queries that depart now."""
        self._num_unfinished -= len(queries)
        if not self._keeps:
            return queries
        self._kept += queries
        if self._num_unfinished or not self._kept:
            return ()
        due, self._kept = sorted(self._kept), []
        return due


class Span(NamedTuple):
    """Tokens first .. first + tokens - 1 of what the query in `slot` is encoded with, in one step.
    The last span gives its next token."""

    slot: int
    first: int
    tokens: int
    is_last: bool


class Seat(NamedTuple):
    """A slot of a group, as numbered after the group's last step."""

    group: int
    slot: int


class Seating(NamedTuple):
    """How a group's slots change before a step: those `removed` are compacted away, then the first
    who join take the slots `replaced`, and the others sit down behind all."""

    removed: tuple[int, ...]
    replaced: tuple[int, ...]


class GroupSlots(Generic[T]):
    """What is known of a group's queries, slot by slot (T: their numbers, or more of them)."""

    def __init__(self) -> None:
        self.seats: list[T] = []
        self._vacated: set[T] = set()  # seats whose queries are gone, until the next step

    def vacate(self, seats: Iterable[T]) -> None:
        """The queries in these seats go with the group's next step."""
        self._vacated.update(seats)

    def seat(self, joining: Sequence[T], *, is_reused: bool) -> Seating:
        """Lets `joining` sit down, in the slots of those who go where these are reused, and takes
        the other slots of those who go away."""
        removed: list[int] = []
        if self._vacated:
            removed = [slot for slot, seat in enumerate(self.seats) if seat in self._vacated]
            self._vacated.clear()
        count = len(joining) if is_reused else 0
        seating = Seating(removed=tuple(removed[count:]), replaced=tuple(removed[:count]))
        self.compact(seating.removed)
        self.place(joining, seating.replaced)
        return seating

    def compact(self, removed: Collection[int]) -> list[Move]:
        """Takes the slots `removed` away; returns the moves that make the others contiguous."""
        if not removed:
            return []
        moves = compaction_moves(len(self.seats), removed)
        apply_moves(self.seats, moves, len(removed))
        return moves

    def place(self, joining: Sequence[T], replaced: Sequence[int] = ()) -> int:
        """The first of `joining` take the slots `replaced`, the others those behind all. Returns
        the first slot behind."""
        first = len(self.seats)
        for slot, seat in zip(replaced, joining, strict=False):
            self.seats[slot] = seat
        self.seats += joining[len(replaced):]
        return first


class Move(NamedTuple):
    """Copy cache row `source` onto row `target`."""

    source: int
    target: int


def compaction_moves(num_active: int, removed: Iterable[int]) -> list[Move]:
    """Moves that make the survivors of slots 0..num_active-1 contiguous again.

    Only rows behind the new end move, each into a hole before it: the fewest copies possible."""
    holes = sorted(set(removed))
    assert all(0 <= slot < num_active for slot in holes), f"{holes = } {num_active = }"
    remaining = num_active - len(holes)
    gone = set(holes)
    movers = [slot for slot in range(remaining, num_active) if slot not in gone]
    return [Move(source, target) for source, target in zip(movers, holes, strict=False)]


def apply_moves(items: list[T], moves: Iterable[Move], num_removed: int) -> None:
    """Makes of `items`, which are by slot, what they are after compaction."""
    for source, target in moves:
        items[target] = items[source]
    del items[len(items) - num_removed:]
