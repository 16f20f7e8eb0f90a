"""The search of one policy's space: what is common to them for xscheduler.search.

A policy's search keeps what it has evaluated, so that several latency bounds share it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from xgpt.core.controls import max_in_system
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate
from xprofiler.interpolation import REFUSED_BEYOND
from xprofiler.remembered import Remembered
from xprofiler.timing import TimingSource
from xscheduler.branch_and_bound import Box, Candidate, NodeResult, Outcome, maximise
from xscheduler.spaces.rra import RraSearch
from xscheduler.spaces.rra_points import CROWDING, RraPoints
from xscheduler.spaces.tensor_plans import TensorPlan, batch_range, iteration_range
from xscheduler.spaces.waa import WaaPointFigures, WaaSearch, group_range
from xsimulator.policies import policy_class
from xsimulator.policies.waa.plans import WaaPlans

# For the tightest latency, at small batches: values of decode_iterations looked at over all plans
# (and at least of one), and numbers of decode_micro_batches.
LATENCY_SAMPLES, LEAST_SAMPLES = 512, 16
SMALL_BATCHES = (1, 2, 4)
MOST_GROUPS = 4


class Examiner(Protocol):
    """One policy's boxes under one latency bound."""

    roots: list[Box]

    def examine(self, boxes: Sequence[Box]) -> list[NodeResult]: ...

    def split(self, box: Box) -> list[Box]: ...

    def plan_of(self, root: int) -> int: ...


class Found(NamedTuple):
    """A search's outcome and the tensor plan that each of its roots belongs to."""

    outcome: Outcome
    plan_of_root: tuple[int, ...]


class Tight(NamedTuple):
    """An easy configuration: its latency, and what forbids it apart from that ("": nothing)."""

    latency_s: float
    reason: str
    throughput_qps: float
    plan: int
    point: tuple[int, ...]


class PolicySearch(ABC):
    """Searches one policy's space of one problem, under any latency bound."""

    name: str
    variables: tuple[str, str]  # what a point's two numbers are

    def __init__(self, problem: Problem, plans: Sequence[TensorPlan]) -> None:
        self.problem, self.plans = problem, tuple(plans)

    @property
    @abstractmethod
    def num_evaluated(self) -> int: ...

    @abstractmethod
    def examiner(self, latency_bound_s: float, gap: float, floor_qps: float) -> Examiner: ...

    @abstractmethod
    def estimate(self, plan: int, point: tuple[int, ...]) -> Estimate: ...

    @abstractmethod
    def figures(self, plan: int, point: tuple[int, ...]) -> tuple[float, float]:
        """(throughput_qps, latency_s)."""

    @abstractmethod
    def easiest(self) -> list[Tight]:
        """Configurations among which the tightest latencies are."""

    def search(self, latency_bound_s: float, *, gap: float, max_nodes: int | None,
               max_seconds: float | None, floor_qps: float = 0.0) -> Found:
        """The best point within the bound, within the relative `gap`; what is no better than
        `floor_qps`, had by another policy, is not looked into."""
        own = self.examiner(latency_bound_s, gap, floor_qps)
        outcome = maximise(own.roots, own.examine, gap=gap, max_nodes=max_nodes,
                           max_seconds=max_seconds, split=own.split, floor=floor_qps)
        return Found(outcome, tuple(own.plan_of(root) for root in range(len(own.roots))))

    def beyond(self, tight: Tight) -> str:
        """In words, sizes of a configuration that the timing source refuses."""
        return ""

    def present(self, tight: Tight) -> float:
        """Queries present at a time in a configuration."""
        return float(max_in_system(self.estimate(tight.plan, tight.point).controls))

    def words(self, plan: int, point: tuple[int, ...]) -> str:
        """A point as it is shown."""
        names = ", ".join(f"{name} {value}" for name, value in zip(self.variables, point,
                                                                   strict=True))
        own = self.plans[plan]
        return f"{names}, tp_degree {own.tp_degree}, tp_gpus {own.tp_gpus}"


def best_of_roots(found: Found, plans: Sequence[int]) -> tuple[Candidate | None, float]:
    """(best candidate, upper bound) over the roots of some tensor plans."""
    own = [found.outcome.per_root[root] for root, plan in enumerate(found.plan_of_root)
           if plan in plans]
    candidates = [best for best, _ in own if best is not None]
    return (min(candidates, key=lambda one: one.rank, default=None),
            max((bound for _, bound in own), default=-np.inf))


class RraPolicySearch(PolicySearch):
    """encode_batch x decode_iterations."""

    name = "rra"
    variables = ("encode_batch", "decode_iterations")

    def __init__(self, problem: Problem, timing: TimingSource, plans: Sequence[TensorPlan]) -> None:
        super().__init__(problem, plans)
        self.points = RraPoints(problem, timing, plans)

    @property
    def num_evaluated(self) -> int:
        return self.points.num_evaluated

    def examiner(self, latency_bound_s: float, gap: float, floor_qps: float) -> RraSearch:
        return RraSearch(self.points, latency_bound_s, gap=gap, floor_qps=floor_qps)

    def estimate(self, plan: int, point: tuple[int, ...]) -> Estimate:
        return self.points.rra.estimate(self.points.config(plan, point))

    def figures(self, plan: int, point: tuple[int, ...]) -> tuple[float, float]:
        found = self.points.evaluate(*(np.array([value]) for value in (plan, *point)))
        return float(found.throughput_qps[0]), float(found.latency_s[0])

    def beyond(self, tight: Tight) -> str:
        config = self.points.config(tight.plan, tight.point)
        return f" ({'; '.join(self.points.rra.beyond(config, REFUSED_BEYOND))})"

    def present(self, tight: Tight) -> float:
        config = self.points.config(tight.plan, tight.point)
        return float(self.points.rra.room([config]).present[0])

    def easiest(self) -> list[Tight]:
        problem = self.problem
        least, most = batch_range(problem.fixed, problem.num_queries)
        first, last = iteration_range(problem.fixed, self.points.rra.flow.max_iterations)
        count = max(LATENCY_SAMPLES // len(self.plans), LEAST_SAMPLES)
        samples = np.linspace(first, last, min(last - first + 1, count))
        batches = sorted({min(max(size, least), most) for size in SMALL_BATCHES})
        keys = np.array([(plan, batch, round(n)) for plan in range(len(self.plans))
                         for batch in batches for n in samples], np.int64)
        found = self.points.evaluate(keys[:, 0], keys[:, 1], keys[:, 2])
        return [Tight(latency, CROWDING[code], qps, plan, (batch, n))
                for latency, code, qps, (plan, batch, n) in zip(
                    found.latency_s.tolist(), found.crowding.tolist(),
                    found.throughput_qps.tolist(), keys.tolist(), strict=True)]


class WaaPolicySearch(PolicySearch):
    """encode_batch x decode_micro_batches."""

    variables = ("encode_batch", "decode_micro_batches")

    def __init__(self, name: str, problem: Problem, timing: TimingSource,
                 plans: Sequence[TensorPlan]) -> None:
        waa: Any = policy_class(name)(problem, Remembered(timing))
        own = [plan for plan in plans if len(
            WaaPlans(waa.plans, plan.tp_degree, plan.tp_gpus).encode_devices)]
        super().__init__(problem, own)
        self.name = name
        self.known = WaaPointFigures(waa, own)

    @property
    def num_evaluated(self) -> int:
        return self.known.num_evaluated

    def examiner(self, latency_bound_s: float, gap: float, floor_qps: float) -> WaaSearch:
        return WaaSearch(self.known, latency_bound_s, gap=gap, floor_qps=floor_qps)

    def estimate(self, plan: int, point: tuple[int, ...]) -> Estimate:
        return self.known.waa.estimate(self.known.config(plan, point))

    def figures(self, plan: int, point: tuple[int, ...]) -> tuple[float, float]:
        qps, latency_s, _ = self.known.evaluate([(plan, point[0], point[1])])[0]
        return qps, latency_s

    def easiest(self) -> list[Tight]:
        least, most = batch_range(self.problem.fixed, self.problem.num_queries)
        batches = sorted({min(max(size, least), most) for size in SMALL_BATCHES})
        keys = []
        for plan, split in enumerate(self.known.splits):
            fewest, highest = group_range(self.problem, split)
            keys += [(plan, batch, groups) for batch in batches
                     for groups in range(fewest, min(highest, fewest + MOST_GROUPS) + 1)]
        return [Tight(latency, reason, qps, plan, (batch, groups))
                for (qps, latency, reason), (plan, batch, groups) in zip(
                    self.known.evaluate(keys), keys, strict=True)]
