"""RRA whose queries are encoded in chunks beside decoding, in closed form (docs/design.md).

Symbols: B_E, N_D, G as in rra.closed_form, c = encode_chunk, T = tokens of the inputs that a group
encodes in a phase, e = iterations between two chunks (xrunner.rules.chunks), K = N_D / e chunks in
a phase. A query joins decoding when its last chunk is in, whenever that is, so that it needs D more
iterations wherever the phase stands; Little's law gives, at any iteration,

    queries decoding = B_E E[D] / N_D

as in RRA with N_D = 1 and B_E / N_D queries encoded in each iteration: occupancies, contexts and
variances are those. All groups encode in the same rounds. One round of chunks and the e - 1 that
decode alone after it are a small phase, whose timeline is RRA's (xsimulator.pipeline); where
chunks come in most rounds, but not in all, the time is that of pairs of rounds and of rounds with
chunks alone, each in its share.

    throughput = B_E / (K small phases)
    latency(d) = (chunks of a query - 1) small phases + its last chunk's round
                 + floor(d / e) small phases + (d mod e) rounds"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from xgpt.core.lengths import BoolArray, FloatArray, IntArray
from xgpt.core.normal import ndtri
from xgpt.core.problem import Problem
from xsimulator import memory
from xsimulator.occupancy import QueryFlow
from xsimulator.pipeline import StageWork, Timeline, sorted_timeline
from xsimulator.plans import StagePlan
from xsimulator.policies.measured_range import Presented
from xsimulator.policies.rra.config import RraConfig
from xsimulator.policies.rra.phase_blocks import BlockTable
from xsimulator.policies.rra.phases import (
    DecodeLoads,
    EncodeTokens,
    Pair,
    PhaseBatches,
    own_steps_s,
    slowest_and_rest,
)

_SIZES = 16
_SCATTER = ndtri((np.arange(_SIZES) + 0.5) / _SIZES)  # equally likely, of a phase's tokens


class ChunkConfigs(NamedTuple):
    """Configurations of one plan, [configs]; `groups` are as many as there are."""

    encode_batch: FloatArray
    decode_iterations: FloatArray
    chunk: FloatArray
    groups: FloatArray

    @classmethod
    def of(cls, configs: Sequence[RraConfig], stages: int) -> "ChunkConfigs":
        """Those of a plan of so many stages."""
        columns = np.array([(one.encode_batch, one.decode_iterations, one.encode_chunk,
                             one.decode_micro_batches or stages) for one in configs], float)
        return cls(*columns.reshape(-1, 4).T)


class ChunkLoads(NamedTuple):
    """What the rounds of configurations of one plan work, [configs]."""

    batches: PhaseBatches  # with one iteration a phase: B_E / N_D queries join at each
    loads: DecodeLoads
    group_batch: FloatArray  # queries that a group encodes in a phase
    chunks: FloatArray  # rounds of a phase that encode
    steps: FloatArray  # of such a round: groups that encode or decode
    tokens: FloatArray  # [2, configs] of the largest group's chunk, and of any
    begins: FloatArray  # chunks that a query's encoding takes

    @property
    def spans(self) -> FloatArray:
        """Parts of inputs in a chunk."""
        return self.group_batch * self.begins / self.chunks

    @property
    def ended(self) -> FloatArray:
        """Queries whose encoding ends with a chunk."""
        return self.group_batch / self.chunks

    @property
    def decoding(self) -> FloatArray:
        """[2, configs] queries of the largest group, and of any, that decode in a round."""
        return np.asarray(self.loads.both[:, 0])


class RoundTimes(NamedTuple):
    """Seconds [configs]; `is_timed`: whether the timing source answered."""

    phase_s: FloatArray
    mixed_s: FloatArray  # a round that encodes, from a group's step to its tokens
    plain_s: FloatArray  # one that does not, in the mean
    alone_s: FloatArray  # more of each round, for a query that is there for certain
    is_timed: BoolArray


class Chunked:
    """The loads and times of such configurations of one problem."""

    def __init__(self, problem: Problem, flow: QueryFlow, blocks: BlockTable,
                 tokens: EncodeTokens) -> None:
        self.problem, self._flow, self._blocks, self._tokens = problem, flow, blocks, tokens
        outputs = problem.lengths.outputs
        self._seen = flow.iterations_of(outputs.quantile(problem.constraint.quantile))
        # what kind "queries" adds: inputs scatter too, and with them how long encoding takes
        self._away = max(self._seen - flow.mean_iterations, 0.0)
        self._scatter = problem.constraint.kind == "queries"

    def loads(self, configs: ChunkConfigs) -> ChunkLoads:
        """A phase takes up no more tokens than its chunks hold: the rest of the queries waits."""
        groups, iterations, mean = configs.groups, configs.decode_iterations, self._tokens.mean
        most = configs.chunk * iterations
        encode_batch = np.minimum(configs.encode_batch, most * groups / mean)
        _, usual, largest, spread = self._tokens.scattered(
            encode_batch, np.minimum(groups, configs.encode_batch))
        # of a phase: how often chunks come is a whole number that hangs on the tokens there are
        scatter = np.maximum(largest + spread * np.where(groups > 1, 0.6, 1.0) * _SCATTER[:, None],
                             0.25 * usual)
        every = np.clip(np.floor(most / scatter), 1.0, iterations)
        chunks = np.ceil(iterations / every).mean(axis=0)
        per_step = encode_batch / iterations
        columns = self._blocks.columns(np.ones(len(groups), np.int64),
                                       np.ceil(encode_batch).astype(np.int64))
        batches = PhaseBatches(encode_batch=per_step, groups=groups,
                               queries=self._blocks.stacked.take(columns, per_step / groups))
        group_batch = encode_batch / groups
        loads = batches.decode_loads()
        # groups that have none of few queries work no chunk, but may decode
        steps = np.maximum(loads.steps[0], groups * np.minimum(group_batch, 1.0))
        of_all = np.minimum(encode_batch * mean / steps / chunks, configs.chunk)
        is_cut = np.where(encode_batch < configs.encode_batch, chunks, chunks - 1)
        return ChunkLoads(
            batches=batches, loads=loads, group_batch=group_batch, chunks=chunks, steps=steps,
            tokens=np.stack([np.clip(largest / chunks, of_all, configs.chunk), of_all]),
            begins=1 + is_cut / np.maximum(group_batch, 1.0))

    def times(self, plan: StagePlan, configs: ChunkConfigs, held: ChunkLoads) -> RoundTimes:
        """A phase is made of chunks and what is decoded after each."""
        mixed, mixed_timed = self._mixed_s(plan, held)
        plain, alone_s, plain_timed = self._plain_s(plan, held)
        kind_of, iterations = plan.steps.kind_of, configs.decode_iterations
        rest = iterations / held.chunks - 1  # rounds that decode alone, after each chunk
        whole = _timeline(mixed, plain, kind_of, np.maximum(rest, 1.0))
        cycle_s, mixed_s = whole.period_s, whole.encoded_s
        plain_s = np.maximum(cycle_s - mixed_s, 0.0) / np.maximum(rest, 1.0)
        phase_s = held.chunks * cycle_s
        rows = np.flatnonzero(rest < 1)
        if len(rows):
            some = [(one[rows], others[rows]) for one, others in mixed]
            always = _timeline(some, some, kind_of, np.ones(len(rows)))
            pairs, single = iterations - held.chunks, 2 * held.chunks - iterations
            phase_s[rows] = (pairs * cycle_s)[rows] + single[rows] * always.period_s / 2
            mixed_s = mixed_s.copy()
            share = np.clip(rest[rows], 0.0, 1.0)
            mixed_s[rows] = share * mixed_s[rows] + (1 - share) * always.period_s / 2
        return RoundTimes(phase_s, mixed_s, plain_s, alone_s, mixed_timed & plain_timed)

    def latency_s(self, configs: ChunkConfigs, held: ChunkLoads, times: RoundTimes,
                  ) -> tuple[FloatArray, FloatArray]:
        """(a query's latency, its time from the start of its encoding to its first token), for
        the iterations of the bound's query."""
        every = configs.decode_iterations / held.chunks
        cycle_s, d = times.phase_s / held.chunks, float(self._seen)
        encode_s = (held.begins - 1) * cycle_s + times.mixed_s
        before = np.floor(d / every + 1e-9)
        left = np.maximum(d - before * every, 0.0)
        seldom_s = before * cycle_s + np.minimum(left * times.plain_s, cycle_s)
        decode_s = np.where(every >= 2, seldom_s, d * times.phase_s / configs.decode_iterations)
        latency_s = encode_s + decode_s + d * times.alone_s
        if self._scatter and self._away > 0:
            # inputs scatter as well as outputs: standard deviations add by their squares
            each = (held.begins - 1) * cycle_s / self._tokens.mean * self._tokens.std
            step = self._away * times.phase_s / configs.decode_iterations
            latency_s = latency_s + np.hypot(step, each * _normal(self.problem)) - step
        return latency_s, encode_s

    def kv_tokens(self, held: ChunkLoads) -> FloatArray:
        """[configs] tokens of KV reserved over all groups, as Rra's: a query is there while it is
        encoded and while it decodes, and the queries of one chunk come together."""
        queries, batch = held.batches.queries, held.batches.group_batch
        groups, num_queries = held.batches.groups, self.problem.num_queries
        longest = self._flow.max_reserve_tokens
        mean, variance = self._flow.reserve_moments
        encoding = batch * self._encoding_rounds(held)
        wanted = (batch * queries.mean_reserved + encoding * mean + held.ended / 2 * mean
                  + memory.KV_QUANTILE_Z * np.sqrt(
                      batch * queries.variance_reserved + encoding * variance) + longest)
        most = np.full(len(batch), np.inf)
        if num_queries is not None:
            most = np.ceil(num_queries / np.minimum(groups, num_queries))
        return np.asarray(np.ceil(np.clip(wanted, longest, most * longest)) * groups)

    def present(self, held: ChunkLoads) -> FloatArray:
        """[configs] queries in the pool in the mean, those that are encoded included."""
        per_step = held.batches.encode_batch
        return np.asarray(per_step * (self._flow.mean_iterations + self._encoding_rounds(held)))

    def held_bytes(self, plan: StagePlan, held: ChunkLoads, kv_tokens: FloatArray) -> FloatArray:
        """[configs, stages] bytes on each rank of a stage."""
        decoding = held.decoding[0]
        return np.asarray(
            plan.weight_bytes + memory.kv_bytes(self.problem, plan.stages, kv_tokens)
            + memory.step_bytes(self.problem, plan.stages, rows=held.tokens[0] + decoding,
                                heads=decoding + np.ceil(held.spans)))

    def presented(self, held: ChunkLoads) -> Presented:
        """The largest sizes that the timing source is asked for."""
        lengths, decoding = self.problem.lengths, held.decoding[0]
        longest = float(lengths.inputs.max)
        return Presented(held.tokens[0] + decoding, held.ended + decoding, decoding,
                         input_tokens=longest, context=longest + lengths.outputs.max)

    @staticmethod
    def _encoding_rounds(held: ChunkLoads) -> FloatArray:
        """Rounds that a query's encoding takes, its last chunk's not counted."""
        rounds = held.group_batch / held.batches.group_batch / held.chunks
        return np.asarray((held.begins - 1) * rounds)

    def _mixed_s(self, plan: StagePlan, held: ChunkLoads) -> tuple[list[Pair], BoolArray]:
        """The slowest group's step that encodes, and all others', by kind of stage."""
        tokens, decoding = held.tokens, held.decoding
        # the group of the largest chunk is seldom that of the most queries
        more, queries = tokens[0] - tokens[1], decoding[0] - decoding[1]
        both = more + queries
        part = np.hypot(more, queries) / np.where(both > 0, both, 1.0)
        tokens = np.stack([tokens[1] + part * more, tokens[1]])
        decoding = np.stack([decoding[1] + part * queries, decoding[1]])
        one = plan.times.mean_attention_s(held.spans)
        context = held.batches.charged_context(held.loads)[:, 0]
        seconds = plan.steps.mixed_s(
            tokens, np.broadcast_to(held.ended, tokens.shape),
            {degree: tokens / self._tokens.mean * own for degree, own in one.items()},
            decoding, context)
        return slowest_and_rest(seconds, held.steps)

    def _plain_s(self, plan: StagePlan,
                 held: ChunkLoads) -> tuple[list[Pair], FloatArray, BoolArray]:
        """The same of a step that decodes alone, with rra.phases.own_steps_s."""
        context = held.batches.charged_context(held.loads)
        seconds = plan.steps.decode_s(held.loads.both, context)
        pairs, is_timed = slowest_and_rest(seconds, held.loads.steps)
        alone_s = own_steps_s(plan, held.batches, held.loads, [own[1] for own in seconds])
        return ([(one[0], rest[0]) for one, rest in pairs], np.asarray(alone_s[0, 0]),
                np.asarray(is_timed[0]))


def _timeline(mixed: Sequence[Pair], plain: Sequence[Pair], kind_of: Sequence[int],
              rounds: FloatArray) -> Timeline:
    """A round of chunks and so many rounds that decode alone."""
    kinds = [StageWork(encode_s=m, encode_rest_s=mr, decode_s=p[None], decode_rest_s=pr[None])
             for (m, mr), (p, pr) in zip(mixed, plain, strict=True)]
    blocks: IntArray = np.ones(len(rounds), np.int64)
    return sorted_timeline([kinds[kind] for kind in kind_of], blocks, rounds[None])


def _normal(problem: Problem) -> float:
    """The bound's quantile in standard deviations of the output lengths."""
    outputs = problem.lengths.outputs
    return (outputs.quantile(problem.constraint.quantile) - outputs.mean) / max(outputs.std, 1e-9)
