"""RRA in closed form (paper sections 4.1 and 6; docs/design.md), for many configurations.

Symbols: B_E = encode_batch, N_D = decode_iterations, G = decode_micro_batches (default: one per
stage), B_D = decode_batch = B_E E[c(D)], c(d) = ceil(d / N_D). Within a phase n(u) queries are
active at iteration u, n(u) / G in each group. A group that happens to be empty takes no step: the
others hold the more. Groups are not equal either, and the pipeline waits for the slowest: its step
is sized as the expected largest of G normals with the variance of a group's tokens (encode) or
queries (decode). Iterations of nearly equal sizes are taken together (rra.phase_blocks), and
times of one size come from tables (xsimulator.step_table): that is what makes it quick.

    throughput = B_E / period      latency(d) = (c(d) - 1) period + finish(1 + (d - 1) mod N_D)

with `period` and `finish` from xsimulator.pipeline. A longer output never has a shorter latency,
so both kinds of bound come to the latency of the output length at the bound's quantile. These are
expected times; how batches scatter around them is the replay's business."""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from xgpt.core.controls import EvenBatches, RraControls
from xgpt.core.lengths import FloatArray, IntArray
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate
from xprofiler.timing import TimingSource
from xrunner.rules.batch_sizer import share_of
from xsimulator import memory
from xsimulator.native import native
from xsimulator.occupancy import flow_of
from xsimulator.plans import PlanSource, StagePlan, run_begins, shared_plans
from xsimulator.policies.figures import (
    Assembler,
    EstimateArrays,
    gathered,
    one_pool,
    per_token_s,
)
from xsimulator.policies.measured_range import MeasuredRange, Presented
from xsimulator.policies.rra.chunked import Chunked
from xsimulator.policies.rra.chunked_form import ChunkedForm
from xsimulator.policies.rra.config import RraConfig, RraConfigs
from xsimulator.policies.rra.native import NativeRra
from xsimulator.policies.rra.native_points import evaluated, presented_at
from xsimulator.policies.rra.phase_blocks import (
    EXACT_ITERATIONS,
    LOADS,
    SMALL_BATCH,
    shared_blocks,
)
from xsimulator.policies.rra.phases import (
    DecodeLoads,
    EncodeTokens,
    PhaseBatches,
    PhaseTimes,
    phase_times,
)

MAX_TIMELINE_ELEMENTS = 48_000  # configurations x blocks x stages at once: what a cache holds
MIN_CHUNK = 256


class Room(NamedTuple):
    """Room is taken [configs] as bytes on the fullest rank, queries present in the mean, and the
    largest size presented to the timing source over the largest that it measured."""

    memory_bytes: FloatArray
    present: FloatArray
    stretch: FloatArray


class Rra:
    """This closed form evaluates configurations of one problem, and keeps what they share."""

    def __init__(self, problem: Problem, timing: TimingSource, *,
                 adjustment: float | None = None, exact_iterations: int = EXACT_ITERATIONS,
                 plans: PlanSource | None = None) -> None:
        """`adjustment` is the share by which an encode step's tokens may leave their mean (section
        5.2 of the paper; xrunner.rules.batch_sizer), by default the problem's. Phases of up to
        `exact_iterations` are worked iteration by iteration. `plans` says which layers lie where;
        by default they are divided as is best for this problem."""
        self.problem, self.timing = problem, timing
        self.adjustment = share_of(problem.adjustment) if adjustment is None else adjustment
        self.flow = flow_of(problem)
        self.seen_iterations = self.flow.iterations_of(
            problem.lengths.outputs.quantile(problem.constraint.quantile))
        self.blocks = shared_blocks(
            self.flow, padded=timing.facts.is_padded, seen_iterations=self.seen_iterations,
            exact_iterations=exact_iterations)
        self.encode_tokens = EncodeTokens(problem.lengths.inputs, self.adjustment)
        self.measured = MeasuredRange(problem, timing)
        self._assembler = Assembler(problem, timing)
        self.capacity_bytes = self._assembler.capacity_bytes
        self.plans: PlanSource = plans or shared_plans(problem, timing)
        library = native()
        self.native = None if library is None else NativeRra(self, library)
        self.chunked = ChunkedForm(
            chunked=Chunked(problem, self.flow, self.blocks, self.encode_tokens),
            plans=self.plans, measured=self.measured, assembler=self._assembler, even=self._even)

    def evaluate(self, configs: RraConfigs | Sequence[RraConfig]) -> EstimateArrays:
        """The figures of every configuration are worked out together for those of one plan."""
        if not isinstance(configs, RraConfigs) and any(one.encode_chunk for one in configs):
            return self._evaluate_both(configs)
        configs = RraConfigs.of(configs)

        def figures(some: RraConfigs, plan: StagePlan, rows: IntArray) -> dict[str, FloatArray]:
            batches = self.batches_of(plan, some, rows)
            loads = batches.decode_loads()
            return self._figures(plan, batches, loads, phase_times(
                plan, batches, loads, self.encode_tokens))

        def by_arrays(some: RraConfigs) -> EstimateArrays:
            columns = gathered(len(some), ((rows, figures(some, plan, rows))
                                           for plan, rows in self.by_plan(some)))
            return EstimateArrays(**columns, fits=columns["memory_bytes"] <= self.capacity_bytes)

        if self.native is None or not len(configs):
            return by_arrays(configs)
        return evaluated(self, self.native, self.measured, configs, by_arrays)

    def room(self, configs: RraConfigs | Sequence[RraConfig]) -> Room:
        """Each configuration takes so much of what there is. That is quick: no timeline."""
        configs = RraConfigs.of(configs)
        memory_bytes, present, stretch = (np.empty(len(configs)) for _ in range(3))
        # what is held does not depend on how finely a phase is divided: blocks of one kind do
        like = np.full(len(configs), SMALL_BATCH)
        for plan, rows in self.by_plan(configs, like):
            is_endless = self.measured.is_endless(plan.times.degrees)
            batches = self.batches_of(plan, configs, rows, like, LOADS if is_endless else ())
            memory_bytes[rows] = self._held(plan, batches, self._kv_tokens(batches)).max(axis=1)
            present[rows] = batches.encode_batch * batches.queries.mean_present
            stretch[rows] = self._stretch(plan, batches)
        return Room(memory_bytes, present, stretch)

    def estimate(self, config: RraConfig) -> Estimate:
        """The Estimate says of one configuration what is shown, and what is executed."""
        if config.encode_chunk:
            return self.chunked.estimate(config)
        plan, batches = self._single(config)
        loads = batches.decode_loads()
        times = phase_times(plan, batches, loads, self.encode_tokens)
        arrays = self._figures(plan, batches, loads, times)
        figures = {name: float(values[0]) for name, values in arrays.items()}
        figures["decode_iteration_s"] = float(times.iteration_s(batches)[0])
        figures |= {"encode_batch": config.encode_batch,
                    "decode_iterations": config.decode_iterations}
        groups = int(batches.groups[0])
        even = self._even(max(figures["present"] - config.encode_batch, 0.0))
        return self._assembler.estimate(
            RraControls(encode_batch=config.encode_batch, decode_micro_batches=groups,
                        decode_iterations=config.decode_iterations, even=even),
            one_pool(config, plan.stages, groups, figures["kv_tokens"]), figures,
            held_bytes=self._held(plan, batches, arrays["kv_tokens"])[0],
            notes=[f"extrapolated: {words}" for words in self.beyond(config)])

    def beyond(self, config: RraConfig, times: float = 1.0) -> list[str]:
        """The words name the sizes of this configuration beyond `times` what was measured."""
        if config.encode_chunk:
            return self.chunked.beyond(config, times)
        plan, batches = self._single(config)
        if self.measured.is_endless(plan.times.degrees):
            return []
        return self.measured.beyond(plan.times.degrees, self._presented(
            batches, batches.decode_loads()), times)

    def by_plan(self, configs: RraConfigs,
                like: IntArray | None = None) -> list[tuple[StagePlan, IntArray]]:
        """Each part has rows of one plan, in falling order of their blocks, few enough for a cache.
        The blocks of the batches `like` are taken in place of their own."""
        like = configs.encode_batch if like is None else like
        keys = configs.tp_degree * (self.problem.cluster.num_devices + 1) + configs.tp_gpus
        columns = self.blocks.columns(configs.decode_iterations, like)
        blocks = self.blocks.packed.counts[columns]
        order = np.lexsort((-blocks, keys))
        begins = run_begins(keys[order])
        parts = []
        for rows in np.split(order, begins[1:]):
            begin = 0
            while begin < len(rows):
                first = rows[begin]
                plan = self.plans.both(int(configs.tp_degree[first]), int(configs.tp_gpus[first]))
                at_once = max(MAX_TIMELINE_ELEMENTS // int(blocks[first] * len(plan.stages)),
                              MIN_CHUNK)
                parts.append((plan, rows[begin:begin + at_once]))
                begin += at_once
        return parts

    def batches_of(self, plan: StagePlan, configs: RraConfigs, rows: IntArray,
                   like: IntArray | None = None, without: Collection[str] = ()) -> PhaseBatches:
        """The batches of some `rows` of `configs`; `like` is that of by_plan, `without` that of
        PhaseBlocks.take."""
        like = configs.encode_batch if like is None else like
        fixed = configs.decode_micro_batches[rows]
        groups = np.where(fixed > 0, fixed, len(plan.stages)).astype(float)
        encode_batch = configs.encode_batch[rows].astype(float)
        columns = self.blocks.columns(configs.decode_iterations[rows], like[rows])
        return PhaseBatches(encode_batch=encode_batch, groups=groups,
                            queries=self.blocks.take(columns, encode_batch / groups,
                                                             without))

    def _evaluate_both(self, configs: Sequence[RraConfig]) -> EstimateArrays:
        """Those that encode in chunks, and the others."""
        is_chunked = np.array([one.encode_chunk > 0 for one in configs])
        parts = []
        for flag, evaluate in ((True, self.chunked.evaluate), (False, self.evaluate)):
            rows = np.flatnonzero(is_chunked == flag)
            if len(rows):
                found = evaluate([configs[row] for row in rows.tolist()])
                parts.append((rows, {name: getattr(found, name) for name in found.__slots__}))
        columns: dict[str, Any] = gathered(len(configs), parts)
        return EstimateArrays(**{**columns, "fits": columns["fits"] > 0})

    def _even(self, active: float) -> EvenBatches:
        """So many queries are still active when a phase begins, in the mean."""
        steers = self.adjustment > 0 and self.problem.adjustment.steers is not False
        return EvenBatches(adjustment=self.adjustment, target_active=steers * active,
                           mean_input_tokens=self.encode_tokens.mean)

    def _single(self, config: RraConfig) -> tuple[StagePlan, PhaseBatches]:
        plan = self.plans.both(config.tp_degree, config.tp_gpus)
        return plan, self.batches_of(plan, RraConfigs.of([config]), np.array([0]))

    def _figures(self, plan: StagePlan, batches: PhaseBatches, loads: DecodeLoads,
                 times: PhaseTimes) -> dict[str, FloatArray]:
        is_timed, period_s = times.is_timed, times.timeline.period_s
        kv_tokens = self._kv_tokens(batches)

        def timed(seconds: FloatArray) -> FloatArray:
            return np.where(is_timed, seconds, np.inf)

        latency_s = timed(times.latency_s(batches, self.seen_iterations))
        ttft_s = timed(times.first_token_s(self.problem.model.is_encoder_decoder))
        return {
            "throughput_qps": np.where(
                is_timed, batches.encode_batch / np.where(is_timed, period_s, 1.0), 0.0),
            "latency_s": latency_s, "ttft_s": ttft_s,
            "tpot_s": per_token_s(self.problem, latency_s, ttft_s),
            "period_s": timed(period_s), "encode_s": timed(times.encode_s),
            "stretch": self._stretch(plan, batches, loads),
            "decode_batch": batches.encode_batch * batches.queries.mean_phases,
            "present": batches.encode_batch * batches.queries.mean_present, "kv_tokens": kv_tokens,
            "memory_bytes": self._held(plan, batches, kv_tokens).max(axis=1)}

    def _stretch(self, plan: StagePlan, batches: PhaseBatches,
                 loads: DecodeLoads | None = None) -> FloatArray:
        degrees = plan.times.degrees
        if self.measured.is_endless(degrees):
            return np.zeros(len(batches.encode_batch))
        return self.measured.stretch(degrees, self._presented(
            batches, loads or batches.decode_loads()))

    def _presented(self, batches: PhaseBatches, loads: DecodeLoads) -> Presented:
        queries, _, tokens = self.encode_tokens.largest(batches)
        return presented_at(self.problem, tokens, queries,
                            loads.both[0].max(axis=0, initial=0.0))

    def _kv_tokens(self, batches: PhaseBatches) -> FloatArray:
        """[configs] tokens of KV reserved over all groups. Cohorts are independent, so mean and
        variance of a group's sum are those of one query's stay times the batch: never less than the
        longest query in every group, nor more than every query that can be there at its longest."""
        queries, batch, groups = batches.queries, batches.group_batch, batches.groups
        longest, num_queries = self.flow.max_reserve_tokens, self.problem.num_queries
        # one longest query more: the odd queries of an uneven split rotate, so at times a group
        # encodes one more than its share, and few queries are not normally distributed
        wanted = batch * queries.mean_reserved + memory.KV_QUANTILE_Z * np.sqrt(
            batch * queries.variance_reserved) + longest
        most = np.ceil(batch) * queries.max_present
        if num_queries is not None:
            most = np.minimum(most, np.ceil(num_queries / np.minimum(groups, num_queries)))
        return np.ceil(np.clip(wanted, longest, np.maximum(most, 1) * longest)) * groups

    def _held(self, plan: StagePlan, batches: PhaseBatches, kv_tokens: FloatArray) -> FloatArray:
        """[configs, stages] bytes on each rank of a stage."""
        return (plan.weight_bytes + memory.kv_bytes(self.problem, plan.stages, kv_tokens)
                + memory.activation_bytes(
                    self.problem, plan.stages,
                    encode_batch=batches.encode_batch / batches.encode_groups,
                    decode_batch=batches.group_batch * batches.queries.mean_phases))
