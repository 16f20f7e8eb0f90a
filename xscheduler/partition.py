"""Devices divided into parts of several sizes, each worth something: the best division.

    worth   {size: what one part of that size brings}
    best    max of the sum over all multisets of sizes that fit the devices

Sums are built up device by device (dynamic programming), so that every division counts though few
are looked at: of n devices and m sizes n m, or n m k for exactly k parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from xgpt.core.problem import Problem


class Division(NamedTuple):
    """Sizes of the parts, the largest first, and what they bring together."""

    worth: float
    sizes: tuple[int, ...]


NOTHING = Division(0.0, ())


def best_division(worth: Mapping[int, float], devices: int,
                  parts: int | None = None) -> Division | None:
    """The best division of at most so many devices into `parts` (None: any number) of sizes that
    bring something; None where there is none into so many. Of equals the one of fewest parts."""
    return _of_rooms(worth, devices, parts)[devices]


def division_of(problem: Problem, worth: Mapping[int, float]) -> Division | None:
    """The best division of a cluster into copies, alike or not, each on some devices of a node or
    on whole nodes; None where there is none. worth: of a copy on so many devices."""
    cluster, copies = problem.cluster, problem.fixed.replicas
    each, nodes = cluster.devices_per_node, cluster.num_nodes
    if copies is not None:
        return _of_nodes(worth, each, nodes, copies)
    within = {size: own for size, own in worth.items() if size <= each}
    if nodes == 1:
        return best_division(within, each)
    node = best_division(within, each)
    over = {size // each: own for size, own in worth.items() if size > each}
    whole = best_division({**over, 1: node.worth if node is not None else 0.0}, nodes)
    if whole is None:
        return None
    inside = node.sizes if node is not None else ()
    return Division(whole.worth, tuple(size for count in whole.sizes for size in (
        inside if count == 1 else (count * each,))))


def _of_nodes(worth: Mapping[int, float], each: int, nodes: int, parts: int) -> Division | None:
    """The best division of nodes of `each` devices into exactly so many parts."""
    within = {size: own for size, own in worth.items() if size <= each}
    inside = [best_division(within, each, count) for count in range(min(parts, each) + 1)]
    whole = [size for size in _able(worth) if size > each]
    rooms: list[list[Division | None]] = [[NOTHING, *[None] * parts]]
    for room in range(1, nodes + 1):
        row = []
        for count in range(parts + 1):
            of_node = [_joined(rooms[-1][count - own], one) for own, one in enumerate(inside)
                       if own <= count]
            over = [_joined(rooms[room - size // each][count - 1], Division(worth[size], (size,)))
                    for size in whole if count and size // each <= room]
            row.append(_better([*of_node, *over]))
        rooms.append(row)
    best = rooms[-1][parts]
    return best and best._replace(sizes=tuple(sorted(best.sizes, reverse=True)))


def _joined(one: Division | None, other: Division | None) -> Division | None:
    if one is None or other is None:
        return None
    return Division(one.worth + other.worth, one.sizes + other.sizes)


def _of_rooms(worth: Mapping[int, float], devices: int,
              parts: int | None) -> list[Division | None]:
    """The best division of 0, 1, ... devices."""
    able = _able(worth)
    if parts is None:
        best: list[Division | None] = [NOTHING]
        for room in range(1, devices + 1):
            best.append(_better([best[-1], *(_with(rest, size, worth) for size in able
                                             if size <= room and (rest := best[room - size]))]))
        return best
    best = [NOTHING] * (devices + 1)
    for _ in range(parts):
        best = [_better([_with(rest, size, worth) for size in able
                         if size <= room and (rest := best[room - size]) is not None])
                for room in range(devices + 1)]
    return best


def _able(worth: Mapping[int, float]) -> list[int]:
    return sorted((size for size, own in worth.items() if own > 0), reverse=True)


def _with(rest: Division, size: int, worth: Mapping[int, float]) -> Division:
    return Division(rest.worth + worth[size], tuple(sorted((*rest.sizes, size), reverse=True)))


def _better(divisions: Sequence[Division | None]) -> Division | None:
    able = [one for one in divisions if one is not None]
    return max(able, key=lambda one: (one.worth, -len(one.sizes)), default=None)
