"""Who is before and after a rank: how steps, tokens and encoded inputs travel within a pool.

A stage is a tensor-parallel group, and every rank of it needs the whole hidden state, which every
rank of the stage before holds. So rank j of a stage takes its steps from rank j mod t of the t
ranks before it: one hop for every rank, where a message between first ranks and a broadcast behind
it would move as many bytes in two hops, one after the other, and put all of them on one sender."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xgpt.core.schedule import Pool


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One rank's neighbours. The head is the first rank of the first stage."""

    rank: int
    pool: str  # its name
    stage: int  # its place in the pool
    steps_from: int | None  # None: the head, which decides them
    peers: tuple[int, ...] = ()  # of the head: its group, which takes the same inputs
    following: tuple[int, ...] = ()  # take this rank's outputs; none on the last stage
    tokens_from: int | None = None  # of the head: the last stage's first rank; None: itself
    tokens_to: int | None = None  # of the last stage's first rank: the head; None: itself
    encoded_from: int | None = None  # whose encoder output it takes; None: its own
    encoded_to: tuple[int, ...] = ()  # of the last stage: who take the encoder's output from it


ALONE = Route(rank=0, pool="all", stage=0, steps_from=None)


def routes(pools: Sequence[Pool]) -> dict[int, Route]:
    """The route of every rank of all pools."""
    return {rank: route for pool in pools for rank, route in _of_pool(pool).items()}


def _of_pool(pool: Pool) -> dict[int, Route]:
    groups = [stage.ranks for stage in pool.stages]
    works_both = pool.role == "both"  # else an encoder's output is for another pool
    head, last = groups[0][0], len(groups) - 1
    by_rank = {}
    for place, group in enumerate(groups):
        for index, rank in enumerate(group):
            is_head, is_last = rank == head, place == last
            by_rank[rank] = Route(
                rank=rank, pool=pool.name, stage=place, peers=group[1:] if is_head else (),
                steps_from=(None if is_head else head if place == 0
                            else _sender(groups[place - 1], index)),
                following=() if is_last else _takers(group, index, groups[place + 1]),
                tokens_from=groups[last][0] if is_head and last > 0 else None,
                tokens_to=head if is_last and index == 0 and last > 0 else None,
                encoded_from=(_sender(groups[last], index) if works_both and not is_last
                              else None),
                encoded_to=tuple(taker for other in groups[:last]
                                 for taker in _takers(group, index, other))
                if works_both and is_last else ())
    return by_rank


def _sender(group: Sequence[int], index: int) -> int:
    """The rank of `group` that sends to the rank at `index` of another."""
    return group[index % len(group)]


def _takers(group: Sequence[int], index: int, others: Sequence[int]) -> tuple[int, ...]:
    """Those of `others` that take from the rank at `index` of `group`."""
    return tuple(rank for other, rank in enumerate(others) if other % len(group) == index)
