"""Replay of a whole job by an Estimate: its own rules over its own stages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np
from numpy.typing import ArrayLike

from xgpt.lengths import IntArray
from xgpt.problem import Problem
from xgpt.schedule import Estimate
from xprofiler.timing import TimingSource
from xrunner.rules.registry import rules_for
from xrunner.rules.steps import BatchingRule
from xrunner.rules.waa import WaaEncodeRule
from xsimulator.handover import HandoverCost
from xsimulator.replay.engine import Engine, Handover, Pool
from xsimulator.replay.records import ReplayResult
from xsimulator.replay.step_clock import StepClock
from xsimulator.stage_times import StageTimes


class Replayer:
    """Replays jobs by one Estimate; keeps the tables of step times between them."""

    def __init__(self, problem: Problem, timing: TimingSource, estimate: Estimate, *,
                 padded: bool | None = None) -> None:
        """padded: see xsimulator.policies.rra.Rra; None: as the timing source's kernels are."""
        self._problem, self._estimate = problem, estimate
        self._padded = timing.is_padded if padded is None else padded
        self._pools = [(role, tuple(stages)) for role, stages in groupby(
            estimate.stages, key=lambda stage: stage.role)]
        self._times = [
            StageTimes(problem.model, problem.cluster, timing, problem.dtype, stages,
                       mean_input=problem.lengths.inputs.mean) for _, stages in self._pools]
        self._handover = None if len(self._pools) == 1 else HandoverCost(
            problem, timing, estimate.stages)
        self._clocks: list[StepClock] = []
        self._max_context = 0

    def run(self, inputs: IntArray, outputs: IntArray, *, max_outputs: ArrayLike | None = None,
            rules: Sequence[BatchingRule] | None = None) -> ReplayResult:
        """Run queries of these lengths, [queries], in this order.

        max_outputs: most tokens each may generate, and so reserves (default: what the problem
        plans with). rules: others than the estimate's own, one per pool. Raises XgptError for a
        query that the schedule's KV budget can never hold.
        """
        inputs, outputs = np.asarray(inputs, np.int64), np.asarray(outputs, np.int64)
        most = np.broadcast_to(np.asarray(
            planned_outputs(self._problem) if max_outputs is None else max_outputs, np.int64),
            inputs.shape)
        own = rules or rules_for(self._estimate)
        pools = [Pool(name=role, rule=rule, clock=clock, padded=self._padded,
                      stages=tuple(stage.index for stage in stages), kv_tokens=kv_tokens)
                 for (role, stages), rule, clock, kv_tokens in zip(
                     self._pools, own, self._ready(inputs, np.maximum(outputs, most)),
                     self._kv_tokens(), strict=True)]
        handover = None
        if self._handover is not None:
            assert isinstance(own[0], WaaEncodeRule)
            handover = Handover(seconds=self._handover.seconds, release=own[0].release)
        return Engine(pools, inputs=inputs, outputs=outputs, reserve_tokens=inputs + most,
                      encode_gives_token=not self._problem.model.is_encoder_decoder,
                      handover=handover).run()

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
        return (estimate.kv_tokens,) if len(self._pools) == 1 else (
            estimate.encode_kv_tokens, estimate.kv_tokens)


def replay_job(problem: Problem, timing: TimingSource, estimate: Estimate, *, inputs: IntArray,
               outputs: IntArray, max_outputs: ArrayLike | None = None, padded: bool | None = None,
               rules: Sequence[BatchingRule] | None = None) -> ReplayResult:
    """One replay (see Replayer)."""
    return Replayer(problem, timing, estimate, padded=padded).run(
        inputs, outputs, max_outputs=max_outputs, rules=rules)


def planned_outputs(problem: Problem) -> int:
    """Output tokens that a query without a limit of its own reserves."""
    return max(problem.lengths.outputs.max, problem.default_max_tokens)
