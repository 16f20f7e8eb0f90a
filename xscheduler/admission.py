"""Which configurations a problem admits, and evaluating many of them once each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from xgpt.problem import Problem
from xprofiler.timing import TimingSource
from xscheduler.space import TensorPlan
from xsimulator.policies.rra import Rra, RraConfig

Point = tuple[int, int]  # encode_batch, decode_iterations


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What decides about one configuration."""

    throughput_qps: float
    latency_s: float
    memory_bytes: float
    present: float


class Admission:
    """Evaluates (plan, point)s of one problem, remembering each, and tells what forbids one."""

    def __init__(self, problem: Problem, timing: TimingSource, plans: Sequence[TensorPlan], *,
                 padded: bool) -> None:
        self.problem, self.plans = problem, tuple(plans)
        self.rra = Rra(problem, timing, padded=padded)
        self._known: dict[tuple[int, Point], Figures] = {}

    @property
    def num_evaluated(self) -> int:
        return len(self._known)

    def config(self, root: int, point: Point) -> RraConfig:
        plan = self.plans[root]
        return RraConfig(encode_batch=point[0], decode_iterations=point[1],
                         tp_degree=plan.tp_degree, tp_gpus=plan.tp_gpus,
                         decode_micro_batches=self.problem.fixed.decode_micro_batches)

    def evaluate(self, wanted: Iterable[tuple[int, Point]]) -> None:
        """Make the figures of these known."""
        new = sorted(set(wanted) - self._known.keys())
        if not new:
            return
        arrays = self.rra.evaluate([self.config(root, point) for root, point in new])
        for row, key in enumerate(new):
            self._known[key] = Figures(
                throughput_qps=float(arrays.throughput_qps[row]),
                latency_s=float(arrays.latency_s[row]),
                memory_bytes=float(arrays.memory_bytes[row]), present=float(arrays.present[row]))

    def figures(self, root: int, point: Point) -> Figures:
        self.evaluate([(root, point)])
        return self._known[root, point]

    def forbidden(self, figures: Figures, latency_bound_s: float,
                  tolerance: float = 0.0) -> str | None:
        """The constraint a configuration violates by more than `tolerance`, or None."""
        if figures.memory_bytes > self.rra.capacity_bytes:
            return "memory"
        if figures.latency_s > latency_bound_s * (1 + tolerance):
            return "latency"
        if figures.present > (self.problem.num_queries or math.inf) + 1e-9:
            return "number of queries"
        return None
