"""The oracle: every configuration of a grid, evaluated. For tests and small spaces."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from xgpt.problem import Problem
from xprofiler.timing import TimingSource
from xscheduler.admission import Admission
from xscheduler.space import tensor_plans, timed_plans
from xsimulator.policies.rra import RraConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class BruteForceResult:
    """The best admissible configuration, if there is one. `tightest_latency_s` is the smallest
    among those that memory and the number of queries admit."""

    config: RraConfig | None
    throughput_qps: float | None
    tightest_latency_s: float | None
    num_configs: int


def best_of_grid(problem: Problem, timing: TimingSource, *, encode_batches: Iterable[int],
                 decode_iterations: Iterable[int], padded: bool = True) -> BruteForceResult:
    """Evaluate the whole grid over every tensor plan the problem allows. Ties go to the smaller
    degree, then GPUs, batch, iterations."""
    plans = timed_plans(tensor_plans(problem.model, problem.cluster, problem.fixed),
                        problem.cluster, timing)
    admission = Admission(problem, timing, plans, padded=padded)
    iterations = list(decode_iterations)
    keys = [(root, (batch, n)) for root in range(len(plans)) for batch in encode_batches
            for n in iterations]
    admission.evaluate(keys)
    bound_s = problem.constraint.latency_s
    best = min(((-admission.figures(key).throughput_qps, key) for key in keys
                if admission.forbidden(key, bound_s) is None), default=None)
    return BruteForceResult(
        config=None if best is None else admission.config(best[1]),
        throughput_qps=None if best is None else -best[0], num_configs=len(keys),
        tightest_latency_s=min((admission.figures(key).latency_s for key in keys
                                if admission.crowding(key) is None), default=None))
