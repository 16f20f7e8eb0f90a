"""Bytes on the ranks of WAA's two pools (docs/design.md; xsimulator.memory)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import cache, cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from xgpt.core.lengths import FloatArray, IntArray
from xgpt.core.problem import Problem
from xgpt.core.units import DTYPE_BYTES
from xsimulator import memory
from xsimulator.occupancy import QueryFlow
from xsimulator.plans import PlanSource, StagePlan
from xsimulator.policies.waa.config import WaaConfigs
from xsimulator.policies.waa.plans import WaaPlan

_MANY_KEPT = 64  # choices of plans whose bytes are kept together


class _PerUnit(NamedTuple):
    """A rank holds such bytes [kinds of stages]: at rest, and for each token of KV, row of a step,
    and query whose next token is chosen. Stages of one kind hold the same."""

    rest: FloatArray
    token: FloatArray
    row: FloatArray
    head: FloatArray

    def fullest(self, tokens: FloatArray, rows: FloatArray, heads: FloatArray) -> FloatArray:
        """The fullest rank holds such bytes [configs]."""
        held = (self.rest[:, None] + self.token[:, None] * tokens + self.row[:, None] * rows
                + self.head[:, None] * heads)
        return np.asarray(held.max(axis=0))


class _ManyPlans(NamedTuple):
    """Bytes of _PerUnit by pool and kind of stage [2, kinds, plans], and stages of the encode pools
    [plans]."""

    per_unit: FloatArray  # [4, 2, kinds, plans]
    stages: FloatArray

    def fullest(self, sizes: HeldSizes) -> FloatArray:
        """The fullest rank of each plan holds such bytes [plans, configs]."""
        return _fullest(self.per_unit[..., None], self.stages[:, None], sizes)

    def of_pairs(self, which: IntArray, sizes: HeldSizes) -> FloatArray:
        """And of plans, one for each of the configurations [configs]."""
        return _fullest(self.per_unit[..., which], self.stages[which], sizes)


def _fullest(per_unit: FloatArray, stages: FloatArray, sizes: HeldSizes) -> FloatArray:
    rest, token, row, head = per_unit
    encoded = _encode_tokens(sizes.batch_tokens, stages)
    held = np.empty((2, *np.broadcast_shapes(rest.shape[1:], encoded.shape)))
    for pool, (tokens, rows, heads) in enumerate((
            (encoded, sizes.encode_rows, sizes.encoded),
            (sizes.decode_tokens, sizes.decode_rows, sizes.decoded))):
        held[pool] = rest[pool] + token[pool] * tokens + row[pool] * rows + head[pool] * heads
    return np.asarray(held.max(axis=(0, 1)))


class HeldSizes(NamedTuple):
    """What configurations have their pools hold [configs]: tokens of the largest encode batch, rows
    and queries of an encode step; the decode pool's KV tokens, rows and queries of its steps."""

    batch_tokens: FloatArray
    encode_rows: FloatArray
    encoded: FloatArray
    decode_tokens: FloatArray
    decode_rows: FloatArray
    decoded: FloatArray

    def take(self, rows: IntArray) -> HeldSizes:
        """Those of some configurations."""
        return HeldSizes(*(values[rows] for values in self))


class WaaMemory:
    """It says what the configurations of one problem need."""

    def __init__(self, problem: Problem, flow: QueryFlow, plans: PlanSource,
                 adjustment: float) -> None:
        self._problem, self._plans, self._adjustment = problem, plans, adjustment
        self.mean_outputs = problem.lengths.outputs.mean
        self._most_tokens = float(flow.max_reserve_tokens)
        self._inputs = problem.lengths.inputs
        self._mean, self._std = self._inputs.mean, self._inputs.std
        # those present are biased to long outputs, and so to the inputs that go with them
        lengths = problem.lengths
        weights = lengths.outputs.pmf * np.maximum(
            lengths.outputs.support - flow.iterations_fewer, 1e-9)
        biased = float(weights @ lengths.mean_input_given_output() / weights.sum())
        self._mean_reserved = biased + self._most_tokens - self._inputs.max
        self._per_unit = cache(self._find_per_unit)
        self._of_kind: dict[Hashable, FloatArray] = {}  # [4] of a stage, as _PerUnit
        self._of_both = cache(self._find_of_both)
        self._many = lru_cache(_MANY_KEPT)(self._find_many)

    def by_stage(self, plan: WaaPlan, configs: WaaConfigs, in_system: FloatArray) -> FloatArray:
        """Each rank of a stage holds so many bytes [configs, stages of both pools]."""
        pools = []
        for pool, tokens, rows, heads in self._largest(plan, self.sizes(configs, in_system)):
            rest, token, row, head = self._linear(pool, pool is plan.encode)
            pools.append(rest + tokens[:, None] * token + rows[:, None] * row
                         + heads[:, None] * head)
        return np.concatenate(pools, axis=1)

    def fullest(self, plan: WaaPlan, configs: WaaConfigs, in_system: FloatArray) -> FloatArray:
        """The fullest rank of any stage holds so many bytes [configs]."""
        return self.fullest_of(plan, self.sizes(configs, in_system))

    def fullest_of(self, plan: WaaPlan, sizes: HeldSizes) -> FloatArray:
        """The same of what is held, which is asked of many plans."""
        encode, decode = (self._per_unit(pool, pool is plan.encode).fullest(tokens, rows, heads)
                          for pool, tokens, rows, heads in self._largest(plan, sizes))
        return np.maximum(encode, decode)

    def fullest_of_many(self, plans: Sequence[WaaPlan], sizes: HeldSizes) -> FloatArray:
        """The same [plans, configs] of many plans at once."""
        return self._many(tuple(plans)).fullest(sizes)

    def fullest_of_pairs(self, plans: Sequence[WaaPlan], which: IntArray,
                         sizes: HeldSizes) -> FloatArray:
        """The same of configurations that each have one of the plans: `which` [configs]."""
        return self._many(tuple(plans)).of_pairs(which, sizes)

    def sizes(self, configs: WaaConfigs, in_system: FloatArray) -> HeldSizes:
        """What the pools hold with so many queries in the system."""
        encoded = np.ceil(configs.batch * (1 + self._adjustment))
        decoded = np.ceil(in_system / configs.groups)
        largest = self._largest_batch(configs.batch)
        return HeldSizes(
            batch_tokens=largest, encode_rows=memory.largest_rows(self._inputs, encoded),
            encoded=encoded,
            # its caches, and a batch that has been handed over and waits for its turn to join
            decode_tokens=self.kv_tokens(in_system) + largest,
            decode_rows=decoded + configs.chunk,
            # beside a chunk, and those whose encoding it ends
            decoded=decoded + np.ceil(configs.chunk / self._mean))

    def evenly(self, counts: IntArray, batch: FloatArray, in_system: FloatArray) -> FloatArray:
        """The fullest device would hold so many bytes [counts of encode devices, configs] if all
        were spread evenly over each pool's: a lower bound, without laying anything out."""
        (encode_rest, encode_token), (decode_rest, decode_token) = self._of_whole
        encoding = counts[:, None]
        return np.asarray(np.maximum(
            (encode_rest + self.encode_kv_tokens(batch, 1) * encode_token) / encoding,
            (decode_rest + self.kv_tokens(in_system) * decode_token)
            / (self._problem.cluster.num_devices - encoding)))

    @cached_property
    def _of_whole(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """Bytes at rest, and of a token, of each pool on one device; the encode pool of an
        encoder-decoder model has no cache."""
        encode, decode = (self._plans.pool([(0,)], role) for role in ("encode", "decode"))
        tokens = [float(memory.kv_bytes(self._problem, pool.stages, 1.0)[0])
                  for pool in (encode, decode)]
        if self._problem.model.is_encoder_decoder:
            tokens[0] = 0.0
        return (float(encode.weight_bytes[0]), tokens[0]), (float(decode.weight_bytes[0]),
                                                            tokens[1])

    def encode_kv_tokens(self, batch: FloatArray, stages: int) -> FloatArray:
        """The encode pool has so many tokens at most: a batch in each stage, one that waits, and
        one that is handed over."""
        return _encode_tokens(self._largest_batch(batch), stages)

    def _largest_batch(self, batch: FloatArray) -> FloatArray:
        """An encode batch has so many tokens at its upper threshold."""
        return np.maximum(batch * self._mean * (1 + self._adjustment), self._inputs.max)

    def kv_tokens(self, in_system: FloatArray) -> FloatArray:
        """So many tokens are reserved for the queries in the system, at a high quantile, for one
        longest query at least."""
        most = self._most_tokens
        wanted = (in_system * self._mean_reserved
                  + memory.KV_QUANTILE_Z * self._std * np.sqrt(in_system))
        return np.asarray(np.ceil(np.clip(wanted, most, np.maximum(in_system, 1.0) * most)))

    def _largest(self, plan: WaaPlan, sizes: HeldSizes,
                 ) -> list[tuple[StagePlan, FloatArray, FloatArray, FloatArray]]:
        """Each pool comes with KV tokens, and rows and queries of its largest step."""
        tokens = _encode_tokens(sizes.batch_tokens, len(plan.encode.stages))
        return [(plan.encode, tokens, sizes.encode_rows, sizes.encoded),
                (plan.decode, sizes.decode_tokens, sizes.decode_rows, sizes.decoded)]

    def _find_per_unit(self, pool: StagePlan, is_encode: bool) -> _PerUnit:
        # stages between the ends are of few kinds, of which many pools have some
        stages, last = pool.stages, len(pool.stages) - 1
        kinds = {(is_encode, stage.num_layers, stage.num_encoder_layers, stage.tp_degree,
                  index == 0, index == last): index for index, stage in enumerate(stages)}
        new = [key for key in kinds if key not in self._of_kind]
        if new:
            own = sorted({*(kinds[key] for key in new), last})  # the last stage stays the last
            found = np.stack(self._linear(replace(
                pool, stages=tuple(stages[index] for index in own),
                weight_bytes=pool.weight_bytes[own]), is_encode), axis=1)
            self._of_kind.update((key, found[own.index(kinds[key])]) for key in new)
        return _PerUnit(*np.stack([self._of_kind[key] for key in kinds], axis=1))

    def _find_many(self, plans: tuple[WaaPlan, ...]) -> _ManyPlans:
        held = [self._of_both(plan) for plan in plans]
        most = max(own.shape[-1] for own in held)
        return _ManyPlans(
            np.stack([own if own.shape[-1] == most else _again(own, most) for own in held],
                     axis=-1), np.array([float(len(plan.encode.stages)) for plan in plans]))

    def _find_of_both(self, plan: WaaPlan) -> FloatArray:
        """[4, 2, kinds of stages] the bytes of _PerUnit, of the encode pool and the decode pool."""
        pools = [np.stack(self._per_unit(pool, pool is plan.encode))
                 for pool in (plan.encode, plan.decode)]
        most = max(own.shape[-1] for own in pools)
        return np.stack([_again(own, most) for own in pools], axis=1)

    def _linear(self, pool: StagePlan, is_encode: bool) -> tuple[FloatArray, ...]:
        """The figures of _PerUnit are given by stage."""
        problem, stages = self._problem, pool.stages

        def step(rows: float, heads: float) -> FloatArray:
            return memory.step_bytes(problem, stages, rows=rows, heads=heads)

        token = memory.kv_bytes(problem, stages, 1.0)
        if is_encode and problem.model.is_encoder_decoder:
            # the encoder's output alone, on its last stage
            token = np.zeros(len(stages))
            token[-1] = problem.model.hidden_size * DTYPE_BYTES[problem.dtype]
        idle = step(0.0, 0.0)
        return pool.weight_bytes + idle, token, step(1.0, 0.0) - idle, step(0.0, 1.0) - idle


def _encode_tokens(batch_tokens: FloatArray, stages: FloatArray | int) -> FloatArray:
    """Tokens of an encode pool of so many stages: see WaaMemory.encode_kv_tokens."""
    return np.asarray(np.ceil((stages + 2) * batch_tokens))


def _again(values: FloatArray, most: int) -> FloatArray:
    """[..., most] the last axis with its first values once more: no stage is fuller for that."""
    return values[..., np.arange(most) % values.shape[-1]]
