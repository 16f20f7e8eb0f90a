"""The rough formulas of one problem, by policy."""

from __future__ import annotations

from functools import cache
from typing import Any

from xgpt.core.policies import policy
from xgpt.core.problem import Problem
from xprofiler.timing import TimingSource
from xsimulator.plans import PlanSource, shared_plans
from xsimulator.rough.figures import Formula
from xsimulator.rough.workload import Workload


class Formulas:
    """They share the stages' plans and what the lengths say."""

    def __init__(self, problem: Problem, timing: TimingSource, workload: Workload | None = None,
                 plans: PlanSource | None = None) -> None:
        self.problem, self._timing = problem, timing
        self._workload = workload or Workload(problem)
        self._plans = plans or shared_plans(problem, timing)
        self.of = cache(self._made)

    def _made(self, name: str) -> Formula:
        made: Any = policy(name).load("formula")
        found: Formula = made(name, self.problem, self._timing, self._plans, self._workload)
        return found
