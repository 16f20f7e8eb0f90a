"""Which cache rows move when queries finish: one pure function that head and stages obey."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Move(NamedTuple):
    """Copy cache row `source` onto row `target`."""

    source: int
    target: int


def compaction_moves(num_active: int, removed: Iterable[int]) -> list[Move]:
    """Moves that make the survivors of slots 0..num_active-1 contiguous again.

    Only rows behind the new end move, each into a hole before it: the fewest copies possible.
    """
    holes = sorted(set(removed))
    assert all(0 <= slot < num_active for slot in holes), f"{holes = } {num_active = }"
    remaining = num_active - len(holes)
    gone = set(holes)
    movers = [slot for slot in range(remaining, num_active) if slot not in gone]
    return [Move(source, target) for source, target in zip(movers, holes, strict=False)]


def apply_moves(items: list[int], removed: Iterable[int]) -> list[int]:
    """`items` by slot, after compaction: what a stage's or the head's table becomes."""
    removed = list(removed)
    result = list(items)
    for source, target in compaction_moves(len(items), removed):
        result[target] = result[source]
    return result[: len(items) - len(set(removed))]
