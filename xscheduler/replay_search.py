"""The best schedule of a problem: candidates are ordered by rough formulas, and judged by replays.

Best first over cells (xscheduler.space): of the cell from which most is expected the point from
which most is expected is replayed, which corrects what is expected of its neighbours; until no cell
is expected to have more than the best that was found. What stays in the race is replayed again with
more queries, and climbed from to better neighbours."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from xgpt.core.errors import InputError, XgptError
from xgpt.core.lengths import IntArray
from xgpt.core.policies import able_policies
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate
from xprofiler.timing import TimingSource
from xscheduler.copies import has_room, most_copies, problem_on
from xscheduler.partition import division_of
from xscheduler.kept_bounds import KeptBounds
from xscheduler.space import Cell, Expected, Off, Point, Replayed, usual_off
from xscheduler.spaces.tensor_plans import tensor_plans
from xsimulator.replay.job import planned_queries, replay_job
from xsimulator.replay.predict import checked_queries, with_watched
from xsimulator.replay.steady import steady_figures
from xsimulator.replay.step_clock import StepClocks
from xsimulator.rough.forms import Formulas
from xsimulator.rough.workload import Workload

SEED = 20240427
LEAST_LOOK, LOOK_ROUNDS = 800, 6  # chosen: queries of a first replay, at least and by those present
RACE, RUNNERS_UP = 0.05, 5  # chosen: what is climbed from, too: of the best's throughput, and how many
FINALS, CLIMBS = 3, 24  # chosen
LIKELY = 0.01  # chosen: by so much less by the formula is a neighbour looked at
LEAST = 0.002  # chosen: what a neighbour must bring
STEPS = (1.3, 1.1, 1.03)  # chosen: to neighbours
MOST_REPLAYS = 400  # chosen


class Replays:
    """Replays of configurations of one part of the cluster, all with the same queries."""

    def __init__(self, problem: Problem, timing: TimingSource) -> None:
        self.problem, self.timing = problem, timing
        self._clocks = StepClocks(problem, timing)
        self._drawn: tuple[IntArray, IntArray] | None = None
        self.count = 0

    def of(self, estimate: Estimate, queries: int) -> Replayed:
        """The steady state in a replay of so many queries."""
        self.count += 1
        problem = self.problem
        if self._drawn is None or len(self._drawn[0]) < queries:
            self._drawn = problem.lengths.sample(2 * queries, np.random.default_rng(SEED))
        inputs, outputs = (own[:queries] for own in self._drawn)
        if problem.constraint.kind == "sequence":
            outputs = with_watched(outputs, problem.lengths.outputs.quantile(
                problem.constraint.quantile))
        try:
            result = replay_job(problem, self.timing, estimate, planned_queries(
                problem, inputs, outputs), clocks=self._clocks)
        except XgptError:  # a query that never fits
            return Replayed(estimate, None, queries)
        figures = steady_figures(result, problem.constraint, problem.lengths.outputs) if (
            result.is_timed) else None
        return Replayed(estimate, figures, queries)


def cells_of(problem: Problem, timing: TimingSource) -> Iterator[tuple[Cell, Replays]]:
    """Every policy by every tensor plan, on every number of devices that a copy may have."""
    workload = Workload(problem)
    names = [row.name for row in able_policies(problem.fixed) if not (
        problem.model.is_encoder_decoder and row.is_decoder_only)]
    for part in _parts(problem):
        try:
            plans = tensor_plans(part, timing)
        except InputError:
            continue
        formulas, replays = Formulas(part, timing, workload), Replays(part, timing)
        for name in names:
            formula = formulas.of(name)
            for plan in plans:
                if formula.can_lay_out(tuple(plan)):
                    yield Cell(part, formula, tuple(plan)), replays


def _parts(problem: Problem) -> list[Problem]:
    """The problem of one copy, on every number of devices of a node, and of whole nodes."""
    cluster, wanted = problem.cluster, problem.fixed.replicas
    each = cluster.devices_per_node
    sizes = [*range(1, each), *range(each, cluster.num_devices + 1, each)]
    found = []
    for devices in sizes:
        copies = most_copies(cluster, devices)
        if copies < (wanted or 1):
            continue
        part = problem_on(problem, devices)
        if wanted is not None and copies != wanted:
            share = None if problem.num_queries is None else -(-problem.num_queries // wanted)
            part = replace(part, copies=wanted, num_queries=share)
        if problem.num_queries is not None and part.copies > problem.num_queries:
            continue
        if has_room(part):
            found.append(part)
    return found


class Found(NamedTuple):
    """Copies of one shape: the cell and the point of each, and how many there are."""

    cell: Cell
    point: Point
    copies: int

    @property
    def replayed(self) -> Replayed:
        return self.cell.replayed[self.point]


class Search:
    """The search of one problem."""

    def __init__(self, problem: Problem, timing: TimingSource) -> None:
        self.problem = problem
        self._replays: dict[Cell, Replays] = dict(cells_of(problem, timing))
        self.cells: dict[int, list[Cell]] = {}  # by devices of a copy
        for cell in self._replays:
            self.cells.setdefault(cell.problem.cluster.num_devices, []).append(cell)

    @property
    def num_replays(self) -> int:
        return sum(one.count for one in {id(own): own for own in self._replays.values()}.values())

    def best(self, keeps: KeptBounds) -> list[Found]:
        """Copies of one or several shapes that are best together; [] where none was found that
        keeps the limits."""
        found = self._look(keeps)
        for _ in range(FINALS):
            improved = False
            for one in found:
                improved |= self._climb(one.cell, one.point, keeps)
            for one in self._runners_up(found, keeps):
                improved |= self._climb(one.cell, one.point, keeps)
            again = self._look(keeps)
            if not improved and again == found:
                break
            found = again
        return found

    def _look(self, keeps: KeptBounds) -> list[Found]:
        """Replays what is expected to be part of the best division, until that is of nothing but
        what was replayed."""
        usual: dict[str, Off] = dict(usual_off(list(self._replays)))
        expected = {cell: self._expected(cell, keeps, usual) for cell in self._replays}
        while True:
            tops: dict[int, Cell] = {}
            for size, cells in self.cells.items():
                top = max(cells, key=lambda one: expected[one].throughput_qps)
                if not top.off and top.is_coarse:  # now what lies between its points
                    top.is_coarse = False
                    expected[top] = self._expected(top, keeps, usual)
                    top = max(cells, key=lambda one: expected[one].throughput_qps)
                tops[size] = top
            worth = {size: expected[top].throughput_qps / top.copies for size, top in tops.items()}
            division = division_of(self.problem, worth)
            if division is None or division.worth <= 0:
                return []
            unsure = [size for size in dict.fromkeys(division.sizes)
                      if not expected[tops[size]].is_replayed]
            if not unsure or self.num_replays >= MOST_REPLAYS:
                return [Found(tops[size], expected[tops[size]].point or (),
                              division.sizes.count(size))
                        for size in dict.fromkeys(division.sizes)
                        if expected[tops[size]].is_replayed]
            size = max(unsure, key=lambda one: worth[one] * division.sizes.count(one))
            cell, point = tops[size], expected[tops[size]].point
            assert point is not None
            self._replay(cell, point)
            cell.misses += not keeps.is_kept(cell, point)
            before, usual = usual, dict(usual_off(list(self._replays)))
            for other in self._replays:
                if other is cell or (not other.off and other.policy == cell.policy
                                     and usual != before):
                    expected[other] = self._expected(other, keeps, usual)

    def _expected(self, cell: Cell, keeps: KeptBounds, usual: Mapping[str, Off]) -> Expected:
        own = cell.best_replayed(partial(keeps.is_kept, cell))
        return cell.expected(keeps.limits(cell), usual.get(cell.policy, Off()), own)

    def _replay(self, cell: Cell, point: Point, *, is_whole: bool = False) -> Replayed:
        found = cell.replayed.get(point)
        estimate = cell.formula.estimate(cell.plan, point) if found is None else found.estimate
        whole = checked_queries(cell.problem, estimate)
        queries = whole if is_whole else min(whole, max(LEAST_LOOK, math.ceil(
            LOOK_ROUNDS * estimate.most_in_system)))
        if found is None or found.queries < queries:
            found = self._replays[cell].of(estimate, queries)
            cell.note(point, found)
        return found

    def _runners_up(self, found: Sequence[Found], keeps: KeptBounds) -> list[Found]:
        """Of the sizes that are taken the best of other cells that are nearly as good."""
        others = []
        for one in found:
            own = one.cell.copies * one.replayed.throughput_qps
            for cell in self.cells[one.cell.problem.cluster.num_devices]:
                best = cell.best_replayed(partial(keeps.is_kept, cell))
                if cell is not one.cell and best.point is not None and (
                        best.throughput_qps > (1 - RACE) * own):
                    others.append((best.throughput_qps, len(others), Found(cell, best.point, 0)))
        return [one for _, _, one in sorted(others, reverse=True)[:RUNNERS_UP]]

    def _climb(self, cell: Cell, point: Point, keeps: KeptBounds) -> bool:
        """Replays a point whole, its neighbours, those of the best of them, and so on until none
        is better; whether any was."""
        def worth(at: Point) -> float:
            return cell.replayed[at].throughput_qps if keeps.is_kept(cell, at) else 0.0

        self._replay(cell, point, is_whole=True)
        own, improved = worth(point), False
        for _ in range(CLIMBS):
            for other in _neighbours(cell, point):
                if other in cell.replayed and worth(other) <= own:
                    continue
                self._replay(cell, other, is_whole=True)
                if (found := worth(other)) > own * (1 + LEAST):
                    own, point, improved = found, other, True
                    break
            else:
                break
        return improved


def _neighbours(cell: Cell, point: Point) -> list[Point]:
    """Points beside one, along each variable that the cell has several values of, which the
    formula says have room and no more than a little less throughput."""
    found: list[Point] = []
    for place, value in enumerate(point):
        if len(np.unique(cell.points[:, place])) < 2 or value == 0:
            continue
        for step in STEPS:
            for other in (max(value + 1, round(value * step)), min(value - 1, round(value / step))):
                if other >= 1:
                    found.append((*point[:place], other, *point[place + 1:]))
    points, rough = cell._with_room(np.array(found, np.int64).reshape(-1, len(point)))
    own = cell.formula.rough(cell.plan, np.array([point], np.int64))
    likely = rough.throughput_qps > (1 - LIKELY) * own.throughput_qps[0]
    return [tuple(one) for one in points[likely].tolist()]
