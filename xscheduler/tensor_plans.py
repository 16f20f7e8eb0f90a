"""The tensor plans that are searched (paper sections 4.2, 5).

A tensor-parallel group lies within a node. Groups over several whole nodes are searched only if the
job asks for them (`schedule.tp_degree`) or the weights do not fit otherwise, since their sums cross
the network. All values of tp_gpus are searched, because neither memory nor throughput is monotone
in it. From MANY_NODES nodes on, tp_gpus is none, one node, half, 3/4 or all of the devices."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import NamedTuple

from xgpt.core.cluster import Cluster
from xgpt.core.controls import FixedSchedule
from xgpt.core.errors import wrong
from xgpt.core.model import layer_params_of_rank
from xgpt.core.problem import Problem
from xgpt.core.units import WEIGHT_BYTES
from xprofiler.timing import TimingSource
from xsimulator.allocation import refuse_plan
from xsimulator.memory import capacity_bytes

MANY_NODES = 4  # chosen: clusters of more nodes are not divided in every way
DEGREES = (1, 2, 4, 8, 16)


class TensorPlan(NamedTuple):
    """Partial tensor parallelism: the first `tp_gpus` devices form groups of `tp_degree`."""

    tp_degree: int
    tp_gpus: int


def tensor_plans(problem: Problem, timing: TimingSource) -> list[TensorPlan]:
    """The plans to search, by degree, then tp_gpus: those that model, cluster and job allow and
    `timing` has times for. Raises InputError with the reason if there is none."""
    cluster, fixed = problem.cluster, problem.fixed
    plans, reasons = _allocatable(problem, fixed)
    degrees = [own for own in _degrees(problem) if own <= cluster.num_devices]
    for name, parts in asdict(problem.model.split).items():
        if not plans and fixed.tp_degree is None and all(degree % parts for degree in degrees):
            raise wrong("schedule", f"schedule.{name}", parts, "a divisor of a group's degree: "
                        f"{', '.join(map(str, degrees))} on {cluster.num_devices} devices")
    if not plans:
        key = "tp_degree" if fixed.tp_gpus is None else "tp_gpus"
        raise wrong("schedule", f"schedule.{key}", getattr(fixed, key), reasons[0] if reasons else
                    f"{cluster.num_devices} devices cannot form a group")
    timed = _timed(plans if fixed.tp_gpus is not None else _likely(plans, cluster), cluster, timing)
    if not timed:
        raise wrong("schedule", "schedule.tp_degree", sorted({plan.tp_degree for plan in plans}),
                    f"one that these times cover: {timing.provenance()}")
    return timed


def _likely(plans: Sequence[TensorPlan], cluster: Cluster) -> Sequence[TensorPlan]:
    """The plans that are searched on this number of nodes; all if none covers whole nodes."""
    each, nodes = cluster.devices_per_node, cluster.num_nodes
    few = {0, each, each * (nodes // 2), each * (3 * nodes // 4), cluster.num_devices}
    whole = [plan for plan in plans if plan.tp_gpus in few]
    return whole if whole and nodes >= MANY_NODES else plans


def _allocatable(problem: Problem, fixed: FixedSchedule) -> tuple[list[TensorPlan], list[str]]:
    """(plans that model and cluster allow, reasons against the others)."""
    model, cluster = problem.model, problem.cluster
    degrees = _degrees(problem) if fixed.tp_degree is None else (fixed.tp_degree,)
    plans, reasons = [], []
    for degree in degrees:
        counts = [0] if degree == 1 else list(range(degree, cluster.num_devices + 1, degree))
        if fixed.tp_gpus is not None:
            # degree 1 has no groups: all values of tp_gpus mean the same
            counts = [0] if degree == 1 else [fixed.tp_gpus]
        for gpus in counts:
            reason = refuse_plan(model, cluster, degree, gpus)
            if reason is None:
                plans.append(TensorPlan(tp_degree=degree, tp_gpus=gpus))
            else:
                reasons.append(reason)
    if fixed.tp_gpus and fixed.tp_degree is None:
        plans = [plan for plan in plans if plan.tp_degree > 1]
    if (most := problem.most_stages) is not None:
        plans = [plan for plan in plans if plan.tp_gpus in (0, cluster.num_devices)
                 and cluster.num_devices // plan.tp_degree <= most]
    return plans, reasons


def _degrees(problem: Problem) -> tuple[int, ...]:
    """Degrees within a node; also larger ones if no group within a node can hold its layers."""
    model, cluster = problem.model, problem.cluster
    near = tuple(degree for degree in DEGREES if degree <= cluster.devices_per_node)
    for degree in near:
        stages = cluster.num_devices // degree
        fullest = (-(-model.num_layers // stages) * layer_params_of_rank(model, degree)
                   * WEIGHT_BYTES[problem.weight_dtype])
        if stages <= model.num_layers and fullest <= capacity_bytes(cluster.device):
            return near
    return DEGREES


def _timed(plans: Sequence[TensorPlan], cluster: Cluster, timing: TimingSource) -> list[TensorPlan]:
    """The plans for whose degrees `timing` has times: the groups', and 1 for single devices."""
    can_time = timing.facts.can_time
    return [plan for plan in plans if (not plan.tp_gpus or can_time(plan.tp_degree))
            and (plan.tp_gpus >= cluster.num_devices or can_time(1))]
