"""The oracle: every configuration of a grid, evaluated. For tests and small spaces."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from xgpt.core.problem import Problem
from xprofiler.interpolation import REFUSED_BEYOND
from xprofiler.timing import TimingSource
from xscheduler.tensor_plans import tensor_plans
from xscheduler.spaces.waa import group_range
from xsimulator.policies import make_policy
from xsimulator.policies.rra.config import RraConfig
from xsimulator.policies.waa.config import WaaConfig
from xsimulator.policies.waa.plans import WaaPlans


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BruteForce:
    """Every point of a policy's grid, evaluated: [configs] throughput, latency, and whether
    memory, the number of queries, the timing source and the bounds on the tokens' pace admit it."""

    configs: tuple[Any, ...]
    throughput_qps: np.ndarray
    latency_s: np.ndarray
    is_roomy: np.ndarray

    def best(self, latency_bound_s: float) -> tuple[Any | None, float]:
        """(configuration, throughput_qps) of the best admissible one; (None, 0) if there is none.
        Ties go to the earlier."""
        score = np.where(self.is_roomy & (self.latency_s <= latency_bound_s),
                         self.throughput_qps, 0.0)
        if not (score > 0).any():
            return None, 0.0
        row = int(np.argmax(score))
        return self.configs[row], float(score[row])

    @property
    def tightest_latency_s(self) -> float:
        """The least latency of those there is room for; infinite if there is none."""
        return float(np.min(self.latency_s[self.is_roomy], initial=math.inf))


def evaluate_grid(policy: str, problem: Problem, timing: TimingSource, *,
                  encode_batches: Sequence[int], others: Sequence[int] | None = None
                  ) -> BruteForce:
    """Of "rra" (others: decode_iterations), "waa-c" or "waa-m" (decode_micro_batches; None: all
    that are searched), over every tensor plan the problem allows."""
    plans = tensor_plans(problem, timing)
    made: Any = make_policy(policy, problem, timing)
    configs: list[Any] = []
    for plan in plans:
        degree, gpus = plan.tp_degree, plan.tp_gpus
        if policy == "rra":
            assert others is not None
            configs += [RraConfig(encode_batch=batch, decode_iterations=n, tp_degree=degree,
                                  tp_gpus=gpus,
                                  decode_micro_batches=problem.fixed.decode_micro_batches)
                        for batch in encode_batches for n in others]
            continue
        split = WaaPlans(made.plans, degree, gpus)
        if not len(split.encode_devices):
            continue
        fewest, most = group_range(problem, split)
        configs += [WaaConfig(encode_batch=batch, decode_micro_batches=groups, tp_degree=degree,
                              tp_gpus=gpus)
                    for batch in encode_batches for groups in others or range(fewest, most + 1)]
    if not configs:
        return BruteForce(configs=(), throughput_qps=np.empty(0), latency_s=np.empty(0),
                          is_roomy=np.empty(0, bool))
    found = made.evaluate(configs)
    # its own statement of xscheduler.admissible, which it checks
    is_roomy = (found.fits & (found.present <= (problem.num_queries or math.inf) + 1e-9)
                & (found.stretch <= REFUSED_BEYOND)
                & (found.ttft_s <= problem.constraint.limit_s("ttft"))
                & (found.tpot_s <= problem.constraint.limit_s("tpot")))
    return BruteForce(configs=tuple(configs), throughput_qps=found.throughput_qps,
                      latency_s=found.latency_s, is_roomy=is_roomy)
