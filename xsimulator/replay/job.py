"""Replay of a whole job by an Estimate: its own rules over its own stages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np
from numpy.typing import ArrayLike

from xgpt.core.lengths import IntArray
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate
from xprofiler.timing import TimingSource
from xrunner.rules.steps import BatchingRule, rules_for
from xrunner.rules.waa import WaaEncodeRule
from xsimulator.handover import HandoverCost
from xsimulator.layer_times import LayerTimes
from xsimulator.replay.engine import run
from xsimulator.replay.flow import HandoverPlan
from xsimulator.replay.pool import PoolPlan
from xsimulator.replay.queries import Queries
from xsimulator.replay.records import ReplayResult
from xsimulator.replay.sharing import ROUNDS, SharedClock, slow_downs
from xsimulator.replay.step_clock import Clock, StepClock
from xsimulator.stage_times import StageTimes


class Replayer:
    """Replays jobs by one Estimate; keeps the tables of step times between them."""

    def __init__(self, problem: Problem, timing: TimingSource, estimate: Estimate) -> None:
        self._problem, self._estimate = problem, estimate
        self._pools = [(role, tuple(stages)) for role, stages in groupby(
            estimate.deployment.stages, key=lambda stage: stage.role)]
        layers = LayerTimes.of(problem, timing)
        self._times = [StageTimes(layers, problem.cluster, stages) for _, stages in self._pools]
        self._handover = None if len(self._pools) == 1 else HandoverCost(
            problem, timing, estimate.deployment.stages)
        self._sharing = timing.facts.sharing
        self._clocks: list[StepClock] = []
        self._max_context = 0

    def run(self, inputs: IntArray, outputs: IntArray, *, max_outputs: ArrayLike | None = None,
            rules: Sequence[BatchingRule] | None = None,
            clocks: Sequence[Clock] | None = None) -> ReplayResult:
        """Run queries of these lengths, [queries], in this order.

        max_outputs: most tokens each may generate, and so reserves (default: what the problem
        plans with). rules, clocks: others than the estimate's own, one per pool. Raises XgptError
        for a query that the schedule's KV budget can never hold.
        """
        inputs, outputs = np.asarray(inputs, np.int64), np.asarray(outputs, np.int64)
        most = np.broadcast_to(np.asarray(
            planned_outputs(self._problem) if max_outputs is None else max_outputs, np.int64),
            inputs.shape)
        if clocks is not None or rules is not None or self._sharing <= 1:
            return self._once(inputs, outputs, most, rules or rules_for(self._estimate),
                              clocks or self._ready(inputs, np.maximum(outputs, most)))
        return self._sharing_cores(inputs, outputs, most)

    def _sharing_cores(self, inputs: IntArray, outputs: IntArray, most: IntArray) -> ReplayResult:
        """See xsimulator.replay.sharing."""
        clocks = self._ready(inputs, np.maximum(outputs, most))
        cores = sum(stage.tp_degree for stage in self._estimate.deployment.stages) / self._sharing
        factors = [[1.0] * len(stages) for _, stages in self._pools]
        for left in reversed(range(ROUNDS)):
            result = self._once(inputs, outputs, most, rules_for(self._estimate), [
                SharedClock(clock, own) for clock, own in zip(clocks, factors, strict=True)])
            if left:
                factors = [[slow / self._sharing for slow in own] for own in slow_downs(
                    result, self._estimate.deployment.stages, cores)]
        return result

    def _once(self, inputs: IntArray, outputs: IntArray, most: IntArray,
              own: Sequence[BatchingRule], clocks: Sequence[Clock]) -> ReplayResult:
        pools = [PoolPlan(name=role, role=role, rule=rule, clock=clock, kv_tokens=kv_tokens,
                          stages=tuple(stage.index for stage in stages))
                 for (role, stages), rule, clock, kv_tokens in zip(
                     self._pools, own, clocks, self._kv_tokens(), strict=True)]
        handovers = []
        if self._handover is not None:
            assert isinstance(own[0], WaaEncodeRule)
            handovers = [HandoverPlan(seconds=self._handover.seconds, release=own[0].release)]
        return run(Queries(inputs=inputs, outputs=outputs, reserve_tokens=inputs + most,
                           encode_gives_token=not self._problem.model.is_encoder_decoder),
                   pools, handovers)

    def _ready(self, inputs: IntArray, most: IntArray) -> list[StepClock]:
        """The pools' clocks, with tables up to these lengths. A dead row of a static batch grows
        to the longest output, whatever its own."""
        longest = int(inputs.max(initial=1) + most.max(initial=1)) + 1
        if longest > self._max_context:
            self._max_context = longest
            self._clocks = [StepClock(times, max_context=longest) for times in self._times]
        return self._clocks

    def _kv_tokens(self) -> tuple[int, ...]:
        estimate = self._estimate
        return (estimate.deployment.kv_tokens,) if len(self._pools) == 1 else (
            estimate.deployment.encoding.kv_tokens, estimate.deployment.kv_tokens)


def replay_job(problem: Problem, timing: TimingSource, estimate: Estimate, *, inputs: IntArray,
               outputs: IntArray, max_outputs: ArrayLike | None = None,
               rules: Sequence[BatchingRule] | None = None) -> ReplayResult:
    """One replay (see Replayer)."""
    return Replayer(problem, timing, estimate).run(
        inputs, outputs, max_outputs=max_outputs, rules=rules)


def planned_outputs(problem: Problem) -> int:
    """Output tokens that a query without a limit of its own reserves."""
    return max(problem.lengths.outputs.max, problem.default_max_tokens)
