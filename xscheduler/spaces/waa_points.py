"""Points of WAA's space (xscheduler.spaces.waa), evaluated and bounded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import cast

import numpy as np

from xgpt.core.lengths import FloatArray, IntArray
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate
from xprofiler.made_sources import remembering
from xprofiler.timing import TimingSource
from xscheduler.admissible import Limit, Limits, crowding_or_pace
from xscheduler.branch_and_bound import Box
from xscheduler.spaces.ranked import Ranked
from xscheduler.spaces.tensor_plans import TensorPlan
from xscheduler.spaces.waa_boxes import Ranges, WorkLeft, chunks_of, ranges_of, roots_of
from xsimulator.policies import make_policy
from xsimulator.policies.waa.bounds import WaaBounds
from xsimulator.policies.waa.closed_form import Waa
from xsimulator.policies.waa.config import WaaBoxes, WaaConfig, WaaConfigs


class WaaPoints:
    """The `name` says how layers are divided. Remembers what it was asked, so that searches under
    several latency bounds share it."""

    def __init__(self, name: str, problem: Problem, timing: TimingSource,
                 plans: Sequence[TensorPlan]) -> None:
        waa = cast(Waa, make_policy(name, problem, remembering(timing)))
        self.name, self.problem, self.waa = name, problem, waa
        # a chunk that the job fixes is taken as it is
        self.bounds = WaaBounds(waa, is_modest=problem.fixed.encode_chunk is None)
        self.plans = tuple(plan for plan in plans if len(
            waa.times.split(plan.tp_degree, plan.tp_gpus).encode_devices))
        self._tp_degree = np.array([plan.tp_degree for plan in self.plans], np.int64)
        self.splits = [waa.split(plan.tp_degree, plan.tp_gpus) for plan in self.plans]
        self.limits = Limits.of(problem.constraint, queries=problem.num_queries or math.inf)
        self._known: dict[tuple[int, ...], tuple[float, float, Limit]] = {}
        self._ranked = Ranked[tuple[int, ...]]()
        self.chunks = chunks_of(name, problem)
        self.work = WorkLeft()  # on bounding boxes with chunks

    @property
    def num_evaluated(self) -> int:
        return len(self._known)

    def most(self, keys: Sequence[tuple[int, ...]], latency_bound_s: float) -> FloatArray:
        """What none of these has more of within the bound, before they are evaluated."""
        plan, batch, groups, chunk = np.array(keys, np.int64).reshape(len(keys), 4).T
        most = np.empty(len(keys))
        degree = self._tp_degree[plan]
        for own in np.unique(degree).tolist():
            rows = np.flatnonzero(degree == own)
            plans, which = np.unique(plan[rows], return_inverse=True)
            most[rows] = self.bounds.quick.of_points(
                [self.splits[index] for index in plans.tolist()], WaaConfigs(
                    batch=batch[rows].astype(float), groups=groups[rows].astype(float),
                    chunk=chunk[rows].astype(float)), which, latency_bound_s)
        return most

    def quick(self, plan: IntArray, boxes: WaaBoxes,
              latency_bound_s: float) -> tuple[FloatArray, FloatArray, FloatArray]:
        """[boxes] (most throughput, least latency, least stretch beyond what was measured) of boxes
        of these tensor plans, before any division is looked at: of plans whose groups are of the
        same degrees together, since a call costs as much for one as for many."""
        limit, latency_s, stretch = np.empty((3, len(plan)))
        kinds = self._kinds[plan]
        for kind in np.unique(kinds).tolist():
            rows = np.flatnonzero(kinds == kind)
            own, plans = boxes.take(rows), plan[rows].tolist()
            degrees = self.degrees(plans[0])
            limit[rows], latency_s[rows] = self.bounds.quick.of_boxes(
                [self.splits[index] for index in plans], own, degrees, latency_bound_s)
            stretch[rows] = self.waa.stretch.least(own.least.astype(float), degrees)
        return limit, latency_s, stretch

    def divided(self, plan: int, boxes: WaaBoxes, latency_bound_s: float) -> FloatArray:
        """[boxes] of one tensor plan: no point within the bound has more throughput, by what each
        division of the devices leaves either pool."""
        split, bounds = self.splits[plan], self.bounds
        most = bounds.quick.by_division(split, boxes, latency_bound_s)
        return np.asarray(np.where(bounds.fits(split, boxes), most, 0.0).max(axis=0))

    def best_known(self, latency_bound_s: float) -> tuple[float, int, tuple[int, ...]] | None:
        """(throughput, plan, point) of the best admissible point of any box that was evaluated so
        far."""
        best = self._ranked.best(latency_bound_s)
        return None if best is None else (best[0], best[1][0], best[1][1:])

    def config(self, plan: int, point: tuple[int, ...]) -> WaaConfig:
        return WaaConfig(encode_batch=point[0], decode_micro_batches=point[1],
                         encode_chunk=point[2],
                         tp_degree=self.plans[plan].tp_degree, tp_gpus=self.plans[plan].tp_gpus)

    def estimate(self, plan: int, point: tuple[int, ...]) -> Estimate:
        return self.waa.estimate(self.config(plan, point))

    def figures(self, plan: int, point: tuple[int, ...]) -> tuple[float, float]:
        return self.evaluate([(plan, *point)])[0][:2]

    def evaluate(self, keys: Sequence[tuple[int, ...]]) -> list[tuple[float, float, Limit]]:
        """(throughput_qps, latency_s by the slower way of encoding, what else forbids it) of each
        (plan, encode batch, groups, chunk)."""
        new = [key for key in dict.fromkeys(keys) if key not in self._known]
        if new:
            figures, slower_s = self.waa.evaluate_either_way([
                self.config(key[0], key[1:]) for key in new])
            limits = crowding_or_pace(figures, self.limits)
            found = list(zip(figures.throughput_qps.tolist(), slower_s.tolist(),
                             map(Limit, limits.tolist()), strict=True))
            self._known.update(zip(new, found, strict=True))
            self._ranked.add((key, qps, latency_s) for key, (qps, latency_s, forbidding) in zip(
                new, found, strict=True) if not forbidding and key[3] in self.chunks)
        return [self._known[key] for key in keys]

    def degrees(self, plan: int) -> list[int]:
        """Of the stages that a tensor plan may have."""
        own, devices = self.plans[plan], self.problem.cluster.num_devices
        return sorted({own.tp_degree} | ({1} if own.tp_gpus < devices else set()))

    @cached_property
    def _kinds(self) -> IntArray:
        """[plans] alike where groups are of the same degrees."""
        kinds: dict[tuple[int, ...], int] = {}
        return np.array([kinds.setdefault(tuple(self.degrees(plan)), len(kinds))
                         for plan in range(len(self.plans))], np.int64)

    def is_modest(self, batch: int, groups: int, chunk: int) -> bool:
        """Whether a configuration with that chunk is looked at."""
        return not chunk or self.problem.fixed.encode_chunk is not None or (
            chunk <= self.waa.modest_chunk(float(batch), float(groups)))

    @cached_property
    def roots(self) -> tuple[list[Box], list[int]]:
        """The roots, and the tensor plan of each."""
        return roots_of(self.ranges, len(self.chunks) - 1)

    @cached_property
    def ranges(self) -> list[Ranges]:
        """Of each tensor plan."""
        return [ranges_of(self.problem, self.bounds, split) for split in self.splits]
