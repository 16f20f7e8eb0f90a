"""The rough formulas of one problem, by policy."""

from __future__ import annotations

from functools import cache
from typing import Any

from xgpt.core.problem import Problem
from xprofiler.timing import TimingSource
from xsimulator.plans import StagePlans, shared_plans
from xsimulator.rough.one_pool import Continuous, Rra
from xsimulator.rough.static import Static
from xsimulator.rough.two_pools import TwoPools
from xsimulator.rough.workload import Workload

KINDS: dict[str, Any] = {"rra": Rra, "waa-c": TwoPools, "waa-m": TwoPools, "ft": Static,
                         "dsi": Static, "orca": Continuous, "vllm": Continuous,
                         "sarathi": Continuous}


class Formulas:
    """They share the stages' plans and what the lengths say."""

    def __init__(self, problem: Problem, timing: TimingSource, workload: Workload,
                 plans: StagePlans | None = None) -> None:
        self.problem = problem
        plans = plans or shared_plans(problem, timing)
        self.of = cache(lambda name: KINDS[name](name, problem, timing, plans, workload))
