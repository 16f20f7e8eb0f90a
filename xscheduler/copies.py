"""Copies of the model on equal parts of a cluster, each with a share of the queries.

A part is some devices of one node, or whole nodes: a copy never lies on parts of several nodes. Of
the parts that a cluster has equally often the largest is meant, so a cluster of two nodes of eight
devices has copies on 16, 8, 4, 2 and 1 of them. Devices that are left over idle."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from xgpt.core.cluster import Cluster
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate
from xsimulator.memory import capacity_bytes, least_weight_bytes


class Slicing(NamedTuple):
    """So many copies, each on a part of the cluster as large as `part`."""

    copies: int
    part: Cluster


def slicings(cluster: Cluster, copies: int | None = None) -> list[list[Slicing]]:
    """Every number of copies that the cluster has room for (or the one given), the most first; of
    each the parts that it may have, the largest first: a smaller one only serves where the model
    cannot be laid out on the larger."""
    of_count: dict[int, list[Slicing]] = {}
    for most, part in _parts(cluster):
        count = most if copies is None else min(most, copies)
        of_count.setdefault(count, []).append(Slicing(count, part))
    counts = sorted(of_count, reverse=True) if copies is None else [copies]
    return [of_count[count] for count in counts if count in of_count]


def _parts(cluster: Cluster) -> Iterator[tuple[int, Cluster]]:
    """(how often the cluster has it, part) of every size, the largest first."""
    for nodes in range(cluster.num_nodes, 0, -1):
        yield cluster.num_nodes // nodes, cluster.with_nodes(num_nodes=nodes)
    for devices in range(cluster.devices_per_node - 1, 0, -1):
        yield (cluster.num_nodes * (cluster.devices_per_node // devices),
               cluster.equal_part(devices))


def most_copies(cluster: Cluster, devices: int) -> int:
    """Copies on so many devices each that the cluster has room for."""
    if devices <= cluster.devices_per_node:
        return cluster.num_nodes * (cluster.devices_per_node // devices)
    nodes, rest = divmod(devices, cluster.devices_per_node)
    return 0 if rest else cluster.num_nodes // nodes


def problems_of_copies(problem: Problem) -> list[list[Problem]]:
    """The problem of one copy, for every number of copies that the job allows, the most first; of
    each on every part that it may have, the largest first. No more copies than queries."""
    wanted = problem.fixed.replicas
    most = problem.cluster.num_devices if problem.num_queries is None or wanted else (
        problem.num_queries)
    return [[problem_of_copy(problem, one) for one in parts]
            for parts in slicings(problem.cluster, wanted) if parts[0].copies <= most]


def problem_of_copy(problem: Problem, slicing: Slicing) -> Problem:
    """What one of the copies is to do: its share of the queries (rounded up) on its part."""
    copies, part = slicing
    if copies == 1 and part == problem.cluster:
        return problem
    share = None if problem.num_queries is None else -(-problem.num_queries // copies)
    return replace(problem, cluster=part, num_queries=share, copies=copies)


def problem_on(problem: Problem, devices: int) -> Problem:
    """That of copies on so many devices of one node, or on whole nodes: as many as there are."""
    return problem_of_copy(problem, Slicing(
        most_copies(problem.cluster, devices), _part_of(problem.cluster, devices)))


def _part_of(cluster: Cluster, devices: int) -> Cluster:
    nodes = -(-devices // cluster.devices_per_node)
    return cluster.equal_part(devices) if devices < cluster.devices_per_node else (
        cluster.with_nodes(num_nodes=nodes, devices_per_node=devices // nodes))


def problem_for(problem: Problem, estimate: Estimate) -> Problem:
    """The problem of one of the copies that an estimate of the problem has; the same where it is
    of a copy already."""
    deployment = estimate.deployment
    copies, devices = deployment.replicas, deployment.devices_per_replica
    if (problem.copies, problem.cluster.num_devices) == (copies, devices):
        return problem
    return problem_of_copy(problem, Slicing(copies, _part_of(problem.cluster, devices)))


def has_room(problem: Problem) -> bool:
    """Whether the devices of a copy together hold the weights; what else it takes is not asked."""
    room = problem.cluster.num_devices * capacity_bytes(problem.cluster.device)
    return least_weight_bytes(problem) <= room


def idle_note(cluster: Cluster, estimate: Estimate) -> str:
    """What is said of devices that no copy has; "" where there are none."""
    idle = cluster.num_devices - estimate.num_devices
    if idle <= 0:
        return ""
    each, copies = estimate.deployment.devices_per_replica, estimate.deployment.replicas
    kind = "GPU" if cluster.device.kind == "gpu" else "rank"
    are = f"{idle} {kind} idles" if idle == 1 else f"{idle} {kind}s idle"
    if most_copies(cluster, each) > copies:  # no more are asked for
        return (f"{are}: the job asks for {copies} cop{'y' if copies == 1 else 'ies'}, and there "
                "is room for more")
    return f"{are}: no further copy on {each} {kind}{'s' * (each != 1)} fits"
