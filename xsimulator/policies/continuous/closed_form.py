"""ORCA, vLLM and Sarathi in closed form: continuous batching with a queue that never runs empty.

    throughput = groups * (queries encoded per step) / (time between a group's steps)

ORCA and Sarathi encode beside decoding, so a query takes D + 1 steps; vLLM's steps do either, and
its decoding queries wait while others are encoded. How many queries are present follows from
`max_active`, or from the KV budget where that binds (xsimulator.policies.continuous.forms); how
long steps hold each other up in a pipeline from xsimulator.policies.continuous.in_flight.

    latency(d) = (from the start of the encoding to its token) + d * (time between tokens)

KV: all memory that weights and activations leave, as those engines take it, but no more than
`max_active` queries can need. A longer output never has a shorter latency, so both kinds of bound
come to the latency of the output length at the bound's quantile.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from xgpt.core.lengths import FloatArray, IntArray
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate
from xgpt.core.schedule_file import estimate_from_flat
from xgpt.core.units import DTYPE_BYTES
from xprofiler.timing import TimingSource
from xrunner.rules.paged import BLOCK_TOKENS, WATERMARK
from xsimulator import memory
from xsimulator.occupancy import Occupancy, QueryFlow
from xsimulator.plans import Plan, Plans
from xsimulator.policies.continuous import forms as continuous
from xsimulator.policies.continuous.forms import Load, LoadTimes, Steps
from xsimulator.policies.continuous.in_flight import Intervals, intervals, least_intervals
from xsimulator.policies.continuous.paged_walk import Walk, WalkTable, walk
from xsimulator.policies.figures import EstimateArrays
from xsimulator.policies.grids import geometric

DEFAULT_TOKEN_BUDGET = 2048  # of one step; vLLM's default, and never less than the longest input
LEAST_LATENCY = 0.97  # of the latency without waiting, which holds for the mean step alone
LEAST_DECODING = 1e-3  # share of the queries that decode at all, in vLLM's closed form
MEMORY_BINDS = 0.98  # share of the slots below which memory, not slots, decides who is present


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationConfig:
    """`max_active`: most queries at a time, over all groups. `token_budget`: most tokens of one
    step (vLLM, Sarathi); 0: the default."""

    max_active: int
    tp_degree: int = 1
    tp_gpus: int = 0
    token_budget: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Held:
    """[configs] what configurations hold; `load` of one of their groups."""

    groups: IntArray
    kv_tokens: FloatArray
    fits: NDArray[np.bool_]
    load: Load


class _IterationLevel(ABC):
    """Evaluates configurations of one problem."""

    name: str
    alternates = False  # a step that encodes is followed by one that decodes, in each group

    def __init__(self, problem: Problem, timing: TimingSource) -> None:
        self.problem, self.timing = problem, timing
        self.plans = Plans(problem, timing)
        self._times: dict[tuple[int, int], LoadTimes] = {}
        self.flow = QueryFlow(
            problem.lengths, is_encoder_decoder=problem.model.is_encoder_decoder,
            reserved_output_tokens=problem.default_max_tokens)
        self._load_flow = continuous.Flow(
            problem.lengths, is_encoder_decoder=problem.model.is_encoder_decoder,
            reserved_outputs=self.flow.max_reserve_tokens - problem.lengths.inputs.max)

    @property
    def capacity_bytes(self) -> int:
        return memory.capacity_bytes(self.problem.cluster.device)

    @abstractmethod
    def load(self, slots: FloatArray, kv_tokens: FloatArray, budget: FloatArray) -> Load:
        """What a group holds with so many slots, KV tokens and tokens a step."""

    @abstractmethod
    def _step_tokens(self, configs: Sequence[IterationConfig], slots: FloatArray) -> FloatArray:
        """Most tokens of one step, for the activations."""

    @property
    def _has_budget(self) -> bool:
        return True

    def grid(self, max_queries: int, plans: Sequence[tuple[int, int]]) -> list[IterationConfig]:
        """Every plan with each number of queries, a tenth apart, up to what memory holds."""
        found = []
        for tp_degree, tp_gpus in plans:
            for count in geometric(max_queries):
                found += [IterationConfig(max_active=count, tp_degree=tp_degree, tp_gpus=tp_gpus,
                                          token_budget=budget) for budget in self.budgets()]
        return self._useful(found)

    def budgets(self) -> list[int]:
        """Token budgets worth a look."""
        return [self.budget_of(0)] if self._has_budget else [0]

    def budget_of(self, token_budget: int) -> int:
        longest = self.problem.lengths.inputs.max
        return token_budget or max(DEFAULT_TOKEN_BUDGET, longest)

    def evaluate(self, configs: Sequence[IterationConfig]) -> EstimateArrays:
        """Figures of every configuration; vectorised over those of one plan."""
        columns = self._figures(configs)
        fits = columns.pop("fits") > 0
        return EstimateArrays(fits=fits, **{name: columns[name] for name in (
            "throughput_qps", "latency_s", "period_s", "encode_s", "decode_batch", "present",
            "kv_tokens", "memory_bytes", "stretch")})

    def limits(self, configs: Sequence[IterationConfig]) -> tuple[FloatArray, FloatArray]:
        """(throughput_qps, latency_s) that `evaluate` does not better: steps never wait for each
        other. Much quicker where pipelines are long."""
        qps, latency_s = np.zeros(len(configs)), np.full(len(configs), np.inf)
        held = self._held(configs)
        for key, rows in _by_plan(configs).items():
            load, groups = held.load.take(rows), held.groups[rows]
            steps = self._steps(key, load)
            least = least_intervals(steps.plain_s, steps.encode_s, load.share, groups,
                                    steps.kind_of)
            is_timed = steps.is_timed & held.fits[rows]
            qps[rows] = np.where(is_timed, groups * load.per_step / least.any_s, 0.0)
            latency_s[rows] = np.where(is_timed, LEAST_LATENCY * self._latency(load, least),
                                       np.inf)
        return qps, latency_s

    def estimate(self, config: IterationConfig) -> Estimate:
        """One configuration as the artefact that is shown, and executed."""
        plan = self.plans.both(config.tp_degree, config.tp_gpus)
        found = {name: float(values[0]) for name, values in self._figures([config]).items()}
        per_stage = self._memory_bytes(plan, [config], np.array([found["kv_tokens"]]))[0]
        by_rank = {rank: int(np.ceil(size)) for stage, size in zip(
            plan.stages, per_stage, strict=True) for rank in stage.ranks}
        notes = [f"times: {self.timing.provenance()}"]
        if found["stretch"] > 1:
            notes.append(f"extrapolated: sizes up to {found['stretch']:.2g} times those measured")
        return estimate_from_flat(
            policy=self.name, encode_batch=max(round(found["encode_batch"]), 1),
            decode_batch=found["decode_batch"], decode_iterations=1,
            decode_micro_batches=int(_groups(plan, [config])[0]), tp_degree=config.tp_degree,
            tp_gpus=config.tp_gpus, throughput_qps=found["throughput_qps"],
            output_tokens_per_s=found["throughput_qps"] * self.problem.lengths.outputs.mean,
            latency_s=found["latency_s"], encode_s=found["encode_s"],
            decode_iteration_s=found["decode_s"], period_s=found["period_s"],
            memory_bytes=tuple(by_rank[rank] for rank in sorted(by_rank)),
            memory_capacity_bytes=self.capacity_bytes, kv_tokens=int(found["kv_tokens"]),
            fits=bool(found["fits"]), stages=plan.stages, notes=tuple(notes),
            max_active=config.max_active,
            token_budget=self.budget_of(config.token_budget) if self._has_budget else 0)

    def _useful(self, configs: list[IterationConfig]) -> list[IterationConfig]:
        """Those that fit; of one plan no more queries than memory ever holds."""
        found = []
        for key, rows in _by_plan(configs).items():
            part = [configs[row] for row in rows]
            plan = self.plans.both(*key)
            kv_tokens, fits = self._kv_tokens(plan, part)
            least = kv_tokens / (self.problem.lengths.inputs.support[0] + 1)
            held = self._load_flow.present.context
            for row, config in enumerate(part):
                if fits[row] and config.max_active <= min(least[row],
                                                          1.5 * kv_tokens[row] / held + 8):
                    found.append(config)
        return found

    def _held(self, configs: Sequence[IterationConfig]) -> _Held:
        """One call for all plans: a walk costs the same for many configurations as for one."""
        groups, fits = np.ones(len(configs), np.int64), np.zeros(len(configs), bool)
        kv_tokens = np.zeros(len(configs))
        for key, rows in _by_plan(configs).items():
            plan, part = self.plans.both(*key), [configs[row] for row in rows]
            groups[rows] = _groups(plan, part)
            kv_tokens[rows], fits[rows] = self._kv_tokens(plan, part)
        budget = np.array([self.budget_of(c.token_budget) for c in configs], float)
        load = self.load(_slots(configs, groups), np.floor(kv_tokens / groups), budget)
        return _Held(groups=groups, kv_tokens=kv_tokens, fits=fits, load=load)

    def _figures(self, configs: Sequence[IterationConfig]) -> dict[str, FloatArray]:
        held = self._held(configs)
        columns: dict[str, FloatArray] = {}
        for key, rows in _by_plan(configs).items():
            part = [configs[row] for row in rows]
            figures = self._part_figures(key, part, held.groups[rows], held.load.take(rows))
            figures["memory_bytes"] = self._memory_bytes(
                self.plans.both(*key), part, held.kv_tokens[rows]).max(axis=1)
            for name, values in figures.items():
                columns.setdefault(name, np.empty(len(configs)))[rows] = values
        return columns | {"kv_tokens": held.kv_tokens, "fits": held.fits.astype(float)}

    def _part_figures(self, key: tuple[int, int], configs: Sequence[IterationConfig],
                      groups: IntArray, load: Load) -> dict[str, FloatArray]:
        """Of configurations of one plan."""
        steps = self._steps(key, load)
        between = intervals(steps.plain_s, steps.encode_s, load.share, groups, steps.kind_of,
                            alternates=self.alternates)
        qps = groups * load.per_step / between.any_s
        figures = {
            "latency_s": self._latency(load, between), "period_s": between.any_s,
            "decode_s": between.plain_s,
            "encode_s": steps.encode_s[:, :, steps.kind_of].sum(axis=2).mean(axis=1)}
        figures = {name: np.where(steps.is_timed, values, np.inf)
                   for name, values in figures.items()}
        return figures | {
            "throughput_qps": np.where(steps.is_timed, qps, 0.0), "stretch": steps.stretch,
            "decode_batch": groups * load.decoding, "present": groups * load.present,
            "encode_batch": load.encoded.mean(axis=1)}

    def _latency(self, load: Load, between: Intervals) -> FloatArray:
        longest = self.problem.lengths.outputs.quantile(self.problem.constraint.quantile)
        d = self.flow.iterations_of(longest)
        encoded = load.encode_steps * between.encode_s
        return encoded + self._decode_latency(d, load, between)

    def _decode_latency(self, d: int, load: Load, between: Intervals) -> FloatArray:
        """Every step of a group gives a token to all its queries: steps in which more of them
        decode are seen by more."""
        beside, alone = load.share * load.beside, (1 - load.share) * load.alone
        seen = beside * between.encode_s + alone * between.plain_s
        return (d + load.waits) * np.where(
            beside + alone > 0, seen / np.maximum(beside + alone, 1e-12), between.any_s)

    def _steps(self, key: tuple[int, int], load: Load) -> Steps:
        if key not in self._times:
            self._times[key] = LoadTimes(self.plans.both(*key), self.timing,
                                         self.problem.lengths, self._occupancy)
        return self._times[key](load)

    @cached_property
    def _occupancy(self) -> Occupancy:
        return self.flow.occupancy(1, padded=self.timing.facts.is_padded)

    def _kv_tokens(self, plan: Plan,
                   configs: Sequence[IterationConfig]) -> tuple[FloatArray, FloatArray]:
        """KV budget over all groups, and whether it holds the longest query in each."""
        problem, groups = self.problem, _groups(plan, configs)
        one = memory.kv_bytes(problem.model, plan.stages, problem.dtype, 1.0)
        left = self.capacity_bytes - plan.weight_bytes - self._activation_bytes(plan, configs)
        room = np.floor((left / one).min(axis=1) / groups / BLOCK_TOKENS)
        blocks = np.ceil(self.flow.max_reserve_tokens / BLOCK_TOKENS)
        most = np.ceil(_slots(configs, groups)) * (blocks + 1) / (1 - WATERMARK)
        group_blocks = np.clip(np.ceil(most), blocks, np.maximum(room, blocks))
        return group_blocks * BLOCK_TOKENS * groups, room >= blocks

    def _memory_bytes(self, plan: Plan, configs: Sequence[IterationConfig],
                      kv_tokens: FloatArray) -> FloatArray:
        """[configs, stages] bytes on each rank of a stage."""
        problem = self.problem
        return (plan.weight_bytes + self._activation_bytes(plan, configs)
                + memory.kv_bytes(problem.model, plan.stages, problem.dtype, kv_tokens))

    def _activation_bytes(self, plan: Plan, configs: Sequence[IterationConfig]) -> FloatArray:
        """[configs, stages] of the largest step: its tokens through a layer, its logits."""
        model, problem = self.problem.model, self.problem
        slots = np.ceil(_slots(configs, _groups(plan, configs)))
        rows, item = self._step_tokens(configs, slots), DTYPE_BYTES[problem.dtype]
        is_cpu = problem.cluster.device.kind == "cpu"
        columns = []
        for stage in plan.stages:
            inner = memory.LIVE_MLP_COPIES * model.intermediate_size * (
                2 if model.is_gated_mlp else 1)
            heads = (model.num_heads + 2 * model.kv_heads) * model.head_dim
            width = (memory.LIVE_HIDDEN_COPIES * model.hidden_size
                     + (inner + heads) / stage.tp_degree)
            scores = (model.num_heads / stage.tp_degree * problem.lengths.inputs.max**2 * 4
                      if is_cpu else 0.0)
            columns.append(rows * width * item + scores)
        columns[-1] = columns[-1] + (slots + 1) * model.vocab_size / (
            plan.stages[-1].tp_degree) * memory.LOGIT_BYTES
        return np.stack(columns, axis=-1)


class Orca(_IterationLevel):
    """One encoding a step at most, KV reserved at admission."""

    name = "orca"

    @property
    def _has_budget(self) -> bool:
        return False

    def load(self, slots: FloatArray, kv_tokens: FloatArray, budget: FloatArray) -> Load:
        flow = self._load_flow
        present, iterations = flow.present, flow.present.iterations
        places = continuous.most_that_fit(slots, kv_tokens, present.reserve, present.reserve_std)
        share = continuous.one_at_a_time(places, iterations)
        decoding = share * iterations
        alone = np.where(share < 1, np.maximum(places, decoding), decoding)
        beside = continuous.beside(decoding, alone, share)
        ones = np.ones((len(slots), continuous.SIZES))
        return Load(
            per_step=share, share=share, tokens=flow.input_sizes * ones, encoded=ones,
            beside=beside, alone=alone, ended=share, decoding=decoding, present=decoding + share,
            encode_steps=np.ones(len(slots)), between=np.zeros(len(slots)),
            waits=np.zeros(len(slots)))

    def _step_tokens(self, configs: Sequence[IterationConfig], slots: FloatArray) -> FloatArray:
        return self.problem.lengths.inputs.max + slots


class _Paged(_IterationLevel):
    """KV in blocks, none reserved for the output."""

    is_chunked: bool  # inputs are encoded in parts, beside decoding

    def _most_present(self, slots: FloatArray, kv_tokens: FloatArray) -> FloatArray:
        """Queries that slots and blocks hold, if blocks did not scatter."""
        flow, inputs = self._load_flow, self.problem.lengths.inputs
        waiting = (inputs.std**2 + inputs.mean**2) / inputs.mean  # the one that finds no room
        room = kv_tokens * (1 - WATERMARK) - waiting / 2
        held = self._tokens_held
        return continuous.most_that_fit(slots, np.maximum(room, held), held,
                                        flow.present.context_std)

    @property
    def _tokens_held(self) -> float:
        """Tokens in blocks of a query present, before a step adds one."""
        return float(continuous.blocks_tokens(self._load_flow.present.context - 1))

    @cached_property
    def _walks(self) -> WalkTable:
        flow, iterations = self._load_flow, self._iterations

        def walked(slots: FloatArray, room: FloatArray, budget: FloatArray) -> Walk:
            return walk(slots=slots, room=room, budget=budget, is_chunked=self.is_chunked,
                        held=self._tokens_held, iterations=iterations,
                        input_sizes=flow.input_sizes, last_sizes=flow.last_sizes,
                        sizes=continuous.SIZES)

        return WalkTable(walked, held=self._tokens_held, is_chunked=self.is_chunked,
                         sizes=continuous.SIZES)

    @property
    def _iterations(self) -> float:
        return max(self._load_flow.present.iterations, 1e-9)

    def _rate(self, found: Walk) -> FloatArray:
        """Queries that end per step; encoding one again yields a token too."""
        return found.running / np.maximum(self._iterations - found.evictions,
                                          self._iterations / 2)


class Vllm(_Paged):
    """Encodes whatever has room before it decodes on."""

    name = "vllm"
    is_chunked = False
    alternates = True

    def budgets(self) -> list[int]:
        longest = self.problem.lengths.inputs.max
        return sorted({max(budget, longest) for budget in (512, 1024, 2048, 4096, 8192, 16384)})

    def load(self, slots: FloatArray, kv_tokens: FloatArray, budget: FloatArray) -> Load:
        flow, inputs = self._load_flow, self.problem.lengths.inputs
        # only queries of more than one token decode; for each that leaves, more are encoded
        decoding = max(flow.decoding_share, LEAST_DECODING)
        iterations = max(self._iterations, decoding)
        present = self._most_present(slots, kv_tokens)
        chance, counts = continuous.ends_per_step(
            present, np.full(len(slots), decoding / iterations))
        counts = counts / decoding
        tokens, waits = flow.batch_tokens(counts), np.zeros(len(slots))
        rate = present / iterations
        rows = np.flatnonzero((present < MEMORY_BINDS * slots) | (iterations < 4))
        if rows.size:
            found = self._walks(slots[rows], kv_tokens[rows], budget[rows])
            present[rows], rate[rows] = found.running, self._rate(found)
            chance[rows], tokens[rows], counts[rows] = continuous.scaled(
                found, rate[rows], inputs.mean)
            waits[rows] = found.evicted / rate[rows] - found.evictions
        # the input that a step has no room left for is length-biased, and finds half of it free
        filled = np.maximum(budget - (inputs.mean + inputs.std**2 / inputs.mean) / 2, inputs.mean)
        pieces = np.where(tokens > budget[:, None], np.ceil(tokens / filled[:, None]), 1.0)
        scale = pieces.mean(axis=1)
        tokens, counts = continuous.in_pieces(tokens, counts, pieces, filled)
        encodes = chance * scale  # per decode step
        share = encodes / (1 + encodes)
        return Load(
            per_step=rate * (1 - share), share=share, tokens=tokens,
            encoded=counts, beside=np.zeros(len(slots)), alone=present, waits=waits,
            ended=rate, decoding=present, present=present,
            encode_steps=np.ones(len(slots)), between=encodes)

    def _decode_latency(self, d: int, load: Load, between: Intervals) -> FloatArray:
        others = np.maximum(1 - 1 / load.present, 0.0)  # none of them is its own encoding
        encodes = others * load.between * between.encode_s
        return ((d + load.waits) * between.plain_s
                + np.maximum(d - 1 + load.waits, 0) * encodes)

    def _step_tokens(self, configs: Sequence[IterationConfig], slots: FloatArray) -> FloatArray:
        budgets = np.array([self.budget_of(c.token_budget) for c in configs], float)
        rows: FloatArray = np.maximum(np.maximum(budgets, slots), self.flow.max_reserve_tokens)
        return rows


class Sarathi(_Paged):
    """Fills every step to its token budget with chunks of waiting inputs."""

    name = "sarathi"
    is_chunked = True

    def budgets(self) -> list[int]:
        return [32, 64, 128, 256, 512, 1024, 2048, 4096, 8192]

    def budget_of(self, token_budget: int) -> int:
        return token_budget or DEFAULT_TOKEN_BUDGET

    def load(self, slots: FloatArray, kv_tokens: FloatArray, budget: FloatArray) -> Load:
        flow, mean = self._load_flow, self.problem.lengths.inputs.mean
        iterations, slots = self._iterations, np.minimum(slots, budget)
        present = self._most_present(slots, kv_tokens)
        rate = present / (iterations + 1)
        chance, counts = continuous.ends_per_step(present, rate / present)
        tokens = flow.batch_tokens(counts)
        waits, steps = np.zeros(len(slots)), np.ones(len(slots))
        decoding = rate * iterations
        alone, beside = present.copy(), continuous.beside(decoding, present, chance)
        is_full = tokens.max(axis=1) > budget - rate * iterations
        rows = np.flatnonzero((present < MEMORY_BINDS * slots) | is_full)
        if rows.size:
            found = self._walks(slots[rows], kv_tokens[rows], budget[rows])
            rate[rows] = self._rate(found)
            chance[rows], tokens[rows], counts[rows] = continuous.scaled(found, rate[rows], mean)
            tokens[rows] = np.minimum(tokens[rows], (budget[rows] - found.running)[:, None])
            waits[rows] = found.evicted / rate[rows] - found.evictions
            steps[rows] = found.chunks
            decoding[rows] = alone[rows] = beside[rows] = found.running
        return Load(
            per_step=rate, share=chance, tokens=tokens, encoded=counts, beside=beside,
            alone=alone, ended=rate, decoding=decoding, present=decoding + rate,
            encode_steps=steps, between=np.zeros(len(slots)), waits=waits)

    def _step_tokens(self, configs: Sequence[IterationConfig], slots: FloatArray) -> FloatArray:
        return np.array([self.budget_of(c.token_budget) for c in configs], float)


def _by_plan(configs: Sequence[IterationConfig]) -> dict[tuple[int, int], IntArray]:
    rows: dict[tuple[int, int], list[int]] = {}
    for row, config in enumerate(configs):
        rows.setdefault((config.tp_degree, config.tp_gpus), []).append(row)
    return {key: np.array(found) for key, found in rows.items()}


def _groups(plan: Plan, configs: Sequence[IterationConfig]) -> IntArray:
    """One per stage, but never one without a query."""
    return np.minimum(len(plan.stages), [c.max_active for c in configs]).astype(np.int64)


def _slots(configs: Sequence[IterationConfig], groups: IntArray) -> FloatArray:
    """Of each group; fractional where they do not share evenly."""
    return np.array([c.max_active for c in configs], float) / groups
