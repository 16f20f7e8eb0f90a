"""WAA's space: encode_batch x decode_micro_batches under every tensor plan that leaves devices for
both pools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from xgpt.core.controls import max_in_system
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate
from xprofiler.made_sources import Remembered
from xprofiler.timing import TimingSource
from xscheduler.spaces.space import SMALL_BATCHES, Selection, Tight
from xscheduler.spaces.tensor_plans import TensorPlan, batch_range
from xscheduler.spaces.waa_examiner import WaaExaminer
from xscheduler.spaces.waa_points import WaaPoints, group_range
from xsimulator.policies import make_policy
from xsimulator.policies.waa.plans import WaaPlans

MOST_GROUPS = 4  # decode_micro_batches above the fewest, for the tightest latency


class WaaSpace:
    """See xscheduler.spaces.space.Space. `name` says how layers are divided."""

    variables = ("encode_batch", "decode_micro_batches")

    def __init__(self, name: str, problem: Problem, timing: TimingSource,
                 plans: Sequence[TensorPlan]) -> None:
        waa: Any = make_policy(name, problem, Remembered(timing))
        self.name, self.problem = name, problem
        self.plans = tuple(plan for plan in plans if len(
            WaaPlans(waa.plans, plan.tp_degree, plan.tp_gpus).encode_devices))
        self.points = WaaPoints(waa, self.plans)

    @property
    def num_evaluated(self) -> int:
        return self.points.num_evaluated

    def examiner(self, latency_bound_s: float, gap: float, floor_qps: float) -> WaaExaminer:
        return WaaExaminer(self.points, latency_bound_s, gap=gap, floor_qps=floor_qps)

    def estimate(self, plan: int, point: tuple[int, ...]) -> Estimate:
        return self.points.waa.estimate(self.points.config(plan, point))

    def figures(self, plan: int, point: tuple[int, ...]) -> tuple[float, float]:
        qps, latency_s, _ = self.points.evaluate([(plan, point[0], point[1])])[0]
        return qps, latency_s

    def beyond(self, tight: Tight) -> str:
        return ""

    def present(self, tight: Tight) -> float:
        return float(max_in_system(self.estimate(tight.plan, tight.point).controls))

    def easiest(self) -> list[Tight]:
        least, most = batch_range(self.problem.fixed, self.problem.num_queries)
        batches = sorted({min(max(size, least), most) for size in SMALL_BATCHES})
        keys = []
        for plan, split in enumerate(self.points.splits):
            fewest, highest = group_range(self.problem, split)
            keys += [(plan, batch, groups) for batch in batches
                     for groups in range(fewest, min(highest, fewest + MOST_GROUPS) + 1)]
        return [Tight(latency, limit, qps, plan, (batch, groups))
                for (qps, latency, limit), (plan, batch, groups) in zip(
                    self.points.evaluate(keys), keys, strict=True)]

    def selection(self, num_queries: int) -> Selection:
        """The closed form's grid, moved to what the job fixes."""
        fixed, waa = self.problem.fixed, self.points.waa
        pins = {name: value for name in self.variables
                if (value := getattr(fixed, name)) is not None}
        grid = waa.grid(num_queries, [(plan.tp_degree, plan.tp_gpus) for plan in self.plans])
        return Selection(policy=self.name, closed_form=waa, configs=list(dict.fromkeys(
            replace(config, **pins) for config in grid)))
