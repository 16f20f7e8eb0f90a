"""Limits that a configuration keeps: by its replay, times its safety margin.

Each configuration has its own margin. Margins take time, so one is computed only if the replay
keeps the limit with the least margin that any configuration has. Points without a replay are judged
by the latest margin of their cell."""

from collections.abc import Callable

from xgpt.core.constraint import Constraint, Metric
from xgpt.core.problem import Problem
from xscheduler.margin import MarginParts, Margins
from xscheduler.space import Cell, Limits, Point

_PACE: tuple[Metric, ...] = ("ttft", "tpot")


class Feasibility:
    """Checks replayed points against one constraint, with safety margins or without."""

    def __init__(self, constraint: Constraint, margins_of: Callable[[Problem], Margins], *,
                 has_margin: bool) -> None:
        self._constraint, self._margins_of, self._has_margin = constraint, margins_of, has_margin
        self._parts: dict[tuple[Cell, Point], MarginParts] = {}
        self._latest: dict[Cell, Limits] = {}
        self._of_policy: dict[str, Limits] = {}

    def limits(self, cell: Cell) -> Limits:
        """Limits, in seconds, for the cell's points, divided by the latest margin known of the
        cell, else of its policy, else by the least one."""
        known = self._latest.get(cell) or self._of_policy.get(cell.policy)
        return known or self._divided({"latency": self.least_factor(cell.problem)})

    def least_factor(self, part: Problem) -> float:
        """Lower bound on the latency margin, a factor, of all schedules on this part."""
        return self._margins_of(part).least_factor if self._has_margin else 1.0

    def factor(self, cell: Cell, point: Point) -> float:
        """Factor of the point's margin on its latency, at least 1."""
        return self.margin(cell, point).factor if self._has_margin else 1.0

    def is_kept(self, cell: Cell, point: Point) -> bool:
        """Whether a replayed point keeps every limit with its own margin."""
        least = self._divided({"latency": self.least_factor(cell.problem)})
        return cell.is_kept(point, least) and cell.is_kept(point, self._own(cell, point))

    def margin(self, cell: Cell, point: Point) -> MarginParts:
        """The safety margin on a replayed point's latency."""
        key = cell, point
        if key not in self._parts:
            self._parts[key] = self._margins_of(cell.problem).margin(
                cell.replayed[point].estimate)
        return self._parts[key]

    def _own(self, cell: Cell, point: Point) -> Limits:
        if not self._has_margin:
            return self._divided({})
        factors: dict[Metric, float] = {"latency": self.margin(cell, point).factor}
        for metric in _PACE:
            if self._constraint.bound_on(metric) is not None:
                factors[metric] = self._margins_of(cell.problem).margin(
                    cell.replayed[point].estimate, metric).factor
        own = self._divided(factors)
        self._latest[cell] = self._of_policy[cell.policy] = own
        return own

    def _divided(self, factors: dict[Metric, float]) -> Limits:
        limit = self._constraint.limit_s
        return Limits(latency_s=limit("latency") / factors.get("latency", 1.0),
                      ttft_s=limit("ttft") / factors.get("ttft", 1.0),
                      tpot_s=limit("tpot") / factors.get("tpot", 1.0))
