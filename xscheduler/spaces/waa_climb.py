"""A climb to WAA's best with chunks, from a few points of each tensor plan to what is better near
by: bounds of boxes with chunks are loose and cost much, and what is known spares many of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from xgpt.core.problem import Problem
from xscheduler.admissible import Limit
from xscheduler.branch_and_bound import Box, Candidate
from xscheduler.spaces.tensor_plans import batch_range
from xscheduler.spaces.waa_boxes import CHUNKS, Ranges, group_range, largest_batch
from xsimulator.policies.waa.bounds import WaaBounds
from xsimulator.policies.waa.closed_form import Waa
from xsimulator.policies.waa.plans import WaaPlans

GRID_GROUPS, GRID_CHUNKS = 3, 2  # numbers of groups that a climb begins from, and of how many
# sizes of chunks one
GRID_BATCHES = (1.0, 3.0, 8.0)  # encode_batch over the least
CLIMBED = 3  # tensor plans, those that are best on the grid, which are climbed in
FEWER = (1.0, 0.6, 0.4, 0.25)  # encode_batch beside chunks over that without
MOST_CLIMBED = 16  # devices: a point takes long where there are many ways to divide them
WORTH_A_STEP = 1e-4  # of throughput
STEPS = (0.75, 1.33)  # of encode_batch, beside one more or less
MOST_STEPS = 12

Key = tuple[int, ...]  # tensor plan, encode_batch, decode_micro_batches, encode_chunk


class Climber(NamedTuple):
    """Looks for what is best with a chunk within a latency bound. `evaluate` gives (throughput,
    latency, what forbids it) of points; `least_batch` the least encode_batch of one with so many
    groups and so large a chunk."""

    evaluate: Callable[[Sequence[Key]], Sequence[tuple[float, float, Limit]]]
    least_batch: Callable[[int, int], int]
    latency_bound_s: float
    sizes: Sequence[int] = CHUNKS

    def grid(self, plan: int, batches: tuple[int, int], counts: tuple[int, int]) -> list[Key]:
        """A few points of a tensor plan with the least and largest encode_batch and
        decode_micro_batches: where chunks leave no step out, other batches change little."""
        return [(plan, batch, groups, size) for groups in _spread(*counts, GRID_GROUPS)
                for size in self.sizes[::GRID_CHUNKS] for batch in {
                    round(max(self.least_batch(groups, size), batches[0]) * times)
                    for times in GRID_BATCHES} if batch <= batches[1]]

    def beside(self, plan: int, point: Sequence[int]) -> list[Key]:
        """Points with chunks around one without."""
        return [(plan, max(round(point[0] * share), 1), point[1], size)
                for size in self.sizes for share in FEWER]

    def best(self, grid: Sequence[Key], ranges: Mapping[int, Ranges]) -> tuple[float, Key] | None:
        """(throughput, what has it) of the best that is found from the grid's best points, each of
        another tensor plan, by steps to what is better near by; None where none is admissible."""
        grid = [key for key in grid if ranges[key[0]][0][0] <= key[1] <= ranges[key[0]][0][1]]
        best: dict[int, tuple[float, Key]] = {}
        for own, key in zip(self._value(grid), grid, strict=True):
            if own > best.get(key[0], (0.0, key))[0]:
                best[key[0]] = own, key
        first = sorted(best.values(), reverse=True)[:CLIMBED]
        return max((self._climbed(*one, ranges[one[1][0]]) for one in first), default=None)

    def _value(self, keys: Sequence[Key]) -> list[float]:
        """Throughput of points; 0 where one may not be chosen."""
        modest = [key for key in keys if key[1] >= self.least_batch(key[2], key[3])]
        known = dict(zip(modest, self.evaluate(modest), strict=True))
        return [qps if not forbidding and latency_s <= self.latency_bound_s else 0.0
                for qps, latency_s, forbidding in (
                    known.get(key, (0.0, math.inf, Limit.NONE)) for key in keys)]

    def _climbed(self, own: float, key: Key, ranges: Ranges) -> tuple[float, Key]:
        (least, most), (fewest, highest) = ranges
        for _ in range(MOST_STEPS):
            plan, batch, groups, size = key
            place = self.sizes.index(size)
            near = [(plan, min(max(one, least), most), count, chunk)
                    for count in range(max(groups - 1, fewest), min(groups + 1, highest) + 1)
                    for chunk in self.sizes[max(place - 1, 0):place + 2]
                    for one in {batch - 1, batch, batch + 1, self.least_batch(count, chunk),
                                *(round(batch * step) for step in STEPS)}]
            found = max(zip(self._value(near), near, strict=True))
            if found[0] <= own * (1 + WORTH_A_STEP):
                break
            own, key = found
        return own, key


def _spread(least: int, most: int, count: int) -> list[int]:
    """So many whole numbers from one to the other, in even ratios."""
    spread = np.unique(np.rint(np.geomspace(least, max(most, least), count)).astype(int))
    return [int(one) for one in spread]


def candidate_in(roots: Sequence[Box], plan_of_root: Sequence[int], chunks: Sequence[int],
                 qps: float, key: Sequence[int]) -> Candidate | None:
    """A point as a candidate of the root that it lies in, if one has it."""
    plan, batch, groups, chunk = key
    place = batch, groups, chunks.index(chunk)
    return next((Candidate(objective=qps, root=box.root, point=(batch, groups, chunk))
                 for box, own in zip(roots, plan_of_root, strict=True)
                 if own == plan and all(low <= value <= up for low, value, up in zip(
                     box.lower, place, box.upper, strict=True))), None)


def ranges_of(problem: Problem, bounds: WaaBounds, split: WaaPlans) -> Ranges:
    """Least and largest encode_batch and decode_micro_batches under a tensor plan."""
    least, largest = batch_range(problem.fixed, problem.num_queries)
    return (least, max(largest_batch(bounds, split, largest), least)), group_range(problem, split)


def least_modest(waa: Waa, groups: int, chunk: int) -> int:
    """No smaller encode_batch has modest chunks of that size (Waa.modest_chunk)."""
    return math.ceil(chunk / float(waa.modest_chunk(np.ones(1), np.array([float(groups)]))[0])
                     * (1 - 1e-9))
