"""Equal replicas on parts of a cluster, each with a share of the requests.

A part is some devices of one node, or whole nodes. Each number of replicas takes the largest parts
that the cluster has so many of: two nodes of eight devices have replicas on 16, 8, 4, 2 or 1
devices. Left-over devices idle."""

from dataclasses import replace

from xgpt.core.cluster import Cluster
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate
from xsimulator.memory import capacity_bytes, least_weight_bytes


def replica_sizes(cluster: Cluster) -> list[int]:
    """The numbers of devices that a part of the cluster may have, rising."""
    each = cluster.devices_per_node
    return [*range(1, each), *range(each, cluster.num_devices + 1, each)]


def max_replicas(cluster: Cluster, devices: int) -> int:
    """Number of replicas on `devices` devices each that fit on the cluster."""
    if devices <= cluster.devices_per_node:
        return cluster.num_nodes * (cluster.devices_per_node // devices)
    nodes, rest = divmod(devices, cluster.devices_per_node)
    return 0 if rest else cluster.num_nodes // nodes


def num_replicas(problem: Problem, devices: int) -> int:
    """Number of equal replicas on `devices` devices each for an engine with `most_stages`: as many
    as fit, as the job asks for, and as have a request; 0 if the job's values do not allow them."""
    cluster, fixed = problem.cluster, problem.fixed
    degree, wanted, most = fixed.tp_degree or 1, fixed.replicas, max_replicas(cluster, devices)
    is_divided = fixed.tp_degree is None or (
        devices % degree == 0 and devices // degree <= (problem.most_stages or devices))
    if devices > cluster.devices_per_node or not is_divided or (wanted or 1) > most:
        return 0
    return wanted or min(most, problem.num_queries or most)


def equal_parts(problem: Problem) -> list[Problem]:
    """The problems of one replica for an engine with `most_stages`, by devices of a replica."""
    return [replica_problem(problem, count, _part_of(problem.cluster, devices))
            for devices in replica_sizes(problem.cluster)
            if (count := num_replicas(problem, devices))]


def replica_problems(problem: Problem) -> list[Problem]:
    """The problem of one replica, on the largest part that it may have, for every number of
    replicas that the job allows, the most first. There are no more replicas than requests."""
    cluster, wanted = problem.cluster, problem.fixed.replicas
    if problem.most_stages is not None:
        return equal_parts(problem)
    largest = {min(max_replicas(cluster, devices), wanted or cluster.num_devices): devices
               for devices in replica_sizes(cluster)}
    counts = sorted(largest, reverse=True) if wanted is None else [wanted]
    most = cluster.num_devices if problem.num_queries is None or wanted else problem.num_queries
    return [replica_problem(problem, count, _part_of(cluster, largest[count]))
            for count in counts if count in largest and count <= most]


def replica_problem(problem: Problem, copies: int, part: Cluster) -> Problem:
    """The problem of one replica: its part of the cluster, its share of the requests (rounded
    up)."""
    if copies == 1 and part == problem.cluster:
        return problem
    share = None if problem.num_queries is None else -(-problem.num_queries // copies)
    return replace(problem, cluster=part, num_queries=share, copies=copies)


def problem_on(problem: Problem, devices: int) -> Problem:
    """The problem of one of as many replicas on `devices` devices each as fit."""
    return replica_problem(problem, max_replicas(problem.cluster, devices),
                           _part_of(problem.cluster, devices))


def _part_of(cluster: Cluster, devices: int) -> Cluster:
    nodes = -(-devices // cluster.devices_per_node)
    return cluster.equal_part(devices) if devices < cluster.devices_per_node else (
        replace(cluster, num_nodes=nodes, devices_per_node=devices // nodes))


def problem_of_replica(problem: Problem, estimate: Estimate) -> Problem:
    """The problem of one of the estimate's replicas; `problem` if it is of one already."""
    deployment = estimate.deployment
    copies, devices = deployment.replicas, deployment.devices_per_replica
    if (problem.copies, problem.cluster.num_devices) == (copies, devices):
        return problem
    return replica_problem(problem, copies, _part_of(problem.cluster, devices))


def weights_fit(problem: Problem) -> bool:
    """Whether the devices of a replica together hold the weights; other memory is not counted."""
    room = problem.cluster.num_devices * capacity_bytes(problem.cluster.device)
    return least_weight_bytes(problem) <= room


def idle_note(cluster: Cluster, estimate: Estimate) -> str:
    """A note on devices that no replica uses; "" if there are none."""
    idle = cluster.num_devices - estimate.num_devices
    if idle <= 0:
        return ""
    each, copies = estimate.deployment.devices_per_replica, estimate.deployment.replicas
    kind = "GPU" if cluster.device.kind == "gpu" else "rank"
    are = f"{idle} {kind} idles" if idle == 1 else f"{idle} {kind}s idle"
    if max_replicas(cluster, each) > copies:
        return (f"{are}: the job asks for {copies} replica{'s' * (copies != 1)}, and there is room "
                "for more")
    return f"{are}: no further replica on {each} {kind}{'s' * (each != 1)} fits"
