"""FT and DSI in closed form: a batch is encoded, then decoded until its longest query is done
(paper section 2, Figure 1; xrunner.rules.static), for many configurations.

Symbols: B = encode_batch, G = decode_micro_batches, D = decode iterations a query needs, F its
distribution, M = the largest D of a batch: P(M >= u) = 1 - F(u - 1)^B. Rows that are done keep
decoding and their contexts grow, so a round of G decode steps takes r(u) = max(all groups' steps on
the busiest stage, the slowest group's way through all stages), with the input lengths of the whole
batch. The pipeline is empty when a batch begins:

    period = start of round 1 + E[sum over u <= M of r(u)] + share of a round      qps = B / period

The first rounds follow exactly from the encode steps (max-plus recurrence). The last token is known
in its group's turn of the round after it: on the average that share of a round is gone then, and
steps of that round are superfluous. A query's latency counts from its own encoding to the end of
its batch. Kind `sequence`: expected, with M = max(D of the quantile's length, all others); kind
`queries`: the quantile over M, over a query's place in its batch, and over the batch's input
tokens. In both, expected largest micro-batches stand for the largest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from xgpt.core.lengths import FloatArray
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate
from xgpt.core.schedule_file import estimate_from_flat
from xprofiler.timing import Operator, TimingSource
from xsimulator import memory
from xsimulator.occupancy import expected_maximum_z
from xsimulator.plans import Plan, Plans
from xsimulator.policies.grids import geometric, group_counts
from xsimulator.policies.rra.closed_form import EstimateArrays
from xsimulator.policies.static.rounds import (
    EXACT_ROUNDS,
    NODES,
    Batch,
    Rounds,
    advance,
    pushed,
)

CHUNK_ELEMENTS = 4_000_000  # of the largest arrays: configurations are evaluated in chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticConfig:
    """One point of the space. `encode_parts`: encode steps of each decode group; None: one, and
    it is no variable (FT)."""

    encode_batch: int
    decode_micro_batches: int
    encode_parts: int | None = None
    tp_degree: int = 1
    tp_gpus: int = 0


class _Sizes(NamedTuple):
    """[configs]; what lies in the steps."""

    batch: FloatArray
    groups: FloatArray  # decode groups that are not empty
    encodes: FloatArray  # encode steps that are not empty
    parts: FloatArray  # of the first group
    encode_queries: FloatArray  # of an encode step, in the mean
    tokens: FloatArray  # of an encode step, in the mean
    most_tokens: FloatArray  # of the largest
    rows: FloatArray  # of a decode step, in the mean
    most_rows: FloatArray  # of the largest


class Static:
    """Evaluates configurations of one problem; Ft and Dsi differ in the grid alone."""

    name = ""
    grid_parts: tuple[int | None, ...] = (None,)  # encode_parts in the grid

    def __init__(self, problem: Problem, timing: TimingSource) -> None:
        self.problem, self.timing = problem, timing
        self._plans = Plans(problem, timing)
        fewer = 0 if problem.model.is_encoder_decoder else 1
        below = np.minimum(
            np.concatenate([[0.0], np.cumsum(problem.lengths.outputs.pmf)])[fewer:], 1.0)
        below[-1] = 1.0
        self._rounds = Rounds(below)
        self._max_iterations = len(below) - 1
        quantile = problem.lengths.outputs.quantile(problem.constraint.quantile)
        self._watched = quantile - fewer  # D of the bound's sequence

    @property
    def capacity_bytes(self) -> int:
        return memory.capacity_bytes(self.problem.cluster.device)

    def grid(self, max_queries: int, plans: Sequence[tuple[int, int]]) -> list[StaticConfig]:
        """Every (tp_degree, tp_gpus) of `plans`, with decode groups up to twice its stages and
        batches that are their multiples, 10 % apart, as far as memory and queries reach."""
        found = []
        for tp_degree, tp_gpus in plans:
            plan = self._plans.both(tp_degree, tp_gpus)
            for groups in group_counts(len(plan.stages)):
                for parts in self.grid_parts:
                    encodes = groups * (parts or 1)
                    sizes = geometric(max(max_queries // encodes, 1))
                    line = [StaticConfig(
                        encode_batch=min(size * encodes, max_queries), encode_parts=parts,
                        decode_micro_batches=groups, tp_degree=tp_degree, tp_gpus=tp_gpus)
                        for size in sizes]
                    used = self._memory_bytes(plan, self._sizes(line)).max(axis=1)
                    found += line[:int(np.searchsorted(used, self.capacity_bytes, side="right"))]
        return found

    def evaluate(self, configs: Sequence[StaticConfig]) -> EstimateArrays:
        """Figures of every configuration; vectorised over those of one (tp_degree, tp_gpus)."""
        columns: dict[str, FloatArray] = {}
        rows_of: dict[tuple[int, int], list[int]] = {}
        for row, config in enumerate(configs):
            rows_of.setdefault((config.tp_degree, config.tp_gpus), []).append(row)
        for key, rows in rows_of.items():
            plan = self._plans.both(*key)
            width = NODES * len(plan.stages) + self._max_iterations
            size = max(CHUNK_ELEMENTS // width, 1)
            for begin in range(0, len(rows), size):
                part = rows[begin:begin + size]
                for name, values in self._figures(plan, [configs[row] for row in part]).items():
                    columns.setdefault(name, np.empty(len(configs)))[part] = values
        return EstimateArrays(**columns, fits=columns["memory_bytes"] <= self.capacity_bytes)

    def estimate(self, config: StaticConfig) -> Estimate:
        """One configuration as the artefact that is shown, and executed."""
        plan, problem = self._plans.both(config.tp_degree, config.tp_gpus), self.problem
        sizes = self._sizes([config])
        figures = {name: float(values[0]) for name, values in self._figures(plan, [config]).items()}
        by_rank = {rank: int(np.ceil(size)) for stage, size in zip(
            plan.stages, self._memory_bytes(plan, sizes)[0], strict=True) for rank in stage.ranks}
        rounds = float(self._rounds.not_done(sizes.batch).sum())
        period, encode = figures["period_s"], figures["encode_s"]
        return estimate_from_flat(
            policy=self.name, encode_batch=config.encode_batch, decode_batch=config.encode_batch,
            decode_iterations=max(round(rounds), 1),
            decode_micro_batches=int(sizes.groups[0]),
            encode_micro_batches=int(sizes.groups[0] * sizes.parts[0]),
            tp_degree=config.tp_degree, tp_gpus=config.tp_gpus,
            throughput_qps=figures["throughput_qps"],
            output_tokens_per_s=figures["throughput_qps"] * problem.lengths.outputs.mean,
            latency_s=figures["latency_s"], encode_s=encode,
            decode_iteration_s=(max(period - encode, 0.0) / max(rounds, 1.0)
                                if np.isfinite(period) else np.inf),
            period_s=period, memory_bytes=tuple(by_rank[rank] for rank in sorted(by_rank)),
            memory_capacity_bytes=self.capacity_bytes, kv_tokens=int(figures["kv_tokens"]),
            fits=max(by_rank.values()) <= self.capacity_bytes, stages=plan.stages,
            notes=(f"times: {self.timing.provenance()}",
                   *(["sizes beyond what was measured"] if figures["stretch"] > 1 else [])))

    def _figures(self, plan: Plan, configs: Sequence[StaticConfig]) -> dict[str, FloatArray]:
        sizes = self._sizes(configs)
        with np.errstate(invalid="ignore"):  # refused sizes take infinite time, see below
            batch = self._timeline(plan, sizes)
            period = self._rounds.expected_s(batch, self._rounds.not_done(sizes.batch))
            latency = self._latency_s(batch)
        is_timed = np.isfinite(period)
        return {
            "throughput_qps": np.where(is_timed, sizes.batch / np.where(is_timed, period, 1), 0.0),
            "latency_s": np.where(is_timed, latency, np.inf),
            "period_s": np.where(is_timed, period, np.inf),
            "encode_s": np.where(is_timed, batch.encode_s, np.inf),
            "decode_batch": sizes.batch, "present": sizes.batch,
            "kv_tokens": self._kv_tokens(sizes), "stretch": self._stretch(plan, sizes),
            "memory_bytes": self._memory_bytes(plan, sizes).max(axis=1),
        }

    def _latency_s(self, batch: Batch) -> FloatArray:
        if self.problem.constraint.kind == "sequence":
            return self._rounds.with_output_s(batch, self._watched)
        inputs = self.problem.lengths.inputs
        scatter = batch.encode_s * inputs.std / (inputs.mean * np.sqrt(batch.queries))
        return self._rounds.quantile_s(batch, self.problem.constraint.quantile, scatter)

    def _sizes(self, configs: Sequence[StaticConfig]) -> _Sizes:
        inputs = self.problem.lengths.inputs
        batch = np.array([c.encode_batch for c in configs], float)
        groups = np.minimum([c.decode_micro_batches for c in configs], batch)
        parts = np.minimum([c.encode_parts or 1 for c in configs], np.ceil(batch / groups))
        encodes = np.minimum(groups * parts, batch)
        queries = batch / encodes
        odd = queries - np.floor(queries)  # that share of the steps encodes one query more
        tokens = queries * inputs.mean
        spread = np.sqrt(queries * inputs.std**2 + odd * (1 - odd) * inputs.mean**2)
        most = np.minimum(tokens + expected_maximum_z(encodes) * spread,
                          np.ceil(queries) * inputs.max)
        rows = batch / groups
        return _Sizes(batch, groups, encodes, parts, queries, tokens, most, rows, np.ceil(rows))

    def _timeline(self, plan: Plan, sizes: _Sizes) -> Batch:
        one = plan.times.mean_attention_s(self.problem.lengths.inputs, sizes.encode_queries)

        def encode_s(tokens: FloatArray) -> FloatArray:
            share = tokens / self.problem.lengths.inputs.mean  # queries' worth of attention
            return plan.times.encode_s(tokens, sizes.encode_queries,
                                       {degree: share * own for degree, own in one.items()})

        most, usual = encode_s(sizes.most_tokens), encode_s(sizes.tokens)
        before = np.floor((sizes.encodes - 1) / 2)  # the largest in the middle of the others
        free = pushed(np.zeros(usual.shape), usual, before)
        free = pushed(free, most, np.ones(before.shape))
        free = pushed(free, usual, sizes.encodes - 1 - before)
        last = encoded = free[:, -1]
        # the first group's own; the largest is among its steps once in `groups` times
        first = (pushed(np.zeros(usual.shape), usual, sizes.parts)[:, -1]
                 + (most - usual).sum(axis=1) / sizes.groups)
        first = np.where(sizes.groups > 1, np.minimum(first, last), last)
        step, rest = self._decode_s(plan, sizes)
        begins, ends = [], []
        for round_ in range(EXACT_ROUNDS + 1):
            begin = np.maximum(first, free[:, 0])
            begins.append(begin)
            ends.append(np.maximum(last, begin + rest[:, 0, 0]))
            if round_ < EXACT_ROUNDS:
                free, first, last = advance(free, begin, last, step[:, 0], rest[:, 0])
        later = np.maximum((step + rest).max(axis=2), step.sum(axis=2))
        begin_s, end_s = np.stack(begins, axis=1), np.stack(ends, axis=1)
        return Batch(queries=sizes.batch, groups=sizes.groups, encodes=sizes.encodes,
                     encode_s=encoded, begin_s=begin_s, spread_s=end_s - begin_s, later_s=later,
                     place_s=usual[:, 0])

    def _decode_s(self, plan: Plan, sizes: _Sizes) -> tuple[FloatArray, FloatArray]:
        """[configs, NODES, stages] seconds of the slowest group's step and of all others' at the
        nodes."""
        inputs = self.problem.lengths.inputs
        if self.timing.facts.is_padded:
            # the slowest is the one with the longest input of those with most rows
            odd = sizes.rows - np.floor(sizes.rows)
            in_largest = np.where(odd > 0, odd, 1.0) * sizes.groups * sizes.most_rows
            longest = _largest_of(inputs.pmf, np.concatenate([sizes.rows, in_largest]))
            context, most_context = np.split(longest, 2)
        else:
            context = np.full(len(sizes.batch), inputs.mean)
            most_context = inputs.mean + expected_maximum_z(sizes.groups) * inputs.std / np.sqrt(
                sizes.rows)
        nodes = self._rounds.nodes
        usual = plan.times.decode_s(sizes.rows[:, None], context[:, None] + nodes)
        most = plan.times.decode_s(sizes.most_rows[:, None], most_context[:, None] + nodes)
        return most, np.maximum(sizes.groups[:, None, None] * usual - most, 0.0)

    def _kv_tokens(self, sizes: _Sizes) -> FloatArray:
        """Over all groups: each its rows' inputs at a high quantile, and the most output for
        each."""
        inputs = self.problem.lengths.inputs
        output = max(self.problem.lengths.outputs.max, self.problem.default_max_tokens)
        rows = sizes.most_rows
        spread = memory.KV_QUANTILE_Z * inputs.std * np.sqrt(rows)
        most = np.minimum(rows * inputs.mean + spread, rows * inputs.max)
        group = np.maximum(np.ceil(most), inputs.max) + rows * output
        tokens: FloatArray = group * sizes.groups
        return tokens

    def _memory_bytes(self, plan: Plan, sizes: _Sizes) -> FloatArray:
        """[configs, stages] bytes on each rank of a stage."""
        problem = self.problem
        return (plan.weight_bytes
                + memory.kv_bytes(problem.model, plan.stages, problem.dtype, self._kv_tokens(sizes))
                + memory.activation_bytes(
                    problem.model, plan.stages, problem.dtype, inputs=problem.lengths.inputs,
                    encode_batch=np.ceil(sizes.encode_queries), decode_batch=sizes.most_rows,
                    is_cpu=problem.cluster.device.kind == "cpu"))

    def _stretch(self, plan: Plan, sizes: _Sizes) -> FloatArray:
        """[configs] the largest size presented over the largest measured."""
        lengths, is_encoder_decoder = self.problem.lengths, self.problem.model.is_encoder_decoder
        context = self._max_iterations + (0 if is_encoder_decoder else lengths.inputs.max)
        encode = Operator.ENCODER_REST if is_encoder_decoder else Operator.LAYER_REST
        found = np.zeros(len(sizes.batch))
        for degree in plan.times.degrees:
            rest, head, decode, attend = (self.timing.reach(op, degree) for op in (
                encode, Operator.HEAD, Operator.DECODE_ATTENTION, Operator.ENCODE_ATTENTION))
            for size, measured in ((sizes.most_tokens, rest.x), (sizes.encode_queries, head.x),
                                   (sizes.most_rows, min(head.x, decode.x)), (context, decode.y),
                                   (lengths.inputs.max, attend.x)):
                found = np.maximum(found, np.asarray(size, float) / measured)
        return found


class Ft(Static):
    """FasterTransformer: the same micro-batches for encoding and decoding."""

    name = "ft"


class Dsi(Static):
    """DeepSpeed-Inference's hybrid schedule: each decode group is encoded in several parts. One
    part is among them: on a single stage more would only cost."""

    name = "dsi"
    grid_parts = (1, 2, 3, 4, 6, 8)


def _largest_of(pmf: FloatArray, counts: FloatArray) -> FloatArray:
    """Expected largest of `counts` independent lengths."""
    sizes, index = np.unique(counts, return_inverse=True)
    below = np.minimum(np.cumsum(pmf)[:-1], 1.0)
    largest: FloatArray = (1 + (1 - below ** sizes[:, None]).sum(axis=1))[index]
    return largest
