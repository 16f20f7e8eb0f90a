"""WAA's space: encode_batch x decode_micro_batches under every tensor plan that leaves devices for
both pools, whose decode pool takes chunks of some sizes or none (paper section 5).

A root is a tensor plan with ranges of encode_batch and decode_micro_batches, without chunks or with
all sizes of them. A box is bounded from its corners (xsimulator.policies.waa.bounds), over every
division of the devices that its points may have; a few points are evaluated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import cast

import numpy as np

from xgpt.core.controls import max_in_system
from xgpt.core.lengths import FloatArray
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate
from xprofiler.made_sources import remembering
from xprofiler.timing import TimingSource
from xscheduler.admissible import Limit, Limits, crowding_or_pace
from xscheduler.branch_and_bound import Box
from xscheduler.spaces.space import SMALL_BATCHES, Selection, Tight
from xscheduler.spaces.tensor_plans import TensorPlan, batch_range
from xscheduler.spaces.waa_boxes import (
    Ranges,
    WorkLeft,
    chunks_of,
    group_range,
    roots_of,
    takes_climbed,
)
from xscheduler.spaces.waa_climb import MOST_CLIMBED, climbed, ranges_of
from xscheduler.spaces.waa_examiner import WaaExaminer
from xsimulator.policies import make_policy
from xsimulator.policies.waa.bounds import WaaBounds
from xsimulator.policies.waa.closed_form import Waa
from xsimulator.policies.waa.config import WaaConfig, WaaConfigs

MOST_GROUPS = 4  # decode_micro_batches above the fewest, for the tightest latency
# Divisions that boxes with chunks are bounded for in one search, times the devices that they
# divide: what is spent on a large cluster is to be no more than on a node.
CHUNKED_WORK = 8_000
# On more devices a quarter of it: on 64 no gap was narrower for the rest of it.
MANY_DEVICES = 48
UNCLAIMED = 0.5  # share of it more for searches of which nothing is claimed


class WaaSpace:
    """See xscheduler.spaces.space.Space. `name` says how layers are divided. Remembers what it was
    asked, so that searches under several latency bounds share it."""

    variables = ("encode_batch", "decode_micro_batches", "encode_chunk")

    def __init__(self, name: str, problem: Problem, timing: TimingSource,
                 plans: Sequence[TensorPlan]) -> None:
        waa = cast(Waa, make_policy(name, problem, remembering(timing)))
        self.name, self.problem, self.waa = name, problem, waa
        # a chunk that the job fixes is taken as it is
        self.bounds = WaaBounds(waa, is_modest=problem.fixed.encode_chunk is None)
        self.plans = tuple(plan for plan in plans if len(
            waa.times.split(plan.tp_degree, plan.tp_gpus).encode_devices))
        self.splits = [waa.split(plan.tp_degree, plan.tp_gpus) for plan in self.plans]
        self.limits = Limits.of(problem.constraint, queries=problem.num_queries or math.inf)
        self._known: dict[tuple[int, ...], tuple[float, float, Limit]] = {}
        self.chunks = chunks_of(name, problem)
        self.work = WorkLeft()  # on bounding boxes with chunks

    @property
    def num_evaluated(self) -> int:
        return len(self._known)

    def examiner(self, latency_bound_s: float, gap: float, floor_qps: float, *,
                 keeps_gap: bool = False, is_claimed: bool = True) -> WaaExaminer:
        devices = self.problem.cluster.num_devices
        self.work.grant(latency_bound_s, is_claimed=is_claimed, work=(
            math.inf if keeps_gap else CHUNKED_WORK / devices * (
                1.0 if is_claimed else UNCLAIMED) / (1 if devices <= MANY_DEVICES else 4)))
        return WaaExaminer(self, latency_bound_s, gap=gap, floor_qps=floor_qps)

    def unproved(self, latency_bound_s: float, gap: float,
                 floor_qps: float) -> tuple[float, int, tuple[int, ...]] | None:
        """See Space: the best with chunks that is climbed to, where no box has any."""
        if not takes_climbed(self.name, self.problem) or (
                self.problem.cluster.num_devices > MOST_CLIMBED):
            return None
        found = climbed(self, latency_bound_s, floor_qps, gap)
        return None if found is None else (found[0], found[1][0], found[1][1:])

    def most(self, keys: Sequence[tuple[int, ...]], latency_bound_s: float) -> FloatArray:
        """What none of these has more of within the bound, before they are evaluated."""
        plan, batch, groups, chunk = np.array(keys, np.int64).reshape(len(keys), 4).T
        most = np.empty(len(keys))
        for index in np.unique(plan).tolist():
            rows = np.flatnonzero(plan == index)
            most[rows] = self.bounds.of_points(self.splits[index], WaaConfigs(
                batch=batch[rows].astype(float), groups=groups[rows].astype(float),
                chunk=chunk[rows].astype(float)), latency_bound_s)
        return most

    def best_known(self, latency_bound_s: float) -> tuple[float, int, tuple[int, ...]] | None:
        """(throughput, plan, point) of the best admissible point of any box that was evaluated so
        far."""
        best = min(((-qps, key) for key, (qps, latency_s, forbidding) in self._known.items()
                    if latency_s <= latency_bound_s and qps > 0 and not forbidding
                    and key[3] in self.chunks), default=None)
        return None if best is None else (-best[0], best[1][0], best[1][1:])

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
            self._known.update(zip(new, zip(
                figures.throughput_qps.tolist(), slower_s.tolist(),
                map(Limit, limits.tolist()), strict=True), strict=True))
        return [self._known[key] for key in keys]

    def degrees(self, plan: int) -> list[int]:
        """Of the stages that a tensor plan may have."""
        own, devices = self.plans[plan], self.problem.cluster.num_devices
        return sorted({own.tp_degree} | ({1} if own.tp_gpus < devices else set()))

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

    def beyond(self, tight: Tight) -> str:
        return ""

    def present(self, tight: Tight) -> float:
        return float(max_in_system(self.estimate(tight.plan, tight.point).controls))

    def easiest(self) -> list[Tight]:
        least, most = batch_range(self.problem.fixed, self.problem.num_queries)
        batches = sorted({min(max(size, least), most) for size in SMALL_BATCHES})
        keys = []
        for plan, split in enumerate(self.splits):
            fewest, highest = group_range(self.problem, split)
            keys += [(plan, batch, groups, self.chunks[0]) for batch in batches
                     for groups in range(fewest, min(highest, fewest + MOST_GROUPS) + 1)]
        return [Tight(latency, limit, qps, plan, tuple(point))
                for (qps, latency, limit), (plan, *point) in zip(
                    self.evaluate(keys), keys, strict=True)]

    def selection(self, num_queries: int) -> Selection:
        """The closed form's grid, moved to what the job fixes."""
        pins = {name: value for name in self.variables
                if (value := getattr(self.problem.fixed, name)) is not None}
        return Selection(closed_form=self.waa, configs=list(dict.fromkeys(
            replace(config, **pins) for config in self.waa.grid(num_queries, self.plans))))
