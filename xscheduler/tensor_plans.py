"""The tensor plans that are searched (paper sections 4.2, 5).

A group lies within a node. One over several whole nodes is looked at where the job asks for it
(`schedule.tp_degree`), and where the weights have no room otherwise: its sums go over the network.
Every (tp_degree, tp_gpus) is a root of its own: neither memory nor, over fast links, throughput is
monotone in tp_gpus, and there are few values: on MANY_NODES nodes and more those of whole nodes are
looked at, which leave pipelines of many lengths; on MOST_NODES those of one node and of quarters
of all."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from xgpt.core.cluster import Cluster
from xgpt.core.controls import FixedSchedule
from xgpt.core.errors import wrong
from xgpt.core.problem import Problem
from xgpt.core.units import WEIGHT_BYTES
from xprofiler.timing import TimingSource
from xsimulator.allocation import refuse_plan
from xsimulator.memory import capacity_bytes

MANY_NODES = 4  # from which on tp_gpus that are no whole nodes are not looked at, unless asked for
MOST_NODES = 8  # chosen: from which on those of one node and of quarters of them all are
_DEGREES = (1, 2, 4, 8, 16)


class TensorPlan(NamedTuple):
    """Partial tensor parallelism: the first `tp_gpus` GPUs in groups of `tp_degree`."""

    tp_degree: int
    tp_gpus: int


def tensor_plans(problem: Problem, timing: TimingSource) -> list[TensorPlan]:
    """Every plan that the model and the cluster can hold, the job has not excluded and `timing`
    answers for, by degree, then GPUs. Raises InputError if none is left, with the reason."""
    cluster, fixed = problem.cluster, problem.fixed
    plans, reasons = _allocatable(problem, fixed)
    if not plans:
        key = "tp_degree" if fixed.tp_gpus is None else "tp_gpus"
        raise wrong("schedule", f"schedule.{key}", getattr(fixed, key), reasons[0] if reasons else
                    f"{cluster.num_devices} devices cannot form a group")
    timed = _timed(plans if fixed.tp_gpus is not None else _likely(plans, cluster), cluster, timing)
    if not timed:
        raise wrong("schedule", "schedule.tp_degree", sorted({plan.tp_degree for plan in plans}),
                    f"none of these can be timed by what there is: {timing.provenance()}")
    return timed


def _likely(plans: Sequence[TensorPlan], cluster: Cluster) -> Sequence[TensorPlan]:
    """Those that are looked at; all where none is of whole nodes."""
    each, nodes = cluster.devices_per_node, cluster.num_nodes
    whole = [plan for plan in plans if plan.tp_gpus % each == 0]
    if nodes >= MOST_NODES:
        few = {0, each, *(each * round(nodes * share / 4) for share in range(1, 5))}
        whole = [plan for plan in whole if plan.tp_gpus in few]
    return whole if whole and nodes >= MANY_NODES else plans


def left_out(problem: Problem) -> str:
    """Of copies of a problem on how many nodes which tensor plans are not looked at, in words; ""
    where all that can be are."""
    plans, nodes = _allocatable(problem, problem.fixed)[0], problem.cluster.num_nodes
    if problem.fixed.tp_gpus is not None or len(_likely(plans, problem.cluster)) == len(plans):
        return ""
    which = "one node or quarters of all" if nodes >= MOST_NODES else "whole nodes"
    return f"of copies on {nodes} nodes only with tensor-parallel groups on {which}"


def all_tensor_plans(problem: Problem, timing: TimingSource) -> list[TensorPlan]:
    """All of them, whatever the job fixes; [] where there is none."""
    return _timed(_allocatable(problem, FixedSchedule())[0], problem.cluster, timing)


def _allocatable(problem: Problem, fixed: FixedSchedule) -> tuple[list[TensorPlan], list[str]]:
    """(plans, why others are none)"""
    model, cluster = problem.model, problem.cluster
    degrees = _degrees(problem) if fixed.tp_degree is None else (fixed.tp_degree,)
    plans, reasons = [], []
    for degree in degrees:
        counts = [0] if degree == 1 else list(range(degree, cluster.num_devices + 1, degree))
        if fixed.tp_gpus is not None:
            # degree 1 has no groups: every count of GPUs comes to the same
            counts = [0] if degree == 1 else [fixed.tp_gpus]
        for gpus in counts:
            reason = refuse_plan(model, cluster, degree, gpus)
            if reason is None:
                plans.append(TensorPlan(tp_degree=degree, tp_gpus=gpus))
            else:
                reasons.append(reason)
    if fixed.tp_gpus and fixed.tp_degree is None:
        plans = [plan for plan in plans if plan.tp_degree > 1]
    return plans, reasons


def _degrees(problem: Problem) -> tuple[int, ...]:
    """Those within a node; all where no such group, nor a single device, can hold its layers."""
    model, cluster = problem.model, problem.cluster
    near = tuple(degree for degree in _DEGREES if degree <= cluster.devices_per_node)
    layer_bytes = model.decoder_layer_params * WEIGHT_BYTES[problem.weight_dtype]
    for degree in near:
        stages = cluster.num_devices // degree
        fullest = -(-model.num_layers // stages) * layer_bytes / degree
        if stages <= model.num_layers and fullest <= capacity_bytes(cluster.device):
            return near
    return _DEGREES


def _timed(plans: Sequence[TensorPlan], cluster: Cluster, timing: TimingSource) -> list[TensorPlan]:
    """Those of `plans` whose every degree `timing` answers for: the groups', and 1 where devices
    are left single."""
    can_time = timing.facts.can_time
    return [plan for plan in plans if (not plan.tp_gpus or can_time(plan.tp_degree))
            and (plan.tp_gpus >= cluster.num_devices or can_time(1))]


def between(first: int, last: int, count: int) -> list[int]:
    """So many whole numbers from one to the other, in even ratios; of equal ones one. They are
    np.geomspace's, which takes five times as long for so few."""
    logarithms = np.arange(count) * ((math.log10(last) - math.log10(first)) / (count - 1))
    middle = np.rint(np.power(10.0, logarithms + math.log10(first)))[1:-1].tolist()
    return sorted({first, last, *map(int, middle)})
