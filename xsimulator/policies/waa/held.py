"""Bytes that ranks of WAA's pools hold for each token, row and query, of single plans and of many
at once (xsimulator.policies.waa.memory says of how many)."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np

from xgpt.core.lengths import FloatArray, IntArray
from xgpt.core.problem import Problem
from xgpt.core.units import DTYPE_BYTES
from xsimulator import memory
from xsimulator.plans import StagePlan
from xsimulator.policies.waa.plans import WaaPlan

_MANY_KEPT = 64  # choices of plans whose bytes are kept together


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


class PerUnit(NamedTuple):
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


class ManyPlans(NamedTuple):
    """Bytes of PerUnit by pool and kind of stage [2, kinds, plans], and stages of the encode pools
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
    encode, decode = (
        (rest[pool] + token[pool] * tokens + row[pool] * rows + head[pool] * heads).max(axis=0)
        for pool, (tokens, rows, heads) in enumerate((
            (encode_tokens(sizes.batch_tokens, stages), sizes.encode_rows, sizes.encoded),
            (sizes.decode_tokens, sizes.decode_rows, sizes.decoded))))
    return np.asarray(np.maximum(encode, decode))


class HeldPerUnit:
    """The bytes of one problem's pools are kept: `of_pool` [kinds of stages] of a pool, and whether
    it is the encode pool; `of_many` of plans."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self.of_pool = cache(self._find_of_pool)
        self.of_many = lru_cache(_MANY_KEPT)(self._find_of_many)
        self._of_kind: dict[Hashable, FloatArray] = {}  # [4] of a stage, as PerUnit
        self._of_both = cache(self._find_of_both)

    def _find_of_pool(self, pool: StagePlan, is_encode: bool) -> PerUnit:
        # stages between the ends are of few kinds, of which many pools have some
        stages, last = pool.stages, len(pool.stages) - 1
        kinds = {(is_encode, stage.num_layers, stage.num_encoder_layers, stage.tp_degree,
                  index == 0, index == last): index for index, stage in enumerate(stages)}
        new = [key for key in kinds if key not in self._of_kind]
        if new:
            own = sorted({*(kinds[key] for key in new), last})  # the last stage stays the last
            found = np.stack(self.by_stage(replace(
                pool, stages=tuple(stages[index] for index in own),
                weight_bytes=pool.weight_bytes[own]), is_encode), axis=1)
            self._of_kind.update((key, found[own.index(kinds[key])]) for key in new)
        return PerUnit(*np.stack([self._of_kind[key] for key in kinds], axis=1))

    def _find_of_many(self, plans: tuple[WaaPlan, ...]) -> ManyPlans:
        held = [self._of_both(plan) for plan in plans]
        most = max(own.shape[-1] for own in held)
        return ManyPlans(
            np.stack([own if own.shape[-1] == most else _again(own, most) for own in held],
                     axis=-1), np.array([float(len(plan.encode.stages)) for plan in plans]))

    def _find_of_both(self, plan: WaaPlan) -> FloatArray:
        """[4, 2, kinds of stages] the bytes of PerUnit, of the encode pool and the decode pool."""
        pools = [np.stack(self.of_pool(pool, pool is plan.encode))
                 for pool in (plan.encode, plan.decode)]
        most = max(own.shape[-1] for own in pools)
        return np.stack([_again(own, most) for own in pools], axis=1)

    def by_stage(self, pool: StagePlan, is_encode: bool) -> tuple[FloatArray, ...]:
        """The figures of PerUnit are given by stage."""
        problem, stages = self._problem, pool.stages
        own = memory.StageBytes(problem, stages)
        token = own.kv(1.0)
        if is_encode and problem.model.is_encoder_decoder:
            # the encoder's output alone, on its last stage
            token = np.zeros(len(stages))
            token[-1] = problem.model.hidden_size * DTYPE_BYTES[problem.dtype]
        idle = own.step(0.0, 0.0)
        return (pool.weight_bytes + idle, token, own.step(1.0, 0.0) - idle,
                own.step(0.0, 1.0) - idle)


def encode_tokens(batch_tokens: FloatArray, stages: FloatArray | int) -> FloatArray:
    """Tokens of an encode pool of so many stages: see WaaMemory.encode_kv_tokens."""
    return np.asarray(np.ceil((stages + 2) * batch_tokens))


def _again(values: FloatArray, most: int) -> FloatArray:
    """[..., most] the last axis with its first values once more: no stage is fuller for that."""
    return values[..., np.arange(most) % values.shape[-1]]
