"""The division of a cluster into replicas of several sizes that has the highest throughput.

    qps_of  {number of devices: requests/s of one replica on so many}
    best    largest sum over all multisets of sizes that fit the cluster

The best division of d devices follows from the best ones of fewer (dynamic programming), so that
every division counts. For n devices and m sizes it takes n m steps, or n m k for exactly k
parts."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from xgpt.core.problem import Problem
from xscheduler.replicas import num_replicas


class Division(NamedTuple):
    """Number of devices of each replica, the largest first, and the requests/s of all together."""

    throughput_qps: float
    sizes: tuple[int, ...]


NOTHING = Division(0.0, ())


def best_division(qps_of: Mapping[int, float], devices: int,
                  parts: int | None = None) -> Division | None:
    """The best division of at most `devices` into `parts` replicas (None: any number), of equals
    the one of fewest replicas; None if no sizes add up to `parts`. Sizes of 0 requests/s are
    unused."""
    return _of_rooms(qps_of, devices, parts)[devices]


def division_of(problem: Problem, qps_of: Mapping[int, float]) -> Division | None:
    """The best division of the problem's cluster into replicas, equal or not, each in one node or
    on whole nodes; None if there is none. qps_of: {devices: requests/s of a replica}."""
    cluster, copies = problem.cluster, problem.fixed.replicas
    if problem.most_stages is not None:
        equal = [(size, own, num_replicas(problem, size)) for size, own in qps_of.items()]
        return _better([Division(count * own, (size,) * count) for size, own, count in equal
                        if own > 0 and count])
    each, nodes = cluster.devices_per_node, cluster.num_nodes
    if copies is not None:
        return _of_nodes(qps_of, each, nodes, copies)
    within = {size: own for size, own in qps_of.items() if size <= each}
    if nodes == 1:
        return best_division(within, each)
    node = best_division(within, each)
    over = {size // each: own for size, own in qps_of.items() if size > each}
    whole = best_division({**over, 1: node.throughput_qps if node is not None else 0.0}, nodes)
    if whole is None:
        return None
    inside = node.sizes if node is not None else ()
    return Division(whole.throughput_qps, tuple(size for count in whole.sizes for size in (
        inside if count == 1 else (count * each,))))


def _of_nodes(qps_of: Mapping[int, float], each: int, nodes: int, parts: int) -> Division | None:
    """The best division of `nodes` nodes of `each` devices into exactly `parts` replicas."""
    within = {size: own for size, own in qps_of.items() if size <= each}
    inside = [best_division(within, each, count) for count in range(min(parts, each) + 1)]
    whole = [size for size in _able(qps_of) if size > each]
    rooms: list[list[Division | None]] = [[NOTHING, *[None] * parts]]
    for room in range(1, nodes + 1):
        row = []
        for count in range(parts + 1):
            of_node = [_joined(rooms[-1][count - own], one) for own, one in enumerate(inside)
                       if own <= count]
            over = [_joined(rooms[room - size // each][count - 1], Division(qps_of[size], (size,)))
                    for size in whole if count and size // each <= room]
            row.append(_better([*of_node, *over]))
        rooms.append(row)
    best = rooms[-1][parts]
    return best and best._replace(sizes=tuple(sorted(best.sizes, reverse=True)))


def _joined(one: Division | None, other: Division | None) -> Division | None:
    if one is None or other is None:
        return None
    return Division(one.throughput_qps + other.throughput_qps, one.sizes + other.sizes)


def _of_rooms(qps_of: Mapping[int, float], devices: int,
              parts: int | None) -> list[Division | None]:
    """The best divisions of 0, 1, ... `devices` devices."""
    able = _able(qps_of)
    if parts is None:
        best: list[Division | None] = [NOTHING]
        for room in range(1, devices + 1):
            best.append(_better([best[-1], *(_with(rest, size, qps_of) for size in able
                                             if size <= room and (rest := best[room - size]))]))
        return best
    best = [NOTHING] * (devices + 1)
    for _ in range(parts):
        best = [_better([_with(rest, size, qps_of) for size in able
                         if size <= room and (rest := best[room - size]) is not None])
                for room in range(devices + 1)]
    return best


def _able(qps_of: Mapping[int, float]) -> list[int]:
    return sorted((size for size, own in qps_of.items() if own > 0), reverse=True)


def _with(rest: Division, size: int, qps_of: Mapping[int, float]) -> Division:
    return Division(rest.throughput_qps + qps_of[size],
                    tuple(sorted((*rest.sizes, size), reverse=True)))


def _better(divisions: Sequence[Division | None]) -> Division | None:
    able = [one for one in divisions if one is not None]
    return max(able, key=lambda one: (one.throughput_qps, -len(one.sizes)), default=None)
