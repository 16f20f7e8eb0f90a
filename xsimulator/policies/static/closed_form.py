"""FT and DSI in closed form: a batch is encoded, then decoded until its longest query is done
(paper section 2, Figure 1; xrunner.rules.static), for many configurations.

FT (FasterTransformer) has the same micro-batches for encoding and decoding; DSI
(DeepSpeed-Inference's hybrid schedule) encodes each decode group in several parts.

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
tokens. In both, expected largest micro-batches stand for the largest."""

from collections.abc import Sequence
from functools import partial

import numpy as np

from xgpt.core.controls import StaticControls
from xgpt.core.lengths import FloatArray
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate
from xprofiler.timing import TimingSource
from xsimulator import memory
from xsimulator.occupancy import expected_maximum_z
from xsimulator.plans import StagePlan, shared_plans
from xsimulator.policies import geometric, group_counts
from xsimulator.policies.figures import (
    Assembler,
    EstimateArrays,
    by_plan,
    gathered,
    one_pool,
    per_token_s,
)
from xsimulator.policies.measured_range import MeasuredRange, Presented
from xsimulator.policies.static.config import StaticConfig, StaticSteps, static_steps
from xsimulator.policies.static.rounds import EXACT_ROUNDS, NODES, BatchTimeline, Rounds

CHUNK_ELEMENTS = 4_000_000  # of the largest arrays: configurations are evaluated in chunks


class Static:
    """This closed form evaluates configurations of one problem, and keeps what they share."""

    def __init__(self, name: str, problem: Problem, timing: TimingSource, *,
                 grid_parts: Sequence[int | None] = (None,)) -> None:
        """`grid_parts` are the encode_parts of the grid."""
        self.name, self.problem, self.timing = name, problem, timing
        self.grid_parts = grid_parts
        self.plans = shared_plans(problem, timing)
        self._range = MeasuredRange(problem, timing)
        self._assembler = Assembler(problem, timing)
        self.capacity_bytes = self._assembler.capacity_bytes
        fewer = 0 if problem.model.is_encoder_decoder else 1
        below = np.minimum(
            np.concatenate([[0.0], np.cumsum(problem.lengths.outputs.pmf)])[fewer:], 1.0)
        below[-1] = 1.0
        self.rounds = Rounds(below)
        self._max_iterations = len(below) - 1
        quantile = problem.lengths.outputs.quantile(problem.constraint.quantile)
        self.watched = quantile - fewer  # D of the bound's sequence

    def grid(self, max_queries: int, plans: Sequence[tuple[int, int]]) -> list[StaticConfig]:
        """The grid has every (tp_degree, tp_gpus) of `plans`, with decode groups up to twice its
        stages and multiples of these as batches, 10 % apart, as far as memory and queries reach."""
        configs, inputs = [], self.problem.lengths.inputs
        for tp_degree, tp_gpus in plans:
            plan = self.plans.both(tp_degree, tp_gpus)
            for groups in group_counts(len(plan.stages)):
                for parts in self.grid_parts:
                    encodes = groups * (parts or 1)
                    sizes = geometric(max(max_queries // encodes, 1))
                    line = [StaticConfig(
                        encode_batch=min(size * encodes, max_queries), encode_parts=parts,
                        decode_micro_batches=groups, tp_degree=tp_degree, tp_gpus=tp_gpus)
                        for size in sizes]
                    used = self._held(plan, static_steps(line, inputs)).max(axis=1)
                    configs += line[:int(np.searchsorted(used, self.capacity_bytes, side="right"))]
        return configs

    def evaluate(self, configs: Sequence[StaticConfig]) -> EstimateArrays:
        """The figures of every configuration are worked out together for those of one plan."""
        parts = []
        for key, rows in by_plan(configs).items():
            plan = self.plans.both(*key)
            size = max(CHUNK_ELEMENTS // (NODES * len(plan.stages) + self._max_iterations), 1)
            for part in np.split(rows, range(size, len(rows), size)):
                steps = static_steps([configs[row] for row in part], self.problem.lengths.inputs)
                parts.append((part, self._figures(plan, steps)))
        columns = gathered(len(configs), parts)
        return EstimateArrays(**columns, fits=columns["memory_bytes"] <= self.capacity_bytes)

    def estimate(self, config: StaticConfig) -> Estimate:
        """The Estimate says of one configuration what is shown, and what is executed."""
        plan = self.plans.both(config.tp_degree, config.tp_gpus)
        steps = static_steps([config], self.problem.lengths.inputs)
        figures = {name: float(values[0]) for name, values in self._figures(plan, steps).items()}
        rounds = float(self.rounds.not_done(steps.batch).sum())
        period, encode = figures["period_s"], figures["encode_s"]
        figures["decode_iteration_s"] = (
            max(period - encode, 0.0) / max(rounds, 1.0) if np.isfinite(period) else np.inf)
        figures |= {"encode_batch": config.encode_batch, "decode_iterations": rounds}
        groups = int(steps.groups[0])
        controls = StaticControls(
            policy=self.name, encode_batch=config.encode_batch, decode_micro_batches=groups,
            encode_micro_batches=int(groups * steps.parts[0]))
        return self._assembler.estimate(
            controls, one_pool(config, plan.stages, groups, figures["kv_tokens"]), figures,
            held_bytes=self._held(plan, steps)[0],
            notes=["sizes beyond what was measured"] if figures["stretch"] > 1 else [])

    def _figures(self, plan: StagePlan, steps: StaticSteps) -> dict[str, FloatArray]:
        with np.errstate(invalid="ignore"):  # refused sizes take infinite time, see below
            timeline = self._timeline(plan, steps)
            period = self.rounds.expected_s(timeline, self.rounds.not_done(steps.batch))
            latency = self._latency_s(timeline)
            ttft = timeline.first_token_s(is_decoded=self.problem.model.is_encoder_decoder)
        is_timed, lengths = np.isfinite(period), self.problem.lengths
        context = self._max_iterations + (
            0 if self.problem.model.is_encoder_decoder else lengths.inputs.max)
        presented = Presented(
            encode_tokens=steps.most_tokens, encode_queries=steps.encode_queries,
            decode_queries=steps.most_rows, context=context, input_tokens=lengths.inputs.max)
        latency, ttft = (np.where(is_timed, seconds, np.inf) for seconds in (latency, ttft))
        return {
            "throughput_qps": np.where(is_timed, steps.batch / np.where(is_timed, period, 1), 0.0),
            "latency_s": latency, "ttft_s": ttft,
            "tpot_s": per_token_s(self.problem, latency, ttft),
            "period_s": np.where(is_timed, period, np.inf),
            "encode_s": np.where(is_timed, timeline.encode_s, np.inf),
            "decode_batch": steps.batch, "present": steps.batch,
            "kv_tokens": self._kv_tokens(steps),
            "stretch": self._range.stretch(plan.times.degrees, presented),
            "memory_bytes": self._held(plan, steps).max(axis=1)}

    def _kv_tokens(self, steps: StaticSteps) -> FloatArray:
        """[configs] tokens of KV in all groups: each reserves its rows' inputs at a high quantile,
        and the most output for each."""
        inputs, rows = self.problem.lengths.inputs, steps.most_rows
        output = max(self.problem.lengths.outputs.max, self.problem.default_max_tokens)
        spread = memory.KV_QUANTILE_Z * inputs.std * np.sqrt(rows)
        most = np.minimum(rows * inputs.mean + spread, rows * inputs.max)
        tokens: FloatArray = np.maximum(np.ceil(most), inputs.max) + rows * output
        return tokens * steps.groups

    def _held(self, plan: StagePlan, steps: StaticSteps) -> FloatArray:
        """[configs, stages] bytes on each rank of a stage."""
        return (plan.weight_bytes
                + memory.kv_bytes(self.problem, plan.stages, self._kv_tokens(steps))
                + memory.activation_bytes(
                    self.problem, plan.stages, encode_batch=np.ceil(steps.encode_queries),
                    decode_batch=steps.most_rows))

    def _latency_s(self, batch: BatchTimeline) -> FloatArray:
        if self.problem.constraint.kind == "sequence":
            return self.rounds.with_output_s(batch, self.watched)
        inputs = self.problem.lengths.inputs
        scatter = batch.encode_s * inputs.std / (inputs.mean * np.sqrt(batch.queries))
        return self.rounds.quantile_s(batch, self.problem.constraint.quantile, scatter)

    def _timeline(self, plan: StagePlan, steps: StaticSteps) -> BatchTimeline:
        one = plan.times.mean_attention_s(steps.encode_queries)

        def encode_s(tokens: FloatArray) -> FloatArray:
            share = tokens / self.problem.lengths.inputs.mean  # queries' worth of attention
            return plan.times.encode_s(tokens, steps.encode_queries,
                                       {degree: share * own for degree, own in one.items()})

        most, usual = encode_s(steps.most_tokens), encode_s(steps.tokens)
        before = np.floor((steps.encodes - 1) / 2)  # the largest in the middle of the others
        free = Rounds.pushed(np.zeros(usual.shape), usual, before)
        free = Rounds.pushed(free, most, np.ones(before.shape))
        free = Rounds.pushed(free, usual, steps.encodes - 1 - before)
        last = encoded = free[:, -1]
        # the first group's own; the largest is among its steps once in `groups` times
        first = (Rounds.pushed(np.zeros(usual.shape), usual, steps.parts)[:, -1]
                 + (most - usual).sum(axis=1) / steps.groups)
        first = np.where(steps.groups > 1, np.minimum(first, last), last)
        step, rest = self._decode_s(plan, steps)
        begins, ends = [], []
        for round_ in range(EXACT_ROUNDS + 1):
            begin = np.maximum(first, free[:, 0])
            begins.append(begin)
            ends.append(np.maximum(last, begin + rest[:, 0, 0]))
            if round_ < EXACT_ROUNDS:
                free, first, last = Rounds.advance(free, begin, last, step[:, 0], rest[:, 0])
        later = np.maximum((step + rest).max(axis=2), step.sum(axis=2))
        begin_s, end_s = np.stack(begins, axis=1), np.stack(ends, axis=1)
        return BatchTimeline(
            queries=steps.batch, groups=steps.groups, encodes=steps.encodes, encode_s=encoded,
            begin_s=begin_s, spread_s=end_s - begin_s, later_s=later, place_s=usual[:, 0])

    def _decode_s(self, plan: StagePlan, steps: StaticSteps) -> tuple[FloatArray, FloatArray]:
        """The slowest group's step, and all others', take so many seconds [configs, NODES, stages]
        at the nodes."""
        inputs = self.problem.lengths.inputs
        if self.timing.facts.is_padded:
            # the slowest is the one with the longest input of those with most rows
            odd = steps.rows - np.floor(steps.rows)
            in_largest = np.where(odd > 0, odd, 1.0) * steps.groups * steps.most_rows
            sizes, index = np.unique(np.concatenate([steps.rows, in_largest]), return_inverse=True)
            below = np.minimum(np.cumsum(inputs.pmf)[:-1], 1.0)
            longest = 1 + (1 - below ** sizes[:, None]).sum(axis=1)  # of so many inputs
            context, most_context = np.split(longest[index], 2)
        else:
            context = np.full(len(steps.batch), inputs.mean)
            most_context = inputs.mean + expected_maximum_z(steps.groups) * inputs.std / np.sqrt(
                steps.rows)
        nodes = self.rounds.nodes
        usual = plan.times.decode_s(steps.rows[:, None], context[:, None] + nodes)
        most = plan.times.decode_s(steps.most_rows[:, None], most_context[:, None] + nodes)
        return most, np.maximum(steps.groups[:, None, None] * usual - most, 0.0)


# The closed forms of the policies (problem, timing); encode steps are no variable of FT. One part
# is among those of DSI's grid: on a single stage more would only cost.
ft = partial(Static, "ft")
dsi = partial(Static, "dsi", grid_parts=(1, 2, 3, 4, 6, 8))
