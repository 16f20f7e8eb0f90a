"""Boxes of WAA's space (xscheduler.spaces.waa) examined under one latency bound for branch and
bound (paper section 5)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from xgpt.core.lengths import FloatArray, IntArray
from xscheduler.admissible import Limit, beyond_range
from xscheduler.branch_and_bound import Box, Candidate, NodeResult
from xscheduler.spaces.waa_boxes import FEW_POINTS, corners_of, grid, points_of
from xscheduler.spaces.waa_climb import MOST_CLIMBED, candidate_in, climbed
from xscheduler.spaces.waa_points import WaaPoints
from xsimulator.policies.waa.bounds import BoxBounds

SIDE_PARTS = 3  # into which either side of a box is split
CHUNK_PARTS = (2, 2, 2)  # and of a box of several chunk sizes
LOOKED_AT = 3  # boxes, the most promising, at whose corners points are evaluated
FIRST_PLANS = 6  # of which so many are; of other tensor plans one
WORK_SHARE = 0.25  # of what is left, spent before other boxes have their turn again
LEFT = "chunks left open: their bounds cost much"
IMMODEST = "chunks hold more than is encoded in an iteration"  # why a box is not looked into
# why it holds nothing, by what is told first
_REASONS = (Limit.MEMORY, Limit.MEMORY, Limit.LATENCY, Limit.TTFT, Limit.TPOT, Limit.RANGE)


class WaaExaminer:
    """Examines boxes under one latency bound."""

    def __init__(self, space: WaaPoints, latency_bound_s: float, *, gap: float,
                 floor_qps: float) -> None:
        """`floor_qps`: throughput found elsewhere; what is no better is not looked into."""
        self._space, self._bound_s, self._gap = space, latency_bound_s, gap
        self._best_qps = floor_qps
        self._glanced_at: set[int] = set()  # roots with chunks
        self._has_climbed = space.problem.cluster.num_devices > MOST_CLIMBED or (
            space.problem.fixed.encode_chunk is not None)
        self._largest: dict[int, int] = {}  # by plan: encode_batch within the bound
        # an encoder-decoder model's first token is decoded, too
        tokens = space.problem.lengths.outputs.quantile(space.problem.constraint.quantile) - 1
        waited = space.waa.iterations_waited - 1.5 * space.problem.model.is_encoder_decoder
        self._iterations_a_token = max(waited, 0.0) / max(tokens, 1)
        self.roots, self.plan_of_root = space.roots

    @property
    def known(self) -> Candidate | None:
        """The best admissible point that was evaluated under any bound so far."""
        best = self._space.best_known(self._bound_s)
        return None if best is None else candidate_in(
            self.roots, self.plan_of_root, self._space.chunks, best[0], (best[1], *best[2]))

    def raise_floor(self, floor_qps: float) -> None:
        self._best_qps = max(self._best_qps, floor_qps)

    def split(self, box: Box) -> list[Box]:
        """Either side into parts of even ratio; first the sizes of chunks."""
        if box.lower[2] < box.upper[2]:
            return grid(box, CHUNK_PARTS)
        return grid(box, (SIDE_PARTS, SIDE_PARTS, 1))

    def examine(self, boxes: Sequence[Box]) -> list[NodeResult]:
        """Plan after plan, the most promising first by a quick bound, those without chunks before
        those with: boxes that are then no better than what was found are not looked into."""
        known = self._largest.get
        boxes = [box if box.upper[0] <= known(self.plan_of_root[box.root], -1) else (
            self._contracted(box)) for box in boxes]
        limit, latency, stretch = self._quick(boxes)
        space, turns = self._space, self._in_turn(boxes, limit)
        most_qps, least_s = limit.tolist(), latency.tolist()
        is_refused = beyond_range(stretch).tolist()
        results: list[NodeResult | None] = [None] * len(boxes)
        share = WORK_SHARE * space.work.left(self._bound_s)
        for place, (has_chunks, rows) in enumerate(turns):
            left, later = list[int](), list[int]()
            for row in rows.tolist():
                box = boxes[row]
                if not space.is_modest(box.upper[0], box.lower[1], space.chunks[box.lower[2]]):
                    results[row] = NodeResult(box=box, reason=IMMODEST)
                elif least_s[row] > self._bound_s or is_refused[row]:
                    results[row] = NodeResult(box=box, reason=(
                        Limit.RANGE if is_refused[row] else Limit.LATENCY).words)
                elif most_qps[row] <= self._best_qps * (1 + self._gap):
                    results[row] = NodeResult(upper_bound=most_qps[row], box=box,
                                              is_settled=False, reason="")
                elif has_chunks and (share <= 0 or self._is_first_glance(box)):
                    later.append(row)
                else:
                    left.append(row)
            if later:  # all of one tensor plan
                most = np.minimum(limit[later], space.divided(
                    self.plan_of_root[boxes[later[0]].root],
                    corners_of(boxes, np.array(later), space.chunks), self._bound_s))
                for row, own_qps in zip(later, most.tolist(), strict=True):
                    results[row] = NodeResult(
                        upper_bound=own_qps, box=boxes[row], reason=LEFT,
                        is_settled=space.work.left(self._bound_s) < 1, is_glance=True)
            before = space.bounds.work
            peak = self._climb() if has_chunks and left else None
            own = self._examine([boxes[row] for row in left], LOOKED_AT if place < FIRST_PLANS
                                else 1) if left else []
            if peak is not None and (own[0].best is None or peak.rank < own[0].best.rank):
                own[0] = own[0]._replace(best=peak)
            if has_chunks:
                spent = space.bounds.work - before
                share -= spent
                space.work.spend(self._bound_s, spent)
            for row, result in zip(left, own, strict=True):
                results[row] = result
        return [result for result in results if result is not None]

    def _climb(self) -> Candidate | None:
        """The best with chunks that a climb finds, once."""
        if self._has_climbed:
            return None
        self._has_climbed, space = True, self._space
        found = climbed(space, self._bound_s, self._best_qps, self._gap)
        if found is None:
            return None
        self._best_qps = found[0]
        return candidate_in(self.roots, self.plan_of_root, space.chunks, *found)

    def _in_turn(self, boxes: Sequence[Box], limit: FloatArray) -> list[tuple[bool, IntArray]]:
        """(whether they take chunks, rows of boxes of one plan)."""
        has_chunks = np.array([self._space.chunks[box.upper[2]] > 0 for box in boxes])
        turns = [(takes, -float(limit[own].max()), index, own)
                 for index, rows in self._by_plan(boxes) for takes in (False, True)
                 if len(own := rows[has_chunks[rows] == takes])]
        return [(takes, own) for takes, _, _, own in sorted(turns, key=lambda turn: turn[:3])]

    def _contracted(self, box: Box) -> Box:
        """The box without batches that are too large to be quick enough: the tables that bound it
        need not reach so far."""
        most = self._largest_within(self.plan_of_root[box.root])
        upper = max(min(box.upper[0], most), box.lower[0])
        return box if upper == box.upper[0] else Box(
            root=box.root, lower=box.lower, upper=(upper, *box.upper[1:]))

    def _largest_within(self, plan: int) -> int:
        if plan not in self._largest:
            (_, largest), _ = self._space.ranges[plan]
            if not math.isinf(self._bound_s):
                largest = self._space.bounds.quick.largest_within(
                    largest, self._space.degrees(plan), self._bound_s, self._space.chunks[-1])
            self._largest[plan] = largest
        return self._largest[plan]

    def _is_first_glance(self, box: Box) -> bool:
        """Whether it is a root that was not looked at before, and may yet be given up by then."""
        is_first = (box.lower == self.roots[box.root].lower and box.upper[1:] == self.roots[
            box.root].upper[1:] and box.root not in self._glanced_at)
        self._glanced_at.add(box.root)
        return is_first

    def _quick(self, boxes: Sequence[Box]) -> tuple[FloatArray, FloatArray, FloatArray]:
        """[boxes] most throughput, least latency, least stretch beyond what was measured."""
        plan = np.array([self.plan_of_root[box.root] for box in boxes], np.int64)
        return self._space.quick(plan, corners_of(boxes, np.arange(len(boxes)), self._space.chunks),
                                 self._bound_s)

    def _by_plan(self, boxes: Sequence[Box]) -> list[tuple[int, IntArray]]:
        plan = np.array([self.plan_of_root[box.root] for box in boxes])
        return [(int(index), np.flatnonzero(plan == index)) for index in np.unique(plan)]

    def _examine(self, boxes: Sequence[Box], looked_at: int) -> list[NodeResult]:
        limit, latency, ttft, iteration, held = self._bounds(boxes)
        capacity, limits = self._space.waa.capacity_bytes, self._space.limits
        # where outputs are of one token there is no pace, however long an iteration
        each = self._iterations_a_token
        tpot = iteration * each if each else np.zeros_like(iteration)
        # nothing fits although half a batch would: what decodes with it does not
        place = np.select([held > capacity, (limit <= 0) & np.isfinite(latency),
                           latency > self._bound_s, ttft > limits.ttft_s, tpot > limits.tpot_s,
                           limit <= 0], range(len(_REASONS)), len(_REASONS))
        seen = self._look(boxes, np.where(place == len(_REASONS), limit, 0.0), looked_at)
        results = []
        for box, most, at, (best, of_all) in zip(boxes, limit.tolist(), place.tolist(), seen,
                                                 strict=True):
            if at < len(_REASONS):
                results.append(NodeResult(box=box, reason=_REASONS[at].words))
            elif of_all is not None:
                results.append(NodeResult(upper_bound=min(of_all, most), best=best, box=box,
                                          reason="each point evaluated"))
            else:
                is_close = best is not None and most <= best.objective * (1 + self._gap)
                results.append(NodeResult(upper_bound=most, best=best, box=box,
                                          is_settled=is_close, reason="decided at its corner"))
        return results

    def _bounds(self, boxes: Sequence[Box]) -> BoxBounds:
        space = self._space
        bounds = np.empty((len(BoxBounds._fields), len(boxes)))
        for index, rows in self._by_plan(boxes):
            bounds[:, rows] = space.bounds.bound(
                space.splits[index], corners_of(boxes, rows, space.chunks),
                worth_qps=self._best_qps * (1 + self._gap), latency_bound_s=self._bound_s)
        return BoxBounds(*bounds)

    def _look(self, boxes: Sequence[Box], limit: FloatArray,
              looked_at: int) -> list[tuple[Candidate | None, float | None]]:
        """[boxes] (best admissible point looked at, what none of its points exceeds where all were
        looked at): of boxes that may still have a better one, so many and those of few points."""
        seen: list[tuple[Candidate | None, float | None]] = [(None, None)] * len(boxes)
        most_qps = limit.tolist()
        rows = [row for place, row in enumerate(np.argsort(-limit, kind="stable").tolist())
                if most_qps[row] > self._best_qps * (1 + self._gap)
                and (place < looked_at or boxes[row].num_points <= FEW_POINTS)]
        points = [[point for point in points_of(boxes[row], self._space.chunks)
                   if self._space.is_modest(*point)] for row in rows]
        keys = [(self.plan_of_root[boxes[row].root], *point)
                for row, own in zip(rows, points, strict=True) for point in own]
        most = dict(zip(keys, self._space.most(keys, self._bound_s).tolist(), strict=True))
        worth = [key for key in keys if most[key] > self._best_qps]
        known = dict(zip(worth, self._space.evaluate(worth), strict=True))
        for row, own in zip(rows, points, strict=True):
            box, plan = boxes[row], self.plan_of_root[boxes[row].root]
            admissible = [Candidate(objective=qps, root=box.root, point=point) for point in own
                          if (plan, *point) in known
                          for qps, latency_s, forbidding in [known[plan, *point]]
                          if not forbidding and qps > 0 and latency_s <= self._bound_s]
            best = min(admissible, key=lambda one: one.rank, default=None)
            left_qps = max((most[plan, *point] for point in own if (plan, *point) not in known),
                           default=-math.inf)
            seen[row] = best, None if box.num_points > FEW_POINTS else max(
                left_qps, -math.inf if best is None else best.objective)
            if best is not None:
                self._best_qps = max(self._best_qps, best.objective)
        return seen
