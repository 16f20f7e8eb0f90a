"""RRA in closed form (paper sections 4.1 and 6; design.md section 3.2), for many configurations.

Symbols: B_E = encode_batch, N_D = decode_iterations, G = decode_micro_batches (default: one per
stage), B_D = decode_batch = B_E E[c(D)], c(d) = ceil(d / N_D). Within a phase n(u) queries are
active at iteration u, n(u) / G in each group. A group that happens to be empty takes no step: the
others hold the more. Groups are not equal either, and the pipeline waits for the slowest: its step
is sized as the expected largest of G normals with the variance of a group's tokens (encode) or
queries (decode).

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
from scipy import special

from xgpt.errors import InputError, Mistake
from xgpt.lengths import FloatArray
from xgpt.problem import Problem
from xgpt.schedule import Estimate, StageAssignment
from xprofiler.timing import Operator, TimingSource
from xsimulator import memory
from xsimulator.allocation import StageCost, allocate, refuse_plan, stage_ranks
from xsimulator.occupancy import Occupancy, QueryFlow, expected_maximum
from xsimulator.pipeline import Timeline, phase_timeline
from xsimulator.stage_times import LayerTimes, StageTimes

# Reference workload that layers are balanced for: batches of ordinary size, in the ratio in which
# the problem's queries need encoding and decoding.
REFERENCE_ENCODE_QUERIES = 8
REFERENCE_DECODE_QUERIES = 32
BoolArray = NDArray[np.bool_]
# seconds of the slowest group's step, of all others', and whether the timing source answered
_Steps = tuple[FloatArray, FloatArray, BoolArray]
MAX_TIMELINE_ELEMENTS = 2_000_000  # configurations are evaluated in chunks of about this size


@dataclass(frozen=True, slots=True, kw_only=True)
class RraConfig:
    """One point of RRA's space. `decode_micro_batches` None: one per stage."""

    encode_batch: int
    decode_iterations: int
    tp_degree: int = 1
    tp_gpus: int = 0
    decode_micro_batches: int | None = None


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Plan:
    """What depends on (tp_degree, tp_gpus) alone."""

    stages: tuple[StageAssignment, ...]
    times: StageTimes
    weight_bytes: FloatArray  # [stages]


class Rra:
    """Evaluates configurations of one problem; keeps what they share."""

    def __init__(self, problem: Problem, timing: TimingSource, *, padded: bool = True) -> None:
        """`padded`: decode attention works every query of a micro-batch at the longest context
        among them (our runner); False where a source's engine reads each query's own."""
        self.problem, self.timing, self._padded = problem, timing, padded
        self.flow = QueryFlow(
            problem.lengths, is_encoder_decoder=problem.model.is_encoder_decoder,
            reserved_output_tokens=problem.default_max_tokens)
        self._plans: dict[tuple[int, int], _Plan] = {}

    @property
    def capacity_bytes(self) -> int:
        return memory.capacity_bytes(self.problem.cluster.device)

    def stages(self, tp_degree: int, tp_gpus: int) -> tuple[StageAssignment, ...]:
        """The allocation of layers. Raises InputError for a plan the model or cluster refuses."""
        return self._plan(tp_degree, tp_gpus).stages

    def evaluate(self, configs: Sequence[RraConfig]) -> EstimateArrays:
        """Figures of every configuration; vectorised over those of one (tp_degree, tp_gpus)."""
        columns: dict[str, FloatArray] = {}
        chunks: dict[tuple[int, int], list[int]] = {}
        for row, config in enumerate(configs):
            chunks.setdefault((config.tp_degree, config.tp_gpus), []).append(row)
        for key, rows in chunks.items():
            plan = self._plan(*key)
            deepest = max(configs[row].decode_iterations for row in rows)
            size = max(MAX_TIMELINE_ELEMENTS // (deepest * len(plan.stages)), 1)
            for begin in range(0, len(rows), size):
                part = rows[begin:begin + size]
                for name, values in self._figures(plan, [configs[row] for row in part]).items():
                    columns.setdefault(name, np.empty(len(configs)))[part] = values
        fits = columns["memory_bytes"] <= self.capacity_bytes
        return EstimateArrays(**columns, fits=fits)

    def room(self, configs: Sequence[RraConfig]) -> Room:
        """What each takes of what there is: quick, no timeline."""
        memory_bytes, present, stretch = (np.empty(len(configs)) for _ in range(3))
        for row, config in enumerate(configs):
            plan = self._plan(config.tp_degree, config.tp_gpus)
            memory_bytes[row] = self._memory_bytes(plan, [config]).max()
            present[row] = config.encode_batch * self._occupancy(config).mean_present
            stretch[row] = self._stretch(plan, config)
        return Room(memory_bytes, present, stretch)

    def estimate(self, config: RraConfig) -> Estimate:
        """One configuration as the artefact that is shown, and executed."""
        plan, problem = self._plan(config.tp_degree, config.tp_gpus), self.problem
        figures = {k: float(v[0]) for k, v in self._figures(plan, [config]).items()}
        per_stage = self._memory_bytes(plan, [config])[0]
        by_rank = {rank: int(np.ceil(size)) for stage, size in zip(
            plan.stages, per_stage, strict=True) for rank in stage.ranks}
        period, encode = figures["period_s"], figures["encode_s"]
        return Estimate(
            policy="rra", encode_batch=config.encode_batch, decode_batch=figures["decode_batch"],
            decode_iterations=config.decode_iterations,
            decode_micro_batches=_groups(plan, config), tp_degree=config.tp_degree,
            tp_gpus=config.tp_gpus, throughput_qps=figures["throughput_qps"],
            output_tokens_per_s=figures["throughput_qps"] * problem.lengths.outputs.mean,
            latency_s=figures["latency_s"], encode_s=encode,
            decode_iteration_s=(max(period - encode, 0.0) / config.decode_iterations
                                if np.isfinite(period) else np.inf),
            period_s=period, memory_bytes=tuple(by_rank[rank] for rank in sorted(by_rank)),
            memory_capacity_bytes=self.capacity_bytes, kv_tokens=int(figures["kv_tokens"]),
            fits=max(by_rank.values()) <= self.capacity_bytes, stages=plan.stages,
            notes=(f"times: {self.timing.provenance()}",
                   *(f"extrapolated: {words}" for words in self.beyond(config))),
        )

    def _sizes(self, plan: _Plan, config: RraConfig) -> list[tuple[str, float, float]]:
        """The largest sizes the timing source is presented with: (in words, size, measured up
        to)."""
        groups, batch = _groups(plan, config), float(config.encode_batch)
        queries, _, tokens = self._encode_sizes(
            np.array([batch]), np.array([min(groups, batch)], float))
        _, most, _ = _group_load(self._occupancy(config), batch / groups, groups)
        lengths, is_encoder_decoder = self.problem.lengths, self.problem.model.is_encoder_decoder
        decoding, inputs = float(most.max(initial=0.0)), float(lengths.inputs.max)
        context = lengths.outputs.max + (0.0 if is_encoder_decoder else inputs)
        encode = Operator.ENCODER_REST if is_encoder_decoder else Operator.LAYER_REST
        found = []
        for degree in plan.times.degrees:
            reach = {op: self.timing.reach(op, degree) for op in (
                encode, Operator.HEAD, Operator.DECODE_ATTENTION, Operator.ENCODE_ATTENTION)}
            found += [
                ("tokens encoded at once", float(tokens[0]), reach[encode].x),
                ("queries encoded at once", float(queries[0]), reach[Operator.HEAD].x),
                ("queries decoded at once", decoding, min(reach[Operator.HEAD].x,
                                                          reach[Operator.DECODE_ATTENTION].x)),
                ("tokens of context", context, reach[Operator.DECODE_ATTENTION].y),
                ("tokens of one input", inputs, reach[Operator.ENCODE_ATTENTION].x)]
        return found

    def _stretch(self, plan: _Plan, config: RraConfig) -> float:
        return max(size / measured for _, size, measured in self._sizes(plan, config))

    def beyond(self, config: RraConfig, times: float = 1.0) -> list[str]:
        """In words, the sizes of this configuration beyond `times` what was measured."""
        plan = self._plan(config.tp_degree, config.tp_gpus)
        found = {f"up to {size:.0f} {words}, measured up to {measured:.0f}"
                 for words, size, measured in self._sizes(plan, config) if size > times * measured}
        return sorted(found)

    def _figures(self, plan: _Plan, configs: Sequence[RraConfig]) -> dict[str, FloatArray]:
        batch = np.array([c.encode_batch for c in configs], float)
        occupancies = [self._occupancy(c) for c in configs]
        timeline, encode_s, is_timed = self._timeline(plan, configs, occupancies)
        memory_bytes = self._memory_bytes(plan, configs).max(axis=1)

        def timed(seconds: FloatArray) -> FloatArray:
            return np.where(is_timed, seconds, np.inf)

        return {
            "throughput_qps": np.where(
                is_timed, batch / np.where(is_timed, timeline.period_s, 1.0), 0.0),
            "latency_s": timed(self._latency(timeline, configs)),
            "period_s": timed(timeline.period_s), "encode_s": timed(encode_s),
            "stretch": np.array([self._stretch(plan, c) for c in configs]),
            "decode_batch": batch * np.array([o.mean_phases for o in occupancies]),
            "present": batch * np.array([o.mean_present for o in occupancies]),
            "kv_tokens": self._kv_tokens(plan, configs), "memory_bytes": memory_bytes,
        }

    def _occupancy(self, config: RraConfig) -> Occupancy:
        return self.flow.occupancy(config.decode_iterations, padded=self._padded)

    def _timeline(self, plan: _Plan, configs: Sequence[RraConfig],
                  occupancies: Sequence[Occupancy]) -> tuple[Timeline, FloatArray, BoolArray]:
        """The phases' timeline, seconds from the first to the last stage's end of encoding, and
        whether the timing source answered for every step (else both mean nothing)."""
        batch = np.array([c.encode_batch for c in configs], float)
        groups = np.array([_groups(plan, c) for c in configs], float)
        encode, encode_rest, encode_timed = self._encode_s(plan, batch, np.minimum(groups, batch))
        decode, decode_rest, decode_timed = self._decode_s(plan, batch, groups, occupancies)
        timeline = phase_timeline(
            encode_s=encode, encode_rest_s=encode_rest, decode_s=decode, decode_rest_s=decode_rest,
            iterations=np.array([c.decode_iterations for c in configs]))
        encode_s = encode.sum(axis=1) + encode_rest.max(axis=1)
        return timeline, encode_s, encode_timed & decode_timed.all(axis=1)

    def _encode_s(self, plan: _Plan, batch: FloatArray, groups: FloatArray) -> _Steps:
        inputs = self.problem.lengths.inputs
        queries, tokens, most = self._encode_sizes(batch, groups)
        one = plan.times.mean_attention_s(inputs, queries)

        def seconds(tokens_each: FloatArray) -> FloatArray:
            each = tokens_each / inputs.mean  # queries' worth of attention
            attention = {degree: each * own for degree, own in one.items()}
            return plan.times.encode_s(tokens_each, queries, attention)

        return _slowest_and_rest(seconds(most), seconds(tokens), groups[:, None])

    def _encode_sizes(self, batch: FloatArray,
                      groups: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Queries and tokens of an encode micro-batch, and tokens of the largest of a phase."""
        inputs = self.problem.lengths.inputs
        queries = batch / groups
        odd = queries - np.floor(queries)  # that share of the groups encodes one query more
        tokens = queries * inputs.mean
        spread = np.sqrt(queries * inputs.std**2 + odd * (1 - odd) * inputs.mean**2)
        return queries, tokens, tokens + _expected_maximum_z(groups) * spread

    def _decode_s(self, plan: _Plan, batch: FloatArray, groups: FloatArray,
                  occupancies: Sequence[Occupancy]) -> _Steps:
        """[configs, max N_D, stages] expected seconds of one group's step and of the others'."""
        shape = (len(occupancies), max(o.decode_iterations for o in occupancies))
        queries, most, context, most_context, steps = (np.zeros(shape) for _ in range(5))
        for row, occupancy in enumerate(occupancies):
            to = occupancy.decode_iterations
            load = _group_load(occupancy, batch[row] / groups[row], groups[row])
            queries[row, :to], most[row, :to], steps[row, :to] = load
            for charged, size in ((context, queries), (most_context, most)):
                charged[row, :to] = _charged_context(occupancy, size[row, :to])
        slowest = plan.times.decode_s(most, most_context)
        usual = plan.times.decode_s(queries, context)
        return _slowest_and_rest(slowest, usual, steps[..., None])

    def _latency(self, timeline: Timeline, configs: Sequence[RraConfig]) -> FloatArray:
        longest = self.problem.lengths.outputs.quantile(self.problem.constraint.quantile)
        d = self.flow.iterations_of(longest)
        if d == 0:
            return timeline.encoded_s
        n_d = np.array([c.decode_iterations for c in configs])
        phases_before, last = np.divmod(d - 1, n_d)
        return phases_before * timeline.period_s + timeline.finish_s[np.arange(len(n_d)), last]

    def _kv_tokens(self, plan: _Plan, configs: Sequence[RraConfig]) -> FloatArray:
        return np.array([float(memory.reserved_tokens(
            self._occupancy(c), c.encode_batch / _groups(plan, c), _groups(plan, c),
            self.flow.max_reserve_tokens, self.problem.num_queries)) for c in configs])

    def _memory_bytes(self, plan: _Plan, configs: Sequence[RraConfig]) -> FloatArray:
        """[configs, stages] bytes on each rank of a stage."""
        problem = self.problem
        groups = np.array([_groups(plan, c) for c in configs])
        batch = np.array([c.encode_batch for c in configs], float)
        phases = np.array([self._occupancy(c).mean_phases for c in configs])
        return (plan.weight_bytes
                + memory.kv_bytes(problem.model, plan.stages, problem.dtype,
                                  self._kv_tokens(plan, configs))
                + memory.activation_bytes(
                    problem.model, plan.stages, problem.dtype, inputs=problem.lengths.inputs,
                    encode_batch=batch / np.minimum(groups, batch),
                    decode_batch=batch * phases / groups,
                    is_cpu=problem.cluster.device.kind == "cpu"))

    def _plan(self, tp_degree: int, tp_gpus: int) -> _Plan:
        key = (tp_degree, tp_gpus)
        if key not in self._plans:
            self._plans[key] = self._make_plan(tp_degree, tp_gpus)
        return self._plans[key]

    def _make_plan(self, tp_degree: int, tp_gpus: int) -> _Plan:
        problem = self.problem
        reason = refuse_plan(problem.model, problem.cluster, tp_degree, tp_gpus)
        if reason is not None:
            raise InputError([Mistake(file="schedule", line=None, key="tp_degree, tp_gpus",
                                      value=(tp_degree, tp_gpus), allowed=reason)])
        ranks = stage_ranks(problem.cluster.num_devices, tp_degree, tp_gpus)
        stages = allocate(problem.model, ranks, self._reference_costs(ranks))
        times = StageTimes(problem.model, problem.cluster, self.timing, problem.dtype, stages,
                           mean_input=problem.lengths.inputs.mean)
        return _Plan(stages=stages, times=times,
                     weight_bytes=memory.weight_bytes(problem.model, stages, problem.dtype))

    def _reference_costs(self, ranks: Sequence[tuple[int, ...]]) -> list[StageCost]:
        """What each stage needs for the reference workload (see xsimulator.allocation)."""
        problem, timing = self.problem, self.timing
        layers = LayerTimes(problem.model, timing, problem.cluster.intra_link, problem.dtype)
        iterations = self.flow.mean_iterations
        rounds = iterations * REFERENCE_ENCODE_QUERIES / REFERENCE_DECODE_QUERIES
        context = problem.lengths.inputs.mean + iterations / 2

        def total(operator: Operator, encode: float, decode: float, degree: int) -> float:
            once = timing.operator_s(operator, [encode, decode], tp_degree=degree)
            return float(once[0] + rounds * once[1])

        costs = []
        for index, group in enumerate(ranks):
            degree = len(group)
            # no more than was measured: what is refused would take for ever on every stage alike
            rows = timing.reach(Operator.LAYER_REST, degree).x
            queries = min(REFERENCE_DECODE_QUERIES, rows,
                          timing.reach(Operator.DECODE_ATTENTION, degree).x)
            tokens = min(REFERENCE_ENCODE_QUERIES * problem.lengths.inputs.mean, rows)
            one = layers.encode_attention_s(
                min(problem.lengths.inputs.mean, timing.reach(Operator.ENCODE_ATTENTION, degree).x),
                REFERENCE_ENCODE_QUERIES, degree)
            encode = float(layers.encode_layer_s(tokens, REFERENCE_ENCODE_QUERIES * one, degree))
            decode = rounds * float(layers.decode_layer_s(
                queries, min(context, timing.reach(Operator.DECODE_ATTENTION, degree).y), degree,
                problem.lengths.inputs.mean))
            fixed = total(Operator.EMBED, tokens, queries, degree) if index == 0 else 0.0
            if index == len(ranks) - 1:
                fixed += total(Operator.HEAD, REFERENCE_ENCODE_QUERIES, queries, degree)
            if problem.model.is_encoder_decoder:
                own = decode + float(layers.cross_kv_s(tokens, degree))
                costs.append(StageCost(layer_s=own, fixed_s=fixed, encoder_layer_s=encode))
            else:
                costs.append(StageCost(layer_s=encode + decode, fixed_s=fixed))
        return costs


def _group_load(occupancy: Occupancy, group_batch: float,
                groups: float) -> tuple[FloatArray, FloatArray, FloatArray]:
    """At each iteration: queries of a group that has any, of the largest group, and how many
    groups have any. [N_D] each."""
    mean = group_batch * occupancy.active
    is_possible = mean > 0
    # NOTE: expm1 keeps a tiny chance of a step, which 1 - exp would round to none
    chance = np.where(is_possible, -np.expm1(group_batch * occupancy.log_absent), 1.0)
    queries = mean / chance
    square = (group_batch * occupancy.variance_active + mean**2) / chance
    spread = np.sqrt(np.maximum(square - queries**2, 0.0))
    steps = groups * np.where(is_possible, chance, 0.0)
    return queries, queries + _expected_maximum_z(steps) * spread, steps


def _charged_context(occupancy: Occupancy, queries: FloatArray) -> FloatArray:
    """Tokens of context a query is charged in a step of `queries` [N_D]."""
    mean = occupancy.context / np.where(occupancy.active > 0, occupancy.active, 1.0)
    if occupancy.maximum_context is None:
        return mean
    return np.maximum(mean, expected_maximum(occupancy.maximum_context, queries))


def _expected_maximum_z(count: FloatArray) -> FloatArray:
    """Expected largest of `count` standard normals (Blom's approximation); 0 for one or fewer."""
    many = np.maximum(count, 1.0)
    return np.asarray(special.ndtri((many - 0.375) / (many + 0.25)))


def _slowest_and_rest(slowest: FloatArray, usual: FloatArray, steps: FloatArray) -> _Steps:
    """`steps` (expected number, fractional) steps of `usual` seconds in the mean, the slowest of
    which takes `slowest`: that one, and the others together. [..., stages], the last result
    without that axis."""
    is_timed: BoolArray = np.isfinite(slowest) & np.isfinite(usual)
    slowest, usual = np.where(is_timed, slowest, 0.0), np.where(is_timed, usual, 0.0)
    return (slowest * np.minimum(steps, 1.0), np.maximum(steps * usual - slowest, 0.0),
            np.asarray(is_timed.all(axis=-1)))


def evaluate(problem: Problem, timing: TimingSource, configs: Sequence[RraConfig], *,
             padded: bool = True) -> EstimateArrays:
    """Figures of many configurations of one problem."""
    return Rra(problem, timing, padded=padded).evaluate(configs)


def estimate(problem: Problem, timing: TimingSource, config: RraConfig, *,
             padded: bool = True) -> Estimate:
    """One configuration's Estimate."""
    return Rra(problem, timing, padded=padded).estimate(config)


def _groups(plan: _Plan, config: RraConfig) -> int:
    return config.decode_micro_batches or len(plan.stages)
