"""Seconds of the steps of many pools of one role, by kind of stage: those of one name take as long
in all of them (xsimulator.stage_times: StageKinds), and are asked for once for each array of sizes
that nobody can change."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache

import numpy as np

from xgpt.core.lengths import FloatArray
from xsimulator.fixed_sizes import is_fixed
from xsimulator.plans import StagePlan
from xsimulator.stage_times import StageTimes

ROWS_RATIO = 1.03  # between the group sizes at which decode steps are tabulated
_SIZES = 64  # of which so many are taken together, so that many pools' tables are of the same ones


@cache
def first_batches(most: int) -> FloatArray:
    """1, 2, ... up to so many: the same array for every plan, so that who answers for it can know
    it again."""
    batches = np.arange(1, most + 1, dtype=float)
    batches.flags.writeable = False
    return batches


@cache
def group_sizes(count: int) -> FloatArray:
    """So many sizes, likewise, at which decode steps are tabulated."""
    sizes: FloatArray = np.asarray(ROWS_RATIO ** np.arange(count), float)
    sizes.flags.writeable = False
    return sizes


def many(count: int) -> int:
    """So many group sizes or a few more."""
    return -(-count // _SIZES) * _SIZES


class StepColumns:
    """`ask`: seconds [sizes, stages] of steps of some stages."""

    def __init__(self, ask: Callable[[StageTimes, FloatArray], FloatArray]) -> None:
        self._ask = ask
        self._known: dict[tuple[Hashable, int], tuple[FloatArray, FloatArray]] = {}
        self._first: dict[Hashable, FloatArray] = {}  # of most first batches

    def of_kinds(self, pool: StagePlan, sizes: FloatArray) -> list[FloatArray]:
        """Those [sizes] of each kind of the pool's stages."""
        _, times, names = pool.kinds
        if times.is_encoder_decoder or not is_fixed(sizes):  # no names of more than one pool
            return list(np.ascontiguousarray(self._ask(times, sizes).T))
        keys = [(name, id(sizes)) for name in names]
        if not all(key in self._known for key in keys):
            columns = np.ascontiguousarray(self._ask(times, sizes).T)
            self._known.update(zip(keys, ((sizes, column) for column in columns), strict=True))
            if sizes is first_batches(len(sizes)):
                self._first.update((name, column) for name, column in zip(
                    names, columns, strict=True) if len(column) > len(self._first.get(name, ())))
        return [self._known[key][1] for key in keys]

    def of_stages(self, pool: StagePlan, sizes: FloatArray) -> FloatArray:
        """[sizes, stages] the same of each of the pool's stages."""
        columns = self._among_first(pool, sizes)
        if columns is None:
            columns = self.of_kinds(pool, sizes)
        return np.stack(columns, axis=1).take(pool.kinds.kind_of, axis=1)

    def _among_first(self, pool: StagePlan, batches: FloatArray) -> list[FloatArray] | None:
        """[batches] of each kind, where they are known as first batches."""
        if pool.kinds.times.is_encoder_decoder:
            return None
        most = min(len(self._first.get(name, ())) for name in pool.kinds.names)
        if not most or batches.max() > most:
            return None
        whole = batches.astype(np.intp)
        if (whole != batches).any():
            return None
        return [self._first[name][whole - 1] for name in pool.kinds.names]
