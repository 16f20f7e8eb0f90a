"""A small job and schedules of it, for the tests of what follows a search."""

from __future__ import annotations

import math

from taken_as_true import TakenAsTrue

from xgpt.core.cluster import Device, Link, uniform_cluster
from xgpt.core.constraint import latency_constraint
from xgpt.core.job import FixedSchedule
from xgpt.core.lengths import JointLengths, truncated_normal
from xgpt.core.model import ModelSpec
from xgpt.core.problem import Problem
from xgpt.core.schedule import Schedule
from xgpt.core.schedule_file import schedule_from_flat
from xprofiler.roofline import Roofline
from xsimulator.rough.forms import fixed_estimate

TOY = ModelSpec(name="toy", family="opt", num_layers=6, hidden_size=1024, num_heads=16,
                vocab_size=8000, intermediate_size=4096, max_positions=512,
                has_learned_positions=True)
LINK = Link(name="fast", bandwidth_bytes_per_s=200e9, latency_s=3e-6)
MEMORY = 600_000_000


def toy_problem(*, latency_s=math.inf, memory=MEMORY, kind="gpu", nodes=1, per_node=4,
                outputs=(9, 4, 20), num_queries=None, fixed=None) -> Problem:
    device = Device(name="toy", kind=kind, memory_bytes=int(memory), bandwidth_bytes_per_s=4e11,
                    flops_per_s=(("float32", 1e13), ("float16", 5e13)))
    cluster = uniform_cluster(name="toy", device=device, num_nodes=nodes, devices_per_node=per_node,
                      intra_link=LINK, inter_link=LINK)
    return Problem(
        model=TOY, cluster=cluster, dtype="float16", num_queries=num_queries,
        lengths=JointLengths(inputs=truncated_normal(40, 20, 80),
                             outputs=truncated_normal(*outputs)),
        constraint=latency_constraint(latency_s=latency_s), fixed=fixed or FixedSchedule(),
        default_max_tokens=outputs[2])


def roofline_of(problem: Problem) -> Roofline:
    return TakenAsTrue(problem.model, problem.cluster.device, problem.dtype)


def estimate_of(problem: Problem, policy="rra", **variables):
    return fixed_estimate(policy, problem, roofline_of(problem), FixedSchedule(**variables))


def schedule_of(problem: Problem, estimate=None, **changes) -> Schedule:
    """A schedule as a search would answer; `changes`: of the estimate's figures."""
    if estimate is None:
        estimate = estimate_of(problem, encode_batch=4, decode_iterations=4)
    estimate = estimate.changed(**changes)
    return schedule_from_flat(
        estimate=estimate, latency_bound_s=problem.constraint.latency_s,
        constraint_kind="sequence", quantile=0.99, status="optimal",
        bound_qps=estimate.figures.throughput_qps, gap=0.0, nodes=1, seconds=0.0,
        fingerprint=problem.fingerprint)
