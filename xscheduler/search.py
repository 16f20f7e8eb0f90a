"""Best-first search over the cells of a problem (xscheduler.space).

1. The rough formula orders the points of every cell.
2. The most promising point of the most promising cell is replayed. The replay corrects the formula
   around that point and for similar cells.
3. Step 2 repeats until no cell is expected to beat the best replayed point (the incumbent).
4. The incumbent and points within OPTIMISM of it are replayed with more requests. A local search
   goes from each to better neighbours.
5. Among the finalists the longest replay decides."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from xgpt.core.problem import Problem
from xscheduler.admission_choice import further_cells
from xscheduler.feasibility import Feasibility
from xscheduler.neighbours import neighbours
from xscheduler.partition import division_of
from xscheduler.replays import Replayed, Replays
from xscheduler.space import (
    LEAST_GAIN,
    NOTHING,
    OPTIMISM,
    Cell,
    CellKind,
    Correction,
    Expected,
    Point,
    mean_corrections,
)
from xsimulator.replay.prediction import CHECKED_ROUNDS, LEAST_CHECKED, num_checked_queries
from xsimulator.replay.steady_state import ROUNDING, enough_queries

SURE = 4  # chosen: requests of the longest replay, as a multiple of a whole one's
TRIES = 8  # chosen: points of which the best, or the quickest, are replayed longest


class Found(NamedTuple):
    """Equal replicas as part of a schedule: their cell, their point and their number."""

    cell: Cell
    point: Point
    copies: int

    @property
    def replayed(self) -> Replayed:
        return self.cell.replayed[self.point]


class ReplayedCells:
    """The cells of one problem with the replays of their points."""

    def __init__(self, problem: Problem, cells: Iterable[tuple[Cell, Replays]]) -> None:
        """cells: without replays, each with the Replays of its part of the cluster, which may be
        shared with other searches."""
        self.problem, self._replays, self.num_replays = problem, dict(cells), 0
        self.cells: dict[int, list[Cell]] = {}  # by devices of a replica
        # (everything that the expectation depends on, the expectation)
        self._expected: dict[Cell, tuple[tuple[object, ...], Expected]] = {}
        for cell in self._replays:
            self.cells.setdefault(cell.problem.cluster.num_devices, []).append(cell)

    @property
    def all_cells(self) -> list[Cell]:
        """The cells of all numbers of devices."""
        return list(self._replays)

    @property
    def num_points(self) -> int:
        """Number of configurations evaluated, by the formula or by a replay."""
        return self.num_replays + sum(cell.num_points for cell in self._replays)

    @property
    def unreplayed(self) -> tuple[tuple[str, int], ...]:
        """(reason, number of cells) for the cells without any replay."""
        empty = sum(not len(cell.points) for cell in self._replays)
        unseen = sum(not cell.off for cell in self._replays) - empty
        return tuple((why, count) for why, count in (
            ("expected to be no better", unseen), ("without room", empty)) if count)

    def best_of(self, keeps: Feasibility, is_wanted: Callable[[Cell], bool],
                chosen_qps: float = math.inf) -> Found | None:
        """The best replayed point of the wanted cells, or None; only cells with as many replicas as
        the job asks for. A point that beats `chosen_qps` in a short replay is replayed with as many
        requests as the chosen one."""
        cells = [cell for cell in self._replays if is_wanted(cell) and self.is_whole(cell)]
        for _ in range(TRIES):
            one = self.best_replayed(keeps, cells)
            if one is None or one.copies * one.replayed.throughput_qps <= chosen_qps:
                break
            self.replay(one.cell, one.point, times=SURE)
        return one

    def is_whole(self, cell: Cell) -> bool:
        """Whether the cell has as many replicas as the job asks for."""
        return self.problem.fixed.replicas in (None, cell.copies)

    def best_replayed(self, keeps: Feasibility, cells: Sequence[Cell]) -> Found | None:
        """The best replayed point of the cells; None if none keeps its limits."""
        best: Found | None = None
        most = 0.0
        for cell in cells:
            found = cell.best_replayed(partial(keeps.is_kept, cell))
            if found.point is not None and found.throughput_qps > (1 + ROUNDING) * most:
                best, most = Found(cell, found.point, cell.copies), found.throughput_qps
        return best

    def best_replayed_division(self, keeps: Feasibility) -> list[Found]:
        """The best division of the cluster by replayed points alone; [] if there is none."""
        best = {size: one for size, cells in self.cells.items()
                if (one := self.best_replayed(keeps, cells)) is not None}
        division = division_of(self.problem, {
            size: one.replayed.throughput_qps for size, one in best.items()})
        if division is None or division.throughput_qps <= 0:
            return []
        return [best[size]._replace(copies=division.sizes.count(size))
                for size in dict.fromkeys(division.sizes)]

    def expected(self, cell: Cell, keeps: Feasibility,
                  usual: Mapping[CellKind, Correction]) -> Expected:
        """The best point that the cell is expected to have, with its throughput. usual: mean
        correction of the formula over similar cells."""
        limits, prior = keeps.limits(cell), usual.get(cell.alike, Correction())
        state = keeps, cell.num_noted, cell.misses, cell.is_coarse, limits, prior
        known = self._expected.get(cell)
        if known is None or known[0] != state:
            own = cell.best_replayed(partial(keeps.is_kept, cell))
            limits = keeps.limits(cell)  # with the margins that this has computed
            known = (*state[:4], limits, prior), cell.expected(limits, prior, own)
            self._expected[cell] = known
        return known[1]

    def replay(self, cell: Cell, point: Point, *, times: int = 0) -> Replayed:
        """The replay of a point with `times` as many requests as a check of a latency limit takes,
        or (0) with the fewer requests of a first replay. A longer replay of the point is reused."""
        found = cell.replayed.get(point)
        estimate = cell.formula.estimate(cell.plan, point) if found is None else found.estimate
        whole = num_checked_queries(cell.problem, estimate)
        queries = times * whole or enough_queries(
            estimate, least=LEAST_CHECKED, rounds=CHECKED_ROUNDS, most=whole)
        if found is None or found.queries < queries:
            self.num_replays += 1
            replays = self._replays[cell]
            key = cell.policy, cell.room, cell.plan, point, queries
            if key not in replays.known:
                replays.known[key] = replays.of(estimate, queries)
            if found is not None and times == SURE:
                cell.longer = max(cell.longer, replays.known[key].latency_s / found.latency_s)
            found = replays.known[key]
            cell.note(point, found)
        if times == SURE:
            cell.sure.add(point)
        return found

    def quickest(self) -> list[Found]:
        """Replays the TRIES points with the least rough latency, and returns those with a steady
        state; [] if no cell has a point."""
        likely = sorted(((float(cell.rough.latency_s[row]), index, row)
                         for index, cell in enumerate(self._replays)
                         if len(cell.points) and self.is_whole(cell)
                         for row in np.argsort(cell.rough.latency_s)[:1].tolist()))
        cells, found = list(self._replays), []
        for _, index, row in likely[:TRIES]:
            cell, point = cells[index], tuple(cells[index].points[row].tolist())
            if self.replay(cell, point, times=SURE).figures is not None:
                found.append(Found(cell, point, cell.copies))
        return found


RUNNERS_UP = 4  # chosen: at most so many start a local search
# chosen: replays of a policy without a feasible point, or of a cell with few; local searches
PROBES = 3
MOST_REPLAYS = 400  # chosen: of one pass over all cells


class Search(ReplayedCells):
    """The search of one problem."""

    def __init__(self, problem: Problem, cells: Iterable[tuple[Cell, Replays]], *,
                 cuts: Callable[[], bool] = lambda: False,
                 most_replays: int | None = None) -> None:
        """cells: see ReplayedCells. cuts: returns true once the search must end with the best so
        far. most_replays: of one pass over all cells."""
        super().__init__(problem, cells)
        self._cuts, self._most_replays = cuts, most_replays or MOST_REPLAYS
        self._climbed: set[tuple[Cell, Point, Feasibility]] = set()  # local optima

    def best(self, keeps: Feasibility, enough_qps: float = math.inf, *,
             is_compared: bool = False) -> list[Found]:
        """The replicas, equal or not, with the highest throughput together; [] if none was found
        that keeps the limits.

        `enough_qps`: throughput at which the search may stop. `is_compared`: the result is only
        shown beside the chosen schedule, so steps 4 and 5 are left out."""
        found = self._best_by_open_cells(keeps, enough_qps, is_compared)
        while total_qps(found) < enough_qps and (
                added := further_cells(self._replays, total_qps(found), keeps)):
            self._replays |= added
            for cell in added:
                self.cells[cell.problem.cluster.num_devices].append(cell)
            if any(one.cell.room > 1 for one in self._look(keeps)):
                found = max(found, self._best_by_open_cells(keeps, enough_qps, is_compared),
                            key=total_qps)
        return found

    def _best_by_open_cells(self, keeps: Feasibility, enough_qps: float,
                            is_compared: bool) -> list[Found]:
        found = self._look(keeps) or (self._look(keeps) if self.quickest() else [])
        if is_compared:
            return found
        if self._replay_unseen(found, keeps):
            found = self._look(keeps)
        for _ in range(PROBES):
            if self._cuts() or total_qps(found) >= enough_qps:
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
        first_qps, sure = total_qps(found), self._surely_best(found, keeps)
        if total_qps(sure) > (1 - LEAST_GAIN) * first_qps:
            return sure
        for one in sure:  # the longest replay chose another point: start from it, too
            self._climb(one.cell, one.point, keeps)
        return max(sure, self._surely_best(self._look(keeps), keeps), key=total_qps)

    def _surely_best(self, found: list[Found], keeps: Feasibility) -> list[Found]:
        """Replays the best points with most requests, one after the other, until no other point
        promises noticeably more than the best of these. Returns the best."""
        best: list[Found] = []
        for _ in range(TRIES):
            for one in found:
                self.replay(one.cell, one.point, times=SURE)
            if all(keeps.is_kept(one.cell, one.point) for one in found):
                best = max(best, found, key=total_qps)
            again = self._look(keeps)
            if again == found or (best and total_qps(again) <= (
                    1 + NOTHING) * total_qps(best)):
                break
            found = again
        else:  # short replays may flatter one policy's points, all alike: look at each policy's
            for name in sorted({cell.policy for cell in self._replays if best}):
                cells = [cell for cell in self._replays if cell.policy == name]
                other = self.best_of(keeps, cells.__contains__, total_qps(best))
                if other is not None and total_qps([other]) > (1 + NOTHING) * total_qps(best):
                    best = [other]
        return best or found

    def probe_policies(self, keeps: Feasibility) -> None:
        """Replays up to PROBES promising points of each policy that has no feasible one yet."""
        for name in {cell.policy for cell in self._replays}:
            for _ in range(PROBES):
                cells = [cell for cell in self._replays if cell.policy == name]
                if self.best_of(keeps, cells.__contains__) or self._cuts():
                    break
                usual = mean_corrections(list(self._replays))
                expected = [self.expected(cell, keeps, usual) for cell in cells]
                cell, best = max(zip(cells, expected, strict=True),
                                 key=lambda pair: pair[1].throughput_qps)
                if best.point is None or best.is_replayed:
                    break
                self.replay(cell, best.point)
                cell.misses += not keeps.is_kept(cell, best.point)

    def _look(self, keeps: Feasibility) -> list[Found]:
        """Replays the points that the best division is expected to consist of, until all parts of
        the best division are replayed points (steps 1 to 3). Returns that division."""
        usual = dict(mean_corrections(list(self._replays)))
        before_look = self.num_replays
        most = before_look + self._most_replays
        expected = {cell: self.expected(cell, keeps, usual) for cell in self._replays}
        while True:
            tops: dict[int, Cell] = {}
            for size, cells in self.cells.items():
                top = max(cells, key=lambda one: expected[one].throughput_qps)
                if not top.off and top.is_coarse:  # refine its grid around the best point
                    top.is_coarse = False
                    expected[top] = self.expected(top, keeps, usual)
                    top = max(cells, key=lambda one: expected[one].throughput_qps)
                tops[size] = top
            qps_of = {size: expected[top].throughput_qps / top.copies for size, top in tops.items()}
            division = division_of(self.problem, qps_of)
            if division is None or division.throughput_qps <= 0:
                return []
            unsure = [size for size in dict.fromkeys(division.sizes)
                      if not expected[tops[size]].is_replayed]
            if not unsure:
                return [Found(tops[size], expected[tops[size]].point or (),
                              division.sizes.count(size))
                        for size in dict.fromkeys(division.sizes)]
            if self.num_replays >= most or self._cuts():
                found = self.best_replayed_division(keeps)
                if found or self.num_replays >= min(most, before_look + PROBES):
                    return found
            size = max(unsure, key=lambda one: qps_of[one] * division.sizes.count(one))
            cell, point = tops[size], expected[tops[size]].point
            assert point is not None
            self.replay(cell, point)
            cell.misses += not keeps.is_kept(cell, point)
            before, usual = usual, dict(mean_corrections(list(self._replays)))
            for other in self._replays:
                if other is cell or (not other.off and other.alike == cell.alike
                                     and usual != before):
                    expected[other] = self.expected(other, keeps, usual)

    def _replay_unseen(self, found: Sequence[Found], keeps: Feasibility) -> bool:
        """Replays points of other cells on the chosen numbers of devices that beat the incumbent if
        their formula is right. Similar cells, or few points of their own, may suggest that it is
        too high. Returns whether there was any."""
        before = self.num_replays
        for one in found:
            own_qps = one.cell.copies * one.replayed.throughput_qps
            for cell in self.cells[one.cell.problem.cluster.num_devices]:
                while len(cell.off) < PROBES and not self._cuts():
                    likely = cell.expected(keeps.limits(cell), Correction(), Expected())
                    optimistic_qps = likely.throughput_qps * (1 + OPTIMISM if cell.off else 1)
                    if likely.point is None or optimistic_qps <= own_qps:
                        break
                    self.replay(cell, likely.point)
                    cell.misses += not keeps.is_kept(cell, likely.point)
        return self.num_replays > before

    def _try_nearly_as_good(self, found: Sequence[Found], keeps: Feasibility) -> None:
        """Replays points that are expected to come within OPTIMISM of the incumbent."""
        own_qps = total_qps(found)
        usual = mean_corrections(list(self._replays))
        expected = [(self.expected(cell, keeps, usual), number, cell)
                    for number, cell in enumerate(self._replays)]
        nearly = [(one.throughput_qps, number, one.point, cell) for one, number, cell in expected
                  if one.point is not None and not one.is_replayed
                  and one.throughput_qps > (1 - OPTIMISM) * own_qps]
        for _, _, point, cell in sorted(nearly, reverse=True, key=lambda own: own[:2])[:RUNNERS_UP]:
            self.replay(cell, point)

    def _runners_up(self, found: Sequence[Found], keeps: Feasibility) -> list[Found]:
        """The best points of other cells that come within OPTIMISM of the incumbent."""
        own_qps = total_qps(found)
        taken = {one.cell for one in found}
        others: list[tuple[float, int, Found]] = []
        for cell in self._replays:
            best = cell.best_replayed(partial(keeps.is_kept, cell))
            if cell in taken:
                continue
            if best.throughput_qps <= (1 - OPTIMISM) * own_qps:
                best = self._nearly_kept(cell, keeps, own_qps)
            if best.point is not None and best.throughput_qps > (1 - OPTIMISM) * own_qps:
                others.append((best.throughput_qps, len(others), Found(cell, best.point, 0)))
        return [one for _, _, one in sorted(others, reverse=True)[:RUNNERS_UP]]

    def _nearly_kept(self, cell: Cell, keeps: Feasibility, own_qps: float) -> Expected:
        """The quickest point with more throughput that exceeds the limit by at most LEAST_GAIN."""
        limit_s = keeps.limits(cell).latency_s
        near = [(one.latency_s, cell.copies * one.throughput_qps, point)
                for point, one in cell.replayed.items()
                if limit_s < one.latency_s < (1 + LEAST_GAIN) * limit_s
                and cell.copies * one.throughput_qps > own_qps]
        return Expected(*min(near)[1:], is_replayed=True) if near else Expected()

    def _climb(self, cell: Cell, point: Point, keeps: Feasibility) -> bool:
        """Local search: moves to a better neighbour until there is none. Returns whether it moved.
        All points are replayed with the requests of a whole check."""
        def feasible_qps(at: Point, least_qps: float = 0.0) -> float:
            """Throughput; 0 if infeasible or at most `least_qps`, which needs no margin."""
            qps = cell.replayed[at].throughput_qps
            return qps if qps > least_qps and keeps.is_kept(cell, at) else 0.0

        self.replay(cell, point, times=1)
        own, improved = feasible_qps(point), False
        while not self._cuts():
            for other in neighbours(cell, point, *([] if own else [OPTIMISM])):
                least_qps = own * (1 + NOTHING)
                if other in cell.replayed and not feasible_qps(other, own):
                    continue
                self.replay(cell, other, times=1)
                if found := feasible_qps(other, least_qps):
                    own, point, improved = found, other, True
                    break
            else:
                break
        self._climbed.add((cell, point, keeps))
        return improved


def total_qps(found: Sequence[Found]) -> float:
    return sum(one.copies * one.replayed.throughput_qps for one in found)
