"""The rough formulas of one problem, by policy."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from xgpt.core.lengths import IntArray
from xgpt.core.policies import policy
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate
from xprofiler.timing import TimingSource
from xsimulator.plans import StagePlans, shared_plans
from xsimulator.policies import make_policy
from xsimulator.rough.figures import Formula, Rough, point_of
from xsimulator.rough.workload import Workload

MOST_QUERIES = 1 << 16  # chosen: of a grid where the job does not say how many there are


class Formulas:
    """They share the stages' plans and what the lengths say."""

    def __init__(self, problem: Problem, timing: TimingSource, workload: Workload,
                 plans: StagePlans | None = None) -> None:
        self.problem, self._timing, self._workload = problem, timing, workload
        self._plans = plans or shared_plans(problem, timing)
        self.of = cache(self._made)

    def _made(self, name: str) -> Formula:
        made: Any = policy(name).load("formula")
        if made is None:
            return OnGrid(name, self.problem, self._timing)
        found: Formula = made(name, self.problem, self._timing, self._plans, self._workload)
        return found


class OnGrid:
    """A policy of another package: the closed form that it brings, on the grid that this has."""

    def __init__(self, name: str, problem: Problem, timing: TimingSource) -> None:
        self.policy, self.problem = name, problem
        self._form: Any = make_policy(name, problem, timing)
        self._configs: dict[tuple[tuple[int, int], tuple[int, ...]], Any] = {}

    def can_lay_out(self, plan: tuple[int, int]) -> bool:
        """See Formula."""
        return len(self.points(plan)) > 0

    def points(self, plan: tuple[int, int]) -> IntArray:
        """See Formula."""
        names = policy(self.policy).variable_names
        fixed = self.problem.fixed
        for config in self._form.grid(self.problem.num_queries or MOST_QUERIES, [plan]):
            point = tuple(int(getattr(config, name, 0) or 0) for name in names)
            if all(fixed.value_of(name) in (None, value)
                   for name, value in zip(names, point, strict=True)):
                self._configs[plan, point] = config
        return np.array([point for own, point in self._configs if own == plan],
                        np.int64).reshape(-1, len(names))

    def rough(self, plan: tuple[int, int], points: IntArray) -> Rough:
        """See Formula. What is off the grid has no room."""
        columns = {name: np.full(len(points), np.inf) for name in Rough.__slots__}
        columns["throughput_qps"] = np.zeros(len(points))
        keys = [(plan, tuple(point)) for point in points.tolist()]
        rows = [row for row, key in enumerate(keys) if key in self._configs]
        if rows:
            found = self._form.evaluate([self._configs[keys[row]] for row in rows])
            for name, own in columns.items():
                own[rows] = getattr(found, "period_s" if name == "iteration_s" else name)
            columns["memory_bytes"][rows] = np.where(found.fits, found.memory_bytes, np.inf)
        return Rough(**columns)

    def of_estimate(self, estimate: Estimate) -> dict[str, float]:
        """See Formula."""
        deployment = estimate.deployment
        plan = deployment.tp_degree, deployment.tp_gpus
        self.points(plan)
        return self.rough(plan, np.array([point_of(estimate)], np.int64)).of(0)

    def estimate(self, plan: tuple[int, int], point: tuple[int, ...]) -> Estimate:
        """See Formula."""
        found: Estimate = self._form.estimate(self._configs[plan, tuple(point)])
        return found
