"""A job of fewer queries than its own fixed control variables keep present: a job file that is
tried on its first lines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from xgpt.core.errors import InfeasibleError
from xgpt.core.policies import policies
from xgpt.core.problem import Problem
from xgpt.core.schedule import Schedule


def plan_with_enough(problem: Problem, plan: Callable[[Problem], Schedule],
                     tell: Callable[[str], None]) -> Schedule:
    """`plan` of the problem or, where nothing but its number of queries forbids what the job fixes,
    of one without a number: its batches never fill. Raises InfeasibleError."""
    try:
        return plan(problem)
    except InfeasibleError:
        schedule = _without_the_number(problem, plan)
        if schedule is None:
            raise
    count = problem.num_queries or 0
    tell(f"note: the job has {count:,} quer{'y' if count == 1 else 'ies'}, fewer than its fixed "
         "schedule keeps at work at a time: batches will not fill")
    return schedule


def _without_the_number(problem: Problem, plan: Callable[[Problem], Schedule]) -> Schedule | None:
    """None where nothing is fixed, or more than the number forbids it."""
    controls = {name for row in policies() for name in row.variable_names}
    if problem.num_queries is None or all(
            problem.fixed.value_of(name) is None for name in controls):
        return None
    try:
        return plan(replace(problem, num_queries=None))
    except InfeasibleError:
        return None
