"""The space of static batches: encode_batch x decode_micro_batches x encode steps of a group (of
DSI) under every tensor plan, and its boxes examined for branch and bound.

A root is a tensor plan. A grid over all that it has is bounded at once, at little cost
(xsimulator.policies.static.bounds): where outputs scatter, a batch that lasts until its longest is
done loses so much that no plan comes near what other policies have, and nothing is evaluated. Where
one may, it is divided into boxes, and of small ones each point is evaluated."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import cast

import numpy as np

from xgpt.core.lengths import BoolArray, FloatArray
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate
from xprofiler.timing import TimingSource
from xscheduler.admissible import Limit, Limits, crowding_or_pace
from xscheduler.branch_and_bound import Box, Candidate, NodeResult
from xscheduler.spaces.remembered import RememberedPolicy
from xscheduler.spaces.space import SMALL_BATCHES, AllInBoxes, Selection, Tight
from xscheduler.spaces.tensor_plans import (
    MOST_QUERIES,
    TensorPlan,
    batch_range,
    even_parts,
    spread_sizes,
)
from xsimulator.plans import StagePlan
from xsimulator.policies import group_counts, make_policy
from xsimulator.policies.static.bounds import StaticBounds, shared_bounds
from xsimulator.policies.static.boxes import StaticBoxes
from xsimulator.policies.static.closed_form import Static
from xsimulator.policies.static.config import StaticConfig
from xsimulator.policies.static.room import may_fit, most_queries

MOST_PARTS = 8  # encode steps of a group
AN_OCTAVE = 4  # numbers of queries a group at which a plan's grid is divided
SEEDED, SEEDS = 2, 3  # roots in which points are evaluated at first, and boxes of their grids
LOOKED_AT = 12  # boxes of many points, examined together, in which some are evaluated
FEW = 48  # points of a box that are all evaluated
SPLIT = 4  # parts that a range of batches is divided into
SELECTED_PLANS, SELECTED_PARTS = 4, (2, 4)  # for a job of few queries

Range = tuple[int, int]
Ranges = tuple[Range, Range, Range]
Point = tuple[int, int, int]  # encode_batch, decode_micro_batches, encode steps of a group


class PlanGrid:
    """Boxes [sizes, groups] that hold all batches of a plan, FT's and DSI's, and what they cannot
    reach."""

    def __init__(self, bounds: StaticBounds, plan: StagePlan, most: int, groups: Range,
                 steps: int | None) -> None:
        """Batches of up to `most` queries. steps: see `shape_of`."""
        self._bounds, self._plan = bounds, plan
        most = min(most, most_queries(bounds.form, plan))
        octaves = math.ceil(math.log2(max(most / groups[0], 2.0)))
        sizes = 2.0 ** (np.arange(octaves * AN_OCTAVE + 1) / AN_OCTAVE)
        shapes = [shape for own in group_ranges(len(plan.stages), groups)
                  for shape in shape_of(own, (1, MOST_PARTS), steps)]
        (fewest, highest), parts = np.array(shapes, float)[:, :, :, None].transpose(1, 2, 3, 0)
        least = sizes[:-1, None]
        # the chances that batches last are looked up at fewer sizes than there are boxes
        batch = 2.0 ** (np.floor(2 * np.log2(least * fewest)) / 2)
        self.boxes = StaticBoxes(
            least, sizes[1:, None], fewest, highest, parts[0], parts[1], batch)
        fits = may_fit(bounds.form, plan, self.boxes) & (least * fewest <= most) & _may_keep_pace(
            bounds, plan, self.boxes)
        self._qps = np.where(fits, bounds.throughput_qps(plan, self.boxes), 0.0)

    @cached_property
    def _latency_s(self) -> FloatArray:
        return self._bounds.latency_s(self._plan, self.boxes)

    def limit(self, latency_bound_s: float, worth_qps: float) -> FloatArray:
        """Queries/s that no configuration within the bound exceeds; where none is better than
        `worth_qps` under any bound, under any."""
        if math.isinf(latency_bound_s) or self._qps.max(initial=0.0) <= worth_qps:
            return self._qps
        return np.where(self._latency_s <= latency_bound_s, self._qps, 0.0)


def _may_keep_pace(bounds: StaticBounds, plan: StagePlan, boxes: StaticBoxes) -> BoolArray:
    """Whether some batch of each box may keep the bounds on the first token and on later ones."""
    constraint, able = bounds.form.problem.constraint, np.asarray(True)
    if (limit_s := constraint.limit_s("ttft")) < math.inf:
        able = able & (bounds.first_token_s(plan, boxes) <= limit_s)
    if (limit_s := constraint.limit_s("tpot")) < math.inf:
        able = able & (bounds.per_token_s(plan, boxes) <= limit_s)
    return able


class StaticSpace(AllInBoxes):
    """See xscheduler.spaces.space.Space. A box has the Points between its ends."""

    def __init__(self, name: str, problem: Problem, timing: TimingSource,
                 plans: Sequence[TensorPlan]) -> None:
        self.name, self.problem, self.plans = name, problem, tuple(plans)
        self.form = cast(Static, make_policy(name, problem, timing))
        self._has_parts = self.form.grid_parts != (None,)
        self.steps = problem.fixed.encode_micro_batches if self._has_parts else None
        self.variables: tuple[str, ...] = ("encode_batch", "decode_micro_batches")
        if self._has_parts:
            self.variables = (*self.variables, "encode_micro_batches")
        self._known = RememberedPolicy(self.form.evaluate, None)
        self._limits = Limits.of(problem.constraint, queries=problem.num_queries or math.inf)
        self.bounds = shared_bounds(self.form)
        self._bounded: dict[Box, tuple[float, float]] = {}

    @property
    def num_evaluated(self) -> int:
        return self._known.num_evaluated

    def examiner(self, latency_bound_s: float, gap: float, floor_qps: float, *,
                 keeps_gap: bool = False, is_claimed: bool = True) -> StaticExaminer:
        return StaticExaminer(self, latency_bound_s, gap=gap, floor_qps=floor_qps)

    def ranges(self, plan: int) -> Ranges:
        """Least and most of each of a Point's values."""
        fixed, given = self.problem.fixed, self.problem.fixed.decode_micro_batches
        stages = len(self.form.plans.both(*self.plans[plan]).stages)
        least, most = batch_range(fixed, self.problem.num_queries or MOST_QUERIES)
        groups = (given, given) if given else (1, 2 * stages)
        (shape,) = shape_of(groups, (1, MOST_PARTS if self._has_parts else 1), self.steps)
        return (least, most), *shape

    def config(self, plan: int, point: Point) -> StaticConfig:
        return StaticConfig(encode_batch=point[0], decode_micro_batches=point[1],
                            encode_parts=point[2] if self._has_parts else None,
                            tp_degree=self.plans[plan].tp_degree, tp_gpus=self.plans[plan].tp_gpus)

    def shown(self, point: Point) -> tuple[int, ...]:
        """The values of `variables` of a Point."""
        return (*point[:2], point[1] * point[2])[:len(self.variables)]

    def evaluate(self, plans: Sequence[int],
                 points: Sequence[Point]) -> tuple[FloatArray, FloatArray, FloatArray]:
        """(throughput, latency, Limit but for the latency) of points, each under its plan."""
        figures = self._known.evaluate([self.config(plan, point) for plan, point in zip(
            plans, points, strict=True)])
        return (figures.throughput_qps, figures.latency_s,
                np.asarray(crowding_or_pace(figures, self._limits), float))

    def grid(self, plan: int) -> PlanGrid:
        """A plan's grid, which FT and DSI share."""
        (_, most), groups, _ = self.ranges(plan)
        key = (*self.plans[plan], most, groups, self.steps)
        if key not in self.bounds.kept:
            self.bounds.kept[key] = PlanGrid(
                self.bounds, self.form.plans.both(*self.plans[plan]), most, groups, self.steps)
        return cast(PlanGrid, self.bounds.kept[key])

    def bounded(self, boxes: Sequence[Box]) -> list[tuple[float, float]]:
        """What no configuration of each box exceeds, and no latency goes below; 0 where none may
        fit into memory, or keep the bounds on tokens. Searches under several bounds come upon the
        same boxes."""
        new = [box for box in boxes if box not in self._bounded]
        ends = np.array([(*box.lower, *box.upper) for box in new], float).reshape(-1, 6)
        of_root = np.array([box.root for box in new], np.int64)
        for root in np.unique(of_root).tolist():
            rows = np.flatnonzero(of_root == root)
            least, fewest, parts, most, highest, most_parts = ends[rows].T
            own = StaticBoxes.of((least, most), (fewest, highest), (parts, most_parts))
            plan = self.form.plans.both(*self.plans[root])
            able = may_fit(self.form, plan, own) & _may_keep_pace(self.bounds, plan, own)
            qps = np.where(able, self.bounds.throughput_qps(plan, own), 0)
            self._bounded.update(zip([new[row] for row in rows], zip(
                qps.tolist(), self.bounds.latency_s(plan, own).tolist(), strict=True), strict=True))
        return [self._bounded[box] for box in boxes]

    def estimate(self, plan: int, point: tuple[int, ...]) -> Estimate:
        return self.form.estimate(self.config(plan, _of_shown(point)))

    def figures(self, plan: int, point: tuple[int, ...]) -> tuple[float, float]:
        qps, latency_s, _ = self.evaluate([plan], [_of_shown(point)])
        return float(qps[0]), float(latency_s[0])

    def beyond(self, tight: Tight) -> str:
        return ""

    def present(self, tight: Tight) -> float:
        return float(tight.point[0])

    def easiest(self) -> list[Tight]:
        plans, points = list[int](), list[Point]()
        for plan in range(len(self.plans)):
            (least, most), (fewest, highest), parts = self.ranges(plan)
            batches = sorted({min(max(size, least), most) for size in SMALL_BATCHES})
            own = [point for point in itertools.product(
                batches, sorted({fewest, (fewest + highest) // 2}), sorted({*parts}))
                if _allows(self, point)]
            plans += [plan] * len(own)
            points += own
        figures = zip(*(own.tolist() for own in self.evaluate(plans, points)), strict=True)
        return [Tight(latency_s, Limit(int(limit)), qps, plan, self.shown(point))
                for plan, point, (qps, latency_s, limit) in zip(
                    plans, points, figures, strict=True)]

    def selection(self, num_queries: int) -> Selection:
        """Batches a quarter apart in one group, and in one a stage, under the tensor plans that
        promise most."""
        bound_s = self.problem.constraint.latency_s
        best = [float(self.grid(plan).limit(bound_s, 0.0).max(initial=0.0))
                for plan in range(len(self.plans))]
        order = sorted(range(len(best)), key=lambda plan: -best[plan])[:SELECTED_PLANS]
        sizes = spread_sizes(num_queries, self.problem.fixed.encode_batch, set())
        points = [(plan, point) for plan in order
                  for _, (fewest, highest), parts in [self.ranges(plan)]
                  for point in itertools.product(
                      sizes, sorted({fewest, (highest + 1) // 2}),
                      sorted({*parts}) if self.steps else SELECTED_PARTS if self._has_parts
                      else (1,)) if _allows(self, point)]
        return Selection(closed_form=self.form, configs=[
            self.config(plan, point) for plan, point in points])


def group_ranges(stages: int, groups: tuple[int, int]) -> list[tuple[int, int]]:
    """Numbers of groups from the fewest to the highest in ranges, narrower where they are few."""
    fewest, highest = groups
    ends = sorted({min(max(count, fewest), highest) for count in group_counts(stages)} | {highest})
    return [(max(before + 1, fewest), end) for before, end in zip(
        [fewest - 1, *ends[:-1]], ends, strict=True)]


def shape_of(groups: Range, parts: Range, steps: int | None) -> list[tuple[Range, Range]]:
    """[ranges of groups and of encode steps of a group], as narrow as there are some where the job
    has a batch encoded in so many `steps`; [] where no such number of groups divides them."""
    if steps is None:
        return [(groups, parts)]
    able = [count for count in range(groups[0], groups[1] + 1) if steps % count == 0]
    return [((able[0], able[-1]), (steps // able[-1], steps // able[0]))] if able else []


def _allows(space: StaticSpace, point: Point) -> bool:
    """Whether the point has as many encode steps as the job says."""
    return space.steps is None or point[1] * point[2] == space.steps


def _of_shown(point: tuple[int, ...]) -> Point:
    batch, groups, *steps = point
    return batch, groups, steps[0] // groups if steps else 1


class StaticExaminer:
    """Examines boxes under one latency bound."""

    known: Candidate | None = None

    def __init__(self, space: StaticSpace, latency_bound_s: float, *, gap: float,
                 floor_qps: float) -> None:
        self._space, self._bound_s, self._gap, self._best_qps = (
            space, latency_bound_s, gap, floor_qps)
        self.plan_of_root = list(range(len(space.plans)))
        self.roots = [Box(root=plan, lower=tuple(least for least, _ in ranges),
                          upper=tuple(most for _, most in ranges))
                      for plan in self.plan_of_root for ranges in [space.ranges(plan)]]

    def raise_floor(self, floor_qps: float) -> None:
        self._best_qps = max(self._best_qps, floor_qps)

    def split(self, box: Box) -> Sequence[Box]:
        """A root has a box for each range of groups and octave of batches; others are halved, and
        those of several numbers of groups along these."""
        (least, fewest, parts), (most, highest, most_parts) = box.lower, box.upper
        if box is self.roots[box.root]:
            stages = len(self._space.form.plans.both(*self._space.plans[box.root]).stages)
            return self._boxes(box, group_ranges(stages, (fewest, highest)), _octaves(least, most))
        if highest > fewest:
            middle = (fewest + highest) // 2
            return self._boxes(box, [(fewest, middle), (middle + 1, highest)], [(least, most)])
        if (most + 1) * (parts + 1) < (least + 1) * (most_parts + 1):
            return box.split()
        return [Box(root=box.root, lower=(low, fewest, parts), upper=(up, highest, most_parts))
                for low, up in even_parts(least, most, SPLIT)]

    def _boxes(self, box: Box, groups: Sequence[Range], batches: Sequence[Range]) -> list[Box]:
        """Parts of a box, of these ranges."""
        parts = box.lower[2], box.upper[2]
        return [Box(root=box.root, lower=(low, fewest, least), upper=(up, highest, most))
                for own in groups
                for (fewest, highest), (least, most) in shape_of(own, parts, self._space.steps)
                for low, up in batches]

    def examine(self, boxes: Sequence[Box]) -> list[NodeResult]:
        if boxes and boxes[0] is self.roots[boxes[0].root]:
            return self._roots(boxes)
        limits = [qps if least_s <= self._bound_s else 0.0
                  for qps, least_s in self._space.bounded(boxes)]
        order = sorted(range(len(boxes)), key=lambda row: -limits[row])
        worth = [row for row in order if limits[row] > self._best_qps * (1 + self._gap)]
        few = {row for row in worth if boxes[row].num_points <= FEW}
        rows = [*few, *[row for row in worth if row not in few][:LOOKED_AT]]
        best = dict(zip(rows, self._look([
            (boxes[row], (_all if row in few else _some)(boxes[row])) for row in rows]),
            strict=True))
        return [_evaluated(box, best[row]) if row in few else _bounded(
            box, limits[row], best.get(row)) for row, box in enumerate(boxes)]

    def _roots(self, boxes: Sequence[Box]) -> list[NodeResult]:
        worth_qps = self._best_qps * (1 + self._gap)
        cells = [self._space.grid(box.root).limit(self._bound_s, worth_qps) for box in boxes]
        limits = [float(own.max(initial=0.0)) for own in cells]
        seeds = [(boxes[row], self._seeds(boxes[row], cells[row]))
                 for row in sorted(range(len(boxes)), key=lambda row: -limits[row])
                 if limits[row] > worth_qps][:SEEDED]
        best = {own.root: found for (own, _), found in zip(seeds, self._look(seeds), strict=True)}
        return [_bounded(box, limit, best.get(box.root))
                for box, limit in zip(boxes, limits, strict=True)]

    def _seeds(self, box: Box, cells: FloatArray) -> list[Point]:
        """Points in the boxes of a root's grid that promise most."""
        grid, points = self._space.grid(box.root).boxes, list[Point]()
        for place in np.argsort(-cells, axis=None)[:SEEDS].tolist():
            row, column = divmod(place, cells.shape[1])
            low, up = float(grid.least[row, 0]), float(grid.most[row, 0])
            parts = {max(int(grid.parts[0, column]), box.lower[2]),
                     min(int(grid.most_parts[0, column]), box.upper[2])}
            for groups in {int(grid.fewest[0, column]), int(grid.highest[0, column])}:
                points += [(math.floor(size * groups), groups, part) for size in (
                    low, math.sqrt(low * up), up) for part in parts]
        return [point for point in points if all(low <= value <= up for low, value, up in zip(
            box.lower, point, box.upper, strict=True))]

    def _look(self, asked: Sequence[tuple[Box, Iterable[Point]]]) -> list[Candidate | None]:
        """The best admissible of the points given with each box, all evaluated together."""
        space = self._space
        own = [[point for point in points if _allows(space, point)] for _, points in asked]
        plans = [box.root for (box, _), points in zip(asked, own, strict=True) for _ in points]
        if not plans:
            return [None] * len(asked)
        qps, latency_s, limit = space.evaluate(plans, [point for points in own for point in points])
        score = np.where((limit == 0) & (latency_s <= self._bound_s), qps, 0.0).tolist()
        self._best_qps = max(self._best_qps, *score)
        found, begin = list[Candidate | None](), 0
        for (box, _), points in zip(asked, own, strict=True):
            each = [Candidate(objective=value, root=box.root, point=space.shown(point))
                    for value, point in zip(score[begin:begin + len(points)], points, strict=True)
                    if value > 0]
            found.append(min(each, key=lambda one: one.rank, default=None))
            begin += len(points)
        return found


def _bounded(box: Box, limit: float, best: Candidate | None) -> NodeResult:
    if limit <= 0:
        return NodeResult(box=box, reason=Limit.LATENCY.words)
    return NodeResult(box=box, upper_bound=limit, best=best, is_settled=False, reason="")


def _evaluated(box: Box, best: Candidate | None) -> NodeResult:
    if best is None:
        return NodeResult(box=box, reason=Limit.LATENCY.words)
    return NodeResult(box=box, upper_bound=best.objective, best=best, reason="evaluated")


def _octaves(least: int, most: int) -> list[tuple[int, int]]:
    """From the least to the most, each range to twice its first."""
    firsts = [least]
    while 2 * firsts[-1] <= most:
        firsts.append(2 * firsts[-1])
    return list(zip(firsts, [first - 1 for first in firsts[1:]] + [most], strict=True))


def _all(box: Box) -> list[Point]:
    batches, groups, parts = (range(low, up + 1) for low, up in zip(
        box.lower, box.upper, strict=True))
    return list(itertools.product(batches, groups, parts))


def _some(box: Box) -> list[Point]:
    """The ends of a box, and what lies between those of its batches."""
    (least, fewest, parts), (most, highest, most_parts) = box.lower, box.upper
    return list(itertools.product(sorted({least, (least + most) // 2, most}),
                                  sorted({fewest, highest}), sorted({parts, most_parts})))
