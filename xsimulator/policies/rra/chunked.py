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
chunks alone, each in its share. With fewer queries than groups, others of these encode in each
phase than in the last: short ones are run (rra.turns). Where phases are unlike each other these are
walked (rra.phase_walk).

    throughput = B_E / (K small phases)
    latency(d) = (chunks of a query - 1) (iterations between two) rounds + its last chunk's round
                 + floor(d / e) small phases + (d mod e) rounds"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cache, lru_cache
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
from xsimulator.policies.rra.dealt import Rule
from xsimulator.policies.rra.packed_blocks import OWN
from xsimulator.policies.rra.phase_blocks import LOADS, BlockTable
from xsimulator.policies.rra.phase_walk import PhaseWalk
from xsimulator.policies.rra.phases import (
    DecodeLoads,
    EncodeTokens,
    Pair,
    PhaseBatches,
    own_steps_s,
    slowest_and_rest,
)

ALWAYS = 1.001  # iterations between chunks up to which every round has one
_MOST_LOADS = 256  # kept, of single configurations
_SIZES = 16
_HALVINGS = 16  # of a small phase, in which a quantile lies
_SCATTER = ndtri((np.arange(_SIZES) + 0.5) / _SIZES)  # equally likely, of a phase's tokens


class ChunkConfigs(NamedTuple):
    """Configurations, [configs]; `groups` are as many as there are."""

    encode_batch: FloatArray
    decode_iterations: FloatArray
    chunk: FloatArray
    groups: FloatArray

    @classmethod
    def of(cls, configs: Sequence[RraConfig], stages: Sequence[int]) -> "ChunkConfigs":
        """Those whose plans have so many stages."""
        columns = np.array([(one.encode_batch, one.decode_iterations, one.encode_chunk,
                             one.decode_micro_batches or count)
                            for one, count in zip(configs, stages, strict=True)], float)
        return cls(*columns.reshape(-1, 4).T)

    def take(self, rows: IntArray) -> "ChunkConfigs":
        """Some of them."""
        return ChunkConfigs(*(own[rows] for own in self))


class ChunkLoads(NamedTuple):
    """What the rounds of configurations work, of whichever plans, [configs]."""

    steady: PhaseBatches  # with one iteration a phase: B_E / N_D queries join at each
    cycles: PhaseBatches  # with the iterations of a small phase
    loads: DecodeLoads  # of `steady`
    group_batch: FloatArray  # queries that a group encodes in a phase
    chunks: FloatArray  # rounds of a phase that encode
    every: IntArray  # whole iterations of a small phase
    steps: FloatArray  # of a round with chunks: groups that encode or decode
    tokens: FloatArray  # [2, configs] of the largest group's chunk, and of any
    begins: FloatArray  # chunks that a query's encoding takes
    spacing: FloatArray  # iterations from one chunk of a phase to the next

    def take(self, rows: IntArray) -> "ChunkLoads":
        """Those of some configurations."""
        return ChunkLoads(
            self.steady.take(rows), self.cycles.take(rows), DecodeLoads(
                *(own[..., rows] for own in self.loads)), self.group_batch[rows],
            self.chunks[rows], self.every[rows], self.steps[rows], self.tokens[:, rows],
            self.begins[rows], self.spacing[rows])

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
    encode_s: FloatArray  # from the start of a query's encoding to its first token
    decode_s: FloatArray  # from there to the last token of the latency bound's query
    is_timed: BoolArray
    is_walked: BoolArray  # whose latency is known as it is asked for


class _Cycle(NamedTuple):
    """Seconds [configs] of a small phase; of its round that encodes, and in the mean of one that
    does not; and from a query's last chunk on until the latency bound's query is done."""

    cycle_s: FloatArray
    mixed_s: FloatArray
    plain_s: FloatArray
    seen_s: FloatArray
    is_timed: BoolArray


class Chunked:
    """The loads and times of such configurations of one problem."""

    def __init__(self, problem: Problem, flow: QueryFlow, blocks: BlockTable,
                 tokens: EncodeTokens) -> None:
        self.problem, self._flow, self._blocks, self.tokens = problem, flow, blocks, tokens
        # of one configuration: a schedule's margin asks again under other times
        self.loads_of: Callable[..., ChunkLoads] = blocks.kept.setdefault(
            ("loads", tokens.adjustment), lru_cache(_MOST_LOADS)(lambda *config: self.loads(
                ChunkConfigs(*(np.array([value]) for value in config)))))
        self._bytes_of = cache(lambda plan: memory.StageBytes(problem, plan.stages))
        outputs = problem.lengths.outputs
        self._seen = flow.iterations_of(outputs.quantile(problem.constraint.quantile))
        # what kind "queries" adds: inputs scatter too, and with them how long encoding takes
        self._away = max(self._seen - flow.mean_iterations, 0.0)
        self._scatter = problem.constraint.kind == "queries"
        is_of_all = self._scatter and problem.constraint.quantile
        self._walk = PhaseWalk.of(problem.lengths, flow, tokens, is_padded=blocks.is_padded,
                                  seen=self._seen, quantile=is_of_all or None)

    def loads(self, configs: ChunkConfigs, *, is_timed: bool = True) -> ChunkLoads:
        """A phase takes up no more tokens than its chunks hold: the rest of the queries waits.
        is_timed: `times` will be asked for, not only what is held."""
        groups, iterations, mean = configs.groups, configs.decode_iterations, self.tokens.mean
        most = configs.chunk * iterations
        encode_batch = np.minimum(configs.encode_batch, most * groups / mean)
        _, usual, largest, spread = self.tokens.scattered(
            encode_batch, np.minimum(groups, configs.encode_batch))
        # of a phase: how often chunks come is a whole number that hangs on the tokens there are
        scatter = np.maximum(largest + spread * np.where(groups > 1, 0.6, 1.0) * _SCATTER[:, None],
                             0.25 * usual)
        is_full = encode_batch < configs.encode_batch
        often = np.where(is_full, 1.0, np.clip(np.floor(most / scatter), 1.0, iterations))
        chunks = np.ceil(iterations / often).mean(axis=0)
        between = iterations / chunks
        every = np.where(between < 2, np.where(between > ALWAYS, 2, 1),
                         np.rint(between)).astype(np.int64)
        rate = encode_batch / iterations
        steady = self._batches(rate, groups, np.ones(len(groups), np.int64),
                               () if is_timed else OWN)
        loads, group_batch = steady.decode_loads(), encode_batch / groups
        # groups that have none of few queries work no chunk, but may decode; a query longer than
        # what its group's chunks of a phase hold is encoded in those of several phases
        at_work = np.minimum(group_batch * np.maximum(mean / (configs.chunk * chunks), 1.0), 1.0)
        steps = np.maximum(loads.steps[0], groups * at_work)
        of_all = np.minimum(encode_batch * mean / steps / chunks, configs.chunk)
        num_cuts = np.where(is_full, chunks, chunks - 1)
        return ChunkLoads(
            steady=steady, cycles=self._batches(
                rate * every, groups, every, OWN if is_timed else LOADS), loads=loads,
            group_batch=group_batch, chunks=chunks, every=every, steps=steps,
            tokens=np.array([np.clip(largest / chunks, of_all, configs.chunk), of_all]),
            begins=1 + num_cuts * at_work / group_batch, spacing=often.mean(axis=0))

    def times(self, plan: StagePlan, configs: ChunkConfigs, held: ChunkLoads) -> RoundTimes:
        """A phase is made of chunks and what is decoded after each. A longer pause than in whole
        iterations has more of the rounds that decode alone."""
        count, kind_of = len(held.chunks), plan.steps.kind_of
        mixed, always_timed = self._mixed_s(plan, held, held.decoding, held.steady, held.loads)
        iterations, between = configs.decode_iterations, configs.decode_iterations / held.chunks
        always_s = _timeline(mixed, [(m[None], rest[None]) for m, rest in mixed], kind_of,
                             np.ones(count, np.int64), np.ones((1, count))).period_s / 2
        phase_s, encode_s = held.chunks * always_s, held.begins * always_s
        decode_s, is_timed = self._seen * always_s, always_timed.copy()
        rows = np.flatnonzero(held.every > 1)
        if len(rows):
            order = rows[np.argsort(-self._cycle_blocks(held)[rows], kind="stable")]
            cycle = self._cycle(plan, held, order)
            pause, every = between[order], held.every[order]
            pairs, single = iterations[order] - held.chunks[order], (
                2 * held.chunks[order] - iterations[order])
            of_pairs = pairs * cycle.cycle_s + single * always_s[order]
            of_cycles = held.chunks[order] * (cycle.cycle_s + (pause - every) * cycle.plain_s)
            phase_s[order] = np.where(pause < 2, of_pairs, of_cycles)
            round_s = phase_s[order] / iterations[order]
            encode_s[order] = ((held.begins[order] - 1) * held.spacing[order] * round_s
                               + cycle.mixed_s)
            decode_s[order] = np.where(
                pause < 2, self._seen * round_s,
                cycle.seen_s + self._seen * (round_s - cycle.cycle_s / every))
            is_timed[order] &= cycle.is_timed
        alone_s = self._alone_s(plan, held)
        decode_s += self._seen * alone_s
        of_walk = configs.encode_batch, configs.groups, iterations
        is_walked = self._walk.are_in_turns(*of_walk) | self._walk.is_needed(*of_walk,
                                                                             configs.chunk)
        for row in np.flatnonzero(is_walked).tolist():
            phase_s[row], encode_s[row], decode_s[row] = self._walk.walk(
                plan, Rule(*(int(own[row]) for own in configs)),
                float(held.group_batch[row] * configs.groups[row]))
        return RoundTimes(phase_s, encode_s, decode_s, is_timed & np.isfinite(phase_s), is_walked)

    def latency_s(self, configs: ChunkConfigs, held: ChunkLoads, times: RoundTimes) -> FloatArray:
        """[configs] of the latency bound's query."""
        latency_s = times.encode_s + times.decode_s
        if not self._scatter:
            return latency_s
        more, round_s = held.begins - 1, times.phase_s / configs.decode_iterations
        # inputs scatter as well as outputs: standard deviations add by their squares
        wait_s = more * held.spacing * round_s
        each = wait_s / self.tokens.mean * self.tokens.std
        step = max(self._away, 0.0) * round_s
        scattered_s = np.hypot(step, each * _normal(self.problem)) - step
        # few are cut into two chunks, and wait for the second as long as for many tokens
        late_s = _late_iterations(
            self.problem, np.minimum(more, 1.0), held.spacing) * round_s - wait_s
        more_s = np.where(more < 1, late_s, scattered_s if self._away > 0 else 0.0)
        return np.asarray(latency_s + np.where(times.is_walked, 0.0, more_s))

    def kv_tokens(self, held: ChunkLoads) -> FloatArray:
        """[configs] tokens of KV reserved over all groups, as Rra's: a query is there while it is
        encoded and while it decodes, and the queries of one chunk come together."""
        queries, batch = held.cycles.queries, held.cycles.group_batch
        groups, num_queries = held.steady.groups, self.problem.num_queries
        longest = self._flow.max_reserve_tokens
        mean, variance = self._flow.reserve_moments
        encoding = held.steady.group_batch * self._encoding_rounds(held)
        wanted = (batch * queries.mean_reserved + encoding * mean
                  + memory.KV_QUANTILE_Z * np.sqrt(
                      batch * queries.variance_reserved + encoding * variance) + longest)
        most = np.full(len(batch), np.inf)
        if num_queries is not None:
            most = np.ceil(num_queries / np.minimum(groups, num_queries))
        return np.asarray(np.ceil(np.clip(wanted, longest, most * longest)) * groups)

    def present(self, held: ChunkLoads) -> FloatArray:
        """[configs] queries in the pool in the mean, those that are encoded included."""
        per_step = held.steady.encode_batch
        return np.asarray(per_step * (self._flow.mean_iterations + self._encoding_rounds(held)))

    @staticmethod
    def step_sizes(held: ChunkLoads) -> FloatArray:
        """[2, configs] rows of the largest step, and those whose next token is chosen."""
        decoding = held.decoding[0]
        return np.array([held.tokens[0] + decoding, decoding + np.ceil(held.spans)])

    def held_bytes(self, plan: StagePlan, step_sizes: FloatArray,
                   kv_tokens: FloatArray) -> FloatArray:
        """[configs, stages] bytes on each rank of a stage."""
        own = self._bytes_of(plan)
        return np.asarray(plan.weight_bytes + own.kv(kv_tokens) + own.step(*step_sizes))

    def presented(self, held: ChunkLoads) -> Presented:
        """The largest sizes that the timing source is asked for."""
        lengths, decoding = self.problem.lengths, held.decoding[0]
        longest = float(lengths.inputs.max)
        return Presented(held.tokens[0] + decoding, held.ended + decoding, decoding,
                         input_tokens=longest, context=longest + lengths.outputs.max)

    @staticmethod
    def _encoding_rounds(held: ChunkLoads) -> FloatArray:
        """Rounds that a query's encoding takes, its last chunk's not counted."""
        rounds = held.group_batch / held.steady.group_batch / held.chunks
        return np.asarray((held.begins - 1) * rounds)

    def _batches(self, encode_batch: FloatArray, groups: FloatArray, iterations: IntArray,
                 without: Collection[str] = ()) -> PhaseBatches:
        """So many queries join every `iterations`; at least SMALL_BATCH count as a large batch."""
        columns = self._blocks.columns(iterations, np.full(len(groups), 1 << 10))
        return PhaseBatches(encode_batch=encode_batch, groups=groups,
                            queries=self._blocks.take(columns, encode_batch / groups,
                                                              without))

    @staticmethod
    def _cycle_blocks(held: ChunkLoads) -> IntArray:
        """[configs] blocks of a small phase without its last iteration, which also encodes."""
        queries = held.cycles.queries
        last = queries.widths[queries.blocks - 1, np.arange(len(queries.blocks))]
        return np.maximum(queries.blocks - (last <= 1), 1)

    def _cycle(self, plan: StagePlan, held: ChunkLoads, rows: IntArray) -> _Cycle:
        """Small phases of several iterations, in falling order of their blocks. A query decodes
        first in the round after its last chunk; its small phase's last round encodes again."""
        cycles = held.cycles.take(rows)
        blocks, places = self._cycle_blocks(held)[rows], np.arange(len(rows))
        queries, loads = cycles.queries, cycles.decode_loads()
        last = queries.blocks - 1
        part = held._replace(
            group_batch=held.group_batch[rows], chunks=held.chunks[rows],
            tokens=held.tokens[:, rows], begins=held.begins[rows], steps=np.maximum(
                loads.steps[last, places], held.steps[rows]))
        at_last = loads.both[:, last, places]
        mixed, mixed_timed = self._mixed_s(plan, part, at_last, cycles, loads)
        context = cycles.charged_context(loads)
        plain, is_timed = slowest_and_rest(plan.steps.decode_s(loads.both, context), loads.steps)
        widths = queries.widths.copy()
        widths[last, places] -= 1
        line = _timeline(mixed, plain, plan.steps.kind_of, blocks, widths)
        finish = line.finish_s[places, np.minimum(queries.seen, blocks - 1)]
        is_last = (queries.seen >= blocks) | ((self._seen - 1) % held.every[rows]
                                               == held.every[rows] - 1)
        seen_s = np.where(is_last, line.period_s, finish - line.encoded_s)
        if self._seen == 0:
            seen_s = np.zeros(len(rows))
        rest = np.maximum(line.period_s - line.encoded_s, 0.0)
        return _Cycle(line.period_s, line.encoded_s, rest / np.maximum(held.every[rows] - 1, 1),
                      queries.phases_before * line.period_s + seen_s,
                      mixed_timed & is_timed.all(axis=0))

    def _alone_s(self, plan: StagePlan, held: ChunkLoads) -> FloatArray:
        """More of each round, for a query that is there for certain (rra.phases.own_steps_s)."""
        context = held.steady.charged_context(held.loads)
        seconds = plan.steps.decode_s(held.loads.both, context)
        own = own_steps_s(plan, held.steady, held.loads, [one[1] for one in seconds])
        return np.asarray(own[0, 0])

    def _mixed_s(self, plan: StagePlan, held: ChunkLoads, decoding: FloatArray,
                 batches: PhaseBatches, loads: DecodeLoads) -> tuple[list[Pair], BoolArray]:
        """The slowest group's step that encodes beside `decoding` [2, configs] queries, and all
        others', by kind of stage. `loads`: those of `batches`."""
        tokens = held.tokens
        # the group of the largest chunk is seldom that of the most queries
        more, queries = tokens[0] - tokens[1], decoding[0] - decoding[1]
        both = more + queries
        part = np.hypot(more, queries) / np.where(both > 0, both, 1.0)
        tokens = np.array([tokens[1] + part * more, tokens[1]])
        one = plan.times.mean_attention_s(held.spans)
        context = batches.charged_context(loads)
        last = batches.queries.blocks - 1
        seconds = plan.steps.mixed_s(
            tokens, np.full(tokens.shape, held.ended),
            {degree: tokens / self.tokens.mean * own for degree, own in one.items()},
            np.array([decoding[1] + part * queries, decoding[1]]),
            context[:, last, np.arange(len(last))])
        return slowest_and_rest(seconds, held.steps)


def _late_iterations(problem: Problem, share: FloatArray, later: FloatArray) -> FloatArray:
    """[configs] so many iterations beyond the quantile of all is that of all if a `share` of
    the queries takes `later` more."""
    outputs, quantile = problem.lengths.outputs, problem.constraint.quantile
    places, below = outputs.support.astype(float), np.cumsum(outputs.pmf)
    begin = np.interp(quantile, below, places)
    low, high = np.zeros(len(share)), later.copy()
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        known = (1 - share) * np.interp(begin + middle, places, below) + share * np.interp(
            begin + middle - later, places, below)
        low, high = np.where(known < quantile, middle, low), np.where(
            known < quantile, high, middle)
    return high


def _timeline(mixed: Sequence[Pair], plain: Sequence[Pair], kind_of: Sequence[int],
              blocks: IntArray, widths: FloatArray) -> Timeline:
    """A round of chunks, then `blocks` of rounds that decode alone.

    Of more groups than stages, which a slow stage in the middle holds up only once they have
    queued there, few small phases do not show it: none is shorter than any stage's own work."""
    kinds = [StageWork(encode_s=m, encode_rest_s=mr, decode_s=p, decode_rest_s=pr)
             for (m, mr), (p, pr) in zip(mixed, plain, strict=True)]
    line = sorted_timeline([kinds[kind] for kind in kind_of], blocks, widths)
    is_one = np.arange(len(widths))[:, None] < blocks
    least_s = [own.encode_s + own.encode_rest_s + (np.where(
        is_one, widths * (own.decode_s + own.decode_rest_s), 0.0)).sum(axis=0) for own in kinds]
    return replace(line, period_s=np.maximum(line.period_s, np.max(least_s, axis=0)))


def _normal(problem: Problem) -> float:
    """The bound's quantile in standard deviations of the output lengths."""
    outputs = problem.lengths.outputs
    return (outputs.quantile(problem.constraint.quantile) - outputs.mean) / max(outputs.std, 1e-9)
