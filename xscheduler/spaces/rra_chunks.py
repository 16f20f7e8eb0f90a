"""RRA's configurations that encode in chunks, examined for branch and bound.

A root is a tensor plan with a chunk size, from the rate on at which a chunk brings few of the
queries that decode. What such a configuration does depends on B_E / N_D, the
queries encoded in each round of iterations, and on little else (xsimulator.policies.rra.chunked);
so of all pairs those are searched that make up a ladder of that ratio, of rungs some 1 % apart. A
box is a range of rungs."""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from xgpt.core.lengths import FloatArray, IntArray
from xgpt.core.problem import Problem
from xscheduler.admissible import Limit, Limits, crowding, crowding_or_pace
from xscheduler.branch_and_bound import Box, Candidate, NodeResult
from xscheduler.spaces.ranked import Ranked
from xscheduler.spaces.rra_examiner import ROUNDING
from xscheduler.spaces.rra_points import RraPoints
from xscheduler.spaces.tensor_plans import batch_range, equal_parts, iteration_range
from xsimulator.plans import run_begins
from xsimulator.policies import geometric
from xsimulator.policies.rra.chunk_bounds import ChunkBounds
from xsimulator.policies.rra.chunked import ChunkConfigs
from xsimulator.policies.rra.chunked_form import PlansOf
from xsimulator.policies.rra.config import RateRanges

# Small chunks load every step alike, which long pipelines need; large ones encode a query soon.
CHUNKS = (32, 64, 128, 256, 512, 1024, 2048)
LEAST_BATCH = 64  # queries of a phase, where a ladder is free: from it to twice it at each N_D
GROUP_BATCH = 4  # of a group at least: fewer are not kept even (xrunner.rules.batch_sizer)
SIZE_RATIO = 1.02  # between batches of one N_D that is fixed, or 1
PARTS = 6  # into which a range of rungs is split
# Queries that one chunk brings over those that decode: where they are more, decoding comes and goes
# with the chunks, as it does where a batch is encoded alone.
MOST_BROUGHT = 0.125
TOGETHER = 8  # rungs of a root that are looked at together for whether there is room
CUTS = 8  # rungs whose latency is bounded together


class Ladder(NamedTuple):
    """Rungs in rising order of encode_batch / decode_iterations."""

    batch: IntArray
    iterations: IntArray

    @property
    def rate(self) -> FloatArray:
        return np.asarray(self.batch / self.iterations)


def ladder_of(problem: Problem, max_iterations: int, groups: int) -> Ladder:
    """The rungs that the job's fixed variables leave; phases are a power of two long where they
    are free, and long enough for every one of so many `groups` to encode several queries."""
    fixed = problem.fixed
    (least, most), (first, last) = (batch_range(fixed, problem.num_queries),
                                    iteration_range(fixed, max_iterations))
    if fixed.encode_batch is not None:
        pairs = {(least, n) for n in range(first, last + 1)}
    elif fixed.decode_iterations is not None:
        pairs = {(size, first) for size in geometric(most, ratio=SIZE_RATIO)}
    else:
        low = min(max(LEAST_BATCH, GROUP_BATCH * groups), max(most // 2, 1))
        longest = 1 << (last.bit_length() - 1)
        pairs = {(size, 1) for size in geometric(most, least=low, ratio=SIZE_RATIO)}
        pairs |= {(size, longest) for size in range(1, low)}
        pairs |= {(size, 1 << k) for k in range(1, longest.bit_length())
                  for size in range(low, 2 * low)}
    ordered = np.array(sorted(pairs, key=lambda pair: (pair[0] / pair[1], pair)), np.int64)
    return Ladder(ordered[:, 0], ordered[:, 1])


class _Root(NamedTuple):
    plan: int
    chunk: int


class ChunkPoints:
    """Evaluates rungs of one problem's roots, and remembers what it was asked."""

    def __init__(self, points: RraPoints) -> None:
        self.points, problem = points, points.problem
        self.bounds = ChunkBounds(points.rra)
        stages = [len(points.rra.plans.both(*plan).stages) for plan in points.plans]
        fixed = problem.fixed.decode_micro_batches
        self._groups = [fixed or count for count in stages]
        self.ladder = ladder_of(problem, points.rra.flow.max_iterations, max(self._groups))
        asked = problem.fixed.encode_chunk
        sizes = () if problem.model.is_encoder_decoder else CHUNKS if asked is None else (
            (asked,) if asked else ())
        # the rate from which on a root's chunks bring but a few of the queries that decode
        flow, mean = points.rra.flow, points.rra.encode_tokens.mean
        fewest = 0.0 if asked else MOST_BROUGHT * max(flow.mean_iterations, 1e-9) * mean
        rate, every = self.ladder.rate, [_Root(plan, chunk) for plan in range(len(points.plans))
                                         for chunk in sizes]
        bottoms = [int(np.searchsorted(rate, root.chunk * self._groups[root.plan] / fewest))
                   if fewest else 0 for root in every]
        held = [(root, first) for root, first in zip(every, bottoms, strict=True)
                if first < len(rate)]
        self.roots, self.bottoms = [root for root, _ in held], [first for _, first in held]
        self._rate = self.ladder.rate
        self._plan_of = np.array([root.plan for root in self.roots], np.int64)
        self._chunk_of = np.array([root.chunk for root in self.roots], float)
        self._group_of = np.array(self._groups, float)  # by plan
        self._limits = Limits.of(problem.constraint, queries=problem.num_queries or np.inf)
        self._known: dict[tuple[int, int], tuple[float, float, int]] = {}
        self._ranked = Ranked[tuple[int, int]]()
        self._tops: dict[int, int] = {}
        self.boxes = cache(self._boxes)  # by the number of the first root

    @property
    def num_evaluated(self) -> int:
        return len(self._known)

    def point(self, root: int, rung: int) -> tuple[int, int, int]:
        ladder = self.ladder
        return int(ladder.batch[rung]), int(ladder.iterations[rung]), self.roots[root].chunk

    def configs(self, root: IntArray, rung: IntArray) -> tuple[ChunkConfigs, PlansOf]:
        """Rungs of these roots."""
        points, plan = self.points, self._plan_of[root]
        plans = [(points.rra.plans.both(*points.plans[own]), np.flatnonzero(plan == own))
                 for own in np.unique(plan).tolist()]
        return ChunkConfigs(
            self.ladder.batch[rung].astype(float), self.ladder.iterations[rung].astype(float),
            self._chunk_of[root], self._group_of[plan]), plans

    def evaluate(self, root: IntArray, rung: IntArray) -> tuple[FloatArray, FloatArray, IntArray]:
        """(throughput_qps, latency_s, crowding) of each, all new ones at once."""
        keys = list(zip(root.tolist(), rung.tolist(), strict=True))
        new = [key for key in dict.fromkeys(keys) if key not in self._known]
        if new:
            rows = np.array(new, np.int64)
            found = self.points.rra.chunked.of_arrays(*self.configs(rows[:, 0], rows[:, 1]))
            limits = crowding_or_pace(found, self._limits)
            figures = list(zip(found.throughput_qps.tolist(), found.latency_s.tolist(),
                               limits.tolist(), strict=True))
            self._known.update(zip(new, figures, strict=True))
            self._ranked.add((key, qps, latency_s) for key, (qps, latency_s, crowded) in zip(
                new, figures, strict=True) if not crowded)
        columns = np.array([self._known[key] for key in keys]).reshape(-1, 3)
        return columns[:, 0], columns[:, 1], columns[:, 2].astype(np.int64)

    def best_known(self, latency_bound_s: float) -> tuple[float, int, int] | None:
        """(throughput, root, rung) of the best admissible one that was evaluated so far."""
        best = self._ranked.best(latency_bound_s)
        return None if best is None else (best[0], *best[1])

    def tops(self, root: IntArray) -> IntArray:
        """[boxes] the highest rung of a root that there is room for, and whose tokens its chunks
        hold; -1 where there is none. What is needed grows with the rate."""
        new = sorted({each for each in root.tolist() if each not in self._tops})
        if new:
            self._tops.update(zip(new, self._find_tops(np.array(new, np.int64)).tolist(),
                                  strict=True))
        return np.array([self._tops[each] for each in root.tolist()], np.int64)

    def _find_tops(self, root: IntArray) -> IntArray:
        count, mean = len(self.ladder.batch), self.points.rra.encode_tokens.mean
        low = np.full(len(root), -1)
        high = np.array([max(int(np.searchsorted(
            self.ladder.rate, self.roots[each].chunk * self._groups[self.roots[each].plan] / mean)),
            1) for each in root.tolist()], np.int64).clip(max=count)
        shares = np.arange(1, TOGETHER + 1) / (TOGETHER + 1)
        while len(rows := np.flatnonzero(high - low > 1)):
            tried = low[rows] + np.rint(shares[:, None] * (high - low)[rows]).astype(np.int64)
            tried = np.clip(tried, low[rows] + 1, high[rows] - 1)
            bytes_, present, stretch = self.points.rra.chunked.room(
                *self.configs(np.tile(root[rows], TOGETHER), tried.ravel()))
            has_room = (crowding(bytes_ <= self.points.rra.capacity_bytes, present, stretch,
                                 self._most_present) == 0).reshape(tried.shape)
            low[rows] = np.where(has_room, tried, low[rows]).max(axis=0)
            high[rows] = np.where(has_room, high[rows], tried).min(axis=0)
        return low

    def limits(self, root: IntArray, low: IntArray, high: IntArray, *,
               is_latency: bool) -> FloatArray:
        """[boxes] the bound of throughput, or of latency, over these rungs."""
        limit, rate = np.empty(len(root)), self._rate
        plans = self._plan_of[root]
        order = np.argsort(plans, kind="stable")
        root, low, high, plans = root[order], low[order], high[order], plans[order]
        begins = run_begins(plans).tolist()
        parts = [(self.points.rra.plans.both(*self.points.plans[plans[begin]]), slice(begin, end))
                 for begin, end in zip(begins, [*begins[1:], len(order)], strict=True)]
        # of pairs (first, one after the last) every other part is of these rungs
        pairs, batch = np.stack([low, high + 1], axis=1).ravel(), np.append(self.ladder.batch, 0)
        largest = np.maximum.reduceat(batch, pairs)[::2].astype(float)
        chunk, groups, least = self._chunk_of[root], self._group_of[plans], rate[low]
        if is_latency:
            batch[-1] = batch.max()  # of none is the fewest
            fewest = np.minimum.reduceat(batch, pairs)[::2] / groups
            # of more than chunks hold the rest waits: a round works no more than they do
            least = self.bounds.dealt(
                least, chunk * groups / self.points.rra.encode_tokens.mean, fewest)
        limit[order] = self.bounds.limits(parts, RateRanges(
            least, rate[high], largest, chunk, groups), is_latency=is_latency)
        return limit

    def _boxes(self, first_root: int) -> list[Box]:
        top = len(self.ladder.batch) - 1
        return [Box(root=first_root + place, lower=(bottom,), upper=(top,))
                for place, bottom in enumerate(self.bottoms)]

    @property
    def _most_present(self) -> float:
        return self.points.problem.num_queries or np.inf


class ChunkExaminer:
    """Examines ranges of rungs under one latency bound; `first_root`: the number of its first."""

    def __init__(self, points: ChunkPoints, latency_bound_s: float, *, gap: float,
                 first_root: int) -> None:
        self._points, self._bound_s, self._gap = points, latency_bound_s, gap
        self._first = first_root
        self.best_qps = 0.0
        self.plan_of_root = [root.plan for root in points.roots]
        self.roots = points.boxes(first_root)

    def examine(self, boxes: Sequence[Box]) -> list[NodeResult]:
        points, reasons = self._points, np.full(len(boxes), "", object)
        root = np.array([box.root - self._first for box in boxes], np.int64)
        low = np.array([box.lower[0] for box in boxes], np.int64)
        high = np.array([box.upper[0] for box in boxes], np.int64)
        limit = points.limits(root, low, high, is_latency=False)
        # what is no better than the best at any memory and latency need not be cut
        rows = np.flatnonzero(limit > self.best_qps * (1 + self._gap))
        if np.isfinite(self._bound_s) and len(rows):
            least_s = points.limits(root[rows], low[rows], high[rows], is_latency=True)
            reasons[rows[least_s > self._bound_s]] = Limit.LATENCY.words
            rows = rows[least_s <= self._bound_s]
        high[rows] = np.minimum(high[rows], points.tops(root[rows]))
        reasons[rows[high[rows] < low[rows]]] = Limit.MEMORY.words
        rows = rows[high[rows] >= low[rows]]
        high[rows] = self._cut(root, low, high, reasons, rows)
        rows = rows[reasons[rows] == ""]
        if len(rows):
            limit[rows] = points.limits(root[rows], low[rows], high[rows], is_latency=False)
        limit[reasons != ""] = -np.inf
        results = []
        seen = self._look(root, low, high, limit)
        for row, box in enumerate(boxes):
            if reasons[row]:
                results.append(NodeResult(box=box, reason=str(reasons[row])))
                continue
            best, of_all = seen[row]
            is_all = of_all is not None
            cut = Box(root=box.root, lower=box.lower, upper=(int(high[row]),))
            upper = float(limit[row]) if of_all is None else of_all
            results.append(NodeResult(
                box=cut, upper_bound=upper, best=best, reason="each point evaluated" if is_all
                else "decided at its corner", is_settled=is_all))
        return results

    def known(self) -> Candidate | None:
        """The best admissible rung of those that other searches have evaluated."""
        best = self._points.best_known(self._bound_s)
        return None if best is None else Candidate(
            objective=best[0], root=self._first + best[1], point=self._points.point(*best[1:]))

    def split(self, box: Box) -> list[Box]:
        """Into parts of equal numbers of rungs."""
        return [Box(root=box.root, lower=(first,), upper=(last,))
                for first, last in equal_parts(box.lower[0], box.upper[0], PARTS)]

    def _cut(self, root: IntArray, low: IntArray, high: IntArray, reasons: np.ndarray,
             rows: IntArray) -> IntArray:
        """[rows] no higher rung keeps the latency bound, by a lower bound of the latency."""
        if not np.isfinite(self._bound_s) or not len(rows):
            return np.asarray(high[rows])
        tried = np.rint(np.linspace(low[rows], high[rows], CUTS)).astype(np.int64)
        least_s = self._points.limits(
            np.tile(root[rows], CUTS), tried.ravel(), np.tile(high[rows], CUTS),
            is_latency=True).reshape(tried.shape)
        too_long = least_s > self._bound_s
        reasons[rows[too_long[0]]] = Limit.LATENCY.words
        first = np.argmax(too_long, axis=0)
        is_cut = too_long.any(axis=0) & (first > 0)
        high = high.copy()
        high[rows[is_cut]] = tried[first, np.arange(len(rows))][is_cut] - 1
        return np.asarray(high[rows])

    def _look(self, root: IntArray, low: IntArray, high: IntArray,
              limit: FloatArray) -> list[tuple[Candidate | None, float | None]]:
        """[boxes] (the best admissible point of a few, what none of its points exceeds where these
        were all)."""
        seen: list[tuple[Candidate | None, float | None]] = [(None, None)] * len(root)
        rows = np.flatnonzero(limit > self.best_qps * (1 + self._gap))
        if not len(rows):
            return seen
        is_few = high[rows] - low[rows] < PARTS
        tried = np.where(is_few, np.minimum(low[rows] + np.arange(PARTS)[:, None], high[rows]),
                         np.rint(np.linspace(low[rows], high[rows], PARTS)).astype(np.int64))
        score, left_qps = (own.reshape(tried.shape) for own in self._evaluated(
            np.tile(root[rows], PARTS), tried.ravel()))
        places, left_qps = np.argmax(score, axis=0), left_qps.max(axis=0)
        for column, row in enumerate(rows.tolist()):
            place, own = places[column], int(root[row])
            best = None
            if score[place, column] > 0:
                best = Candidate(objective=float(score[place, column]), root=self._first + own,
                                 point=self._points.point(own, int(tried[place, column])))
                self.best_qps = max(self.best_qps, best.objective)
            most_qps = max(float(left_qps[column]), score[place, column] * (1 + ROUNDING))
            seen[row] = best, (most_qps or -np.inf) if is_few[column] else None
        return seen

    def _evaluated(self, root: IntArray, rung: IntArray) -> tuple[FloatArray, FloatArray]:
        """[points] throughput, 0 of those that are not admissible, or not evaluated since they are
        shown to be no better than the best; and what these have at most, 0 of all others."""
        points = self._points
        qps, left_qps = np.zeros(len(root)), points.limits(root, rung, rung, is_latency=False)
        is_worth = left_qps > self.best_qps
        if np.isfinite(self._bound_s) and is_worth.any():
            rows = np.flatnonzero(is_worth)
            slow = rows[points.limits(root[rows], rung[rows], rung[rows],
                                      is_latency=True) > self._bound_s]
            is_worth[slow], left_qps[slow] = False, 0.0
        rows = np.flatnonzero(is_worth)
        if len(rows):
            of_each, latency_s, crowded = points.evaluate(root[rows], rung[rows])
            qps[rows] = np.where((crowded == 0) & (latency_s <= self._bound_s), of_each, 0.0)
            left_qps[rows] = 0.0
        return qps, left_qps
