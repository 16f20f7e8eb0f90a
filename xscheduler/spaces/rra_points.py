"""RRA configurations of one problem, as points (encode_batch, decode_iterations) of tensor plans:
their figures, what forbids them, and how large a batch there is room for. Remembers what it was
asked, so that searches under several latency bounds share it."""

import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from xgpt.core.lengths import FloatArray, IntArray
from xgpt.core.problem import Problem
from xprofiler.timing import TimingSource
from xscheduler.admissible import SLACK, Limits, crowding, crowding_or_pace
from xscheduler.branch_and_bound import Box
from xscheduler.spaces.ranked import Ranked
from xscheduler.spaces.tensor_plans import TensorPlan, batch_range, even_parts, iteration_range
from xsimulator.policies.rra.bounds import SIDES, RraBounds
from xsimulator.policies.rra.closed_form import Rra
from xsimulator.policies.rra.config import RraConfig, RraConfigs
from xsimulator.policies.rra.native_points import largest_batch

ROOT_RANGES = 12  # of decode_iterations, in even ratios: wide boxes are bounded loosely
_ROOM_POINTS = 16  # batches looked at together on the way to the largest there is room for


class Points(NamedTuple):
    """[points] figures; `crowding`: what forbids the point apart from latency, a Limit."""

    throughput_qps: FloatArray
    latency_s: FloatArray
    crowding: IntArray


class RraPoints:
    """Evaluates points of one problem over its tensor plans."""

    def __init__(self, problem: Problem, timing: TimingSource, plans: Sequence[TensorPlan]) -> None:
        self.problem, self.plans = problem, tuple(plans)
        self.rra = Rra(problem, timing)
        self.bounds = RraBounds(self.rra)
        self._degree = np.array([plan.tp_degree for plan in plans], np.int64)
        self._gpus = np.array([plan.tp_gpus for plan in plans], np.int64)
        self._limits = Limits.of(problem.constraint, queries=problem.num_queries or math.inf)
        self._known: dict[tuple[int, int, int], tuple[float, float, int]] = {}
        self._ranked = Ranked[tuple[int, int, int]]()
        self._room: dict[tuple[int, int], int] = {}

    @property
    def num_evaluated(self) -> int:
        return len(self._known)

    @cached_property
    def roots(self) -> tuple[list[Box], list[int]]:
        """Boxes that cover the space, and the tensor plan of each."""
        corners = _root_corners(self.problem, batch_range(
            self.problem.fixed, self.problem.num_queries), self.rra.flow.max_iterations)
        every = [(plan, *own) for plan in range(len(self.plans)) for own in corners]
        return ([Box(root=root, lower=lower, upper=upper)
                 for root, (_, lower, upper) in enumerate(every)], [plan for plan, *_ in every])

    def configs(self, plan: IntArray, batch: IntArray, iterations: IntArray) -> RraConfigs:
        groups = self.problem.fixed.decode_micro_batches or 0
        return RraConfigs(encode_batch=batch, decode_iterations=iterations,
                          tp_degree=self._degree[plan], tp_gpus=self._gpus[plan],
                          decode_micro_batches=np.full(len(batch), groups, np.int64))

    def config(self, plan: int, point: tuple[int, ...]) -> RraConfig:
        return RraConfig(encode_batch=point[0], decode_iterations=point[1],
                         tp_degree=self.plans[plan].tp_degree, tp_gpus=self.plans[plan].tp_gpus,
                         decode_micro_batches=self.problem.fixed.decode_micro_batches,
                         encode_chunk=point[2] if len(point) > 2 else 0)

    def evaluate(self, plan: IntArray, batch: IntArray, iterations: IntArray) -> Points:
        """Figures of each, all new ones at once."""
        keys = list(zip(plan.tolist(), batch.tolist(), iterations.tolist(), strict=True))
        new = [key for key in dict.fromkeys(keys) if key not in self._known]
        if new:
            rows = np.array(new, np.int64)
            figures = self.rra.evaluate(self.configs(rows[:, 0], rows[:, 1], rows[:, 2]))
            crowding = crowding_or_pace(figures, self._limits)
            found = list(zip(figures.throughput_qps.tolist(), figures.latency_s.tolist(),
                             crowding.tolist(), strict=True))
            self._known.update(zip(new, found, strict=True))
            self._ranked.add((key, qps, latency_s) for key, (qps, latency_s, crowded) in zip(
                new, found, strict=True) if not crowded)
        columns = np.array([self._known[key] for key in keys]).reshape(-1, 3)
        return Points(columns[:, 0], columns[:, 1], columns[:, 2].astype(np.int64))

    def best_known(self, latency_bound_s: float) -> tuple[float, int, tuple[int, int]] | None:
        """(throughput, plan, point) of the best admissible point that was evaluated so far."""
        best = self._ranked.best(latency_bound_s)
        return None if best is None else (best[0], best[1][0], best[1][1:])

    def crowding(self, plan: IntArray, batch: IntArray, iterations: IntArray) -> IntArray:
        """[points] as Points.crowding but for the tokens' pace, without a timeline."""
        return self._crowding(*self.rra.room(self.configs(plan, batch, iterations)))

    def room(self, plan: IntArray, iterations: IntArray, largest: int) -> IntArray:
        """[lines] the largest batch up to `largest` there is room for, 0 if there is none: what is
        needed grows with the batch."""
        keys = list(zip(plan.tolist(), iterations.tolist(), strict=True))
        new = [key for key in dict.fromkeys(keys) if key not in self._room]
        if new:
            rows = np.array(new, np.int64)
            room = self._find_room(rows[:, 0], rows[:, 1], largest)
            self._room.update(zip(new, room.tolist(), strict=True))
        return np.array([self._room[key] for key in keys], np.int64)

    def _find_room(self, plan: IntArray, iterations: IntArray, largest: int) -> IntArray:
        """Bisection, several places at a time."""
        most = largest_batch(
            self.rra.native, self.rra.measured, self.configs(plan, plan, iterations),
            np.full(len(plan), SIDES), (largest, (self.problem.num_queries or math.inf) + SLACK))
        if most is not None:
            return most
        low, high = np.zeros(len(plan), np.int64), np.full(len(plan), largest + 1)
        steps = np.arange(1, _ROOM_POINTS + 1) / (_ROOM_POINTS + 1)
        while (is_open := high - low > 1).any():
            rows = np.flatnonzero(is_open)
            first = np.maximum(low[rows], 1).astype(float)
            tried = first[:, None] * (high[rows] / first)[:, None] ** steps  # sizes act in ratios
            tried = np.clip(np.rint(tried).astype(np.int64), low[rows, None] + 1,
                            high[rows, None] - 1)
            has_room = self.crowding(
                np.repeat(plan[rows], _ROOM_POINTS), tried.ravel(),
                np.repeat(iterations[rows], _ROOM_POINTS)).reshape(tried.shape) == 0
            low[rows] = np.where(has_room, tried, low[rows, None]).max(axis=1)
            high[rows] = np.where(has_room, high[rows, None], tried).min(axis=1)
        return low

    def _crowding(self, memory_bytes: FloatArray, present: FloatArray,
                  stretch: FloatArray) -> IntArray:
        return crowding(memory_bytes <= self.rra.capacity_bytes, present, stretch,
                        self.problem.num_queries or math.inf)


def _root_corners(problem: Problem, batches: tuple[int, int],
                  max_iterations: int) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """(lower, upper) corners (encode_batch, decode_iterations) that cover the space."""
    first, last = iteration_range(problem.fixed, max_iterations)
    sides = [(low, up) for low, up in ((batches[0], min(batches[1], SIDES - 1)),
                                       (max(batches[0], SIDES), batches[1])) if low <= up]
    return [((low, n1), (up, n2)) for n1, n2 in even_parts(first, last, ROOT_RANGES)
            for low, up in sides]
