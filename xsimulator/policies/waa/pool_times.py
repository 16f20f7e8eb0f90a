"""How long the steps of WAA's two pools take, and what one query costs in a single group."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np

from xgpt.core.lengths import FloatArray
from xgpt.core.problem import Problem
from xprofiler.timing import TimingSource
from xsimulator.handover import HandoverCost
from xsimulator.occupancy import QueryFlow
from xsimulator.plans import PlanSource
from xsimulator.policies.waa.plans import WaaPlan

ROWS_RATIO = 1.03  # between the group sizes at which decode steps are tabulated
_ROWS_SPARE = 24  # of them beyond what is asked for: twice as large


class EncodeTimes(NamedTuple):
    """Encode steps of batches take such seconds [batches]."""

    between: FloatArray  # from one step to the next: the slowest stage, or the handover
    through: FloatArray  # of a step at the upper threshold of the workload adjustment
    handover: FloatArray


class PoolTimes:
    """The times of one problem's pools are asked for here; those of decode pools are tabulated."""

    def __init__(self, problem: Problem, timing: TimingSource, plans: PlanSource, flow: QueryFlow,
                 adjustment: float) -> None:
        self._problem, self._timing, self._plans = problem, timing, plans
        self._flow, self._adjustment = flow, adjustment
        self._inputs = problem.lengths.inputs
        self.mean_iterations = max(flow.mean_iterations, 1e-9)
        self._decoding: dict[WaaPlan, DecodeTable] = {}

    def encode_steps(self, plan: WaaPlan, batch: FloatArray, share: float = 1.0) -> FloatArray:
        """An encode step with `share` of the mean tokens takes such seconds [batches, stages]."""
        times = plan.encode.times
        attention = {d: share * batch * own for d, own in times.mean_attention_s(batch).items()}
        return times.encode_s(share * batch * self._inputs.mean, batch, attention)

    def longest_encode_steps(self, plan: WaaPlan, batch: FloatArray) -> FloatArray:
        """At the upper threshold of the workload adjustment it takes such seconds."""
        return self.encode_steps(plan, batch, 1 + self._adjustment)

    def encode(self, plan: WaaPlan, batch: FloatArray) -> EncodeTimes:
        handover = self.handover_s(plan, batch)
        slowest = self.encode_steps(plan, batch).max(axis=1)
        longest = self.longest_encode_steps(plan, batch).sum(axis=1)
        return EncodeTimes(np.maximum(slowest, handover), longest, handover)

    def handover_s(self, plan: WaaPlan, batch: FloatArray) -> FloatArray:
        """The queries that are not done with their first token are handed over in such seconds
        [batches]."""
        cost = HandoverCost(self._problem, self._timing, plan.encode.stages, plan.decode.stages)
        return cost.many(batch * self._inputs.mean * self._decoding_share)

    def decode(self, plan: WaaPlan, rows: FloatArray) -> tuple[FloatArray, FloatArray]:
        """A decode step of that many queries takes such seconds [rows] on the slowest stage, and
        through all."""
        times = plan.decode.times
        done = rows / max(self._flow.mean_iterations, 1.0)  # leave, and join, each iteration
        seconds = times.decode_s(rows, self._context(rows), moved=done * rows / (rows + done))
        if times.is_encoder_decoder:
            seconds = seconds + times.cross_kv_s(done * self._inputs.mean)
        return seconds.max(axis=1), seconds.sum(axis=1)

    def decode_table(self, plan: WaaPlan) -> DecodeTable:
        """The table of a plan's decode steps is kept."""
        if plan not in self._decoding:
            self._decoding[plan] = DecodeTable(self, plan)
        return self._decoding[plan]

    def encode_query_s(self, batch: FloatArray, degree: int) -> FloatArray:
        """C_E is one query's encoding through all layers of a single group."""
        times = self._plans.pool([tuple(range(degree))], "both").times
        attention = {d: batch * own for d, own in times.mean_attention_s(batch).items()}
        seconds: FloatArray = times.encode_s(batch * self._inputs.mean, batch, attention)[..., 0]
        return seconds / batch

    def decode_query_s(self, rows: FloatArray, degree: int) -> FloatArray:
        """C_D is one query's decoding through all layers of a single group, in steps of `rows`."""
        times = self._plans.pool([tuple(range(degree))], "both").times
        seconds: FloatArray = times.decode_s(rows, self._context(rows))[..., 0]
        return seconds / rows * self.mean_iterations

    def _context(self, rows: FloatArray) -> FloatArray:
        return self._flow.charged_context(rows, padded=self._timing.facts.is_padded)

    @cached_property
    def _decoding_share(self) -> float:
        """This share of the queries is not done with its first token, and is handed over."""
        fewer = 0 if self._problem.model.is_encoder_decoder else 1
        return float(self._problem.lengths.outputs.pmf[fewer:].sum())


class DecodeTable:
    """One decode pool's step times, the slowest stage's and the sum, are tabulated over group
    sizes."""

    def __init__(self, times: PoolTimes, plan: WaaPlan) -> None:
        self._times, self._plan = times, plan
        self._slowest = self._slowest_rises = np.empty(0)  # at each node, and to the next
        self._through = self._through_rises = np.empty(0)

    def iteration_s(self, decoding: FloatArray, groups: FloatArray) -> FloatArray:
        """T_iter is that of `decoding` queries in so many groups; groups without a query take no
        step."""
        rows = np.maximum(decoding / groups, 1.0)
        steps = np.minimum(groups, np.maximum(decoding, 1.0))
        position = np.log(rows) / np.log(ROWS_RATIO)
        top = float(position.max(initial=0.0))
        if top >= len(self._slowest_rises):
            self._tabulate(int(top) + 2 + _ROWS_SPARE)
        index = position.astype(np.intp)
        position -= index
        with np.errstate(invalid="ignore"):
            slowest = self._slowest.take(index) + position * self._slowest_rises.take(index)
            through = self._through.take(index) + position * self._through_rises.take(index)
        return np.asarray(np.maximum(steps * slowest, through))

    def _tabulate(self, count: int) -> None:
        sizes = np.asarray(ROWS_RATIO ** np.arange(count), float)
        self._slowest, self._through = self._times.decode(self._plan, sizes)
        with np.errstate(invalid="ignore"):  # from one refused size to the next
            self._slowest_rises = np.diff(self._slowest)
            self._through_rises = np.diff(self._through)
