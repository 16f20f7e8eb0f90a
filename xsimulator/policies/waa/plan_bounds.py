"""What no WAA configuration of a box can better where the devices are divided as one plan says:
from the encode pool's times by batch and the decode pool's by rows
(xsimulator.policies.waa.bounds)."""

from functools import cache, cached_property
from typing import NamedTuple

import numpy as np

from xgpt.core.lengths import FloatArray, IntArray
from xsimulator.addresses import address_of
from xsimulator.envelope import rising_minorant
from xsimulator.policies.waa.chunk_bounds import ChunkedPoolBounds
from xsimulator.policies.waa.closed_form import Waa
from xsimulator.policies.waa.config import WaaBoxes, WaaConfigs
from xsimulator.policies.waa.few_each import FULL, LEAST_SHARE, MANY_GROUPS, least_busy
from xsimulator.policies.waa.plans import WaaPlan
from xsimulator.policies.waa.pool_times import root
from xsimulator.policies.waa.step_columns import (
    ROWS_RATIO,
    first_batches,
    group_sizes,
    many,
)

QUICK_TOLERANCE = 0.01  # parts of a layer may differ in which degree is best for them
ROOT_ACCURACY = 1e-6  # of the fewest that decode: a thousandth of what bounds allow anyway
FIRST_BATCHES = 64  # tabulated to begin with
# numbers of queries that are tried for memory: to 1e6
MEMORY_SIZES: FloatArray = np.asarray(1.02 ** np.arange(700), float)


def leap(batch: int) -> int:
    """Tables end at a power of two beyond the batch, so that plans ask for the same sizes."""
    return int(max(1 << (2 * batch - 1).bit_length(), FIRST_BATCHES))


@cache
def _sizes_and_more(count: int) -> FloatArray:
    """The same, and without limit."""
    return np.append(group_sizes(count), np.inf)


def by_batch(values: FloatArray) -> FloatArray:
    """The values of batches 1, 2, ... are shifted such that the index is the batch."""
    return np.append(values[0], values)


class PairBounds(NamedTuple):
    """[boxes] Under one division no configuration has more throughput_qps, fewer queries that
    decode, a shorter iteration, is quicker, or has its first token sooner."""

    most_qps: FloatArray
    decoding: FloatArray
    iteration_s: FloatArray
    latency_s: FloatArray
    ttft_s: FloatArray


class PlanBounds:
    """One division is bounded by its encode pool's times by batch, its decode pool's by rows."""

    def __init__(self, waa: Waa, plan: WaaPlan, *, is_modest: bool) -> None:
        self._waa, self.plan, self._is_modest = waa, plan, is_modest
        self._top = 0
        self._words: IntArray | None = None  # see described
        self._most_rate = self._least_rate = np.empty(0)  # by batch
        self._least_encode = self._least_through = np.empty(0)  # with the handover, and without
        self._slowest = self._through = np.empty(0)  # by rows, lower envelopes

    def bound(self, boxes: WaaBoxes, latency_bound_s: float) -> PairBounds:
        """What takes longer than `latency_bound_s` need not count for the throughput. Tables reach
        as far as the boxes (see `reach`)."""
        waa = self._waa
        outputs = waa.problem.lengths.outputs.mean
        iteration_s = self._longest_s(boxes, latency_bound_s)
        largest: FloatArray = np.minimum(boxes.most.astype(float) * outputs,
                                         self._most_decoding(boxes, iteration_s))
        absorbed = largest / (waa.times.mean_iterations * self._iteration_s(largest, boxes))
        limit = np.minimum(self._most_rate[boxes.most], absorbed)
        decoding, iteration = np.empty((2, len(limit)))
        if len(rows := np.flatnonzero(boxes.chunk)):
            own = boxes.take(rows)
            limit[rows], decoding[rows], iteration[rows] = self.chunked.limits(
                own, (self._least_rate[own.least], self._most_rate[own.most]),
                self._most_in_system, iteration_s[rows], is_modest=self._is_modest)
        if len(rows := np.flatnonzero(boxes.chunk == 0)):
            decoding[rows], iteration[rows] = self._without_chunks(boxes.take(rows))
        latency = self._least_encode[boxes.least] + waa.iterations_waited * iteration
        return PairBounds(limit, decoding, iteration, latency, self._least_through[boxes.least])

    def _without_chunks(self, boxes: WaaBoxes) -> tuple[FloatArray, FloatArray]:
        """No fewer decode [boxes], and no iteration is shorter."""
        waa = self._waa
        wanted: FloatArray = boxes.least.astype(float) * waa.problem.lengths.outputs.mean
        rate = self._least_rate[boxes.least] * waa.times.mean_iterations

        def excess(decoding: FloatArray) -> FloatArray:
            return rate * self._iteration_s(decoding, boxes) - decoding

        of_wanted = excess(wanted)
        # the root is found from both sides: a little less is less for certain
        decoding = np.where(of_wanted >= 0, wanted, (1 - 2 * ROOT_ACCURACY) * root(
            excess, wanted, np.minimum(of_wanted, 0.0), ROOT_ACCURACY))
        return decoding, self._iteration_s(decoding, boxes)

    def _longest_s(self, boxes: WaaBoxes, latency_bound_s: float) -> FloatArray:
        """No longer an iteration [boxes] keeps the latency bound."""
        waited, encode_s = self._waa.iterations_waited, self._least_encode[boxes.least]
        if waited <= 0:
            return np.full(len(boxes), np.inf)
        # where every batch is refused no iteration is any good, and inf - inf no number
        left_s = latency_bound_s * (1 + QUICK_TOLERANCE) - np.where(
            np.isfinite(encode_s), encode_s, 0.0)
        return np.maximum(np.where(np.isfinite(encode_s), left_s / waited, 0.0), 0.0)

    def _most_decoding(self, boxes: WaaBoxes, iteration_s: FloatArray) -> FloatArray:
        """No more can decode [boxes] where an iteration takes no longer than that, by either of
        what `_iteration_s` is the larger of."""
        in_turn, at_once, in_few = (_sizes_and_more(len(table))[np.searchsorted(
            table, seconds, side="right")] for table, seconds in (
                (self._slowest, iteration_s / boxes.fewest), (self._through, iteration_s),
                (self._slowest, iteration_s / (LEAST_SHARE * boxes.fewest))))
        # where some groups are empty, the others hold more, though no more than FULL each in all
        in_turn = np.where((boxes.highest >= MANY_GROUPS) & (in_turn < FULL),
                           np.minimum(in_few, FULL), in_turn)
        return np.asarray(np.minimum(boxes.fewest * in_turn, boxes.highest * at_once))

    @cached_property
    def chunked(self) -> ChunkedPoolBounds:
        return ChunkedPoolBounds(self._waa.times, self.plan.decode,
                                 self._waa.problem.lengths.outputs.mean)

    def described(self, *, has_chunks: bool) -> IntArray:
        """The C structure Division of csrc/planning_waa.cpp, of which the pool and most_in_system
        are for boxes with chunks alone."""
        if self._words is None:
            tables = (self._most_rate, self._least_rate, self._least_encode, self._least_through,
                      self._slowest, self._through, _sizes_and_more(len(self._slowest)))
            self._words = np.array([*(address_of(table) for table in tables), len(self._slowest),
                                    0, 0], np.int64)
        if has_chunks:
            self._words[-2:-1].view(float)[0] = self._most_in_system
            self._words[-1] = address_of(self.chunked.described())
        return self._words

    @cached_property
    def _most_in_system(self) -> float:
        """No more queries than these find room in the decode pool, in as many groups as they
        are."""
        sizes = MEMORY_SIZES
        ones = np.ones(len(sizes))
        fits = self._waa.memory.fullest(self.plan, WaaConfigs.plain(
            ones, sizes), sizes) <= self._waa.capacity_bytes
        return float(sizes[min(int(fits.sum()), len(sizes) - 1)])

    def _iteration_s(self, decoding: FloatArray, boxes: WaaBoxes) -> FloatArray:
        """No T_iter of as many queries or more, in any number of groups of the box, is less."""
        steps = least_busy(decoding, boxes.fewest, boxes.highest)
        slowest = self._at(self._slowest, decoding / steps)
        through = self._at(self._through, decoding / boxes.highest)
        return np.asarray(np.maximum(steps * slowest, through))

    def _at(self, table: FloatArray, rows: FloatArray) -> FloatArray:
        position = np.log(np.maximum(rows, 1.0)) / np.log(ROWS_RATIO)
        index = np.minimum(position.astype(np.intp), len(table) - 2)
        left, right = table[index], table[index + 1]
        return np.asarray(left + np.minimum(position - index, 1.0) * (right - left))

    def reach(self, most: int) -> None:
        """The tables have batches up to so many queries."""
        if most <= self._top:
            return
        waa, plan = self._waa, self.plan
        self._top, self._words = leap(most), None
        batch = first_batches(self._top)
        between, through, handover = waa.times.encode(plan, batch)
        with np.errstate(invalid="ignore"):
            rate = np.where(np.isfinite(between), batch / between, 0.0)
        encode = through + handover

        self._most_rate = by_batch(np.maximum.accumulate(rate))
        timed = np.where(rate > 0, rate, np.inf)  # what is refused bounds nothing
        self._least_rate = by_batch(np.minimum.accumulate(timed[::-1])[::-1])
        self._least_rate[~np.isfinite(self._least_rate)] = 0.0
        self._least_encode, self._least_through = (
            by_batch(np.minimum.accumulate(seconds[::-1])[::-1]) for seconds in (encode, through))
        rows = self._top * max(waa.problem.lengths.outputs.mean, 1.0)
        sizes = group_sizes(many(int(np.log(rows) / np.log(ROWS_RATIO)) + 3))
        slowest, through_rows = waa.times.decode(plan, sizes)
        self._slowest = rising_minorant(sizes, slowest)
        self._through = rising_minorant(sizes, through_rows)
