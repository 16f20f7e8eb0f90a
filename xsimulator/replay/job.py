"""Replay of a whole job by an Estimate: its own rules over its own stages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np
from numpy.typing import ArrayLike

from xgpt.cluster import Link
from xgpt.lengths import FloatArray, IntArray
from xgpt.problem import Problem
from xgpt.schedule import Estimate, StageAssignment
from xgpt.units import DTYPE_BYTES
from xprofiler.timing import TimingSource
from xrunner.rules.registry import rules_for
from xrunner.rules.steps import BatchingRule
from xrunner.rules.waa import WaaEncodeRule
from xsimulator import memory
from xsimulator.replay.engine import Engine, Handover, Pool
from xsimulator.replay.records import ReplayResult
from xsimulator.replay.step_clock import StepClock
from xsimulator.stage_times import StageTimes


def replay_job(problem: Problem, timing: TimingSource, estimate: Estimate, *, inputs: IntArray,
               outputs: IntArray, max_outputs: ArrayLike | None = None, padded: bool = True,
               rules: Sequence[BatchingRule] | None = None) -> ReplayResult:
    """Run queries of these lengths, [queries], in this order.

    max_outputs: most tokens each may generate, and so reserves (default: what the problem plans
    with). padded: see xsimulator.policies.rra.Rra. rules: others than the estimate's own, one per
    pool. Raises XgptError for a query that the schedule's KV budget can never hold.
    """
    inputs, outputs = np.asarray(inputs, np.int64), np.asarray(outputs, np.int64)
    most = planned_outputs(problem) if max_outputs is None else np.asarray(max_outputs, np.int64)
    own_rules = rules or rules_for(estimate, problem.lengths.inputs.mean)
    max_context = int((inputs + np.maximum(outputs, most)).max(initial=1)) + 1
    if not estimate_ends_early(estimate):  # dead rows go on to the longest of their batch
        max_context = int(inputs.max(initial=1) + max(outputs.max(initial=1), np.max(most))) + 1
    pools = []
    by_role = groupby(estimate.stages, key=lambda stage: stage.role)
    for (role, stages), rule in zip(((r, tuple(s)) for r, s in by_role), own_rules, strict=True):
        times = StageTimes(problem.model, problem.cluster, timing, problem.dtype, stages,
                           mean_input=problem.lengths.inputs.mean)
        pools.append(Pool(
            name=role, rule=rule, clock=StepClock(times, max_context=max_context), padded=padded,
            stages=tuple(stage.index for stage in stages), kv_tokens=estimate.kv_tokens))
    handover = None
    if len(pools) == 2:
        encode_rule = own_rules[0]
        assert isinstance(encode_rule, WaaEncodeRule)
        handover = Handover(seconds=HandoverCost(problem, timing, estimate.stages).seconds,
                            release=encode_rule.release)
    return Engine(pools, inputs=inputs, outputs=outputs, reserve_tokens=inputs + most,
                  encode_gives_token=not problem.model.is_encoder_decoder,
                  handover=handover).run()


def estimate_ends_early(estimate: Estimate) -> bool:
    """Whether queries leave their batch when they are done."""
    return estimate.policy not in ("ft", "dsi")


def planned_outputs(problem: Problem) -> int:
    """Output tokens that a query without a limit of its own reserves."""
    return max(problem.lengths.outputs.max, problem.default_max_tokens)


class HandoverCost:
    """Seconds from the encode pool's caches to the decode pool's (paper section 3, XRunner).

    Stages send at once, each to all that need its layers, so the rank with the most to send, or to
    receive, decides. An encoder-decoder model's encoder output goes whole to every decode stage.
    """

    def __init__(self, problem: Problem, timing: TimingSource,
                 stages: Sequence[StageAssignment]) -> None:
        model, item = problem.model, DTYPE_BYTES[problem.dtype]
        encode = [stage for stage in stages if stage.role == "encode"]
        decode = [stage for stage in stages if stage.role == "decode"]
        self._timing, self._link = timing, _widest(problem, encode, decode)
        if model.is_encoder_decoder:
            self.bytes_per_token = float(model.hidden_size * item * len(decode))
        else:
            self.bytes_per_token = float(max(
                memory.kv_bytes(model, pool, problem.dtype, 1.0).max()
                for pool in (encode, decode)))

    def seconds(self, tokens: float) -> float:
        return float(self.many(np.asarray(tokens, float)))

    def many(self, tokens: FloatArray) -> FloatArray:
        """Of each number of tokens."""
        return self._timing.handover_s(tokens * self.bytes_per_token, self._link)


def _widest(problem: Problem, encode: Sequence[StageAssignment],
            decode: Sequence[StageAssignment]) -> Link:
    """Between the ranks that are furthest apart: the slowest of the links used."""
    cluster = problem.cluster
    return cluster.link_between(encode[0].ranks[0], decode[-1].ranks[-1])
