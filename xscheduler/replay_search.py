"""The best schedule of a problem: candidates are ordered by rough formulas, and judged by replays.

Best first over cells (xscheduler.space): of the cell from which most is expected the point from
which most is expected is replayed, which corrects what is expected of its neighbours; until no cell
is expected to have more than the best that was found. What stays in the race is replayed again with
more queries, and climbed from to better neighbours."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from xgpt.core.problem import Problem
from xscheduler.kept_bounds import KeptBounds
from xscheduler.neighbours import neighbours
from xscheduler.partition import division_of
from xscheduler.replayed_cells import SURE, Found, ReplayedCells
from xscheduler.replays import Replays
from xscheduler.space import HOPE, NOTHING, TRUST, Cell, Expected, Off, Point, usual_off

# chosen: what is climbed from, too, by its share of the best's throughput, and how many
RACE, RUNNERS_UP = 0.06, 4  # chosen
FINALS, CLIMBS = 3, 24  # chosen
SURE_LOOKS = 12  # chosen
LOOKS = 3  # chosen: replays of a policy that has nothing, or of a cell that has little
NEARLY = 0.02  # chosen: a latency so much too long, or a throughput so much less, is near enough
LEAST = 0.002  # chosen: what a neighbour must bring
MOST_REPLAYS = 400  # chosen


class Search(ReplayedCells):
    """The search of one problem."""

    def __init__(self, problem: Problem, cells: Iterable[tuple[Cell, Replays]], *,
                 cuts: Callable[[], bool] = lambda: False,
                 most_replays: int | None = None) -> None:
        """cells: see ReplayedCells. cuts: whether what is under way is to end with what it has.
        most_replays: of one look over all cells."""
        super().__init__(problem, cells)
        self._cuts, self._most_replays = cuts, most_replays or MOST_REPLAYS
        self._climbed: set[tuple[Cell, Point, KeptBounds]] = set()  # from where none is better

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
            if self._cuts() or _together_qps(found) >= enough_qps:
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
        had_qps, sure = _together_qps(found), self._surely_best(found, keeps)
        if _together_qps(sure) > (1 - NEARLY) * had_qps:
            return sure
        for one in sure:  # another one, which nothing was climbed from
            self._climb(one.cell, one.point, keeps)
        return max(sure, self._surely_best(self._look(keeps), keeps), key=_together_qps)

    def _surely_best(self, found: list[Found], keeps: KeptBounds) -> list[Found]:
        """A replay of more queries has the last word: of what had most by fewer, one after the
        other, until no other has noticeably more than the best by many."""
        best: list[Found] = []
        for _ in range(SURE_LOOKS):
            for one in found:
                self.replay(one.cell, one.point, times=SURE)
            if all(keeps.is_kept(one.cell, one.point) for one in found):
                best = max(best, found, key=_together_qps)
            again = self._look(keeps)
            if again == found or (best and _together_qps(again) <= (
                    1 + NOTHING) * _together_qps(best)):
                break
            found = again
        return best or found

    def look_at_each(self, keeps: KeptBounds) -> None:
        """Of each policy of which nothing was found yet, replays what is expected to be best."""
        for name in {cell.policy for cell in self._replays}:
            for _ in range(LOOKS):
                cells = [cell for cell in self._replays if cell.policy == name]
                if self.best_of(keeps, cells.__contains__) or self._cuts():
                    break
                usual = usual_off(list(self._replays))
                expected = [self.expected(cell, keeps, usual) for cell in cells]
                cell, best = max(zip(cells, expected, strict=True),
                                 key=lambda pair: pair[1].throughput_qps)
                if best.point is None or best.is_replayed:
                    break
                self.replay(cell, best.point)
                cell.misses += not keeps.is_kept(cell, best.point)

    def _look(self, keeps: KeptBounds) -> list[Found]:
        """Replays what is expected to be part of the best division, until that is of nothing but
        what was replayed."""
        usual = dict(usual_off(list(self._replays)))
        before_look = self.num_replays
        most = before_look + self._most_replays
        expected = {cell: self.expected(cell, keeps, usual) for cell in self._replays}
        while True:
            tops: dict[int, Cell] = {}
            for size, cells in self.cells.items():
                top = max(cells, key=lambda one: expected[one].throughput_qps)
                if not top.off and top.is_coarse:  # now what lies between its points
                    top.is_coarse = False
                    expected[top] = self.expected(top, keeps, usual)
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
                found = self.of_replayed(keeps)
                if found or self.num_replays >= min(most, before_look + LOOKS):
                    return found
            size = max(unsure, key=lambda one: worth[one] * division.sizes.count(one))
            cell, point = tops[size], expected[tops[size]].point
            assert point is not None
            self.replay(cell, point)
            cell.misses += not keeps.is_kept(cell, point)
            before, usual = usual, dict(usual_off(list(self._replays)))
            for other in self._replays:
                if other is cell or (not other.off and other.alike == cell.alike
                                     and usual != before):
                    expected[other] = self.expected(other, keeps, usual)

    def _replay_unseen(self, found: Sequence[Found], keeps: KeptBounds) -> bool:
        """Replays points of the other cells of the sizes that are taken which are better if their
        formula is right: though it was off elsewhere in other cells, and at a point or two, which
        may be odd ones, of its own; whether there was any."""
        before = self.num_replays
        for one in found:
            own_qps = one.cell.copies * one.replayed.throughput_qps
            for cell in self.cells[one.cell.problem.cluster.num_devices]:
                while len(cell.off) < LOOKS and not self._cuts():
                    likely = cell.expected(keeps.limits(cell), Off(), Expected(), TRUST)
                    hoped_qps = likely.throughput_qps * (1 + HOPE if cell.off else 1)
                    if likely.point is None or hoped_qps <= own_qps:
                        break
                    self.replay(cell, likely.point)
                    cell.misses += not keeps.is_kept(cell, likely.point)
        return self.num_replays > before

    def _try_nearly_as_good(self, found: Sequence[Found], keeps: KeptBounds) -> None:
        """Replays what cells are expected to have next to what was found."""
        own_qps = _together_qps(found)
        usual = usual_off(list(self._replays))
        expected = [(self.expected(cell, keeps, usual), number, cell)
                    for number, cell in enumerate(self._replays)]
        nearly = [(one.throughput_qps, number, one.point, cell) for one, number, cell in expected
                  if one.point is not None and not one.is_replayed
                  and one.throughput_qps > (1 - RACE) * own_qps]
        for _, _, point, cell in sorted(nearly, reverse=True, key=lambda own: own[:2])[:RUNNERS_UP]:
            self.replay(cell, point)

    def _runners_up(self, found: Sequence[Found], keeps: KeptBounds) -> list[Found]:
        """The best of other cells that are nearly as good, on devices of any number."""
        own_qps = _together_qps(found)
        taken = {one.cell for one in found}
        others: list[tuple[float, int, Found]] = []
        for cell in self._replays:
            best = cell.best_replayed(partial(keeps.is_kept, cell))
            if cell in taken:
                continue
            if best.throughput_qps <= (1 - RACE) * own_qps:
                best = self._nearly_kept(cell, keeps, own_qps)
            if best.point is not None and best.throughput_qps > (1 - RACE) * own_qps:
                others.append((best.throughput_qps, len(others), Found(cell, best.point, 0)))
        return [one for _, _, one in sorted(others, reverse=True)[:RUNNERS_UP]]

    def _nearly_kept(self, cell: Cell, keeps: KeptBounds, own_qps: float) -> Expected:
        """Of the points that are better, but a little too slow, the one that is least so."""
        limit_s = keeps.limits(cell).latency_s
        near = [(one.latency_s, cell.copies * one.throughput_qps, point)
                for point, one in cell.replayed.items()
                if limit_s < one.latency_s < (1 + NEARLY) * limit_s
                and cell.copies * one.throughput_qps > own_qps]
        return Expected(*min(near)[1:], is_replayed=True) if near else Expected()

    def _climb(self, cell: Cell, point: Point, keeps: KeptBounds) -> bool:
        """Replays a point whole, its neighbours, those of the best of them, and so on until none
        is better; whether any was."""
        def worth(at: Point, least_qps: float = 0.0) -> float:
            """Of what has more than that, whose margin is worth asking for."""
            qps = cell.replayed[at].throughput_qps
            return qps if qps > least_qps and keeps.is_kept(cell, at) else 0.0

        self.replay(cell, point, times=1)
        own, improved = worth(point), False
        for _ in range(CLIMBS):
            for other in neighbours(cell, point, *([] if own else [RACE])):
                least_qps = own * (1 + LEAST)
                if other in cell.replayed and not worth(other, own):
                    continue
                self.replay(cell, other, times=1)
                if found := worth(other, least_qps):
                    own, point, improved = found, other, True
                    break
            else:
                break
        self._climbed.add((cell, point, keeps))
        return improved


def _together_qps(found: Sequence[Found]) -> float:
    return sum(one.copies * one.replayed.throughput_qps for one in found)
