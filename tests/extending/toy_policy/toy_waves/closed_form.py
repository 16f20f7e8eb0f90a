"""The closed form: what a wave takes, and what it holds.

    period = encoding + (D - 1) iterations        qps = wave / period

with D the expected longest output of a wave, whose first token comes with its encoding.

All stages work one after the other, since a wave is one group. A wave keeps its first size here to
the end, which is more than it will take.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from toy_waves.config import WavesConfig, WavesControls
from xgpt.core.lengths import FloatArray
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate
from xprofiler.timing import TimingSource
from xsimulator import memory
from xsimulator.plans import StagePlan, StagePlans
from xsimulator.policies import geometric
from xsimulator.policies.figures import Assembler, EstimateArrays, by_plan, gathered, one_pool

_HELD = ("throughput_qps", "latency_s", "ttft_s", "tpot_s", "period_s", "encode_s", "decode_batch",
         "present", "kv_tokens", "memory_bytes", "stretch")


class Waves:
    """Evaluates configurations of one problem."""

    name = "waves"

    def __init__(self, problem: Problem, timing: TimingSource) -> None:
        self.problem, self.timing = problem, timing
        self._plans = StagePlans(problem, timing)
        self._assembler = Assembler(problem, timing)

    def grid(self, max_queries: int, plans: Sequence[tuple[int, int]]) -> list[WavesConfig]:
        """Configurations all over the space; the planner goes on from the best of them."""
        return [WavesConfig(wave_queries=size, tp_degree=degree, tp_gpus=gpus)
                for degree, gpus in plans for size in geometric(max_queries)]

    def evaluate(self, configs: Sequence[WavesConfig]) -> EstimateArrays:
        """The figures of many configurations."""
        figures = gathered(len(configs), (
            (rows, self._figures(self._plans.both(*plan),
                                 np.array([configs[row].wave_queries for row in rows], float)))
            for plan, rows in by_plan(configs).items()))
        return EstimateArrays(fits=figures["memory_bytes"] <= self._assembler.capacity_bytes,
                              **{name: figures[name] for name in _HELD})

    def estimate(self, config: WavesConfig) -> Estimate:
        """One configuration, as it is shown and executed."""
        plan = self._plans.both(config.tp_degree, config.tp_gpus)
        size = np.array([float(config.wave_queries)])
        figures = {name: float(values[0]) for name, values in self._figures(plan, size).items()}
        return self._assembler.estimate(
            WavesControls(wave_queries=config.wave_queries),
            one_pool(config, plan.stages, 1, figures["kv_tokens"]), figures,
            held_bytes=self._held_bytes(plan, size)[0])

    def _figures(self, plan: StagePlan, size: FloatArray) -> dict[str, FloatArray]:
        lengths, times = self.problem.lengths, plan.times
        below = np.cumsum(lengths.outputs.pmf)[:-1]
        longest = (1 - np.minimum(below, 1.0) ** size[:, None]).sum(axis=1) + 1
        attention = {degree: size * one for degree, one in times.mean_attention_s(size).items()}
        encode_s = times.encode_s(size * lengths.inputs.mean, size, attention).sum(axis=1)
        step_s = times.decode_s(size, lengths.inputs.mean + longest / 2).sum(axis=1)
        period_s = encode_s + (longest - 1) * step_s
        return {
            "throughput_qps": size / period_s, "latency_s": period_s, "period_s": period_s,
            "encode_s": encode_s, "ttft_s": encode_s, "tpot_s": step_s,
            "decode_iteration_s": step_s, "decode_iterations": longest,
            "encode_batch": size, "decode_batch": size, "present": size,
            "kv_tokens": self._kv_tokens(size), "stretch": np.zeros(len(size)),
            "memory_bytes": self._held_bytes(plan, size).max(axis=1)}

    def _kv_tokens(self, size: FloatArray) -> FloatArray:
        lengths = self.problem.lengths
        most = max(lengths.outputs.max, self.problem.default_max_tokens)
        return size * (lengths.inputs.max + most)

    def _held_bytes(self, plan: StagePlan, size: FloatArray) -> FloatArray:
        """[configs, stages] on each rank of a stage."""
        problem, stages = self.problem, plan.stages
        return (plan.weight_bytes + memory.kv_bytes(problem, stages, self._kv_tokens(size))
                + memory.activation_bytes(problem, stages, encode_batch=size, decode_batch=size))
