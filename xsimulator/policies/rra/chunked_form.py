"""The closed form of RRA's configurations that encode in chunks: their figures, and what room each
takes. What they hold and how long that takes is in rra.chunked."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from xgpt.core.controls import EvenBatches, RraControls
from xgpt.core.lengths import FloatArray, IntArray
from xgpt.core.schedule import Estimate
from xsimulator.plans import PlanSource, StagePlan
from xsimulator.policies.figures import (
    Assembler,
    EstimateArrays,
    by_plan,
    gathered,
    one_pool,
    per_token_s,
)
from xsimulator.policies.measured_range import MeasuredRange
from xsimulator.policies.rra.chunked import ChunkConfigs, Chunked, ChunkLoads
from xsimulator.policies.rra.config import RraConfig

# plans, and which of the configurations are of each: what these hold hangs on its groups alone
PlansOf = Sequence[tuple[StagePlan, IntArray]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkedForm:
    """Evaluates configurations of one problem. `even`: how encode batches are kept even, where so
    many queries are active when a phase begins."""

    chunked: Chunked
    plans: PlanSource
    measured: MeasuredRange
    assembler: Assembler
    even: Callable[[float], EvenBatches]

    def evaluate(self, configs: Sequence[RraConfig]) -> EstimateArrays:
        """The figures of every configuration."""
        stages, plans = [0] * len(configs), list[tuple[StagePlan, IntArray]]()
        for key, rows in by_plan(configs).items():
            plan = self.plans.both(*key)
            plans.append((plan, rows))
            for row in rows.tolist():
                stages[row] = len(plan.stages)
        return self.of_arrays(ChunkConfigs.of(configs, stages), plans)

    def of_arrays(self, configs: ChunkConfigs, plans: PlansOf) -> EstimateArrays:
        """The same; what they hold is worked out together for all, what takes time for those of
        one plan."""
        held = self._held(configs)
        columns = gathered(len(held.chunks), (
            (rows, self._figures(plan, configs.take(rows), held.take(rows)))
            for plan, rows in plans))
        fits = columns["memory_bytes"] <= self.assembler.capacity_bytes
        return EstimateArrays(**columns, fits=fits)

    def room(self, configs: ChunkConfigs,
             plans: PlansOf) -> tuple[FloatArray, FloatArray, FloatArray]:
        """(memory_bytes, present, stretch) as of_arrays', without a timeline."""
        held = self.chunked.loads(configs, is_timed=False)
        kv_tokens, sizes = self.chunked.kv_tokens(held), self.chunked.step_sizes(held)
        memory_bytes, stretch = np.empty(len(kv_tokens)), np.zeros(len(kv_tokens))
        for plan, rows in plans:
            memory_bytes[rows] = self.chunked.held_bytes(
                plan, sizes[:, rows], kv_tokens[rows]).max(axis=1)
            if not self.measured.is_endless(plan.times.degrees):
                stretch[rows] = self.measured.stretch(
                    plan.times.degrees, self.chunked.presented(held))[rows]
        return memory_bytes, self._present(configs, held), stretch

    def estimate(self, config: RraConfig) -> Estimate:
        """The Estimate says of one configuration what is shown, and what is executed."""
        plan = self.plans.both(config.tp_degree, config.tp_gpus)
        held = self._loads(plan, config)
        figures = {name: float(values[0]) for name, values in self._figures(
            plan, ChunkConfigs.of([config], [len(plan.stages)]), held).items()}
        figures |= {"encode_batch": config.encode_batch,
                    "decode_iterations": config.decode_iterations,
                    "decode_iteration_s": figures["period_s"] / config.decode_iterations}
        groups = config.decode_micro_batches or len(plan.stages)
        return self.assembler.estimate(
            RraControls(encode_batch=config.encode_batch, decode_micro_batches=groups,
                        decode_iterations=config.decode_iterations,
                        encode_chunk=config.encode_chunk,
                        chunk_queries=math.ceil(
                            config.encode_chunk * self.chunked.tokens.most_of_token),
                        even=self.even(float(self.chunked.present(held)[0]))),
            one_pool(config, plan.stages, groups, figures["kv_tokens"]), figures,
            held_bytes=self.chunked.held_bytes(
                plan, self.chunked.step_sizes(held), np.array([figures["kv_tokens"]]))[0],
            notes=[f"extrapolated: {words}" for words in self.beyond(config)])

    def beyond(self, config: RraConfig, times: float = 1.0) -> list[str]:
        """The words name the sizes of this configuration beyond `times` what was measured."""
        plan = self.plans.both(config.tp_degree, config.tp_gpus)
        if self.measured.is_endless(plan.times.degrees):
            return []
        return self.measured.beyond(
            plan.times.degrees, self.chunked.presented(self._loads(plan, config)), times)

    def _loads(self, plan: StagePlan, config: RraConfig) -> ChunkLoads:
        return self._held(ChunkConfigs.of([config], [len(plan.stages)]))

    def _held(self, configs: ChunkConfigs) -> ChunkLoads:
        if len(configs.groups) > 1:
            return self.chunked.loads(configs)
        return self.chunked.loads_of(*(float(own[0]) for own in configs))

    def _room(self, plan: StagePlan, configs: ChunkConfigs,
              held: ChunkLoads) -> dict[str, FloatArray]:
        kv_tokens, degrees = self.chunked.kv_tokens(held), plan.times.degrees
        stretch: FloatArray = np.zeros(len(kv_tokens))
        if not self.measured.is_endless(degrees):
            stretch = self.measured.stretch(degrees, self.chunked.presented(held))
        return {"kv_tokens": kv_tokens, "present": self._present(configs, held),
                "stretch": stretch, "memory_bytes": self.chunked.held_bytes(
                    plan, self.chunked.step_sizes(held), kv_tokens).max(axis=1)}

    def _present(self, configs: ChunkConfigs, held: ChunkLoads) -> FloatArray:
        # of fewer queries than a phase takes up none would be as planned
        return np.maximum(self.chunked.present(held), configs.encode_batch)

    def _figures(self, plan: StagePlan, configs: ChunkConfigs,
                 held: ChunkLoads) -> dict[str, FloatArray]:
        times = self.chunked.times(plan, configs, held)
        latency_s = self.chunked.latency_s(configs, held, times)
        is_timed, phase_s = times.is_timed & (times.phase_s > 0), times.phase_s
        queries = held.group_batch * configs.groups
        seconds = {"latency_s": latency_s, "period_s": phase_s, "encode_s": times.encode_s,
                   "ttft_s": times.encode_s,
                   "tpot_s": per_token_s(self.chunked.problem, latency_s, times.encode_s)}
        return {
            **{name: np.where(is_timed, own, np.inf) for name, own in seconds.items()},
            **self._room(plan, configs, held),
            "throughput_qps": np.where(is_timed, queries / np.where(is_timed, phase_s, 1.0), 0.0),
            "decode_batch": held.steady.encode_batch * held.steady.queries.mean_phases}
