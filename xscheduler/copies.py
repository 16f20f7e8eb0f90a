"""Equal copies (replicas) of the model on parts of a cluster, each with a share of the queries.

A part is some devices of one node, or whole nodes. Each number of copies takes the largest parts
that the cluster has so many of: two nodes of eight devices have copies on 16, 8, 4, 2 or 1 devices.
Left-over devices idle."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from xgpt.core.cluster import Cluster
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate
from xsimulator.memory import capacity_bytes, least_weight_bytes


class Slicing(NamedTuple):
    """A number of copies, and the part of the cluster that each has."""

    copies: int
    part: Cluster


def slicings(cluster: Cluster, copies: int | None = None) -> list[list[Slicing]]:
    """For every number of copies (or the one given), the most first: the parts that each copy may
    have, the largest first. A smaller part serves if the model cannot be divided over a larger."""
    of_count: dict[int, list[Slicing]] = {}
    for most, part in _parts(cluster):
        count = most if copies is None else min(most, copies)
        of_count.setdefault(count, []).append(Slicing(count, part))
    counts = sorted(of_count, reverse=True) if copies is None else [copies]
    return [of_count[count] for count in counts if count in of_count]


def _parts(cluster: Cluster) -> Iterator[tuple[int, Cluster]]:
    """Yields (how many the cluster has, part) for every size, the largest first."""
    for nodes in range(cluster.num_nodes, 0, -1):
        yield cluster.num_nodes // nodes, replace(cluster, num_nodes=nodes)
    for devices in range(cluster.devices_per_node - 1, 0, -1):
        yield (cluster.num_nodes * (cluster.devices_per_node // devices),
               cluster.equal_part(devices))


def most_copies(cluster: Cluster, devices: int) -> int:
    """Number of copies on `devices` devices each that the cluster has room for."""
    if devices <= cluster.devices_per_node:
        return cluster.num_nodes * (cluster.devices_per_node // devices)
    nodes, rest = divmod(devices, cluster.devices_per_node)
    return 0 if rest else cluster.num_nodes // nodes


def problems_of_copies(problem: Problem) -> list[list[Problem]]:
    """The problem of one copy for every number of copies that the job allows, the most first; a
    list of the parts that a copy may have, as `slicings`. There are no more copies than queries."""
    wanted = problem.fixed.replicas
    most = problem.cluster.num_devices if problem.num_queries is None or wanted else (
        problem.num_queries)
    return [[problem_of_copy(problem, one) for one in parts]
            for parts in slicings(problem.cluster, wanted) if parts[0].copies <= most]


def problem_of_copy(problem: Problem, slicing: Slicing) -> Problem:
    """The problem of one copy: its part of the cluster and its share of the queries, rounded up."""
    copies, part = slicing
    if copies == 1 and part == problem.cluster:
        return problem
    share = None if problem.num_queries is None else -(-problem.num_queries // copies)
    return replace(problem, cluster=part, num_queries=share, copies=copies)


def problem_on(problem: Problem, devices: int) -> Problem:
    """The problem of one of the most copies that have `devices` devices each."""
    return problem_of_copy(problem, Slicing(
        most_copies(problem.cluster, devices), _part_of(problem.cluster, devices)))


def _part_of(cluster: Cluster, devices: int) -> Cluster:
    nodes = -(-devices // cluster.devices_per_node)
    return cluster.equal_part(devices) if devices < cluster.devices_per_node else (
        replace(cluster, num_nodes=nodes, devices_per_node=devices // nodes))


def problem_for(problem: Problem, estimate: Estimate) -> Problem:
    """The problem of one of the estimate's copies; `problem` itself if it is that of a copy."""
    deployment = estimate.deployment
    copies, devices = deployment.replicas, deployment.devices_per_replica
    if (problem.copies, problem.cluster.num_devices) == (copies, devices):
        return problem
    return problem_of_copy(problem, Slicing(copies, _part_of(problem.cluster, devices)))


def has_room(problem: Problem) -> bool:
    """Whether the devices of a copy together hold the weights; other memory is not counted."""
    room = problem.cluster.num_devices * capacity_bytes(problem.cluster.device)
    return least_weight_bytes(problem) <= room


def idle_note(cluster: Cluster, estimate: Estimate) -> str:
    """A note on devices that no copy has; "" if there are none."""
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
