"""Rough formula for any one-pool rule, such as those of other packages: each query that ends is
replaced at once, up to what the groups hold. The replay shows what the rule really does."""

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from xgpt.core.controls import Controls
from xgpt.core.deployment import Deployment, Pool
from xgpt.core.lengths import FloatArray, IntArray
from xgpt.core.policies import policy
from xsimulator.rough.figures import Rough, Sizes, assembled
from xsimulator.rough.one_pool import Continuous, LaidOut
from xsimulator.rough.ranges import crossed, grid_of

RATIO = 1.25  # chosen: of the grid of a control variable


class Capacity(NamedTuple):
    """Groups of a rule, and the most queries that each holds."""

    groups: int
    slots: int


class AnyRule(Continuous):
    """Points: grids over the control variables of the policy's row."""

    def __init__(self, *given: Any) -> None:
        """See Formula's makers (xgpt.core.policies.Policy)."""
        super().__init__(*given)
        self._capacity_of = cache(self._ask)

    def points(self, plan: tuple[int, int]) -> IntArray:
        """See Formula."""
        fixed, most = self.problem.fixed, self._most_queries()
        return crossed(*(grid_of(min(one.most, most), fixed.value_of(one.name), RATIO,
                                 least=max(one.least, 1))
                         for one in policy(self.policy).variables))

    def _ask(self, pool: LaidOut, point: tuple[int, ...]) -> Capacity:
        """The capacity that the rule itself reports, for a schedule with room for one query."""
        controls, *_ = self._controls(point, 1, {})
        deployment = Deployment(pools=(Pool(
            name="all", role="both", stages=pool.plan.stages, num_groups=1,
            kv_tokens=self._workload.longest),), tp_degree=1, tp_gpus=0)
        none = dict.fromkeys((*Rough.__slots__, "tpot_s"), 0.0)
        rule = policy(self.policy).load("rules")(assembled(
            self.problem, self.timing, controls, deployment, none,
            Sizes(np.zeros(pool.stages), 1, 1, 0, 0)))
        return Capacity(rule.num_groups, rule.group_max_active)

    def _groups(self, pool: LaidOut, point: tuple[int, ...]) -> int:
        return self._capacity_of(pool, point).groups

    def _rough(self, pool: LaidOut, points: FloatArray) -> Rough:
        work = self._workload
        groups, slots = self._capacities(pool, points)
        rows, heads = self._step_sizes(pool, points)
        room = np.floor(pool.memory.most_tokens(self._capacity, rows, heads) / groups)
        tokens = np.clip(slots * work.longest, work.longest, np.maximum(room, work.longest))
        each = np.minimum(slots, tokens / work.reserve_at_work)
        cycle_s, ended, encode_s, iteration_s = self._apart(
            pool, each, np.full(len(points), np.inf), groups)
        return Rough.made(
            throughput_qps=groups * ended / cycle_s,
            latency_s=encode_s + work.watched * cycle_s, ttft_s=encode_s, encode_s=encode_s,
            iteration_s=iteration_s, period_s=cycle_s, decode_batch=groups * each,
            present=groups * each, kv_tokens=tokens * groups, memory_bytes=np.where(
                room >= work.longest, pool.memory.fullest(tokens * groups, rows, heads), np.inf))

    def _capacities(self, pool: LaidOut, points: FloatArray) -> FloatArray:
        """[2, configs] groups, and most queries of each."""
        return np.array([self._capacity_of(pool, tuple(map(int, point))) for point in points],
                        float).T

    def _step_sizes(self, pool: LaidOut, points: FloatArray) -> tuple[FloatArray, FloatArray]:
        _, slots = self._capacities(pool, points)
        return slots * max(self._workload.inputs.mean, 1.0) + self._workload.inputs.max, slots

    def _controls(self, point: tuple[int, ...], groups: int, found: dict[str, float],
                  ) -> tuple[Controls, float, float]:
        row = policy(self.policy)
        values = dict(zip(row.variable_names, point, strict=True))
        controls: Controls = row.load("controls")(policy=self.policy, **values)
        return controls, max(found.get("present", 1.0), 1.0), 1
