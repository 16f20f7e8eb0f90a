"""The schedule of a policy that has no space of its own, which only another package's can lack: the
best of its grid within the bound, of which nothing is proved."""

import math
import sys
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from xgpt.core.errors import InfeasibleError
from xgpt.core.policies import policy
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate, Schedule, Status
from xgpt.core.schedule_file import schedule_from_flat
from xgpt.core.units import format_seconds
from xprofiler.timing import TimingSource
from xscheduler.admissible import Limits, admissible
from xscheduler.spaces.grid import best
from xscheduler.spaces.remembered import RememberedPolicy
from xscheduler.spaces.space import Selection
from xscheduler.spaces.tensor_plans import MOST_QUERIES, tensor_plans
from xsimulator.policies import make_policy
from xsimulator.policies.figures import EstimateArrays


class GridSearch:
    """The policy that the problem fixes: its best configurations, under one latency bound after the
    other. Raises InputError for a tensor plan that the model or the cluster cannot hold."""

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
    """A policy's closed form whose space is what the job's fixed variables leave of it."""

    def __init__(self, problem: Problem, timing: TimingSource) -> None:
        self.problem, self.timing, self.name = problem, timing, str(problem.fixed.policy)
        self._inner: Any = make_policy(self.name, problem, timing)
        self._given = _given(problem)
        self._known = RememberedPolicy(self._inner.evaluate, None)
        self._grids: dict[Hashable, list[Any]] = {}

    @property
    def num_evaluated(self) -> int:
        return self._known.num_evaluated

    def grid(self, max_queries: int, plans: Sequence[tuple[int, int]]) -> list[Any]:
        """Points of the whole grid, moved to the fixed values."""
        key = max_queries, tuple(plans)
        if key not in self._grids:
            self._grids[key] = list(dict.fromkeys(
                replace(config, **self._given) for config in self._inner.grid(max_queries, plans)))
        return self._grids[key]

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
        own = np.array([all(getattr(config, name) == value for name, value in self._given.items())
                        for config in configs], dtype=bool)
        return replace(figures, fits=figures.fits & own)

    def estimate(self, config: Any) -> Estimate:
        estimate: Estimate = self._inner.estimate(config)
        return estimate


def _given(problem: Problem) -> dict[str, int]:
    """Control variables that the job fixes."""
    assert problem.fixed.policy is not None
    values = {name: problem.fixed.value_of(name)
              for name in policy(problem.fixed.policy).variable_names}
    return {name: value for name, value in values.items() if value is not None}
