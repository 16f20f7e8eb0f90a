"""The schedule of a baseline that is to run: the job's control variables, or the best within the
bound, kept with the same confidence as those that are searched.

An engine whose steps take other times than those that there are works static batches chosen by
these, without the margin that other times would make meaningless (`plan_untimed`)."""

import math
import sys
import time
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from xgpt.core.errors import InfeasibleError, wrong
from xgpt.core.job import FixedSchedule
from xgpt.core.lengths import FloatArray
from xgpt.core.policies import baselines, policy
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate, Schedule, Status
from xgpt.core.schedule_file import schedule_from_flat
from xgpt.core.units import format_seconds
from xprofiler.timing import TimingSource
from xscheduler.admissible import Limits, admissible
from xscheduler.spaces.grid import MOST_QUERIES, QuicklyBounded, best
from xscheduler.spaces.remembered import RememberedPolicy
from xscheduler.spaces.space import Selection
from xscheduler.spaces.tensor_plans import tensor_plans
from xsimulator.policies import make_config, make_policy
from xsimulator.policies.figures import EstimateArrays

_PARTS = "encode_micro_batches"  # of a configuration: encode_parts of each of its groups


class BaselineSearch:
    """The baseline that the problem fixes: its best configurations, under one latency bound after
    the other. Raises InputError for a tensor plan that the model or the cluster cannot hold."""

    def __init__(self, problem: Problem, timing: TimingSource) -> None:
        self._problem, self._plans = problem, tensor_plans(problem, timing)
        self._policy = _Pinned(problem, timing)

    def selections(self, num_queries: int) -> list[Selection]:
        """What the job leaves open of the grid."""
        return [Selection(closed_form=self._policy,
                          configs=self._policy.grid(num_queries, self._plans))]

    @property
    def num_evaluated(self) -> int:
        return self._policy.num_evaluated

    def find(self, bound_s: float) -> Schedule:
        """The best within the bound. Raises InfeasibleError."""
        problem = self._problem
        estimate = best(self._policy, bound_s, plans=self._plans)
        if estimate is None:
            raise InfeasibleError(self._refusal(bound_s))
        constraint = problem.constraint
        return schedule_from_flat(
            estimate=estimate.in_copies(problem.copies), latency_bound_s=bound_s,
            constraint_kind=constraint.kind,
            quantile=constraint.quantile, status=Status.GRID, bound_qps=math.inf, gap=math.inf,
            nodes=self._policy.num_evaluated, seconds=0.0, fingerprint=problem.fingerprint)

    def _refusal(self, bound_s: float) -> str:
        given = ", ".join(f"{name} {value}" for name, value in _given(self._problem).items())
        which = f"no configuration of {self._policy.name}" + (f" with {given}" if given else "")
        least_s = self._policy.least_latency_s(self._plans)
        if least_s is None:
            return f"{which} fits into memory, with no more queries than the job has"
        return (f"{which} keeps the latency bound of {format_seconds(bound_s)} (the quickest seen "
                f"takes {format_seconds(least_s)})")


class _Pinned:
    """A baseline's closed form whose space is what the job's fixed variables leave of it."""

    def __init__(self, problem: Problem, timing: TimingSource) -> None:
        assert problem.fixed.policy in baselines(), f"{problem.fixed.policy = }"
        self.problem, self.timing, self.name = problem, timing, problem.fixed.policy
        self._inner: Any = make_policy(self.name, problem, timing)
        self._given = _given(problem)
        self._known = RememberedPolicy(self._inner.evaluate, self._inner.limits if isinstance(
            self._inner, QuicklyBounded) else None)
        self._grids: dict[Hashable, list[Any]] = {}

    @property
    def num_evaluated(self) -> int:
        return self._known.num_evaluated

    def grid(self, max_queries: int, plans: Sequence[tuple[int, int]]) -> list[Any]:
        """Points of the whole grid, moved to the fixed values."""
        key = max_queries, tuple(plans)
        if key not in self._grids:
            self._grids[key] = self._moved(max_queries, plans)
        return self._grids[key]

    def _moved(self, max_queries: int, plans: Sequence[tuple[int, int]]) -> list[Any]:
        pins = {name: value for name, value in self._given.items() if name != _PARTS}
        moved = []
        for config in self._inner.grid(max_queries, plans):
            own = replace(config, **pins)
            if _PARTS in self._given:
                parts, rest = divmod(self._given[_PARTS], own.decode_micro_batches)
                if rest:
                    continue
                own = replace(own, encode_parts=parts)
            moved.append(own)
        return list(dict.fromkeys(moved))

    def least_latency_s(self, plans: Sequence[tuple[int, int]]) -> float | None:
        """The least latency of the grid's points that fit; None where none does."""
        most = self.problem.num_queries or MOST_QUERIES
        grid = self.grid(most, plans)
        if not grid:
            return None
        figures = self.evaluate(grid)
        roomy = admissible(figures, Limits(queries=most, latency_s=sys.float_info.max))
        return float(figures.latency_s[roomy].min()) if roomy.any() else None

    def evaluate(self, configs: Sequence[Any]) -> EstimateArrays:
        figures = self._known.evaluate(configs)
        return replace(figures, fits=figures.fits & self._is_own(configs))

    def limits(self, configs: Sequence[Any]) -> tuple[FloatArray, FloatArray]:
        """What configurations cannot reach; nothing where the job excludes them."""
        own = self._is_own(configs)
        qps, latency_s = self._known.limits(configs)
        return np.where(own, qps, 0.0), np.where(own, latency_s, np.inf)

    def estimate(self, config: Any) -> Estimate:
        estimate: Estimate = self._inner.estimate(config)
        return estimate

    def _is_own(self, configs: Sequence[Any]) -> np.ndarray[Any, np.dtype[np.bool_]]:
        return np.array([all(_value(config, name) == value for name, value in self._given.items())
                         for config in configs], dtype=bool)


def _given(problem: Problem) -> dict[str, int]:
    """Control variables that the job fixes."""
    assert problem.fixed.policy is not None
    values = {name: problem.fixed.value_of(name)
              for name in policy(problem.fixed.policy).variable_names}
    return {name: value for name, value in values.items() if value is not None}


def _value(config: Any, name: str) -> object:
    if name == _PARTS:
        return (config.encode_parts or 1) * config.decode_micro_batches
    return getattr(config, name)


def plan_untimed(problem: Problem, timing: TimingSource, note: str) -> Schedule:
    """The batches that the problem fixes, even beyond its bound, else those of highest throughput
    within it. `note` is left with the estimate. Raises InfeasibleError."""
    began, fixed, constraint = time.monotonic(), problem.fixed, problem.constraint
    policy: Any = make_policy(str(fixed.policy), problem, timing)
    if fixed.encode_batch is not None:
        estimate, nodes, status = _given_batch(problem, policy), 1, Status.GIVEN
    else:
        (estimate, nodes), status = _best_batch(problem, policy), Status.BEST_SEEN
    estimate = replace(estimate, notes=(*estimate.notes, note))
    return schedule_from_flat(
        estimate=estimate, latency_bound_s=constraint.latency_s, constraint_kind=constraint.kind,
        quantile=constraint.quantile, status=status, bound_qps=math.inf, gap=math.inf, nodes=nodes,
        seconds=time.monotonic() - began, fingerprint=problem.fingerprint)


def _given_batch(problem: Problem, policy: Any) -> Estimate:
    fixed = problem.fixed
    config, _ = make_config(str(fixed.policy), replace(
        fixed, decode_micro_batches=fixed.decode_micro_batches or 1))
    estimate: Estimate = policy.estimate(config)
    if not estimate.figures.fits:
        raise InfeasibleError(f"schedule.encode_batch = {fixed.encode_batch} does not fit: it "
                              f"takes {max(estimate.figures.memory_bytes)} bytes of "
                              f"{estimate.figures.memory_capacity_bytes} a rank")
    if math.isinf(estimate.figures.latency_s):
        raise wrong("schedule", "schedule.encode_batch", fixed.encode_batch,
                    "sizes that the profile does not reach")
    return estimate


def _best_batch(problem: Problem, policy: Any) -> tuple[Estimate, int]:
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
