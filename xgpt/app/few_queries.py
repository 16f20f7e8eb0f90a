"""A job of fewer queries than its own fixed control variables keep present: a job file that is
tried on its first lines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from xgpt.core.errors import InfeasibleError
from xgpt.core.policies import policies
from xgpt.core.schedule import Schedule
from xgpt.report.words import counted

if TYPE_CHECKING:
    from xgpt.app.session import Session


def plan_with_enough(session: Session, plan: Callable[[Session], Schedule]) -> Schedule:
    """`plan` of the session or, where nothing but its number of queries forbids what the job
    fixes, of one with as many as it takes: its batches never fill. Raises InfeasibleError."""
    try:
        return plan(session)
    except InfeasibleError:
        found = _without_the_number(session, plan)
        if found is None:
            raise
    session.tell.say(
        f"note: the job has {counted(session.problem.num_queries or 0, 'query')}, fewer than its "
        "fixed schedule keeps at work at a time: batches will not fill")
    return found


def _without_the_number(session: Session, plan: Callable[[Session], Schedule]) -> Schedule | None:
    """None where nothing is fixed, or more than the number forbids it."""
    problem = session.problem
    controls = {name for row in policies() for name in row.variable_names}
    if problem.num_queries is None or all(
            getattr(problem.fixed, name) is None for name in controls):
        return None
    try:
        return plan(replace(session, problem=replace(problem, num_queries=None)))
    except InfeasibleError:
        return None
