"""What no WAA configuration of a box can better where the devices are divided as one plan says:
from the encode pool's times by batch and the decode pool's by rows
(xsimulator.policies.waa.bounds)."""

from functools import cache, cached_property, partial

import numpy as np

from xgpt.core.lengths import FloatArray
from xsimulator.envelope import rising_minorant
from xsimulator.policies.waa.chunk_bounds import ChunkedPoolBounds
from xsimulator.policies.waa.closed_form import Waa
from xsimulator.policies.waa.config import WaaBoxes, WaaConfigs
from xsimulator.policies.waa.plans import WaaPlan
from xsimulator.policies.waa.pool_times import ROWS_RATIO, root

QUICK_TOLERANCE = 0.01  # parts of a layer may differ in which degree is best for them
_ROOT_ACCURACY = 1e-6  # of the fewest that decode: a thousandth of what bounds allow anyway
FIRST_BATCHES = 64  # tabulated to begin with
# numbers of queries that are tried for memory: to 1e6
MEMORY_SIZES: FloatArray = np.asarray(1.02 ** np.arange(700), float)


def leap(batch: int) -> int:
    """Tables end at a power of two beyond the batch, so that plans ask for the same sizes."""
    return int(max(1 << (2 * batch - 1).bit_length(), FIRST_BATCHES))


@cache
def _batches(most: int) -> FloatArray:
    """1, 2, ... up to so many: the same array for every plan, so that who answers for it can know
    it again."""
    batches = np.arange(1, most + 1, dtype=float)
    batches.flags.writeable = False
    return batches


@cache
def _sizes(count: int) -> FloatArray:
    """So many group sizes, at which decode steps are tabulated."""
    sizes: FloatArray = np.asarray(ROWS_RATIO ** np.arange(count), float)
    sizes.flags.writeable = False
    return sizes


def by_batch(values: FloatArray) -> FloatArray:
    """The values of batches 1, 2, ... are shifted such that the index is the batch."""
    return np.append(values[0], values)


class PlanBounds:
    """One division is bounded by its encode pool's times by batch, its decode pool's by rows."""

    def __init__(self, waa: Waa, plan: WaaPlan, *, is_modest: bool) -> None:
        self._waa, self.plan, self._is_modest = waa, plan, is_modest
        self._chunked = cache(partial(
            ChunkedPoolBounds, waa.times, plan.decode, waa.problem.lengths.outputs.mean))
        self._top = 0
        self._most_rate = self._least_rate = np.empty(0)  # by batch
        self._least_encode = self._least_through = np.empty(0)  # with the handover, and without
        self._slowest = self._through = np.empty(0)  # by rows, lower envelopes

    def bound(self, boxes: WaaBoxes, latency_bound_s: float,
              ) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
        """The bound is (most throughput_qps, 0 where memory does not hold it; least latency_s,
        seconds until the first token, and of an iteration). What takes longer than
        `latency_bound_s` need not count for the throughput."""
        waa = self._waa
        self._tabulate(int(boxes.most.max()))
        outputs = waa.problem.lengths.outputs.mean
        iteration_s = self._longest_s(boxes, latency_bound_s)
        largest: FloatArray = np.minimum(boxes.most.astype(float) * outputs,
                                         self._most_decoding(boxes, iteration_s))
        absorbed = largest / (waa.times.mean_iterations * self._iteration_s(largest, boxes))
        limit = np.minimum(self._most_rate[boxes.most], absorbed)
        decoding, iteration = np.empty((2, len(limit)))
        if len(rows := np.flatnonzero(boxes.chunk)):
            own = boxes.take(rows)
            limit[rows], decoding[rows], iteration[rows] = self._chunked().limits(
                own, (self._least_rate[own.least], self._most_rate[own.most]),
                self._most_in_system, iteration_s[rows], is_modest=self._is_modest)
        if len(rows := np.flatnonzero(boxes.chunk == 0)):
            decoding[rows], iteration[rows] = self._without_chunks(boxes.take(rows))
        through = self._least_through[boxes.least]
        latency = self._least_encode[boxes.least] + waa.iterations_waited * iteration
        # what is decoding, with its caches, may not fit
        held = waa.memory.fullest(self.plan, boxes.easiest, np.ceil(
            0.5 * boxes.least.astype(float) + decoding))
        return np.where(held <= waa.capacity_bytes, limit, 0.0), latency, through, iteration

    def _without_chunks(self, boxes: WaaBoxes) -> tuple[FloatArray, FloatArray]:
        """No fewer decode [boxes], and no iteration is shorter."""
        waa = self._waa
        wanted: FloatArray = boxes.least.astype(float) * waa.problem.lengths.outputs.mean
        rate = self._least_rate[boxes.least] * waa.times.mean_iterations

        def excess(decoding: FloatArray) -> FloatArray:
            return rate * self._iteration_s(decoding, boxes) - decoding

        of_wanted = excess(wanted)
        # the root is found from both sides: a little less is less for certain
        decoding = np.where(of_wanted >= 0, wanted, (1 - 2 * _ROOT_ACCURACY) * root(
            excess, wanted, np.minimum(of_wanted, 0.0), _ROOT_ACCURACY))
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
        in_turn, at_once = (np.append(_sizes(len(table)), np.inf)[np.searchsorted(
            table, seconds, side="right")] for table, seconds in (
                (self._slowest, iteration_s / boxes.fewest), (self._through, iteration_s)))
        return np.asarray(np.minimum(boxes.fewest * in_turn, boxes.highest * at_once))

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
        steps = np.minimum(boxes.fewest, np.maximum(decoding, 1.0))
        slowest = self._at(self._slowest, decoding / boxes.fewest)
        through = self._at(self._through, decoding / boxes.highest)
        return np.asarray(np.maximum(steps * slowest, through))

    def _at(self, table: FloatArray, rows: FloatArray) -> FloatArray:
        position = np.log(np.maximum(rows, 1.0)) / np.log(ROWS_RATIO)
        index = np.minimum(position.astype(np.intp), len(table) - 2)
        left, right = table[index], table[index + 1]
        return np.asarray(left + np.minimum(position - index, 1.0) * (right - left))

    def _tabulate(self, most: int) -> None:
        if most <= self._top:
            return
        waa, plan = self._waa, self.plan
        self._top = leap(most)
        batch = _batches(self._top)
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
        count = int(np.log(rows) / np.log(ROWS_RATIO)) + 3
        sizes = _sizes(count)
        slowest, through_rows = waa.times.decode(plan, sizes)
        self._slowest = rising_minorant(sizes, slowest)
        self._through = rising_minorant(sizes, through_rows)
