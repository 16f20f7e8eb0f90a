"""Upper bound on the throughput of one pool of stages. Symbols as in xsimulator.bound."""

import math
from collections.abc import Callable
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np

from xgpt.core.lengths import BoolArray, FloatArray
from xgpt.core.problem import Problem
from xsimulator import memory
from xsimulator.convex_steps import HALVINGS, RATIO, ROWS
from xsimulator.demand import Demand
from xsimulator.layer_times import LayerTimes
from xsimulator.plans import StagePlan
from xsimulator.step_bounds import Lines, PoolSteps


class Curve(NamedTuple):
    """[m] upper bounds, requests/s, on schedules with a latency up to `latency_s`, which rises."""

    qps: FloatArray
    latency_s: FloatArray


class PoolBound:
    """Upper bounds for one pool. Arrays [m] are over the grid of rows that a cycle decodes."""

    def __init__(self, plan: StagePlan, problem: Problem, demand: Demand,
                 lines: Callable[[LayerTimes, int], Lines]) -> None:
        """lines: see PoolSteps."""
        self.demand, self._constraint = demand, problem.constraint
        self.steps = PoolSteps(plan, problem.cluster.num_devices, demand, lines)
        # tokens that fit on the fullest stage beside its weights and a step of one row
        held = memory.StageBytes(problem, plan.stages)
        device = problem.cluster.device
        free = memory.cache_bytes(device, memory.capacity_bytes(device) - plan.weight_bytes
                                  - held.step(1.0, 1.0))
        with np.errstate(divide="ignore", invalid="ignore"):
            room = np.where(free > 0, free / held.kv(1.0), 0.0)
        self.room_tokens = float(np.min(room))
        self.curve = cache(self._make_curve)
        self._pace_s = self._constraint.limit_s("tpot")

    def alone_qps(self, limit_s: float) -> float:
        """Upper bound, requests/s, on this pool alone with a latency up to `limit_s`."""
        low, high = self._rows
        if not len(low) or not self._keeps_first():
            return 0.0
        groups, is_met = self._fewest_groups(low, high, 1.0, limit_s)
        cycle_s, alone_s = self._cycle(low, high, groups, is_met, 1.0)
        is_kept = self._latency_s(low, groups, 1.0, is_phased=True) <= limit_s
        is_kept &= self._path_latency_s(low, high, is_phased=True) <= limit_s
        is_kept &= alone_s <= self._pace_s
        qps = high / (self.demand.iterations * cycle_s)
        return float(qps[is_kept].max(initial=0.0))

    def _make_curve(self, share: float) -> Curve:
        """Upper bounds, by latency, on a decode pool that encodes this share of the requests."""
        low, high = self._rows
        groups, is_met = self._fewest_groups(low, high, share, math.inf)
        if not len(low):
            return Curve(low, low)
        cycle_s, alone_s = self._cycle(low, high, groups, is_met, share)
        is_kept = alone_s <= self._pace_s
        qps = high / (self.demand.iterations * cycle_s)
        latency_s = self._latency_s(low, groups, share, is_phased=False)
        if share == 0:
            latency_s = np.maximum(latency_s, self._path_latency_s(low, high, is_phased=False))
        return Curve(qps[is_kept], np.maximum.accumulate(latency_s[is_kept]))

    @cached_property
    def most_decode_qps(self) -> float:
        """Upper bound, requests/s, if the pool only decodes."""
        return float(self.curve(0.0).qps.max(initial=0.0))

    def _keeps_first(self) -> bool:
        """Whether an input of the TTFT limit's quantile, encoded alone, keeps that limit."""
        bound = self._constraint.bound_on("ttft")
        return bound is None or self.steps.encode_one_s(float(
            self.demand.lengths.inputs.quantile(bound.quantile))) <= bound.limit_s

    @cached_property
    def _rows(self) -> tuple[FloatArray, FloatArray]:
        """([m] least, [m] most) rows of a cycle; empty if no request fits into memory."""
        most = min(self.room_tokens / self.demand.held, RATIO * ROWS[-1])
        low = ROWS[most >= ROWS]
        return low, np.minimum(low * RATIO, most)

    def _fewest_groups(self, low: FloatArray, high: FloatArray, share: float,
                       limit_s: float) -> tuple[FloatArray, BoolArray]:
        """[m] (lower bound on the G at which the stages, not a group's own steps, set the cycle and
        the latency is kept; whether there is such a G)."""
        steps = self.steps.of_share(share)

        # fewer rows beside the request that the limit is for make its latency shorter
        sizes = [low] if not self.demand.excess else [low, self._batch_beside(low)[0]]

        def is_met(groups: FloatArray) -> BoolArray:
            enough: BoolArray = np.zeros(len(low), bool)
            for rows in sizes:
                each = np.maximum(rows / groups, 1.0)
                enough |= steps.at(steps.path_s, each) <= groups * steps.at(
                    steps.busy_s, each).max(axis=0)
            if limit_s < math.inf:
                enough &= self._path_latency_s(low, groups, is_phased=True) <= limit_s
            return enough & (steps.at(steps.path_s, np.maximum(low / groups, 1.0)) <= self._pace_s)

        few, many = np.ones(len(low)), high.copy()
        is_ever = is_met(many)
        for _ in range(HALVINGS):
            middle = np.sqrt(few * many)
            enough = is_met(middle)
            few, many = np.where(enough, few, middle), np.where(enough, middle, many)
        return few, is_ever

    def _cycle(self, low: FloatArray, high: FloatArray, groups: FloatArray, is_met: BoolArray,
               share: float) -> tuple[FloatArray, FloatArray]:
        """[m] lower bounds on (seconds of a cycle, seconds of a cycle without encoding)."""
        steps, each = self.steps.of_share(share), np.maximum(low / groups, 1.0)
        path_s = steps.at(steps.path_s, np.maximum(low / high, 1.0))
        busy_s, alone_s = (groups * steps.at(own, each).max(axis=0)
                           for own in (steps.busy_s, steps.alone_s))
        return np.where(is_met, busy_s, path_s), np.maximum(alone_s, path_s)

    def _latency_s(self, rows: FloatArray, groups: FloatArray, share: float, *,
                   is_phased: bool) -> FloatArray:
        """[m] lower bound on the latency, from the busiest stage's work."""
        demand, steps, (present, queries, together) = (
            self.demand, self.steps.of_share(share), self._batch_beside(rows))
        each = np.maximum(present / groups, 1.0)
        busy, alone = (groups * steps.at(own, each) for own in (steps.busy_s, steps.alone_s))
        encode_s = (busy - alone) * demand.iterations / present  # of a request
        latency = demand.watched * alone + demand.turnover * (present - 1) * encode_s
        if is_phased:
            latency = np.minimum(latency, (
                together * alone + (demand.watched - together) * steps.alone_s[:, :1]
                # half of the others' encoding, at most what falls into the cycles together
                + np.minimum((queries - 1) / 2, together * present / demand.iterations) * encode_s))
        return np.asarray(self.steps.encode_watched_s * (share > 0) + latency.max(axis=0))

    def _path_latency_s(self, rows: FloatArray, groups: FloatArray, *,
                        is_phased: bool) -> FloatArray:
        """[m] lower bound on the latency, from the steps of the request's own group."""
        steps, (present, _, together) = self.steps.of_share(0.0), self._batch_beside(rows)
        path_s = steps.at(steps.path_s, np.maximum(present / groups, 1.0))
        if not is_phased:
            return np.asarray(self.demand.watched * path_s)
        return np.asarray(self.steps.encode_watched_s + together * path_s
                          + (self.demand.watched - together) * steps.path_s[0])

    def _batch_beside(self, rows: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """[m] (rows with and beside a request of the limit's quantile; requests of a batch that is
        decoded to its end; iterations that the request spends with others in it)."""
        present = np.maximum(rows - self.demand.excess, 1.0)
        return present, *self.demand.in_batches(present)
