"""The schedule of an engine whose steps take other times than those that there are: static batches
chosen by these, without the margin that other times would make meaningless."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

from xgpt.core.errors import InfeasibleError, InputError, Mistake
from xgpt.core.job import FixedSchedule
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate, Schedule
from xgpt.core.schedule_file import schedule_from_flat
from xgpt.core.status import Status
from xgpt.core.units import format_seconds
from xprofiler.timing import TimingSource
from xscheduler.spaces.grid import MOST_QUERIES, best
from xsimulator.policies import make_config, make_policy


def plan_untimed(problem: Problem, timing: TimingSource, note: str) -> Schedule:
    """The batches that the problem fixes, even beyond its bound, else those of highest throughput
    within it. `note` is left with the estimate. Raises InfeasibleError."""
    began, fixed, constraint = time.monotonic(), problem.fixed, problem.constraint
    policy: Any = make_policy(str(fixed.policy), problem, timing)
    if fixed.encode_batch is not None:
        estimate, nodes, status = _given(problem, policy), 1, Status.GIVEN
    else:
        (estimate, nodes), status = _best(problem, policy), Status.BEST_SEEN
    estimate = replace(estimate, notes=(*estimate.notes, note))
    return schedule_from_flat(
        estimate=estimate, latency_bound_s=constraint.latency_s, constraint_kind=constraint.kind,
        quantile=constraint.quantile, status=status, bound_qps=math.inf, gap=math.inf, nodes=nodes,
        seconds=time.monotonic() - began, fingerprint=problem.fingerprint)


def _given(problem: Problem, policy: Any) -> Estimate:
    fixed = problem.fixed
    config, _ = make_config(str(fixed.policy), replace(
        fixed, decode_micro_batches=fixed.decode_micro_batches or 1))
    estimate: Estimate = policy.estimate(config)
    if not estimate.figures.fits:
        raise InfeasibleError(
            f"schedule.encode_batch = {fixed.encode_batch} does not fit: it takes "
            f"{max(estimate.figures.memory_bytes)} bytes of "
            f"{estimate.figures.memory_capacity_bytes} a rank")
    if math.isinf(estimate.figures.latency_s):
        raise InputError([Mistake(
            file="schedule", line=None, key="schedule.encode_batch", value=fixed.encode_batch,
            allowed="sizes that the profile does not reach")])
    return estimate


def _best(problem: Problem, policy: Any) -> tuple[Estimate, int]:
    """(the estimate, configurations looked at)"""
    fixed, bound_s = problem.fixed, problem.constraint.latency_s
    assert fixed.tp_degree is not None and fixed.tp_gpus is not None, f"{fixed = }"
    plans = [(fixed.tp_degree, fixed.tp_gpus)]
    estimate = best(policy, bound_s, plans=plans)
    if estimate is not None:
        return estimate, len(policy.grid(problem.num_queries or MOST_QUERIES, plans))
    single, _ = make_config(policy.name, replace(
        FixedSchedule(), encode_batch=1, decode_micro_batches=1, tp_degree=fixed.tp_degree,
        tp_gpus=fixed.tp_gpus))
    alone: Estimate = policy.estimate(single)
    raise InfeasibleError(
        f"no batch of {policy.name} on {problem.cluster.num_devices} ranks fits and keeps the "
        f"latency bound of {format_seconds(bound_s)}: one query alone takes "
        f"{format_seconds(alone.figures.latency_s)}, by the times of xgpt's own kernels")
