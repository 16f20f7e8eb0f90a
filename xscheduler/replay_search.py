"""The best schedule of a problem: candidates are ordered by rough formulas, and judged by replays.

Best first over cells (xscheduler.space): of the cell from which most is expected the point from
which most is expected is replayed, which corrects what is expected of its neighbours; until no cell
is expected to have more than the best that was found. What stays in the race is replayed again with
more queries, and climbed from to better neighbours."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from xgpt.core.errors import InputError, XgptError
from xgpt.core.lengths import IntArray
from xgpt.core.policies import able_policies
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate
from xprofiler.timing import TimingSource
from xscheduler.copies import has_room, most_copies, problem_on
from xscheduler.kept_bounds import KeptBounds
from xscheduler.partition import division_of
from xscheduler.space import Cell, Expected, Point, Replayed, Usual, usual_off
from xscheduler.tensor_plans import tensor_plans
from xsimulator.replay.figures import steady_replay
from xsimulator.replay.job import planned_queries
from xsimulator.replay.predict import checked_queries, with_watched
from xsimulator.replay.step_clock import StepClocks
from xsimulator.rough.forms import Formulas
from xsimulator.rough.workload import Workload

SEED = 20240427
LEAST_LOOK, LOOK_ROUNDS = 800, 6  # chosen: queries of a first replay, at least and by those present
# chosen: what is climbed from, too, by its share of the best's throughput, and how many
RACE, RUNNERS_UP = 0.06, 4
FINALS, CLIMBS = 3, 24  # chosen
SURE_LOOKS, SURE = 60, 4  # chosen: looks, and how many times a whole replay's queries
LOOKS, QUICKEST = 3, 8  # chosen: replays of a policy that has nothing, and of the least latencies
FEW_NODES = 4  # chosen: of which every number is looked at
LIKELY = 0.01  # chosen: by so much less by the formula is a neighbour looked at
LEAST = 0.002  # chosen: what a neighbour must bring
STEPS = (1.3, 1.1, 1.03)  # chosen: to neighbours
MOST_REPLAYS = 400  # chosen
DRAWN = 4096  # chosen: queries that are drawn at once


class Replays:
    """Replays of configurations of one part of the cluster, all with the same queries."""

    def __init__(self, problem: Problem, timing: TimingSource) -> None:
        self.problem, self.timing = problem, timing
        self._clocks = StepClocks(problem, timing)
        self._rng = np.random.default_rng(SEED)
        self._drawn: tuple[IntArray, IntArray] = np.empty(0, np.int64), np.empty(0, np.int64)
        self.count = 0

    def of(self, estimate: Estimate, queries: int) -> Replayed:
        """The steady state in a replay of so many queries."""
        self.count += 1
        problem = self.problem
        while len(self._drawn[0]) < queries:  # the first are the same, however many are wanted
            more = problem.lengths.sample(DRAWN, self._rng)
            self._drawn = (np.concatenate([self._drawn[0], more[0]]),
                           np.concatenate([self._drawn[1], more[1]]))
        inputs, outputs = (own[:queries] for own in self._drawn)
        if problem.constraint.kind == "sequence":
            outputs = with_watched(outputs, problem.lengths.outputs.quantile(
                problem.constraint.quantile))
        try:
            figures = steady_replay(problem, self.timing, estimate, planned_queries(
                problem, inputs, outputs), self._clocks)
        except XgptError:  # a query that never fits
            figures = None
        return Replayed(estimate, figures, queries)


def cells_of(problem: Problem, timing: TimingSource) -> Iterator[tuple[Cell, Replays]]:
    """Every policy by every tensor plan, on every number of devices that a copy may have."""
    workload = Workload(problem)
    names = names_of(problem)
    for part in parts_of(problem):
        try:
            plans = tensor_plans(part, timing)
        except InputError:
            continue
        formulas, replays = Formulas(part, timing, workload), Replays(part, timing)
        for name in names:
            formula = formulas.of(name)
            for plan in plans:
                if formula.can_lay_out(plan):
                    yield Cell(part, formula, plan), replays


def names_of(problem: Problem) -> list[str]:
    """The policies that are searched."""
    return [row.name for row in able_policies(problem.fixed) if not (
        problem.model.is_encoder_decoder and row.is_decoder_only)]


def parts_of(problem: Problem, *, is_any: bool = False) -> list[Problem]:
    """The problem of one copy, on every number of devices of a node, and of whole nodes: of many
    nodes on the most that so many copies may have. is_any: those that hold no weights, too."""
    cluster, wanted = problem.cluster, problem.fixed.replicas
    each, nodes = cluster.devices_per_node, cluster.num_nodes
    whole = range(1, nodes + 1) if nodes <= FEW_NODES else sorted(
        {nodes // copies for copies in range(1, nodes + 1)})
    sizes = [*range(1, each), *(each * count for count in whole)]
    found = []
    for devices in sizes:
        copies = most_copies(cluster, devices)
        if copies < 1 or devices + (wanted or 1) - 1 > cluster.num_devices:
            continue
        part = problem_on(problem, devices)
        if wanted is not None and copies != wanted:
            share = None if problem.num_queries is None else -(-problem.num_queries // wanted)
            part = replace(part, copies=min(copies, wanted), num_queries=share)
        if problem.num_queries is not None and part.copies > problem.num_queries:
            continue
        if is_any or has_room(part):
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

    def __init__(self, problem: Problem, timing: TimingSource, *,
                 cuts: Callable[[], bool] = lambda: False,
                 most_replays: int | None = None) -> None:
        """cuts: whether what is under way is to end with what it has. most_replays: of one look
        over all cells."""
        self.problem, self._timing, self._cuts = problem, timing, cuts
        self._most_replays = most_replays or MOST_REPLAYS
        self._replays: dict[Cell, Replays] = dict(cells_of(problem, timing))
        self.cells: dict[int, list[Cell]] = {}  # by devices of a copy
        for cell in self._replays:
            self.cells.setdefault(cell.problem.cluster.num_devices, []).append(cell)
        self._climbed: set[tuple[Cell, Point, KeptBounds]] = set()  # from where none is better
        # those without room for the weights were looked at, too: they have no schedule
        self.sizes = {part.cluster.num_devices for part in parts_of(problem, is_any=True)}
        self.bounds: dict[tuple[Any, ...], float] = {}  # upper ones, by size, plans, kind, limit

    @property
    def all_cells(self) -> list[Cell]:
        return list(self._replays)

    @property
    def num_points(self) -> int:
        """Configurations that a formula or a replay was asked for."""
        return self.num_replays + sum(cell.num_points for cell in self._replays)

    @property
    def passed_over(self) -> tuple[tuple[str, int], ...]:
        """Cells that no point of was replayed, by the reason."""
        empty = sum(not len(cell.points) for cell in self._replays)
        unseen = sum(not cell.off for cell in self._replays) - empty
        return tuple((why, count) for why, count in (
            ("expected to be no better", unseen), ("without room", empty)) if count)

    def best_of(self, keeps: KeptBounds, is_wanted: Callable[[Cell], bool]) -> Found | None:
        """The best that was replayed of some cells, in as many equal copies as the job wants."""
        return self._best_replayed(keeps, [cell for cell in self._replays if is_wanted(cell)
                                           and self._is_whole(cell)])

    def _is_whole(self, cell: Cell) -> bool:
        """Whether there are as many copies as the job wants: else it is one part of several."""
        return self.problem.fixed.replicas in (None, cell.copies)

    def _best_replayed(self, keeps: KeptBounds, cells: Sequence[Cell]) -> Found | None:
        best: Found | None = None
        most = 0.0
        for cell in cells:
            found = cell.best_replayed(partial(keeps.is_kept, cell))
            if found.point is not None and found.throughput_qps > most:
                best, most = Found(cell, found.point, cell.copies), found.throughput_qps
        return best

    def look_at_each(self, keeps: KeptBounds) -> None:
        """Of each policy of which nothing was found yet, replays what is expected to be best."""
        for name in {cell.policy for cell in self._replays}:
            for _ in range(LOOKS):
                cells = [cell for cell in self._replays if cell.policy == name]
                if self.best_of(keeps, cells.__contains__) or self._cuts():
                    break
                usual = usual_off(list(self._replays))
                expected = [self._expected(cell, keeps, usual) for cell in cells]
                cell, best = max(zip(cells, expected, strict=True),
                                 key=lambda pair: pair[1].throughput_qps)
                if best.point is None or best.is_replayed:
                    break
                self._replay(cell, best.point)
                cell.misses += not keeps.is_kept(cell, best.point)

    def quickest(self) -> list[Found]:
        """Points among which the least latencies are; [] where no cell has any."""
        likely = sorted(((float(cell.rough.latency_s[row]), index, row)
                         for index, cell in enumerate(self._replays)
                         if len(cell.points) and self._is_whole(cell)
                         for row in np.argsort(cell.rough.latency_s)[:1].tolist()))
        cells, found = list(self._replays), []
        for _, index, row in likely[:QUICKEST]:
            cell, point = cells[index], tuple(cells[index].points[row].tolist())
            if self._replay(cell, point, times=SURE).figures is not None:
                found.append(Found(cell, point, cell.copies))
        return found

    @property
    def num_replays(self) -> int:
        return sum(one.count for one in {id(own): own for own in self._replays.values()}.values())

    def best(self, keeps: KeptBounds, enough_qps: float = math.inf, *,
             is_compared: bool = False) -> list[Found]:
        """Copies of one or several shapes that are best together; [] where none was found that
        keeps the limits. enough_qps: with so many queries/s the search may end. is_compared: what
        is chosen is compared with it, no more: it need not be the very best."""
        found = self._look(keeps) or (self._look(keeps) if self.quickest() else [])
        if is_compared:
            return found
        if self._replay_unseen(found, keeps):
            found = self._look(keeps)
        for _ in range(FINALS):
            if self._cuts() or sum(one.copies * one.replayed.throughput_qps
                                   for one in found) >= enough_qps:
                break
            improved = False
            self._try_nearly_as_good(found, keeps)
            for one in (*found, *self._runners_up(found, keeps)):
                if (one.cell, one.point, keeps) not in self._climbed:
                    improved |= self._climb(one.cell, one.point, keeps)
            again = self._look(keeps)
            if not improved and again == found:
                break
            found = again
        # a replay of more queries has the last word
        for _ in range(SURE_LOOKS):
            for one in found:
                self._replay(one.cell, one.point, times=SURE)
            if (again := self._look(keeps)) == found:
                break
            found = again
        return found

    def _look(self, keeps: KeptBounds) -> list[Found]:
        """Replays what is expected to be part of the best division, until that is of nothing but
        what was replayed."""
        usual = dict(usual_off(list(self._replays)))
        before_look = self.num_replays
        most = before_look + self._most_replays
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
            if not unsure:
                return [Found(tops[size], expected[tops[size]].point or (),
                              division.sizes.count(size))
                        for size in dict.fromkeys(division.sizes)]
            if self.num_replays >= most or self._cuts():
                found = self._of_replayed(keeps)
                if found or self.num_replays >= min(most, before_look + LOOKS):
                    return found
            size = max(unsure, key=lambda one: worth[one] * division.sizes.count(one))
            cell, point = tops[size], expected[tops[size]].point
            assert point is not None
            self._replay(cell, point)
            cell.misses += not keeps.is_kept(cell, point)
            before, usual = usual, dict(usual_off(list(self._replays)))
            for other in self._replays:
                if other is cell or (not other.off and other.alike == cell.alike
                                     and usual != before):
                    expected[other] = self._expected(other, keeps, usual)

    def _replay_unseen(self, found: Sequence[Found], keeps: KeptBounds) -> bool:
        """Replays one point of each other cell of the sizes that are taken which is better if its
        formula is right, though it was off elsewhere; whether there was any."""
        before = self.num_replays
        for one in found:
            own_qps = one.cell.copies * one.replayed.throughput_qps
            for cell in self.cells[one.cell.problem.cluster.num_devices]:
                if cell.off or self._cuts():
                    continue
                likely = cell.expected(keeps.limits(cell), Usual(), Expected())
                if likely.point is not None and likely.throughput_qps > own_qps:
                    self._replay(cell, likely.point)
                    cell.misses += not keeps.is_kept(cell, likely.point)
        return self.num_replays > before

    def _of_replayed(self, keeps: KeptBounds) -> list[Found]:
        """The best division of what was replayed."""
        best = {size: one for size, cells in self.cells.items()
                if (one := self._best_replayed(keeps, cells)) is not None}
        division = division_of(self.problem, {
            size: one.replayed.throughput_qps for size, one in best.items()})
        if division is None or division.worth <= 0:
            return []
        return [best[size]._replace(copies=division.sizes.count(size))
                for size in dict.fromkeys(division.sizes)]

    def _expected(self, cell: Cell, keeps: KeptBounds,
                  usual: Mapping[tuple[str, int], Usual]) -> Expected:
        own = cell.best_replayed(partial(keeps.is_kept, cell))
        return cell.expected(keeps.limits(cell), usual.get(cell.alike, Usual()), own)

    def _replay(self, cell: Cell, point: Point, *, times: int = 0) -> Replayed:
        """With so many times the queries that check a bound; 0: with as many as a first look
        takes."""
        found = cell.replayed.get(point)
        estimate = cell.formula.estimate(cell.plan, point) if found is None else found.estimate
        whole = checked_queries(cell.problem, estimate)
        queries = times * whole or min(whole, max(LEAST_LOOK, math.ceil(
            LOOK_ROUNDS * estimate.most_in_system)))
        if found is None or found.queries < queries:
            found = self._replays[cell].of(estimate, queries)
            cell.note(point, found)
        return found

    def _try_nearly_as_good(self, found: Sequence[Found], keeps: KeptBounds) -> None:
        """Replays what cells are expected to have next to what was found."""
        own_qps = sum(one.copies * one.replayed.throughput_qps for one in found)
        usual = usual_off(list(self._replays))
        expected = [(self._expected(cell, keeps, usual), number, cell)
                    for number, cell in enumerate(self._replays)]
        nearly = [(one.throughput_qps, number, one.point, cell) for one, number, cell in expected
                  if one.point is not None and not one.is_replayed
                  and one.throughput_qps > (1 - RACE) * own_qps]
        for _, _, point, cell in sorted(nearly, reverse=True, key=lambda own: own[:2])[:RUNNERS_UP]:
            self._replay(cell, point)

    def _runners_up(self, found: Sequence[Found], keeps: KeptBounds) -> list[Found]:
        """The best of other cells that are nearly as good, on devices of any number."""
        own_qps = sum(one.copies * one.replayed.throughput_qps for one in found)
        taken = {one.cell for one in found}
        others: list[tuple[float, int, Found]] = []
        for cell in self._replays:
            best = cell.best_replayed(partial(keeps.is_kept, cell))
            if cell not in taken and best.point is not None and (
                    best.throughput_qps > (1 - RACE) * own_qps):
                others.append((best.throughput_qps, len(others), Found(cell, best.point, 0)))
        return [one for _, _, one in sorted(others, reverse=True)[:RUNNERS_UP]]

    def _climb(self, cell: Cell, point: Point, keeps: KeptBounds) -> bool:
        """Replays a point whole, its neighbours, those of the best of them, and so on until none
        is better; whether any was."""
        def worth(at: Point) -> float:
            return cell.replayed[at].throughput_qps if keeps.is_kept(cell, at) else 0.0

        self._replay(cell, point, times=1)
        own, improved = worth(point), False
        for _ in range(CLIMBS):
            for other in _neighbours(cell, point):
                if other in cell.replayed and worth(other) <= own:
                    continue
                self._replay(cell, other, times=1)
                if (found := worth(other)) > own * (1 + LEAST):
                    own, point, improved = found, other, True
                    break
            else:
                break
        self._climbed.add((cell, point, keeps))
        return improved


def _neighbours(cell: Cell, point: Point) -> list[Point]:
    """Points beside one, along each variable that the cell has several values of, which the
    formula says have room and no more than a little less throughput."""
    values = [np.unique(column) for column in cell.points.T]
    places = [place for place, own in enumerate(values) if len(own) > 1]
    ways = [(one, 0) for one in places] + [(one, other) for one in places for other in places
                                           if one < other]
    found: list[Point] = []
    for one in places:  # the next ones of the grid: edges of phases, and chunks where none are
        at = int(np.searchsorted(values[one], point[one]))
        for value in values[one][max(at - 1, 0):at + 2].tolist():
            found.append((*point[:one], value, *point[one + 1:]))
    for step in STEPS:
        for sign in (1, -1):
            for one, other in ways:
                for along in (1, -1) if other else (1,):
                    moved = list(point)
                    if point[one]:
                        moved[one] = _moved(point[one], step, sign)
                    if other and point[other]:
                        moved[other] = _moved(point[other], step, sign * along)
                    found.append(tuple(moved))
    found = [one for one in dict.fromkeys(found) if one != point]
    if not found:
        return []
    points, rough = cell.with_room(np.array(found, np.int64))
    own = cell.formula.rough(cell.plan, np.array([point], np.int64))
    likely = rough.throughput_qps > (1 - LIKELY) * own.throughput_qps[0]
    return [tuple(one) for one in points[likely].tolist()]


def _moved(value: int, step: float, sign: int) -> int:
    """A value larger (sign 1) or smaller (-1) by about this factor, by one at least."""
    return max(value + 1, round(value * step)) if sign > 0 else max(
        min(value - 1, round(value / step)), 1)
