"""The best schedule at each of several latency bounds: the trade-off a user chooses on."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from xgpt.app.opened import OpenedJob
from xgpt.app.plan import JobPlanner
from xgpt.core.errors import InfeasibleError
from xgpt.core.schedule import Schedule
from xgpt.report.what_if_tables import sweep_table
from xscheduler.planner import PlanOptions

_SHARES = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0)  # of the latency that throughput alone would choose


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """The best schedule for each bound (in seconds), or why there is none. As text it is the table
    that `xgpt sweep` prints."""

    rows: tuple[tuple[float, Schedule | str], ...]

    def __str__(self) -> str:
        return sweep_table(self.rows)


def sweep_job(opened: OpenedJob, bounds_s: Sequence[float] | None = None) -> Sweep:
    """Plans the job's steady state under each bound; by default under shares of the latency at the
    highest throughput. Raises InfeasibleError where there is no schedule at all to take shares of.
    """
    planner = JobPlanner(opened, PlanOptions(horizon="steady"))
    bounds_s = _default_bounds(planner) if bounds_s is None else bounds_s
    return Sweep(rows=tuple((bound_s, _at(planner, bound_s)) for bound_s in bounds_s))


def _at(planner: JobPlanner, bound_s: float) -> Schedule | str:
    try:
        return planner.plan(bound_s).schedule
    except InfeasibleError as why:
        return str(why)


def _default_bounds(planner: JobPlanner) -> list[float]:
    best = _at(planner, math.inf)
    if isinstance(best, str):
        raise InfeasibleError(best)
    latency_s = best.figures.latency_s
    return [*(float(f"{share * latency_s:.3g}") for share in _SHARES), math.inf]
