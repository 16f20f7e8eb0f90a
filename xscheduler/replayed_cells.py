"""Cells with what was replayed of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from xgpt.core.problem import Problem
from xscheduler.kept_bounds import KeptBounds
from xscheduler.partition import division_of
from xscheduler.replays import Replayed, Replays
from xscheduler.space import ROUNDING, Alike, Cell, Expected, Off, Point
from xsimulator.replay.predict import checked_queries

LEAST_LOOK, LOOK_ROUNDS = 800, 6  # chosen: queries of a first replay, at least and by those present
SURE = 4  # chosen: as many times a whole replay's queries have the last word
SURE_TRIES = 8  # chosen
QUICKEST = 8  # chosen: replays where least latencies are looked for


class Found(NamedTuple):
    """Copies of one shape: the cell and the point of each, and how many there are."""

    cell: Cell
    point: Point
    copies: int

    @property
    def replayed(self) -> Replayed:
        return self.cell.replayed[self.point]


class ReplayedCells:
    """The cells of one problem."""

    def __init__(self, problem: Problem, cells: Iterable[tuple[Cell, Replays]]) -> None:
        """cells: none of which anything was replayed yet; replays are kept for others."""
        self.problem, self._replays, self.num_replays = problem, dict(cells), 0
        self.cells: dict[int, list[Cell]] = {}  # by devices of a copy
        # what is expected of a cell, with all that it follows from
        self._expected: dict[Cell, tuple[tuple[object, ...], Expected]] = {}
        for cell in self._replays:
            self.cells.setdefault(cell.problem.cluster.num_devices, []).append(cell)

    @property
    def all_cells(self) -> list[Cell]:
        """Of every number of devices."""
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

    def best_of(self, keeps: KeptBounds, is_wanted: Callable[[Cell], bool],
                chosen_qps: float = math.inf) -> Found | None:
        """The best that was replayed of some cells, in as many equal copies as the job wants. What
        has more than was chosen, by few queries, is replayed with as many as that was."""
        cells = [cell for cell in self._replays if is_wanted(cell) and self.is_whole(cell)]
        for _ in range(SURE_TRIES):
            one = self.best_replayed(keeps, cells)
            if one is None or one.copies * one.replayed.throughput_qps <= chosen_qps:
                break
            self.replay(one.cell, one.point, times=SURE)
        return one

    def is_whole(self, cell: Cell) -> bool:
        """Whether there are as many copies as the job wants: else it is one part of several."""
        return self.problem.fixed.replicas in (None, cell.copies)

    def best_replayed(self, keeps: KeptBounds, cells: Sequence[Cell]) -> Found | None:
        """The best of these that was replayed; None where none keeps its bounds."""
        best: Found | None = None
        most = 0.0
        for cell in cells:
            found = cell.best_replayed(partial(keeps.is_kept, cell))
            if found.point is not None and found.throughput_qps > (1 + ROUNDING) * most:
                best, most = Found(cell, found.point, cell.copies), found.throughput_qps
        return best

    def of_replayed(self, keeps: KeptBounds) -> list[Found]:
        """The best division of what was replayed."""
        best = {size: one for size, cells in self.cells.items()
                if (one := self.best_replayed(keeps, cells)) is not None}
        division = division_of(self.problem, {
            size: one.replayed.throughput_qps for size, one in best.items()})
        if division is None or division.worth <= 0:
            return []
        return [best[size]._replace(copies=division.sizes.count(size))
                for size in dict.fromkeys(division.sizes)]

    def expected(self, cell: Cell, keeps: KeptBounds,
                  usual: Mapping[Alike, Off]) -> Expected:
        """What is expected of a cell. usual: what formulas were off by, of cells alike."""
        limits, prior = keeps.limits(cell), usual.get(cell.alike, Off())
        state = keeps, cell.num_noted, cell.misses, cell.is_coarse, limits, prior
        known = self._expected.get(cell)
        if known is None or known[0] != state:
            own = cell.best_replayed(partial(keeps.is_kept, cell))
            limits = keeps.limits(cell)  # of the margins that this asked for
            known = (*state[:4], limits, prior), cell.expected(limits, prior, own)
            self._expected[cell] = known
        return known[1]

    def replay(self, cell: Cell, point: Point, *, times: int = 0) -> Replayed:
        """Replays a point with so many times the queries that check a bound; 0: with as many as a
        first look takes."""
        found = cell.replayed.get(point)
        estimate = cell.formula.estimate(cell.plan, point) if found is None else found.estimate
        whole = checked_queries(cell.problem, estimate)
        queries = times * whole or min(whole, max(LEAST_LOOK, math.ceil(
            LOOK_ROUNDS * estimate.most_in_system)))
        if found is None or found.queries < queries:
            self.num_replays += 1
            replays, key = self._replays[cell], (cell.policy, cell.plan, point, queries)
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
        """Points among which the least latencies are; [] where no cell has any."""
        likely = sorted(((float(cell.rough.latency_s[row]), index, row)
                         for index, cell in enumerate(self._replays)
                         if len(cell.points) and self.is_whole(cell)
                         for row in np.argsort(cell.rough.latency_s)[:1].tolist()))
        cells, found = list(self._replays), []
        for _, index, row in likely[:QUICKEST]:
            cell, point = cells[index], tuple(cells[index].points[row].tolist())
            if self.replay(cell, point, times=SURE).figures is not None:
                found.append(Found(cell, point, cell.copies))
        return found
