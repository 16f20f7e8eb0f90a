"""Rough formula for any one-pool rule, such as those of other packages. It assumes that each
request that ends is replaced at once, up to the capacity of the groups."""

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from xgpt.core.controls import Controls
from xgpt.core.deployment import Deployment, Pool
from xgpt.core.lengths import FloatArray, IntArray
from xgpt.core.policies import policy
from xsimulator.rough.figures import RoughFigures, Sizes, make_estimate
from xsimulator.rough.one_pool import Continuous, TimedPool
from xsimulator.rough.ranges import cross_product, grid_of

RATIO = 1.25  # chosen: of the grid of a control variable


class Capacity(NamedTuple):
    """Number of groups of a rule, and the most requests that each group holds."""

    groups: int
    slots: int


class AnyRule(Continuous):
    """Rough formula of a rule with one pool. A point has one value for each control variable of the
    policy's row, on a grid."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._capacity_of = cache(self._ask)

    def points(self, plan: tuple[int, int]) -> IntArray:
        fixed, most = self.problem.fixed, self._most_queries()
        return cross_product(*(grid_of(min(one.most, most), fixed.value_of(one.name), RATIO,
                                       least=max(one.least, 1))
                               for one in policy(self.policy).variables))

    def _ask(self, pool: TimedPool, point: tuple[int, ...]) -> Capacity:
        """The capacity that the rule itself reports, for a deployment with room for one request."""
        controls, *_ = self._controls(point, 1, {})
        deployment = Deployment(pools=(Pool(
            name="all", role="both", stages=pool.plan.stages, num_groups=1,
            kv_tokens=self._workload.longest),), tp_degree=1, tp_gpus=0)
        none = dict.fromkeys((*RoughFigures.__slots__, "tpot_s"), 0.0)
        rule = policy(self.policy).load("rules")(make_estimate(
            self.problem, self.timing, controls, deployment, none,
            Sizes(np.zeros(pool.stages), 1, 1, 0, 0)))
        return Capacity(rule.num_groups, rule.group_max_active)

    def _groups(self, pool: TimedPool, point: tuple[int, ...]) -> int:
        return self._capacity_of(pool, point).groups

    def _rough(self, pool: TimedPool, points: FloatArray) -> RoughFigures:
        work = self._workload
        groups, slots = self._capacities(pool, points)
        rows, heads = self._step_sizes(pool, points)
        room = np.floor(pool.memory.most_tokens(self._capacity, rows, heads) / groups)
        tokens = np.clip(slots * work.longest, work.longest, np.maximum(room, work.longest))
        each = np.minimum(slots, tokens / work.tokens_at_work)
        cycle_s, ended, encode_s, iteration_s = self._separate(
            pool, each, np.full(len(points), np.inf), groups)
        return RoughFigures.from_columns(
            throughput_qps=groups * ended / cycle_s,
            latency_s=encode_s + work.watched * cycle_s, ttft_s=encode_s, encode_s=encode_s,
            iteration_s=iteration_s, period_s=cycle_s, decode_batch=groups * each,
            present=groups * each, kv_tokens=tokens * groups, memory_bytes=np.where(
                room >= work.longest, pool.memory.fullest(tokens * groups, rows, heads), np.inf))

    def _capacities(self, pool: TimedPool, points: FloatArray) -> FloatArray:
        """[2, configs] number of groups, and the most requests that each holds."""
        return np.array([self._capacity_of(pool, tuple(map(int, point))) for point in points],
                        float).T

    def _step_sizes(self, pool: TimedPool, points: FloatArray) -> tuple[FloatArray, FloatArray]:
        _, slots = self._capacities(pool, points)
        return slots * max(self._workload.inputs.mean, 1.0) + self._workload.inputs.max, slots

    def _controls(self, point: tuple[int, ...], groups: int, found: dict[str, float],
                  ) -> tuple[Controls, float, float]:
        row = policy(self.policy)
        values = dict(zip(row.variable_names, point, strict=True))
        controls: Controls = row.load("controls")(policy=self.policy, **values)
        return controls, max(found.get("present", 1.0), 1.0), 1
