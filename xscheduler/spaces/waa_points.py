"""WAA configurations of one problem, as points (encode_batch, decode_micro_batches) of tensor
plans: their figures, and what forbids them. Remembers what it was asked, so that searches under
several latency bounds share it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from xgpt.core.problem import Problem
from xscheduler.admissible import Limit, crowding
from xscheduler.spaces.tensor_plans import TensorPlan
from xsimulator.policies.waa.bounds import WaaBounds
from xsimulator.policies.waa.closed_form import Waa
from xsimulator.policies.waa.config import WaaConfig
from xsimulator.policies.waa.plans import WaaPlans

GROUPS_PER_STAGE = 2  # at most


class WaaPoints:
    """Evaluates points of one problem over its tensor plans."""

    def __init__(self, waa: Waa, plans: Sequence[TensorPlan]) -> None:
        self.waa, self.plans = waa, tuple(plans)
        self.bounds = WaaBounds(waa)
        self.splits = [waa.split(plan.tp_degree, plan.tp_gpus) for plan in plans]
        self._known: dict[tuple[int, int, int], tuple[float, float, Limit]] = {}

    @property
    def num_evaluated(self) -> int:
        return len(self._known)

    def config(self, plan: int, point: tuple[int, ...]) -> WaaConfig:
        return WaaConfig(encode_batch=point[0], decode_micro_batches=point[1],
                         tp_degree=self.plans[plan].tp_degree, tp_gpus=self.plans[plan].tp_gpus)

    def evaluate(self, keys: Sequence[tuple[int, int, int]]) -> list[tuple[float, float, Limit]]:
        """(throughput_qps, latency_s, what forbids it apart from latency) of each (plan, encode
        batch, groups)."""
        new = [key for key in dict.fromkeys(keys) if key not in self._known]
        if new:
            found = self.waa.evaluate([self.config(key[0], key[1:]) for key in new])
            limits = crowding(found.fits, found.present, found.stretch,
                              self.waa.problem.num_queries or math.inf)
            for key, *figures, limit in zip(
                    new, found.throughput_qps.tolist(), found.latency_s.tolist(), limits.tolist(),
                    strict=True):
                self._known[key] = (figures[0], figures[1], Limit(limit))
        return [self._known[key] for key in keys]


def group_range(problem: Problem, split: WaaPlans) -> tuple[int, int]:
    """Fewest and most decode_micro_batches to consider."""
    if problem.fixed.decode_micro_batches is not None:
        return problem.fixed.decode_micro_batches, problem.fixed.decode_micro_batches
    plan = split.plan(int(split.encode_devices[0]))
    return 1, max(GROUPS_PER_STAGE * len(plan.decode.stages), 1)
