"""Boxes of RRA's space examined for branch and bound (paper section 5).

A root is a tensor plan with a range of decode_iterations N_D and of encode_batch B_E. Memory, the
number of queries present and latency grow with B_E and fall with N_D, throughput the other way
round: xsimulator.policies.rra.bounds bounds a box from its corners, and says why that holds for
measured times too. A box over several N_D is bounded by sums of step times, one of a single N_D by
its timeline; on the way every box is cut to what memory, and a lower bound of the latency, leave of
it. A few points are simply evaluated. So nothing rests on monotonicity but what the bounds state.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from xgpt.core.constraint import Metric
from xgpt.core.lengths import BoolArray, FloatArray, IntArray
from xgpt.core.problem import Problem
from xscheduler.admissible import Limit
from xscheduler.branch_and_bound import Box, Candidate, NodeResult
from xscheduler.spaces.rra_points import RraPoints
from xscheduler.spaces.tensor_plans import batch_range, even_parts
from xsimulator.policies.rra.bounds import SIDES

RANGE_PARTS = 4  # into which a range of N_D is split
FEW_POINTS = 6  # batches of one N_D that are evaluated one by one
CUTS = 5  # batches at which a latency is looked at together; then as many between two of them
AT_ONCE = 48  # boxes in which points are looked at before the next most promising ones
ROOM_SLACK = 0.02  # room may shrink, as N_D grows, by this share
ROUNDING = 1e-12  # a point's figures differ, by as many others as it is evaluated with


class _Boxes(NamedTuple):
    """[boxes] of one kind: all lines (one N_D), or all ranges."""

    plan: IntArray
    least: IntArray  # encode_batch
    most: IntArray
    first: IntArray  # decode_iterations
    last: IntArray

    def take(self, rows: IntArray) -> _Boxes:
        return _Boxes(*(column[rows] for column in self))


class RraExaminer:
    """Examines boxes under one latency bound."""

    def __init__(self, points: RraPoints, latency_bound_s: float, *, gap: float,
                 floor_qps: float) -> None:
        """`floor_qps`: throughput found elsewhere; what is no better is not looked into."""
        self._points, self._bound_s, self._gap = points, latency_bound_s, gap
        problem = points.problem
        self._batches = batch_range(problem.fixed, problem.num_queries)
        self._further = _further_limits(problem)
        self.best_qps = floor_qps
        # (plan, N_D, least, most batch) -> where the line is split, for it is the last admissible
        self._frontier: dict[tuple[int, int, int, int], int] = {}
        self.roots, self.plan_of_root = points.roots

    def examine(self, boxes: Sequence[Box]) -> list[NodeResult]:
        corners = np.array([(self.plan_of_root[box.root], *box.lower, *box.upper)
                            for box in boxes], np.int64).reshape(-1, 5)
        given = _Boxes(corners[:, 0], corners[:, 1], corners[:, 3], corners[:, 2], corners[:, 4])
        results: list[NodeResult | None] = [None] * len(boxes)
        is_line = given.first == given.last
        for kind in (False, True):
            rows = np.flatnonzero(is_line == kind)
            if len(rows):
                own = self._examine([boxes[row] for row in rows.tolist()], given.take(rows), kind)
                for row, result in zip(rows.tolist(), own, strict=True):
                    results[row] = result
        return [result for result in results if result is not None]

    def known(self) -> Candidate | None:
        """The best admissible point of those that other searches have evaluated."""
        best = self._points.best_known(self._bound_s)
        if best is None:
            return None
        qps, plan, point = best
        return next((Candidate(objective=qps, root=box.root, point=point) for box in self.roots
                     if self.plan_of_root[box.root] == plan and all(
                         low <= value <= up for low, value, up in zip(
                             box.lower, point, box.upper, strict=True))), None)

    def split(self, box: Box) -> list[Box]:
        """A range of N_D into parts of even ratio; a line at the middle of its batches."""
        (least, first), (most, last) = box.lower, box.upper
        if first == last:
            middle = self._frontier.get((self.plan_of_root[box.root], first, least, most),
                                        math.isqrt(least * most))
            middle = min(max(middle, least), most - 1)
            return [Box(root=box.root, lower=(low, first), upper=(up, last))
                    for low, up in ((least, middle), (middle + 1, most))]
        return [Box(root=box.root, lower=(least, low), upper=(most, up))
                for low, up in even_parts(first, last, RANGE_PARTS)]

    def _examine(self, boxes: Sequence[Box], given: _Boxes, is_line: bool) -> list[NodeResult]:
        reasons = np.full(len(boxes), "", object)
        reasons[_are_slow_together(self._points, given, self._bound_s)] = Limit.LATENCY.words
        top = self._cut_to_room(given, is_line, reasons)
        limit = np.full(len(boxes), -np.inf)
        is_open = reasons == ""
        if not is_line and self.best_qps > 0:
            # what is no better than the incumbent at any latency need not be cut
            self._bound(limit, given, top, is_open, is_line)
            is_open &= limit > self.best_qps * (1 + self._gap)
        top = self._cut_to_latency(given, top, is_line, reasons, is_open)
        self._bound(limit, given, top, is_open & (reasons == ""), is_line)
        seen = self._look(given, top, limit, is_line)
        if is_line:
            self._cut_to_frontier(given, top, limit, seen)
        results = []
        for row, box in enumerate(boxes):
            if reasons[row]:
                results.append(NodeResult(box=box, reason=str(reasons[row])))
                continue
            cut = Box(root=box.root, lower=box.lower, upper=(int(top[row]), box.upper[1]))
            results.append(self._result(cut, float(limit[row]), seen[row]))
        return results

    def _result(self, cut: Box, limit: float, seen: _Best) -> NodeResult:
        best = None
        if seen.throughput_qps > 0:
            best = Candidate(objective=seen.throughput_qps, root=cut.root, point=seen.point)
        if seen.is_all:
            upper = seen.throughput_qps * (1 + ROUNDING) or -math.inf
            return NodeResult(upper_bound=upper, best=best, box=cut, reason="each point evaluated")
        is_close = limit <= seen.throughput_qps * (1 + self._gap)
        return NodeResult(upper_bound=limit, best=best, box=cut, is_settled=is_close,
                          reason="decided at its corner")

    def _cut_to_room(self, given: _Boxes, is_line: bool, reasons: np.ndarray) -> IntArray:
        """[boxes] the largest batch there can be room for at any of its N_D."""
        points, is_open = self._points, reasons == ""
        room = np.zeros(len(reasons), np.int64)
        room[is_open] = points.room(given.plan[is_open], given.last[is_open], self._batches[1])
        if not is_line:
            room = np.where(room > 0, np.ceil(room * (1 + ROOM_SLACK)).astype(np.int64) + 1, 0)
        top = np.minimum(given.most, room)
        rows = np.flatnonzero((top < given.least) & is_open)
        if len(rows):
            crowding = points.crowding(given.plan[rows], given.least[rows], given.last[rows])
            reasons[rows] = [Limit(code).words or Limit.MEMORY.words for code in crowding]
        return top

    def _bound(self, limit: FloatArray, given: _Boxes, top: IntArray, is_open: np.ndarray,
               is_line: bool) -> None:
        rows = np.flatnonzero(is_open)
        if len(rows):
            limit[rows] = self._limit_qps(given.take(rows), top[rows], is_line)

    def _cut_to_latency(self, given: _Boxes, top: IntArray, is_line: bool,
                        reasons: np.ndarray, is_open: np.ndarray) -> IntArray:
        """[boxes] no larger batch keeps the bounds on latency and on the tokens' pace, by lower
        bounds of these."""
        for limit, of, most_s in ((Limit.LATENCY, "latency", self._bound_s), *self._further):
            if math.isfinite(most_s):
                top = self._cut_to(limit, of, most_s, (given, top, is_line, reasons, is_open))
        return top

    def _cut_to(self, limit: Limit, of: Metric, most_s: float,
                boxes: tuple[_Boxes, IntArray, bool, np.ndarray, np.ndarray]) -> IntArray:
        given, top, is_line, reasons, is_open = boxes
        top, low, rows = top.copy(), given.least.copy(), np.flatnonzero(is_open & (reasons == ""))
        for number in range(2):
            if not len(rows):
                break
            left = given.take(rows)
            # that `low` is not too long is known the second time
            tried = _spread(low[rows], top[rows], CUTS)[:, number:]
            too_long = self._least_s(of, left, tried, top[rows], is_line) > most_s
            # the first that is too long, less one, is the new top
            first, at = np.argmax(too_long, axis=1), np.arange(len(rows))
            below = np.where(too_long.any(axis=1), tried[at, first] - 1, top[rows])
            reasons[rows[below < left.least]] = limit.words
            is_cut = (below < top[rows]) & (below >= left.least)
            rows, below = rows[is_cut], below[is_cut]
            top[rows] = below
            low[rows] = np.minimum(tried[at, np.maximum(first - 1, 0)][is_cut], below)
        return top

    def _least_s(self, of: Metric, left: _Boxes, tried: IntArray, top: IntArray,
                 is_line: bool) -> FloatArray:
        count = tried.shape[1]
        corners = self._points.configs(np.repeat(left.plan, count), tried.ravel(),
                                       np.repeat(left.last, count))
        least_s = self._points.bounds.latency_s(
            corners, np.repeat(top, count), None if is_line else np.repeat(left.first, count),
            of=of)
        return np.asarray(least_s.reshape(tried.shape))

    def _limit_qps(self, left: _Boxes, top: IntArray, is_line: bool) -> FloatArray:
        """[boxes] throughput that no point of it exceeds; infinite where nothing can be said."""
        points = self._points
        corners = points.configs(left.plan, top, left.first)
        limit = points.bounds.throughput_qps(corners, left.least, None if is_line else left.last)
        limit = np.where(limit > 0, limit, np.inf)  # the corner's times are refused
        if is_line:
            rows = np.flatnonzero(limit > self.best_qps)
            if len(rows):
                part = left.take(rows)
                limit[rows] = np.minimum(limit[rows], points.bounds.line_throughput_qps(
                    points.configs(part.plan, top[rows], part.first), part.least))
        return np.asarray(limit)

    def _look(self, given: _Boxes, top: IntArray, limit: FloatArray, is_line: bool) -> list[_Best]:
        """[boxes] the best admissible point looked at in each: all of a short line, else some near
        the largest batch; most promising boxes first, none where there is nothing to gain."""
        bests = [_NOTHING] * len(top)
        order = np.argsort(-limit, kind="stable")
        for begin in range(0, len(order), AT_ONCE):
            rows = order[begin:begin + AT_ONCE]
            rows = rows[limit[rows] > self.best_qps * (1 + self._gap)]
            if not len(rows):
                break
            left, most = given.take(rows), top[rows]
            is_few = (most - left.least < FEW_POINTS) & is_line
            tried = np.where(is_few[:, None], np.minimum(
                left.least[:, None] + np.arange(FEW_POINTS), most[:, None]),
                _near(left.least, most))
            seen = self._at(left, tried)
            if is_line:
                again = self._at(left, _between(tried, seen, left.least))
                seen = [max(pair, key=lambda one: one.throughput_qps)
                        for pair in zip(seen, again, strict=True)]
            for row, one, is_all in zip(rows, seen, is_few, strict=True):
                bests[row] = one._replace(is_all=bool(is_all))
                self.best_qps = max(self.best_qps, one.throughput_qps)
        return bests

    def _at(self, left: _Boxes, tried: IntArray) -> list[_Best]:
        """[boxes] the best of [boxes, points] batches at each box's last N_D."""
        count = tried.shape[1]
        figures = self._points.evaluate(np.repeat(left.plan, count), tried.ravel(),
                                        np.repeat(left.last, count))
        is_admissible = (figures.crowding == 0) & (figures.latency_s <= self._bound_s)
        score = np.where(is_admissible, figures.throughput_qps, 0.0).reshape(tried.shape)
        is_bounded = (figures.crowding == 0) & math.isfinite(self._bound_s)
        latency = np.where(is_bounded, figures.latency_s, np.inf).reshape(tried.shape)
        at = np.argmax(score, axis=1)
        return [_Best(float(score[row, place]), (int(tried[row, place]), int(left.last[row])),
                        tuple((latency[row] / min(self._bound_s, 1e300)).tolist()))
                for row, place in enumerate(at)]

    def _cut_to_frontier(self, given: _Boxes, top: IntArray, limit: FloatArray,
                         seen: Sequence[_Best]) -> None:
        """Ends a line at the best point seen where that is below its top, and the next batch is
        shown to be too slow with all larger ones."""
        rows = np.array([row for row, one in enumerate(seen) if one.throughput_qps > 0
                         and not one.is_all and one.point[0] < top[row]], np.int64)
        if not len(rows):
            return
        ends = np.array([seen[row].point[0] for row in rows], np.int64)
        left, points = given.take(rows), self._points
        if not math.isinf(self._bound_s):
            least_s = points.bounds.line_latency_s(
                points.configs(left.plan, ends + 1, left.last), top[rows])
            is_end = least_s > self._bound_s
            top[rows[is_end]] = ends[is_end]
            if is_end.any():
                part = left.take(np.flatnonzero(is_end))
                limit[rows[is_end]] = points.bounds.line_throughput_qps(
                    points.configs(part.plan, ends[is_end], part.first), part.least)
            ends, left, rows = ends[~is_end], left.take(np.flatnonzero(~is_end)), rows[~is_end]
        for plan, first, least, most, end in zip(left.plan, left.first, left.least, top[rows], ends,
                                                 strict=True):
            self._frontier[int(plan), int(first), int(least), int(most)] = int(end)


def _are_slow_together(points: RraPoints, given: _Boxes, latency_bound_s: float) -> BoolArray:
    """[boxes] that keep no latency bound, by a lower bound for all those of their plan and side
    together: of the roots of many plans most are told so at once."""
    keys = 2 * given.plan + (given.least >= SIDES)
    each, place = np.unique(keys, return_inverse=True)
    if math.isinf(latency_bound_s) or 2 * len(each) > len(keys):
        return np.zeros(len(keys), bool)
    least, first = (np.full(len(each), np.iinfo(np.int64).max) for _ in range(2))
    most, last = (np.zeros(len(each), np.int64) for _ in range(2))
    np.minimum.at(least, place, given.least)
    np.minimum.at(first, place, given.first)
    np.maximum.at(most, place, given.most)
    np.maximum.at(last, place, given.last)
    least_s = points.bounds.latency_s(points.configs(each // 2, least, last), most, first)
    return np.asarray((least_s > latency_bound_s)[place])


def _further_limits(problem: Problem) -> list[tuple[Limit, Metric, float]]:
    """Most seconds until the first token, and for all later ones of the quantile's query."""
    constraint, lengths = problem.constraint, problem.lengths.outputs
    later = max(lengths.quantile(constraint.quantile) - 1, 1)
    return [(Limit.TTFT, "ttft", constraint.limit_s("ttft")),
            (Limit.TPOT, "tpot", later * constraint.limit_s("tpot"))]


class _Best(NamedTuple):
    """The best admissible point that was looked at in a box (0: none), the latencies seen in
    relation to the bound, and whether these were all points."""

    throughput_qps: float
    point: tuple[int, int]
    latency: tuple[float, ...] = ()
    is_all: bool = False


_NOTHING = _Best(0.0, (0, 0))


def _spread(least: IntArray, most: IntArray, count: int) -> IntArray:
    """[boxes, count] from `least` to `most`, both included, in even ratios."""
    ratio = (most / least)[:, None] ** (np.arange(count) / (count - 1))
    points = np.rint(least[:, None] * ratio).astype(np.int64)
    return np.asarray(np.clip(points, least[:, None], most[:, None]))


def _near(least: IntArray, most: IntArray) -> IntArray:
    """[boxes, FEW_POINTS] the largest batch, and some below it, in falling order."""
    shares = np.array([1.0, 0.97, 0.93, 0.87, 0.78, 0.65])
    assert len(shares) == FEW_POINTS
    points = np.floor(most[:, None] * shares).astype(np.int64)
    return np.asarray(np.maximum(points, least[:, None]))


def _between(tried: IntArray, seen: Sequence[_Best], least: IntArray) -> IntArray:
    """[boxes, 3] around where latency, linear between the batches tried, meets the bound."""
    guesses = []
    for batches, one, low in zip(tried.tolist(), seen, least.tolist(), strict=True):
        order = sorted(range(len(batches)), key=batches.__getitem__)
        latency = [one.latency[place] for place in order]
        at = bisect_left(latency, 1.0)
        guess = batches[order[min(at, len(order) - 1)]]
        if 0 < at < len(order) and math.isfinite(latency[at]):
            left, right = batches[order[at - 1]], batches[order[at]]
            share = (1.0 - latency[at - 1]) / max(latency[at] - latency[at - 1], 1e-300)
            guess = math.floor(left + share * (right - left))
        guesses.append([min(max(guess + step, low), max(batches)) for step in (-1, 0, 1)])
    return np.array(guesses, np.int64)
