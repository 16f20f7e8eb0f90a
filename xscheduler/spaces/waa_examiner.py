"""Boxes of WAA's space examined for branch and bound (paper section 5).

A root is a tensor plan with ranges of encode_batch and decode_micro_batches. A box is bounded from
its corners (xsimulator.policies.waa.bounds), over every division of the devices that its points may
have; a few points are evaluated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from xgpt.core.lengths import FloatArray, IntArray
from xscheduler.admissible import Limit, beyond_range
from xscheduler.branch_and_bound import Box, Candidate, NodeResult
from xscheduler.spaces.tensor_plans import batch_range, even_parts
from xscheduler.spaces.waa_points import WaaPoints, group_range
from xsimulator.policies.waa.bounds import WaaBounds
from xsimulator.policies.waa.config import WaaBoxes
from xsimulator.policies.waa.plans import WaaPlans

FEW_POINTS = 6  # that are evaluated one by one
SIDE_PARTS = 3  # into which either side of a box is split
ROOT_PARTS = (8, 4)  # and of a root: encode_batch, decode_micro_batches
LOOKED_AT = 3  # boxes, the most promising, at whose corners points are evaluated


class WaaExaminer:
    """Examines boxes under one latency bound."""

    def __init__(self, figures: WaaPoints, latency_bound_s: float, *, gap: float,
                 floor_qps: float = 0.0) -> None:
        """`floor_qps`: throughput that was found elsewhere; what is no better is not looked into.
        """
        self._figures, self._bound_s, self._gap = figures, latency_bound_s, gap
        self._best_qps = floor_qps
        self.roots: list[Box] = []
        self._plan_of_root: list[int] = []
        problem = figures.waa.problem
        batches = batch_range(problem.fixed, problem.num_queries)
        for plan, split in enumerate(figures.splits):
            groups = group_range(problem, split)
            largest = max(_largest_batch(figures.bounds, split, batches[1]), batches[0])
            whole = Box(root=0, lower=(batches[0], groups[0]), upper=(largest, groups[1]))
            for part in _grid(whole, ROOT_PARTS):
                self.roots.append(Box(root=len(self.roots), lower=part.lower, upper=part.upper))
                self._plan_of_root.append(plan)

    def plan_of(self, root: int) -> int:
        """Index of the tensor plan that a root is of."""
        return self._plan_of_root[root]

    def split(self, box: Box) -> list[Box]:
        """Either side into parts of even ratio."""
        return _grid(box, (SIDE_PARTS, SIDE_PARTS))

    def examine(self, boxes: Sequence[Box]) -> list[NodeResult]:
        """Plan after plan, the most promising first by a quick bound: boxes that are then no better
        than what was found are not looked into."""
        limit, latency, stretch = self._quick(boxes)
        is_refused = beyond_range(stretch)
        results: list[NodeResult | None] = [None] * len(boxes)
        by_plan = sorted(self._by_plan(boxes), key=lambda one: (-limit[one[1]].max(), one[0]))
        for _, rows in by_plan:
            left = []
            for row in rows.tolist():
                if latency[row] > self._bound_s or is_refused[row]:
                    results[row] = NodeResult(
                        upper_bound=-math.inf, best=None, box=boxes[row], is_settled=True,
                        reason=(Limit.RANGE if is_refused[row] else Limit.LATENCY).words)
                elif limit[row] <= self._best_qps * (1 + self._gap):
                    results[row] = NodeResult(upper_bound=float(limit[row]), best=None,
                                              box=boxes[row], is_settled=False, reason="")
                else:
                    left.append(row)
            own = self._examine([boxes[row] for row in left]) if left else []
            for row, result in zip(left, own, strict=True):
                results[row] = result
        return [result for result in results if result is not None]

    def _quick(self, boxes: Sequence[Box]) -> tuple[FloatArray, FloatArray, FloatArray]:
        """[boxes] most throughput, least latency, least stretch beyond what was measured."""
        figures, devices = self._figures, self._figures.waa.problem.cluster.num_devices
        limit, latency, stretch = (np.empty(len(boxes)) for _ in range(3))
        for index, rows in self._by_plan(boxes):
            plan, own = figures.plans[index], _corners(boxes, rows)
            degrees = sorted({plan.tp_degree} | ({1} if plan.tp_gpus < devices else set()))
            limit[rows], latency[rows] = figures.bounds.quick(figures.splits[index], own, degrees)
            stretch[rows] = figures.waa.least_stretch(own.least.astype(float), degrees)
        return limit, latency, stretch

    def _by_plan(self, boxes: Sequence[Box]) -> list[tuple[int, IntArray]]:
        plan = np.array([self._plan_of_root[box.root] for box in boxes])
        return [(int(index), np.flatnonzero(plan == index)) for index in np.unique(plan)]

    def _examine(self, boxes: Sequence[Box]) -> list[NodeResult]:
        limit, latency, held = self._bounds(boxes)
        capacity = self._figures.waa.capacity_bytes
        # nothing fits although half a batch would: what decodes with it does not
        reasons = np.select([held > capacity, (limit <= 0) & np.isfinite(latency),
                             latency > self._bound_s, limit <= 0],
                            [Limit.MEMORY.words, Limit.MEMORY.words, Limit.LATENCY.words,
                             Limit.RANGE.words], "")
        seen = self._look(boxes, np.where(reasons == "", limit, 0.0))
        results = []
        for box, most, reason, (best, is_all) in zip(boxes, limit, reasons, seen, strict=True):
            if reason:
                results.append(NodeResult(upper_bound=-math.inf, best=None, box=box,
                                          is_settled=True, reason=str(reason)))
            elif is_all:
                results.append(NodeResult(
                    upper_bound=-math.inf if best is None else best.objective, best=best, box=box,
                    is_settled=True, reason="each point evaluated"))
            else:
                is_close = best is not None and most <= best.objective * (1 + self._gap)
                results.append(NodeResult(upper_bound=float(most), best=best, box=box,
                                          is_settled=is_close, reason="decided at its corner"))
        return results

    def _bounds(self, boxes: Sequence[Box]) -> tuple[FloatArray, FloatArray, FloatArray]:
        figures = self._figures
        found = tuple(np.empty(len(boxes)) for _ in range(3))
        for index, rows in self._by_plan(boxes):
            for values, part in zip(found, figures.bounds.bound(
                    figures.splits[index], _corners(boxes, rows),
                    worth_qps=self._best_qps * (1 + self._gap)), strict=True):
                values[rows] = part
        return found[0], found[1], found[2]

    def _look(self, boxes: Sequence[Box],
              limit: FloatArray) -> list[tuple[Candidate | None, bool]]:
        """[boxes] (best admissible point looked at, whether these were all): of boxes that may
        still have a better one."""
        found: list[tuple[Candidate | None, bool]] = [(None, False)] * len(boxes)
        rows = [row for place, row in enumerate(np.argsort(-limit, kind="stable").tolist())
                if limit[row] > self._best_qps * (1 + self._gap)
                and (place < LOOKED_AT or boxes[row].num_points <= FEW_POINTS)]
        points = [_points(boxes[row]) for row in rows]
        keys = [(self._plan_of_root[boxes[row].root], *point)
                for row, own in zip(rows, points, strict=True) for point in own]
        known = dict(zip(keys, self._figures.evaluate(keys), strict=True))
        for row, own in zip(rows, points, strict=True):
            box, plan = boxes[row], self._plan_of_root[boxes[row].root]
            admissible = [Candidate(objective=qps, root=box.root, point=point)
                          for point in own
                          for qps, latency_s, forbidding in [known[plan, point[0], point[1]]]
                          if not forbidding and qps > 0 and latency_s <= self._bound_s]
            best = min(admissible, key=lambda one: one.rank, default=None)
            found[row] = best, len(own) == box.num_points
            if best is not None:
                self._best_qps = max(self._best_qps, best.objective)
        return found


def _corners(boxes: Sequence[Box], rows: IntArray) -> WaaBoxes:
    corners = np.array([(*boxes[row].lower, *boxes[row].upper) for row in rows.tolist()], np.int64)
    return WaaBoxes(least=corners[:, 0], most=corners[:, 2], fewest=corners[:, 1],
                    highest=corners[:, 3])


def _points(box: Box) -> list[tuple[int, int]]:
    """All points of a small box, else its corners."""
    (least, fewest), (most, highest) = box.lower, box.upper
    if box.num_points <= FEW_POINTS:
        return [(batch, groups) for batch in range(least, most + 1)
                for groups in range(fewest, highest + 1)]
    return list(dict.fromkeys([(most, fewest), (most, highest), (least, fewest), (least, highest)]))


def _grid(box: Box, parts: tuple[int, int]) -> list[Box]:
    """The box cut along both sides, in even ratios."""
    sides = [even_parts(low, up, count) for low, up, count in zip(box.lower, box.upper, parts,
                                                             strict=True)]
    return [Box(root=box.root, lower=(b1, g1), upper=(b2, g2))
            for b1, b2 in sides[0] for g1, g2 in sides[1]]


def _largest_batch(bounds: WaaBounds, split: WaaPlans, largest: int) -> int:
    """No larger encode_batch up to `largest` can fit; 0 if none can."""
    low, high = 0, largest + 1
    while high - low > 1:
        tried = np.unique(np.rint(np.geomspace(low + 1, high - 1, 16)).astype(np.int64))
        fits = bounds.least_bytes(split, tried) <= bounds.waa.capacity_bytes
        low = int(max(tried[fits], default=low))
        high = int(min(tried[~fits], default=high))
    return low
