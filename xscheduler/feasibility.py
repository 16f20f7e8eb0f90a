"""Which bounds a configuration keeps: by what a replay showed, times the margin that it has.

A margin belongs to a configuration; it is asked for where a replay keeps the bound with the least
margin that any has. What is not replayed yet is taken to have that of its cell's latest."""

from __future__ import annotations

from collections.abc import Callable

from xgpt.core.constraint import Constraint, Metric
from xgpt.core.problem import Problem
from xscheduler.margin import MarginParts, Margins
from xscheduler.space import Cell, Limits, Point

_PACE: tuple[Metric, ...] = ("ttft", "tpot")


class Feasibility:
    """One constraint's bounds, with margins (`has_margin`) or without."""

    def __init__(self, constraint: Constraint, doubts_of: Callable[[Problem], Margins], *,
                 has_margin: bool) -> None:
        self._constraint, self._doubts_of, self._has_margin = constraint, doubts_of, has_margin
        self._parts: dict[tuple[Cell, Point], MarginParts] = {}
        self._latest: dict[Cell, Limits] = {}
        self._of_policy: dict[str, Limits] = {}

    def limits(self, cell: Cell) -> Limits:
        """Of the cell's points, for all that is known of its margins."""
        known = self._latest.get(cell) or self._of_policy.get(cell.policy)
        return known or self._divided({"latency": self.least_factor(cell.problem)})

    def least_factor(self, part: Problem) -> float:
        """No schedule of copies on this part of the cluster has a smaller margin on its latency."""
        return self._doubts_of(part).least_factor if self._has_margin else 1.0

    def factor(self, cell: Cell, point: Point) -> float:
        """That of a point's margin on its latency."""
        return self.margin(cell, point).factor if self._has_margin else 1.0

    def is_kept(self, cell: Cell, point: Point) -> bool:
        """Whether a point that was replayed keeps every bound with its own margin."""
        least = self._divided({"latency": self.least_factor(cell.problem)})
        return cell.is_kept(point, least) and cell.is_kept(point, self._own(cell, point))

    def margin(self, cell: Cell, point: Point) -> MarginParts:
        """The margin on the point's latency."""
        key = cell, point
        if key not in self._parts:
            self._parts[key] = self._doubts_of(cell.problem).margin(
                cell.replayed[point].estimate)
        return self._parts[key]

    def _own(self, cell: Cell, point: Point) -> Limits:
        if not self._has_margin:
            return self._divided({})
        factors: dict[Metric, float] = {"latency": self.margin(cell, point).factor}
        for metric in _PACE:
            if self._constraint.bound_on(metric) is not None:
                factors[metric] = self._doubts_of(cell.problem).margin(
                    cell.replayed[point].estimate, metric).factor
        own = self._divided(factors)
        self._latest[cell] = self._of_policy[cell.policy] = own
        return own

    def _divided(self, factors: dict[Metric, float]) -> Limits:
        limit = self._constraint.limit_s
        return Limits(latency_s=limit("latency") / factors.get("latency", 1.0),
                      ttft_s=limit("ttft") / factors.get("ttft", 1.0),
                      tpot_s=limit("tpot") / factors.get("tpot", 1.0))
