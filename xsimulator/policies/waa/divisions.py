"""How WAA's devices are divided between encoding and decoding (paper section 4.1)."""

import numpy as np

from xgpt.core.lengths import BoolArray, FloatArray, IntArray
from xsimulator.policies.waa.config import WaaBoxes, WaaConfigs
from xsimulator.policies.waa.memory import WaaMemory
from xsimulator.policies.waa.plans import WaaPlans
from xsimulator.policies.waa.pool_times import ROWS_RATIO, PoolTimes


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
        fewest_rows = np.maximum(boxes.least * iterations / boxes.highest, 1.0)
        most_rows = np.maximum(boxes.most * iterations / boxes.fewest, 1.0)
        sizes = ROWS_RATIO ** np.arange(int(np.log(most_rows.max()) / np.log(ROWS_RATIO)) + 3)
        per_row = self._times.decode_query_s(np.asarray(sizes, float), degree)
        # rows between two sizes cost no less, and no more, than at one of those around them; that
        # is so nearly, and a box's own ends are looked at, too
        ends = self._times.decode_query_s(np.stack([fewest_rows, most_rows], axis=1), degree)
        first = np.maximum(np.searchsorted(sizes, fewest_rows, side="right") - 1, 0)
        last = np.searchsorted(sizes, most_rows) + 1
        decode = [np.append(per_row[low:up], own)
                  for low, up, own in zip(first, last, ends, strict=True)]
        # sizes that are refused take for ever, and are no configuration's
        timed = [[part[np.isfinite(part)] for part in parts] for parts in (encode, decode)]
        least, largest = ([np.array([pick(part) if len(part) else np.inf for part in parts])
                           for parts in timed] for pick in (np.min, np.max))
        fewest = _nearest(split, least[0], largest[1])
        return np.asarray(wanted & (counts >= fewest)
                          & (counts <= _nearest(split, largest[0], least[1])))


class DivisionByMemory:
    """WAA-M divides devices so that the fullest is as empty as can be, with as many queries as are
    wanted."""

    def __init__(self, memory: WaaMemory) -> None:
        self._memory = memory

    def divide(self, split: WaaPlans, configs: WaaConfigs) -> IntArray:
        fullest = self._fullest(split, configs, self._may_be(split, configs, configs))
        return np.asarray(split.encode_devices[np.argmin(fullest, axis=0)])

    def possible(self, split: WaaPlans, boxes: WaaBoxes, wanted: BoolArray) -> BoolArray:
        # the fewer are looked at, the less is ruled out: that is sound
        wanted = wanted & self._may_be(split, boxes.easiest, boxes.hardest)
        least = self._fullest(split, boxes.easiest, wanted)
        most = self._fullest(split, boxes.hardest, wanted)
        return np.asarray(wanted & (least <= most.min(axis=0)))

    def _may_be(self, split: WaaPlans, low: WaaConfigs, high: WaaConfigs) -> BoolArray:
        """Divisions [counts of encode devices, boxes] may be the best: even with all bytes spread
        evenly over a pool's devices, others are worse than the best of these is at worst."""
        counts = split.encode_devices
        even = self._memory.evenly(counts, low.batch, self._in_system(low.batch))
        worst = np.empty(len(low.batch))
        likely = np.argmin(even, axis=0)
        for place in np.unique(likely):
            rows = np.flatnonzero(likely == place)
            worst[rows] = self._held(split, int(counts[place]), high.take(rows))
        is_likely: BoolArray = even <= worst
        is_likely[likely, np.arange(len(worst))] = True
        return is_likely

    def _in_system(self, batch: FloatArray) -> FloatArray:
        """So many queries are in the system as it is meant to be."""
        return np.asarray(np.ceil(batch * (self._memory.mean_outputs + 1)))

    def _fullest(self, split: WaaPlans, configs: WaaConfigs, wanted: BoolArray) -> FloatArray:
        """The fullest device holds such bytes [counts of encode devices, configs]; they are
        infinite where not wanted."""
        held = np.full(wanted.shape, np.inf)
        sizes = self._memory.sizes(configs, self._in_system(configs.batch))
        for place in np.flatnonzero(wanted.any(axis=1)).tolist():
            rows = np.flatnonzero(wanted[place])
            held[place, rows] = self._memory.fullest_of(
                split.plan(int(split.encode_devices[place])), sizes.take(rows))
        return held

    def _held(self, split: WaaPlans, count: int, configs: WaaConfigs) -> FloatArray:
        return self._memory.fullest(split.plan(count), configs, self._in_system(configs.batch))


def _nearest(split: WaaPlans, encode_s: FloatArray, decode_s: FloatArray) -> IntArray:
    with np.errstate(invalid="ignore"):
        share = encode_s / (encode_s + decode_s)
    return split.nearest(np.where(np.isfinite(share), share, 0.5))


Division = FixedDivision | DivisionByTime | DivisionByMemory
