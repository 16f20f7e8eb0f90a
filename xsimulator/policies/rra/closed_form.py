"""RRA in closed form (paper sections 4.1 and 6; design.md section 3.2), for many configurations.

Symbols: B_E = encode_batch, N_D = decode_iterations, G = decode_micro_batches (default: one per
stage), B_D = decode_batch = B_E E[c(D)], c(d) = ceil(d / N_D). Within a phase n(u) queries are
active at iteration u, n(u) / G in each group. A group that happens to be empty takes no step: the
others hold the more. Groups are not equal either, and the pipeline waits for the slowest: its step
is sized as the expected largest of G normals with the variance of a group's tokens (encode) or
queries (decode). Iterations of nearly equal sizes are taken together (policies.phase_blocks), and
times of one size come from tables (policies.step_tables): that is what makes it quick.

    throughput = B_E / period      latency(d) = (c(d) - 1) period + finish(1 + (d - 1) mod N_D)

with `period` and `finish` from xsimulator.pipeline. A longer output never has a shorter latency,
so both kinds of bound come to the latency of the output length at the bound's quantile. These are
expected times; how batches scatter around them is the replay's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xgpt.core.lengths import FloatArray, IntArray
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate, StageAssignment
from xgpt.core.schedule_file import estimate_from_flat
from xprofiler.timing import Operator, TimingSource
from xrunner.rules.batch_sizer import LEAST_ADJUSTED, share_of
from xsimulator import memory
from xsimulator.occupancy import QueryFlow, expected_maximum, expected_maximum_z
from xsimulator.pipeline import Timeline, Work, sorted_timeline
from xsimulator.plans import Plan, Plans
from xsimulator.policies.rra.phase_blocks import (
    EXACT_ITERATIONS,
    SMALL_BATCH,
    BlockTable,
    PhaseBlocks,
)
from xsimulator.policies.step_tables import StepTables

BoolArray = NDArray[np.bool_]
NEGLIGIBLE = 1e-4  # chance that a group has no query, below which that costs nothing
MAX_TIMELINE_ELEMENTS = 48_000  # configurations x blocks x stages at once: what a cache holds
MIN_CHUNK = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class RraConfig:
    """One point of RRA's space. `decode_micro_batches` None: one per stage."""

    encode_batch: int
    decode_iterations: int
    tp_degree: int = 1
    tp_gpus: int = 0
    decode_micro_batches: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RraConfigs:
    """Many of them, as arrays of equal length. `decode_micro_batches` 0: one per stage."""

    encode_batch: IntArray
    decode_iterations: IntArray
    tp_degree: IntArray
    tp_gpus: IntArray
    decode_micro_batches: IntArray

    def __len__(self) -> int:
        return len(self.encode_batch)

    @classmethod
    def of(cls, configs: Sequence[RraConfig]) -> RraConfigs:
        rows = np.array([(c.encode_batch, c.decode_iterations, c.tp_degree, c.tp_gpus,
                          c.decode_micro_batches or 0) for c in configs], np.int64)
        rows = rows.reshape(-1, 5)
        return cls(
            encode_batch=rows[:, 0], decode_iterations=rows[:, 1], tp_degree=rows[:, 2],
            tp_gpus=rows[:, 3], decode_micro_batches=rows[:, 4])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EstimateArrays:
    """The figures of an Estimate for many configurations, in their order. `memory_bytes` is that
    of the fullest rank."""

    throughput_qps: FloatArray
    latency_s: FloatArray
    period_s: FloatArray
    encode_s: FloatArray
    decode_batch: FloatArray
    present: FloatArray  # queries in the pool right after encoding, in the mean
    kv_tokens: FloatArray
    memory_bytes: FloatArray
    stretch: FloatArray  # largest size presented over the largest measured; refused beyond 4
    fits: BoolArray


class Room(NamedTuple):
    """[configs] bytes on the fullest rank, queries present in the mean, and the largest size
    presented to the timing source over the largest that it measured."""

    memory_bytes: FloatArray
    present: FloatArray
    stretch: FloatArray


class PlanTables(NamedTuple):
    """What depends on (tp_degree, tp_gpus) alone."""

    plan: Plan
    tables: StepTables

    @property
    def stages(self) -> tuple[StageAssignment, ...]:
        return self.plan.stages


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """Configurations of one plan in falling order of their blocks, and their queries."""

    encode_batch: FloatArray  # [configs]
    groups: FloatArray
    queries: PhaseBlocks

    @property
    def group_batch(self) -> FloatArray:
        return self.encode_batch / self.groups

    @property
    def encode_groups(self) -> FloatArray:
        return np.minimum(self.groups, self.encode_batch)


class Rra:
    """Evaluates configurations of one problem; keeps what they share."""

    def __init__(self, problem: Problem, timing: TimingSource, *,
                 adjustment: float | None = None, exact_iterations: int = EXACT_ITERATIONS,
                 plans: Plans | None = None) -> None:
        """`adjustment`: share by which an encode step's tokens may leave their mean (section 5.2 of
        the paper; xrunner.rules.batch_sizer), by default the problem's. `exact_iterations`: phases
        of up to as many are worked iteration by iteration. `plans`: which layers lie where; by
        default as they are best divided for this problem."""
        self.problem, self.timing = problem, timing
        self.adjustment = share_of(problem.adjustment) if adjustment is None else adjustment
        self._is_steered = self.adjustment > 0 and problem.adjustment.steers is not False
        outputs = problem.lengths.outputs
        self.flow = QueryFlow(
            problem.lengths, is_encoder_decoder=problem.model.is_encoder_decoder,
            reserved_output_tokens=problem.default_max_tokens)
        self.seen_iterations = self.flow.iterations_of(
            outputs.quantile(problem.constraint.quantile))
        self.blocks = BlockTable(
            self.flow, padded=timing.facts.is_padded, seen_iterations=self.seen_iterations,
            exact_iterations=exact_iterations)
        self.input_mean, self.input_std = problem.lengths.inputs.mean, problem.lengths.inputs.std
        self._output_mean = outputs.mean
        self._plans = plans or Plans(problem, timing)
        self._known: dict[tuple[int, int], PlanTables] = {}

    @property
    def capacity_bytes(self) -> int:
        return memory.capacity_bytes(self.problem.cluster.device)

    def stages(self, tp_degree: int, tp_gpus: int) -> tuple[StageAssignment, ...]:
        """The allocation of layers. Raises InputError for a plan the model or cluster refuses."""
        return self._plan(tp_degree, tp_gpus).stages

    def evaluate(self, configs: RraConfigs | Sequence[RraConfig]) -> EstimateArrays:
        """Figures of every configuration; vectorised over those of one (tp_degree, tp_gpus)."""
        configs = configs if isinstance(configs, RraConfigs) else RraConfigs.of(configs)
        columns: dict[str, FloatArray] = {}
        for plan, rows in self.by_plan(configs):
            for name, values in self._figures(plan, self.batch_of(plan, configs, rows)).items():
                columns.setdefault(name, np.empty(len(configs)))[rows] = values
        return EstimateArrays(**columns, fits=columns["memory_bytes"] <= self.capacity_bytes)

    def room(self, configs: RraConfigs | Sequence[RraConfig]) -> Room:
        """What each takes of what there is: quick, no timeline."""
        configs = configs if isinstance(configs, RraConfigs) else RraConfigs.of(configs)
        memory_bytes, present, stretch = (np.empty(len(configs)) for _ in range(3))
        # what is held does not depend on how finely a phase is divided: blocks of one kind do
        like = np.full(len(configs), SMALL_BATCH)
        for plan, rows in self.by_plan(configs, like):
            batch = self.batch_of(plan, configs, rows, like)
            memory_bytes[rows] = self._memory_bytes(plan, batch).max(axis=1)
            present[rows] = batch.encode_batch * batch.queries.mean_present
            stretch[rows] = self._stretch(plan, batch)
        return Room(memory_bytes, present, stretch)

    def estimate(self, config: RraConfig) -> Estimate:
        """One configuration as the artefact that is shown, and executed."""
        plan = self._plan(config.tp_degree, config.tp_gpus)
        batch = self.batch_of(plan, RraConfigs.of([config]), np.array([0]))
        figures = {k: float(v[0]) for k, v in self._figures(plan, batch).items()}
        per_stage = self._memory_bytes(plan, batch)[0]
        by_rank = {rank: int(np.ceil(size)) for stage, size in zip(
            plan.stages, per_stage, strict=True) for rank in stage.ranks}
        period, encode = figures["period_s"], figures["encode_s"]
        return estimate_from_flat(
            policy="rra", encode_batch=config.encode_batch, decode_batch=figures["decode_batch"],
            decode_iterations=config.decode_iterations,
            decode_micro_batches=int(batch.groups[0]), tp_degree=config.tp_degree,
            tp_gpus=config.tp_gpus, throughput_qps=figures["throughput_qps"],
            output_tokens_per_s=figures["throughput_qps"] * self._output_mean,
            latency_s=figures["latency_s"], encode_s=encode,
            decode_iteration_s=(max(period - encode, 0.0) / config.decode_iterations
                                if np.isfinite(period) else np.inf),
            period_s=period, memory_bytes=tuple(by_rank[rank] for rank in sorted(by_rank)),
            memory_capacity_bytes=self.capacity_bytes, kv_tokens=int(figures["kv_tokens"]),
            fits=max(by_rank.values()) <= self.capacity_bytes, stages=plan.stages,
            adjustment=self.adjustment, mean_input_tokens=self.input_mean,
            steered_to=self._is_steered * max(figures["present"] - config.encode_batch, 0.0),
            notes=(f"times: {self.timing.provenance()}",
                   *(f"extrapolated: {words}" for words in self.beyond(config))),
        )

    def beyond(self, config: RraConfig, times: float = 1.0) -> list[str]:
        """In words, the sizes of this configuration beyond `times` what was measured."""
        plan = self._plan(config.tp_degree, config.tp_gpus)
        batch = self.batch_of(plan, RraConfigs.of([config]), np.array([0]))
        found = {f"up to {size[0]:.0f} {words}, measured up to {measured:.0f}"
                 for words, size, measured in self._sizes(plan, batch)
                 if size[0] > times * measured}
        return sorted(found)

    def by_plan(self, configs: RraConfigs,
                 like: IntArray | None = None) -> list[tuple[PlanTables, IntArray]]:
        """Rows of one plan each, in falling order of their blocks, few enough for a cache. `like`:
        batches whose blocks are taken in place of their own."""
        like = configs.encode_batch if like is None else like
        keys = configs.tp_degree * (self.problem.cluster.num_devices + 1) + configs.tp_gpus
        columns = self.blocks.columns(configs.decode_iterations, like)
        blocks = self.blocks.stacked.blocks[columns]
        order = np.lexsort((-blocks, keys))
        begins = np.flatnonzero(np.diff(keys[order], prepend=-1))
        found = []
        for rows in np.split(order, begins[1:]):
            begin = 0
            while begin < len(rows):
                first = rows[begin]
                plan = self._plan(int(configs.tp_degree[first]), int(configs.tp_gpus[first]))
                at_once = max(MAX_TIMELINE_ELEMENTS // int(blocks[first] * len(plan.stages)),
                              MIN_CHUNK)
                found.append((plan, rows[begin:begin + at_once]))
                begin += at_once
        return found

    def batch_of(self, plan: PlanTables, configs: RraConfigs, rows: IntArray,
               like: IntArray | None = None) -> Batch:
        like = configs.encode_batch if like is None else like
        iterations = configs.decode_iterations[rows]
        fixed = configs.decode_micro_batches[rows]
        groups = np.where(fixed > 0, fixed, len(plan.stages)).astype(float)
        encode_batch = configs.encode_batch[rows].astype(float)
        columns = self.blocks.columns(iterations, like[rows])
        return Batch(encode_batch=encode_batch, groups=groups,
                      queries=self.blocks.stacked.take(columns, encode_batch / groups))

    def _sizes(self, plan: PlanTables, batch: Batch,
               loads: _Loads | None = None) -> list[tuple[str, FloatArray, float]]:
        """The largest sizes the timing source is presented with: (in words, [configs] size,
        measured up to)."""
        queries, _, tokens = self._encode_sizes(batch)
        decoding = (loads or decode_loads(batch)).most.max(axis=0, initial=0.0)
        lengths, is_encoder_decoder = self.problem.lengths, self.problem.model.is_encoder_decoder
        longest = float(lengths.inputs.max)
        inputs = np.full(len(queries), longest)
        context = inputs * (not is_encoder_decoder) + lengths.outputs.max
        found = []
        for degree in plan.plan.times.degrees:
            reach = self._reach(degree)
            found += [
                ("tokens encoded at once", tokens, reach.tokens),
                ("queries encoded at once", queries, reach.head),
                ("queries decoded at once", decoding, min(reach.head, reach.decoding)),
                ("tokens of context", context, reach.context),
                ("tokens of one input", inputs, reach.inputs)]
        return found

    def _reach(self, degree: int) -> _Reaches:
        is_encoder_decoder = self.problem.model.is_encoder_decoder
        encode = Operator.ENCODER_REST if is_encoder_decoder else Operator.LAYER_REST
        attention = self.timing.reach(Operator.DECODE_ATTENTION, degree)
        return _Reaches(
            tokens=self.timing.reach(encode, degree).x,
            head=self.timing.reach(Operator.HEAD, degree).x,
            decoding=attention.x, context=attention.y,
            inputs=self.timing.reach(Operator.ENCODE_ATTENTION, degree).x)

    def _stretch(self, plan: PlanTables, batch: Batch, loads: _Loads | None = None) -> FloatArray:
        most = np.zeros(len(batch.encode_batch))
        if all(np.isinf(self._reach(degree)).all() for degree in plan.plan.times.degrees):
            return most
        for _, size, measured in self._sizes(plan, batch, loads):
            np.maximum(most, size / measured, out=most)
        return most

    def _figures(self, plan: PlanTables, batch: Batch) -> dict[str, FloatArray]:
        loads = decode_loads(batch)
        timeline, encode_s, alone_s, is_timed = self._timeline(plan, batch, loads)
        kv_tokens = self._kv_tokens(batch)

        def timed(seconds: FloatArray) -> FloatArray:
            return np.where(is_timed, seconds, np.inf)

        return {
            "throughput_qps": np.where(
                is_timed, batch.encode_batch / np.where(is_timed, timeline.period_s, 1.0), 0.0),
            "latency_s": timed(self._latency(timeline, batch.queries, alone_s)),
            "period_s": timed(timeline.period_s), "encode_s": timed(encode_s),
            "stretch": self._stretch(plan, batch, loads),
            "decode_batch": batch.encode_batch * batch.queries.mean_phases,
            "present": batch.encode_batch * batch.queries.mean_present, "kv_tokens": kv_tokens,
            "memory_bytes": self._memory_bytes(plan, batch, kv_tokens).max(axis=1),
        }

    def _timeline(self, plan: PlanTables, batch: Batch,
                  loads: _Loads) -> tuple[Timeline, FloatArray, FloatArray, BoolArray]:
        """The phases' timeline, seconds from the first to the last stage's end of encoding, what
        _own_steps_s says, and whether the timing source answered for every step (else all of it
        means nothing)."""
        encode, encode_timed = self._encode_s(plan, batch)
        decode, alone_s, decode_timed = _decode_s(plan, batch, loads)
        kinds = [Work(encode_s=e, encode_rest_s=er, decode_s=d, decode_rest_s=dr)
                 for (e, er), (d, dr) in zip(encode, decode, strict=True)]
        timeline = sorted_timeline([kinds[kind] for kind in plan.tables.kind_of],
                                   batch.queries.blocks, batch.queries.widths)
        counts = np.bincount(plan.tables.kind_of)
        through = np.sum([e * c for (e, _), c in zip(encode, counts, strict=True)], axis=0)
        return (timeline, through + np.max([rest for _, rest in encode], axis=0), alone_s,
                encode_timed & decode_timed)

    def _encode_s(self, plan: PlanTables, batch: Batch) -> tuple[list[_Pair], BoolArray]:
        queries, tokens, most = self._encode_sizes(batch)
        one = plan.plan.times.mean_attention_s(self.problem.lengths.inputs, queries)
        both = np.stack([most, tokens])
        each = both / self.input_mean  # queries' worth of attention
        seconds = plan.tables.encode_s(both, np.broadcast_to(queries, both.shape), {
            degree: each * own for degree, own in one.items()})
        return _slowest_and_rest(seconds, batch.encode_groups)

    def _encode_sizes(self, batch: Batch) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Queries and tokens of an encode micro-batch, and tokens of the largest of a phase."""
        groups = batch.encode_groups
        queries = batch.encode_batch / groups
        odd = queries - np.floor(queries)  # that share of the groups encodes one query more
        tokens = queries * self.input_mean
        spread = np.sqrt(queries * self.input_std**2 + odd * (1 - odd) * self.input_mean**2)
        if self.adjustment > 0:
            # within the band wherever (uniform), or as near to the mean as whole inputs allow: half
            # of one, that a cut falls into with a chance in proportion to its length
            band = self.adjustment * tokens / np.sqrt(3)
            cut = (self.input_mean + self.input_std**2 / self.input_mean) / np.sqrt(12)
            share = np.clip(queries - (LEAST_ADJUSTED - 1), 0.0, 1.0)  # of the groups, is adjusted
            spread += share * (np.minimum(spread, np.maximum(band, cut)) - spread)
        return queries, tokens, tokens + expected_maximum_z(groups) * spread

    def _latency(self, timeline: Timeline, queries: PhaseBlocks,
                 alone_s: FloatArray) -> FloatArray:
        if self.seen_iterations == 0:
            return timeline.encoded_s
        rows = np.arange(len(queries.seen))
        before, last = np.cumsum(alone_s * queries.widths, axis=1)
        finish = timeline.finish_s[rows, queries.seen] + last[queries.seen, rows]
        return np.asarray(queries.phases_before * (timeline.period_s + before[-1]) + finish)

    def _kv_tokens(self, batch: Batch) -> FloatArray:
        return memory.reserved_tokens(batch.queries, batch.group_batch, batch.groups,
                                      self.flow.max_reserve_tokens, self.problem.num_queries)

    def _memory_bytes(self, plan: PlanTables, batch: Batch,
                      kv_tokens: FloatArray | None = None) -> FloatArray:
        """[configs, stages] bytes on each rank of a stage."""
        problem = self.problem
        tokens = self._kv_tokens(batch) if kv_tokens is None else kv_tokens
        return (plan.plan.weight_bytes
                + memory.kv_bytes(problem.model, plan.stages, problem.dtype, tokens)
                + memory.activation_bytes(
                    problem.model, plan.stages, problem.dtype, inputs=problem.lengths.inputs,
                    encode_batch=batch.encode_batch / batch.encode_groups,
                    decode_batch=batch.group_batch * batch.queries.mean_phases,
                    is_cpu=problem.cluster.device.kind == "cpu"))

    def _plan(self, tp_degree: int, tp_gpus: int) -> PlanTables:
        key = (tp_degree, tp_gpus)
        if key not in self._known:
            plan = self._plans.both(tp_degree, tp_gpus)
            self._known[key] = PlanTables(plan, StepTables(plan.times, self.timing))
        return self._known[key]


_Pair = tuple[FloatArray, FloatArray]  # seconds of the slowest group's step, and all others'


class _Reaches(NamedTuple):
    """Sizes up to which one degree was measured."""

    tokens: float
    head: float
    decoding: float
    context: float
    inputs: float


class _Loads(NamedTuple):
    """[blocks, configs] at each iteration of a block."""

    most: FloatArray  # queries of the largest group
    queries: FloatArray  # of a group that has any
    steps: FloatArray  # groups that have any
    chance: FloatArray  # that a group has any


def decode_loads(batch: Batch, variance: FloatArray | None = None) -> _Loads:
    """`variance`: in place of the number of active queries' own, [blocks, configs]."""
    blocks, group_batch = batch.queries, batch.group_batch
    variance = blocks.variance_active if variance is None else variance
    mean = group_batch * blocks.active
    is_possible = mean > 0
    # NOTE: expm1 keeps a tiny chance of a step, which 1 - exp would round to none
    chance = np.minimum(-np.expm1(group_batch * blocks.log_absent), mean)
    # a chance too small for the logarithm of its opposite is the mean itself
    chance[chance <= 0] = mean[chance <= 0]
    chance[~is_possible] = 1.0
    queries = mean / chance
    square = (group_batch * variance + mean * mean) / chance
    spread = np.sqrt(np.maximum(square - queries * queries, 0.0))
    steps = batch.groups * chance * is_possible
    return _Loads(queries + expected_maximum_z(steps) * spread, queries, steps, chance)


def _decode_s(plan: PlanTables, batch: Batch,
              loads: _Loads) -> tuple[list[_Pair], FloatArray, BoolArray]:
    """[blocks, configs] expected seconds of one group's step and of the others', by kind; and what
    _own_steps_s says."""
    blocks, tables = batch.queries, plan.tables
    queries = np.stack([loads.most, loads.queries])
    context = np.broadcast_to(blocks.context, queries.shape)
    if blocks.maximum_context is not None:
        context = np.maximum(context, expected_context(blocks.maximum_context, queries))
    seconds = tables.decode_s(queries, context)
    # a group whose queries end moves rows: that happens to some of the steps
    group_batch = batch.group_batch
    happens = -np.expm1(-group_batch * blocks.moved)
    rows = group_batch * blocks.moved / np.where(happens > 0, happens, 1.0)
    share = np.minimum(happens / loads.chance, 1.0)
    for work, own in zip(seconds, tables.compaction_s(rows, context[1]), strict=True):
        work += share * own
    pairs, is_timed = _slowest_and_rest(seconds, loads.steps)
    alone_s = _own_steps_s(plan, batch, loads, [own[1] for own in seconds])
    return pairs, alone_s, np.asarray(is_timed.all(axis=0))


def _own_steps_s(plan: PlanTables, batch: Batch, loads: _Loads,
                 usual: Sequence[FloatArray]) -> FloatArray:
    """[phases before the last, the last; blocks, configs] seconds by which an iteration takes
    longer in the eyes of the latency bound's query, which is there for certain, than in the mean.
    If nobody else is, that is all of the iteration; if nobody else of its group, one step more for
    the slowest stage, as far as the stages are full."""
    blocks = batch.queries
    absent = np.exp(batch.group_batch * np.stack([blocks.own_before, blocks.own_last]))
    absent = np.maximum(absent - NEGLIGIBLE, 0.0)
    if not absent.any():
        return absent
    with np.errstate(invalid="ignore"):
        nobody = np.minimum(np.exp(batch.encode_batch * blocks.nobody), absent)
    counts = np.bincount(plan.tables.kind_of)
    usual = [np.where(np.isfinite(own), own, 0.0) for own in usual]  # refused: said elsewhere
    through = np.sum([own * count for own, count in zip(usual, counts, strict=True)], axis=0)
    crowd = np.minimum(loads.steps / counts.sum(), 1.0)
    longer: FloatArray = nobody * through + (absent - nobody) * crowd * np.max(usual, axis=0)
    return longer


def _slowest_and_rest(seconds: Sequence[FloatArray],
                      steps: FloatArray) -> tuple[list[_Pair], BoolArray]:
    """`steps` (expected number, fractional) steps, `seconds` [slowest and usual, ...] by kind of
    stage: the slowest one, and the others together; and where the source answered for all."""
    most = np.minimum(steps, 1.0)
    total = np.sum([one.sum(axis=0) for one in seconds], axis=0)
    is_timed: BoolArray = np.isfinite(total)
    if not is_timed.all():
        seconds = [np.where(is_timed, one, 0.0) for one in seconds]
    pairs = [(slowest * most, np.maximum(steps * usual - slowest, 0.0))
             for slowest, usual in seconds]
    return pairs, is_timed


def expected_context(table: FloatArray, queries: FloatArray) -> FloatArray:
    """occupancy.expected_maximum for [blocks, configs, doublings + 1]; queries [..., blocks,
    configs]."""
    flat = expected_maximum(table.reshape(-1, table.shape[-1]), queries.reshape(len(queries), -1))
    return flat.reshape(queries.shape)
