"""Seconds per stage of single steps, from tables of StageTimes.

A replay needs one step at a time, while StageTimes works on arrays. Times by rows are tabulated at
every whole number up to DENSE_ROWS and in ratios of 1.01 beyond, attention at contexts in ratios of
1.02. Between them times are linear (exact for a profile, within a thousandth for the roofline).
Tables are filled in blocks on demand. csrc/replay/step_times.h makes the same sums from them."""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, cached_property, lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np

from xgpt.core.deployment import StageAssignment
from xgpt.core.lengths import FloatArray, IntArray
from xgpt.core.placement import Placement
from xgpt.core.policies import Role
from xgpt.core.problem import Problem
from xprofiler.timing import TimingSource, of_role
from xsimulator.layer_times import TOGETHER, LayerTimes
from xsimulator.native import Blocks, NativeClock, NativeTables
from xsimulator.replay.placed_times import PlacedTimes, grids_of
from xsimulator.stage_times import HandoverCost, StageTimes

DENSE_ROWS, ROW_BLOCK = 4096, 256  # chosen
# number of rows that each entry of a table is for
_ROW_SIZES: FloatArray = np.concatenate([
    np.arange(DENSE_ROWS, dtype=float), DENSE_ROWS * 1.01**np.arange(2048)])
_SPARSE: list[float] = _ROW_SIZES[DENSE_ROWS:].tolist()
_CONTEXT_RATIO, _QUERY_BLOCK = 1.02, 32  # chosen
MOST_CLOCKS = 16  # chosen
MOST_TOGETHER = TOGETHER[-1]  # beyond it the attention of one request does not depend on the batch


class StepSizes(NamedTuple):
    """Sizes that decide a step's time. spans: (first token, number of tokens) of each input or
    chunk that is encoded. encoded: requests whose encoding ends."""

    spans: list[tuple[int, int]]
    tokens: int  # of all spans
    encoded: int
    decoded: int
    context: float  # mean context tokens of the decoded rows
    longest: float  # longest context
    moved: float  # rows of the KV cache that compaction moves
    handed: int  # encoder output tokens whose keys and values are projected on arrival


class PoolClock(Protocol):
    """Step times of a pool."""

    def seconds(self, sizes: StepSizes) -> list[float]:
        """[stages] seconds of one step."""


class StepClock:
    """Step times of one pool, as sums of tabulated parts."""

    def __init__(self, times: StageTimes, *, max_context: int) -> None:
        """max_context: most tokens of a request, input and output."""
        self._times, self.max_context = times, max_context
        # whether each decoded row costs the longest context of its group
        self._is_padded = times.layers.timing.facts.is_padded
        is_encoder_decoder = times.is_encoder_decoder
        self._decode_rows = _RowTimes(times.decode_rows_s)
        self._encode_rows = _RowTimes(times.encode_rows_s)
        self._cross = _RowTimes(times.cross_kv_s) if is_encoder_decoder else None
        self._first_tokens = _RowTimes(lambda n: times.first_tokens_s(n)[..., None])
        self._ends = _RowTimes(lambda n: times.ends_s(n)[..., None])
        *grids, of_stages = grids_of(times)
        self._attention, self._compaction = (
            [_GridTimes(seconds, max_context) for seconds in kind] for kind in grids)
        self._inputs = _EncodeAttention(times, max_context)
        self._is_apart = is_encoder_decoder  # encoder and decoder layers share no pass
        self._decode_layers, self._encode_layers = (
            [(int(count), grid)
             for count, grid in zip(layers, of_stages, strict=True)]
            for layers in (times.decoder_layers, times.encode_layers))
        # as csrc/replay/step_times.h numbers them
        self._tables: list[Blocks] = [
            self._decode_rows, self._encode_rows, self._cross or self._decode_rows,
            self._first_tokens, self._ends, self._inputs, *self._attention, *self._compaction]

    @cached_property
    def native(self) -> NativeClock:
        """This clock for csrc. Raises AssertionError without the library."""
        nodes, layers = self._attention[0].nodes, (self._decode_layers, self._encode_layers)
        numbers = [len(self._decode_layers), len(self._attention), len(nodes), self._is_padded,
                   self._is_apart, len(_ROW_SIZES), DENSE_ROWS, ROW_BLOCK, _QUERY_BLOCK,
                   MOST_TOGETHER, self._inputs.max_context]
        return NativeClock(
            self._tables, np.concatenate([numbers, *(np.array(kind).T.ravel() for kind in layers)]),
            np.concatenate([[self._times.overhead_s], _ROW_SIZES, nodes]))

    def seconds(self, sizes: StepSizes) -> list[float]:
        """[stages] seconds of one step."""
        tokens = sizes.tokens
        if self._is_apart and tokens and sizes.decoded:
            apart = [self.seconds(sizes._replace(spans=[], tokens=0, encoded=0)),
                     self.seconds(sizes._replace(decoded=0, moved=0.0, handed=0))]
            overhead = self._times.overhead_s
            return [a + b - overhead for a, b in zip(*apart, strict=True)]
        if not tokens:
            total = self._decode_rows.at(sizes.decoded)
        else:
            total = self._encode_rows.at(tokens + sizes.decoded)
        if tokens:
            encode = self._inputs.attention_s(sizes.spans)
            total = [t + layers * encode[d] for t, (layers, d) in zip(
                total, self._encode_layers, strict=True)]
        if sizes.decoded:
            context = sizes.longest if self._is_padded else sizes.context
            decode = [grid.at(sizes.decoded, context) for grid in self._attention]
            if sizes.moved >= 0.5:
                moved = max(round(sizes.moved), 1)
                decode = [a + grid.at(moved, context) for a, grid in zip(
                    decode, self._compaction, strict=True)]
            total = [t + layers * decode[d] for t, (layers, d) in zip(
                total, self._decode_layers, strict=True)]
        if sizes.handed and self._cross is not None:
            total = [t + c for t, c in zip(total, self._cross.at(sizes.handed), strict=True)]
        heads = sizes.decoded + (0 if self._is_apart else sizes.encoded)
        if heads:
            total[-1] += (self._ends if tokens else self._first_tokens).at(heads)[0]
        return total


class ScaledClock:
    """A clock with the seconds of `clock` times `factors` [stages]."""

    def __init__(self, clock: PoolClock, factors: Sequence[float]) -> None:
        self.clock, self.factors = clock, tuple(factors)

    def seconds(self, sizes: StepSizes) -> list[float]:
        return [s * factor for s, factor in zip(
            self.clock.seconds(sizes), self.factors, strict=True)]


class HandoverTimes:
    """Seconds to hand over the KV cache of so many tokens, and their table for csrc."""

    def __init__(self, cost: HandoverCost) -> None:
        self.seconds = cost.seconds
        self.fetched = handover_table(cost.seconds)


def handover_table(seconds: Callable[[Any], Any]) -> NativeTables:
    """A table for csrc of handover seconds by whole numbers of tokens."""
    return NativeTables([Blocks(ROW_BLOCK, lambda tokens: np.broadcast_to(
        seconds(tokens), tokens.shape)[:, None])])


class StepClocks:
    """Clocks and handover times of one problem's pools, shared by replays of many configurations on
    the same stages. The latest MOST_CLOCKS of each are kept."""

    def __init__(self, problem: Problem, timing: TimingSource) -> None:
        self._layers_of = cache(lambda role: LayerTimes.of(problem, of_role(timing, role)))
        self._problem = problem
        self._clocks = lru_cache(MOST_CLOCKS)(self._clock)
        self.handovers = lru_cache(MOST_CLOCKS)(lambda source, target: HandoverTimes(
            HandoverCost(problem, timing, source, target)))

    def of(self, stages: tuple[StageAssignment, ...], max_context: int, role: Role = "both",
           placement: Placement | None = None, slots: int = 0) -> StepClock:
        """The clock of a pool of these stages, for requests of at most `max_context` tokens.
        slots: with a placement, most requests of a group at a time."""
        own = None if placement is None else replace(placement, budgets=())
        return self._clocks(stages, max_context, role, own, slots)

    def _clock(self, stages: tuple[StageAssignment, ...], max_context: int, role: Role,
               placement: Placement | None, slots: int) -> StepClock:
        layers = self._layers_of(role)
        times = (StageTimes(layers, self._problem.cluster, stages) if placement is None else
                 PlacedTimes(self._problem, layers, stages, placement, slots))
        return StepClock(times, max_context=max_context)


class _RowTimes(Blocks):
    """Seconds by a whole number of rows, per stage."""

    def __init__(self, seconds: Callable[[FloatArray], FloatArray]) -> None:
        super().__init__(ROW_BLOCK, lambda rows: seconds(_ROW_SIZES[rows]))

    def at(self, rows: int) -> list[float]:
        """[stages] seconds of so many rows, as a new list."""
        if rows <= DENSE_ROWS:
            return self.row(rows).copy()
        above = bisect_right(_SPARSE, rows)
        low, place = _SPARSE[above - 1], DENSE_ROWS + above
        share = (rows - low) / (_SPARSE[above] - low)
        return [a + share * (b - a) if b < math.inf else b for a, b in zip(
            self.row(place - 1), self.row(place), strict=True)]  # infinite: unknown time


class _GridTimes(Blocks):
    """Seconds by a whole number of requests and a fractional context."""

    def __init__(self, seconds: Callable[[FloatArray, FloatArray], FloatArray],
                 max_context: int) -> None:
        self._seconds = seconds
        nodes = [0.0]
        while nodes[-1] < max_context + 1:
            nodes.append(min(max(nodes[-1] + 1.0, round(nodes[-1] * _CONTEXT_RATIO)),
                             max_context + 1.0))
        self.nodes = np.array(nodes)
        self._node_list = nodes
        super().__init__(_QUERY_BLOCK, lambda rows: self._seconds(
            rows[:, None].astype(float), self.nodes[None, :]))

    def at(self, queries: int, context: float) -> float:
        row = self.row(queries)
        index = min(bisect_right(self._node_list, context) - 1, len(row) - 2)
        low, left, right = self._node_list[index], row[index], row[index + 1]
        if right == math.inf:  # unknown time
            return right
        return left + (context - low) / (self._node_list[index + 1] - low) * (right - left)


class _EncodeAttention(Blocks):
    """Seconds of encode attention of inputs and of chunks, per tensor-parallel degree."""

    def __init__(self, times: StageTimes, max_context: int) -> None:
        self.max_context = max_context
        lengths = np.arange(1, max_context + 1)

        def find(queries: IntArray) -> FloatArray:
            """[1, degrees x (max_context + 1)] seconds by degree and input length."""
            seconds = times.encode_attention_s(lengths, int(queries[0]))
            return np.concatenate([np.append(0.0, own) for own in seconds.values()])[None]

        super().__init__(1, find)

    def attention_s(self, spans: Sequence[tuple[int, int]]) -> list[float]:
        """[degrees] seconds of all spans in one layer. A chunk costs the difference between the
        input up to its end and up to its beginning, by the pairs of tokens attended."""
        table, found = self.row(min(len(spans), MOST_TOGETHER)), []
        for at in range(0, len(table), self.max_context + 1):
            total = 0.0
            for first, count in spans:  # not sum(), which rounds differently from Python 3.12 on
                end = table[at + first + count]
                total += end - table[at + first] if end < math.inf else end
            found.append(total)
        return found
