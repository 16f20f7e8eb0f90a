"""Tables of a pool's step times by step size, for the slowest stage and through all stages. Sizes
of the tables are in ratios of NODE_RATIO; between them times are linear."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from xgpt.core.lengths import FloatArray, IntArray
from xsimulator.rough.workload import Workload
from xsimulator.stage_times import StageTimes, stage_kinds

NODE_RATIO, MOST_ROWS = 1.15, 1 << 20  # chosen: of the tables
NODES: FloatArray = np.concatenate([[0.0], np.unique(np.round(
    NODE_RATIO ** np.arange(1 + np.log(MOST_ROWS) / np.log(NODE_RATIO)), 2))])

DECODE, OF_TOKEN, ENCODE, ROWS = range(4)


class Seconds(NamedTuple):
    """Seconds of steps: on the slowest stage, and through all stages. Both have one shape."""

    slowest: FloatArray
    through: FloatArray

    def __add__(self, other: Seconds) -> Seconds:  # type: ignore[override]
        return Seconds(self.slowest + other.slowest, self.through + other.through)

    def times(self, factor: FloatArray | float) -> Seconds:
        """Both seconds multiplied by `factor`."""
        return Seconds(self.slowest * factor, self.through * factor)

    def cycle(self, groups: FloatArray) -> FloatArray:
        """Seconds between two steps of one group, if `groups` take turns. It is the longer of the
        slowest stage's work for all groups and a step's way through all stages."""
        return np.maximum(groups * self.slowest, self.through)


class Pace:
    """Step times of one pool, or of several. which: index of the pool for each size."""

    def __init__(self, table: Callable[[int], FloatArray], which: IntArray | int = 0) -> None:
        """table(kind): [pools, 2, NODES] seconds on the slowest stage and through all stages.
        Kinds: DECODE (a decode step at the mean context), OF_TOKEN (one more context token in it),
        ENCODE, and ROWS (matmuls without attention)."""
        self.table, self._which = cache(table), which
        self._lines = cache(self._line_of)

    @classmethod
    def of(cls, times: StageTimes, workload: Workload) -> Pace:
        """The step times of one pool. The workload keeps them for all formulas."""
        if times not in workload.paces:
            workload.paces[times] = cls._tabulate(times, workload)
        found: Pace = workload.paces[times]
        return found

    @classmethod
    def _tabulate(cls, times: StageTimes, workload: Workload) -> Pace:
        kinds = stage_kinds(times)
        number, own = np.bincount(kinds.kind_of), kinds.times
        nodes = np.maximum(NODES, 1e-3)
        context = workload.charged_context(nodes, is_padded=times.layers.timing.facts.is_padded)

        def summed(seconds: FloatArray) -> FloatArray:
            with np.errstate(invalid="ignore"):
                return np.stack([seconds.max(axis=-1), seconds @ number])[None]

        def encode_s() -> FloatArray:
            queries = nodes / workload.inputs.mean
            sharing = workload.sharing
            attention = own.mean_attention_s(np.maximum(queries, 1.0), (
                None if sharing is None else sharing.attended))
            return own.encode_s(nodes, queries, {
                degree: queries * one for degree, one in attention.items()})

        def table(kind: int) -> FloatArray:
            if kind == DECODE:
                return summed(own.decode_s(nodes, context))
            if kind == OF_TOKEN:
                near = summed(own.decode_s(nodes, np.minimum(context, 1.0)))
                with np.errstate(invalid="ignore"):
                    return (found.table(DECODE) - near) / np.maximum(context - 1, 1.0)
            return summed(encode_s() if kind == ENCODE else own.encode_rows_s(nodes))

        found = cls(table)
        return found

    @classmethod
    def concatenated(cls, paces: Sequence[Pace], which: IntArray) -> Pace:
        """The step times of several pools. which: index of the pool for each size."""
        return cls(lambda kind: np.concatenate([pace.table(kind) for pace in paces]), which)

    def decode(self, rows: FloatArray, beyond: FloatArray | float = 0.0) -> Seconds:
        """Seconds of steps that decode `rows`. beyond: context tokens above the mean context."""
        found = self._at(DECODE, rows)
        if np.any(beyond):
            found = found + self._at(OF_TOKEN, rows).times(np.asarray(beyond))
        return found

    def encode(self, tokens: FloatArray) -> Seconds:
        """Seconds of steps that encode `tokens` in total."""
        return self._at(ENCODE, tokens)

    def both(self, rows: FloatArray, tokens: FloatArray) -> Seconds:
        """Seconds of steps that decode `rows` and encode `tokens`; weights are read once."""
        return (self.decode(rows) + self.encode_without_matmuls(tokens)
                + self.extra_matmuls(rows, tokens))

    def encode_without_matmuls(self, tokens: FloatArray) -> Seconds:
        """Seconds to encode `tokens` in total, without the matmuls with the weights."""
        return self.encode(tokens) + self._at(ROWS, tokens).times(-1)

    def extra_matmuls(self, rows: FloatArray, tokens: FloatArray) -> Seconds:
        """Seconds that the matmuls of a step of `rows` take longer with `tokens` more."""
        return self._at(ROWS, rows + tokens) + self._at(ROWS, rows).times(-1)

    def _at(self, table: int, sizes: FloatArray) -> Seconds:
        place = np.searchsorted(NODES[1:-1], sizes, side="right")  # the last node at most `sizes`
        beyond = np.minimum(sizes, NODES[place + 1]) - NODES[place]
        which = self._which
        if np.ndim(which) and np.ndim(sizes) > 1:
            which = np.asarray(which)[:, None]
        begin, slope = self._lines(table)
        found = begin[which, place] + slope[which, place] * beyond[..., None]
        return Seconds(found[..., 0], found[..., 1])

    def _line_of(self, table: int) -> tuple[FloatArray, FloatArray]:
        """([pools, NODES - 1, 2] seconds at each node, seconds per unit of size up to the next)."""
        seconds = np.moveaxis(self.table(table), 1, 2)
        is_timed = np.isfinite(seconds[:, 1:])
        begin = np.where(is_timed, seconds[:, :-1], np.inf)
        with np.errstate(invalid="ignore"):
            slope = np.diff(seconds, axis=1) / np.diff(NODES)[:, None]
        return begin, np.where(is_timed, slope, 0.0)


def with_long_steps(short: Seconds, long: Seconds, share: FloatArray,
                     groups: FloatArray) -> FloatArray:
    """[configs] mean seconds of a cycle of `groups` groups. A `share` of the steps take `long`
    seconds and delay all groups, the others take `short` ones."""
    slowest = share * long.slowest + (1 - share) * short.slowest
    any_long = 1 - (1 - share) ** groups
    through = any_long * long.through + (1 - any_long) * short.through
    return np.asarray(np.maximum(groups * slowest, through))
