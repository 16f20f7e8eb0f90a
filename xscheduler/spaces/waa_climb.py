"""A climb to WAA's best with chunks, from some points of each tensor plan to what is better near
by: bounds of boxes with chunks are loose and cost much, and what is known spares many of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import NamedTuple

import numpy as np

from xgpt.core.lengths import FloatArray, IntArray
from xscheduler.admissible import Limit
from xscheduler.branch_and_bound import Box, Candidate
from xscheduler.spaces.tensor_plans import between
from xscheduler.spaces.waa_boxes import CHUNK_ROOT_PARTS, CHUNKS, Ranges, corners_of, grid
from xscheduler.spaces.waa_points import WaaPoints
from xsimulator.policies.waa.closed_form import Waa
from xsimulator.policies.waa.config import WaaBoxes

GRID_GROUPS, GRID_CHUNKS = 5, 2  # numbers of groups that a climb begins from, and of how many
# sizes of chunks one
GRID_BATCHES = (1.0, 2.0, 4.0, 8.0)  # encode_batch over the least
# Points of the grid that are climbed from, the best of a tensor plan and a size each; and of how
# many tensor plans the best is one of them.
CLIMBED, CLIMBED_PLANS = 6, 4
WORTH_A_START = 0.9  # of what is had elsewhere: points that cannot have as much are not looked at
FEWER = (1.0, 0.6, 0.4, 0.25)  # encode_batch beside chunks over that without
MOST_CLIMBED = 16  # devices: a point takes long where there are many ways to divide them
WORTH_A_STEP = 1e-4  # of throughput
STEPS = (0.75, 1.33)  # of encode_batch, beside one more or less
MOST_STEPS = 12

Key = tuple[int, ...]  # tensor plan, encode_batch, decode_micro_batches, encode_chunk


def _any(keys: Sequence[Key]) -> FloatArray:
    return np.full(len(keys), np.inf)


class Climber(NamedTuple):
    """Looks for what is best with a chunk within a latency bound. `evaluate` gives (throughput,
    latency, what forbids it) of points; `least_batch` the least encode_batch of one with so many
    groups and so large a chunk; `most` what no throughput of points exceeds, which costs far less:
    what is no better than `floor_qps`, had elsewhere, is not evaluated."""

    evaluate: Callable[[Sequence[Key]], Sequence[tuple[float, float, Limit]]]
    least_batch: Callable[[int, int], int]
    latency_bound_s: float
    most: Callable[[Sequence[Key]], FloatArray] = _any
    floor_qps: float = 0.0
    sizes: Sequence[int] = CHUNKS

    def grid(self, plan: int, batches: tuple[int, int], counts: tuple[int, int]) -> list[Key]:
        """A few points of a tensor plan with the least and largest encode_batch and
        decode_micro_batches: where chunks leave no step out, other batches change little."""
        return [(plan, batch, groups, size) for groups in between(*counts, GRID_GROUPS)
                for size in self.sizes[::GRID_CHUNKS] for batch in {
                    round(max(self.least_batch(groups, size), batches[0]) * times)
                    for times in GRID_BATCHES} if batch <= batches[1]]

    def beside(self, plan: int, point: Sequence[int]) -> list[Key]:
        """Points with chunks around one without."""
        return [(plan, max(round(point[0] * share), 1), point[1], size)
                for size in self.sizes for share in FEWER]

    def best(self, grid: Sequence[Key], ranges: Mapping[int, Ranges]) -> tuple[float, Key] | None:
        """(throughput, what has it) of the best that is found from the grid's best points, each of
        another tensor plan or size, by steps to what is better near by; None where none is
        admissible."""
        grid = [key for key in grid if ranges[key[0]][0][0] <= key[1] <= ranges[key[0]][0][1]]
        best: dict[tuple[int, int], tuple[float, Key]] = {}
        values = _Values(self)
        (found,) = values.of([(grid, WORTH_A_START * self.floor_qps)])
        for own, key in zip(found, grid, strict=True):
            if own > best.get((key[0], key[3]), (0.0, key))[0]:
                best[key[0], key[3]] = own, key
        return max(self._climbed(_first(best.values()), ranges, values), default=None)

    def _climbed(self, climbs: list[tuple[float, Key]], ranges: Mapping[int, Ranges],
                 values: _Values) -> list[tuple[float, Key]]:
        """Where climbs from these points lead, each a step at a time together with the others: what
        takes time is to ask, not for how many points. One that comes to where another has been
        goes on as that did, and is left at that."""
        ends: list[tuple[float, Key]] = []
        seen = {key for _, key in climbs}
        for _ in range(MOST_STEPS):
            near = [self._near(key, ranges[key[0]]) for _, key in climbs]
            least = [own * (1 + WORTH_A_STEP) for own, _ in climbs]
            steps = [max(zip(found, keys, strict=True)) for found, keys in zip(
                values.of(list(zip(near, least, strict=True))), near, strict=True)]
            ends += [one for one, step, least_qps in zip(climbs, steps, least, strict=True)
                     if step[0] <= least_qps]
            climbs = list({step[1]: step for step, least_qps in zip(steps, least, strict=True)
                           if step[0] > least_qps and step[1] not in seen}.values())
            seen.update(key for _, key in climbs)
            if not climbs:
                break
        return [*ends, *climbs]

    def _near(self, key: Key, ranges: Ranges) -> list[Key]:
        """Points around one, and it."""
        (least, most), (fewest, highest) = ranges
        plan, batch, groups, size = key
        place = self.sizes.index(size)
        return [(plan, min(max(one, least), most), count, chunk)
                for count in range(max(groups - 1, fewest), min(groups + 1, highest) + 1)
                for chunk in self.sizes[max(place - 1, 0):place + 2]
                for one in {batch - 1, batch, batch + 1, self.least_batch(count, chunk),
                            *(round(batch * step) for step in STEPS)}]


class _Values:
    """Throughput of points of one climb. What none exceeds is asked for once of each."""

    def __init__(self, climber: Climber) -> None:
        self._climber = climber
        self._most: dict[Key, float] = {}  # 0: too small a batch for its chunk

    def of(self, asked: Sequence[tuple[Sequence[Key], float]]) -> list[list[float]]:
        """Of several lists of points, each with a floor: 0 where one may not be chosen, or is no
        better than that."""
        climber, most = self._climber, self._most
        new = dict.fromkeys(key for keys, _ in asked for key in keys if key not in most)
        modest = [key for key in new if key[1] >= climber.least_batch(key[2], key[3])]
        most.update(dict.fromkeys(new, 0.0))
        most.update(zip(modest, climber.most(modest).tolist(), strict=True))
        worth = list(dict.fromkeys(key for keys, floor_qps in asked for key in keys
                                   if most[key] > floor_qps))
        known = {key: qps if not forbidding and latency_s <= climber.latency_bound_s else 0.0
                 for key, (qps, latency_s, forbidding) in zip(
                     worth, climber.evaluate(worth), strict=True)}
        return [[known.get(key, 0.0) if most[key] > floor_qps else 0.0 for key in keys]
                for keys, floor_qps in asked]


def climbed(space: WaaPoints, latency_bound_s: float, floor_qps: float,
            gap: float) -> tuple[float, Key] | None:
    """(throughput, what has it) of the best with chunks that a climb finds in a space within the
    bound, if that is more than the floor and the best of any box that is known; from tensor plans
    that may have more by the gap."""
    best, grid = space.best_known(latency_bound_s), list[Key]()
    floor_qps = max(floor_qps, best[0] if best else 0.0)
    climber = Climber(space.evaluate, cache(partial(least_modest, space.waa)), latency_bound_s,
                      partial(space.most, latency_bound_s=latency_bound_s), floor_qps)
    plans, boxes = _whole(space, latency_bound_s)
    limit, latency_s, _ = space.quick(plans, boxes, latency_bound_s)
    for row in np.flatnonzero(
            (limit > floor_qps * (1 + gap)) & (latency_s <= latency_bound_s)).tolist():
        grid += climber.grid(int(plans[row]), (int(boxes.least[row]), int(boxes.most[row])),
                             (int(boxes.fewest[row]), int(boxes.highest[row])))
    found = climber.best([*grid, *(climber.beside(best[1], best[2]) if best else ())],
                         dict(enumerate(space.ranges)))
    return None if found is None or found[0] <= floor_qps else found


def most_climbed(space: WaaPoints, latency_bound_s: float) -> float:
    """No configuration with modest chunks answers more queries/s within the bound, whatever the
    division of the devices: from the quick bounds of a few boxes, which no search narrows."""
    most_qps = 0.0
    plans, whole = _whole(space, latency_bound_s)
    if not len(plans):
        return most_qps
    parts = [(plan, part) for plan, least, fewest, most, highest in zip(
        *(side.tolist() for side in (plans, whole.least, whole.fewest, whole.most, whole.highest)),
        strict=True) for part in grid(
            Box(root=0, lower=(least, fewest, 0), upper=(most, highest, len(CHUNKS) - 1)),
            CHUNK_ROOT_PARTS)]
    plan_of = np.array([plan for plan, _ in parts], np.int64)
    boxes = corners_of([part for _, part in parts], np.arange(len(parts)), CHUNKS)
    limit, latency_s, _ = space.quick(plan_of, boxes, latency_bound_s)
    for plan in plans.tolist():
        rows = np.flatnonzero((plan_of == plan) & (latency_s <= latency_bound_s)
                              & (limit > most_qps))
        if len(rows):
            divided = space.divided(plan, boxes.take(rows), latency_bound_s)
            most_qps = max(most_qps, float(np.minimum(limit[rows], divided).max()))
    return most_qps


def _first(best: Iterable[tuple[float, Key]]) -> list[tuple[float, Key]]:
    """From which of the best of each tensor plan and size is climbed."""
    left = sorted(best, reverse=True)
    of_plan: dict[int, tuple[float, Key]] = {}
    for one in left:
        of_plan.setdefault(one[1][0], one)
    first = list(of_plan.values())[:CLIMBED_PLANS]
    return [*first, *(one for one in left if one not in first)][:CLIMBED]


def _whole(space: WaaPoints, latency_bound_s: float) -> tuple[IntArray, WaaBoxes]:
    """Tensor plans of which some encode_batch may be quick enough, and a box of chunks of all sizes
    of each."""
    rows = list[tuple[int, ...]]()
    for plan, ((least, largest), groups) in enumerate(space.ranges):
        if math.isfinite(latency_bound_s):
            largest = space.bounds.quick.largest_within(
                largest, space.degrees(plan), latency_bound_s, CHUNKS[-1])
        if largest >= least:
            rows.append((plan, least, largest, *groups))
    columns = np.array(rows, np.int64).reshape(-1, 5).T
    first, last = (np.full(len(rows), size) for size in (CHUNKS[0], CHUNKS[-1]))
    return columns[0], WaaBoxes(least=columns[1], most=columns[2], fewest=columns[3],
                                highest=columns[4], chunk=first, largest_chunk=last)


def candidate_in(roots: Sequence[Box], plan_of_root: Sequence[int], chunks: Sequence[int],
                 qps: float, key: Sequence[int]) -> Candidate | None:
    """A point as a candidate of the root that it lies in, if one has it."""
    plan, batch, groups, chunk = key
    place = batch, groups, chunks.index(chunk)
    return next((Candidate(objective=qps, root=box.root, point=(batch, groups, chunk))
                 for box, own in zip(roots, plan_of_root, strict=True)
                 if own == plan and all(low <= value <= up for low, value, up in zip(
                     box.lower, place, box.upper, strict=True))), None)


def least_modest(waa: Waa, groups: int, chunk: int) -> int:
    """No smaller encode_batch has modest chunks of that size (Waa.modest_chunk)."""
    return math.ceil(chunk / waa.modest_chunk(1.0, float(groups)) * (1 - 1e-9))
