"""How WAA's devices are divided between encoding and decoding (paper section 4.1)."""

import math

import numpy as np

from xgpt.core.lengths import BoolArray, FloatArray, IntArray
from xsimulator.policies.waa.config import WaaBoxes, WaaConfigs
from xsimulator.policies.waa.held import HeldSizes
from xsimulator.policies.waa.memory import WaaMemory
from xsimulator.policies.waa.plans import WaaPlans
from xsimulator.policies.waa.pool_times import PoolTimes
from xsimulator.policies.waa.step_columns import ROWS_RATIO

WHOLE = 4096  # so many rows of a decode step, and fewer, are looked at wherever they are whole
MANY_RATIO = 1.005  # between more of them
ROUNDED = 1e-12  # parts of a time that rounding leaves
AT_ONCE = 20_000  # divisions of configurations whose bytes are worked out though not all are wanted


class FixedDivision:
    """As many devices encode whatever the configuration."""

    def __init__(self, encode_devices: int) -> None:
        self._encode_devices = encode_devices

    def divide(self, split: WaaPlans, configs: WaaConfigs) -> IntArray:
        """So many devices [configs] encode."""
        return np.full(len(configs.batch), self._encode_devices)

    def possible(self, split: WaaPlans, boxes: WaaBoxes, wanted: BoolArray) -> BoolArray:
        """It says [counts of encode devices, boxes] which of those wanted may be the division of
        a configuration of each box."""
        return np.asarray(wanted & (split.encode_devices == self._encode_devices)[:, None])


class DivisionByTime:
    """WAA-C divides devices in proportion to the time that each phase of a query takes."""

    def __init__(self, times: PoolTimes) -> None:
        self._times = times
        self._encode: dict[int, FloatArray] = {}  # by degree: C_E at batches 1, 2, ...
        self._decode: dict[int, tuple[FloatArray, FloatArray]] = {}  # as _decode_steps has them

    def divide(self, split: WaaPlans, configs: WaaConfigs) -> IntArray:
        rows = configs.batch * self._times.mean_iterations / configs.groups
        return _nearest(
            split, self._times.encode_query_s(configs.batch, split.tp_degree),
            self._times.decode_query_s(np.maximum(rows, 1.0), split.tp_degree))

    def possible(self, split: WaaPlans, boxes: WaaBoxes, wanted: BoolArray) -> BoolArray:
        degree, counts, iterations = (
            split.tp_degree, split.encode_devices[:, None], self._times.mean_iterations)
        most, each = int(boxes.most.max()), self._encode.get(degree)
        if each is None or len(each) < most:
            each = self._encode[degree] = self._times.encode_query_s(
                np.arange(1, 2 * most + 1, dtype=float), degree)
        encode = [each[low - 1:up] for low, up in zip(boxes.least, boxes.most, strict=True)]
        rows = np.maximum(np.stack([boxes.least * iterations / boxes.highest,
                                    boxes.most * iterations / boxes.fewest], axis=1), 1.0)
        # sizes that are refused take for ever, and are no configuration's
        timed = [part[np.isfinite(part)] for part in encode]
        least, largest = (np.array([pick(part) if len(part) else np.inf for part in timed])
                          for pick in (np.min, np.max))
        least_decode, largest_decode = self._decode_range(degree, rows)
        fewest = _nearest(split, least, largest_decode)
        return np.asarray(wanted & (counts >= fewest)
                          & (counts <= _nearest(split, largest, least_decode)))

    def _decode_range(self, degree: int, rows: FloatArray) -> tuple[FloatArray, FloatArray]:
        """No query in steps of as many rows as from [boxes, 0] to [boxes, 1] decodes in less time,
        and none takes longer. A step of more rows takes no less time than one of fewer, but a
        query's share of it falls and jumps: between two sizes it is no less than the quicker step's
        for each of the more rows, and no more than the slower one's for each of the fewer."""
        sizes, steps = self._decode_steps(degree, float(rows.max()))
        of_ends, (low, up) = rows * self._times.decode_query_s(rows, degree), rows.T
        first = np.searchsorted(sizes, low, side="right")
        last = np.maximum(np.searchsorted(sizes, up, side="left"), first)
        # from either end to the size of the table next to it, or to the other end
        is_apart = last > first
        after, before = np.minimum(first, len(sizes) - 1), np.maximum(last - 1, 0)
        next_size, previous_size = (np.where(is_apart, sizes[at], other) for at, other in (
            (after, up), (before, low)))
        next_step, previous_step = (np.where(is_apart, steps[at], other) for at, other in (
            (after, of_ends[:, 1]), (before, of_ends[:, 0])))
        parts = np.array([[of_ends[:, 0], next_step], [previous_step, of_ends[:, 1]]])
        timed = np.where(np.isfinite(parts), parts, 0.0)
        least = (parts.min(axis=1) / [next_size, up]).min(axis=0)
        largest = (timed.max(axis=1) / [low, previous_size]).max(axis=0)
        # and between sizes of the table: of pairs every other part is of these
        if len(rest := np.flatnonzero(last - first > 1)):
            pairs = np.stack([first[rest], last[rest] - 1], axis=1).ravel()
            known = np.where(np.isfinite(steps), steps, 0.0)
            least[rest] = np.minimum(least[rest], np.minimum.reduceat(np.append(
                np.minimum(steps[:-1], steps[1:]) / sizes[1:], np.inf), pairs)[::2])
            largest[rest] = np.maximum(largest[rest], np.maximum.reduceat(np.append(
                np.maximum(known[:-1], known[1:]) / sizes[:-1], 0.0), pairs)[::2])
        return least / (1 + ROUNDED), np.where(np.isfinite(least), largest * (1 + ROUNDED), np.inf)

    def _decode_steps(self, degree: int, most_rows: float) -> tuple[FloatArray, FloatArray]:
        """(sizes to `most_rows` at least, seconds of decode steps of these through one group)."""
        known = self._decode.get(degree)
        if known is None or known[0][-1] < most_rows:
            sizes = _sizes_to(2 * most_rows)
            known = self._decode[degree] = (
                sizes, sizes * self._times.decode_query_s(sizes, degree))
        return known


class DivisionByMemory:
    """WAA-M divides devices so that the fullest is as empty as can be, with as many queries as are
    wanted."""

    def __init__(self, memory: WaaMemory) -> None:
        self._memory = memory

    def divide(self, split: WaaPlans, configs: WaaConfigs) -> IntArray:
        sizes = self._sizes(configs)
        fullest = self._fullest(split, sizes, self._may_be(split, configs, sizes))
        return np.asarray(split.encode_devices[np.argmin(fullest, axis=0)])

    def possible(self, split: WaaPlans, boxes: WaaBoxes, wanted: BoolArray) -> BoolArray:
        # the fewer are looked at, the less is ruled out: that is sound
        hardest = self._sizes(boxes.hardest)
        wanted = wanted & self._may_be(split, boxes.easiest, hardest)
        least = self._fullest(split, self._sizes(boxes.easiest), wanted)
        most = self._fullest(split, hardest, wanted)
        return np.asarray(wanted & (least <= most.min(axis=0)))

    def _may_be(self, split: WaaPlans, low: WaaConfigs, high: HeldSizes) -> BoolArray:
        """Divisions [counts of encode devices, boxes] may be the best: even with all bytes spread
        evenly over a pool's devices, others are worse than the best of these is at worst."""
        counts = split.encode_devices
        even = self._memory.evenly(counts, low.batch, self._in_system(low.batch))
        likely = np.argmin(even, axis=0), np.arange(len(low.batch))
        is_best: BoolArray = np.zeros(even.shape, bool)
        is_best[likely] = True
        worst = self._fullest(split, high, is_best)[likely]
        is_likely: BoolArray = even <= worst
        return is_likely | is_best

    def _in_system(self, batch: FloatArray) -> FloatArray:
        """So many queries are in the system as it is meant to be."""
        return np.asarray(np.ceil(batch * (self._memory.mean_outputs + 1)))

    def _sizes(self, configs: WaaConfigs) -> HeldSizes:
        return self._memory.sizes(configs, self._in_system(configs.batch))

    def _fullest(self, split: WaaPlans, sizes: HeldSizes, wanted: BoolArray) -> FloatArray:
        """The fullest device holds such bytes [counts of encode devices, configs]; they are
        infinite where not wanted."""
        held = np.full(wanted.shape, np.inf)
        places = np.flatnonzero(wanted.any(axis=1))
        plans = [split.plan(count) for count in split.encode_devices[places].tolist()]
        if wanted.size <= AT_ONCE and plans:
            held[places] = np.where(wanted[places], self._memory.fullest_of_many(plans, sizes),
                                    np.inf)
            return held
        for place, plan in zip(places.tolist(), plans, strict=True):
            rows = np.flatnonzero(wanted[place])
            held[place, rows] = self._memory.fullest_of(plan, sizes.take(rows))
        return held


def _sizes_to(most_rows: float) -> FloatArray:
    """Numbers of rows from 1 to `most_rows` at least, closely, and as far as WHOLE each whole one:
    there a measured table's points lie."""
    few = ROWS_RATIO ** np.arange(math.log(WHOLE) / math.log(ROWS_RATIO))
    many = WHOLE * MANY_RATIO ** np.arange(
        2 + max(math.log(most_rows / WHOLE) / math.log(MANY_RATIO), 0.0))
    return np.unique(np.concatenate([few, np.arange(1.0, WHOLE), many]))


def _nearest(split: WaaPlans, encode_s: FloatArray, decode_s: FloatArray) -> IntArray:
    with np.errstate(invalid="ignore"):
        share = encode_s / (encode_s + decode_s)
    return split.nearest(np.where(np.isfinite(share), share, 0.5))


Division = FixedDivision | DivisionByTime | DivisionByMemory
