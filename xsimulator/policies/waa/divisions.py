"""WAA-C and WAA-M: how the devices are divided between encoding and decoding (paper 4.1)."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from xgpt.core.lengths import FloatArray, IntArray
from xsimulator.policies.figures import BoolArray
from xsimulator.policies.waa.closed_form import ROWS_RATIO, Boxes, Waa, WaaConfig, WaaPoints
from xsimulator.policies.waa.plans import WaaPlans

__all__ = ["WaaC", "WaaConfig", "WaaM"]


class WaaC(Waa):
    """Devices in proportion to the time that each phase of a query takes."""

    name = "waa-c"

    def divide(self, split: WaaPlans, points: WaaPoints, degree: int) -> IntArray:
        encode_s = self.encode_query_s(points.batch, degree)
        decode_s = self.decode_query_s(
            np.maximum(points.batch * self.mean_iterations / points.groups, 1.0), degree)
        return self._nearest(split, encode_s, decode_s)

    def divisions(self, split: WaaPlans, boxes: Boxes, wanted: BoolArray) -> BoolArray:
        degree, counts = split.tp_degree, split.encode_devices[:, None]
        batches, each = self._encode_table(int(boxes.most.max()), degree)
        encode = [each[low - 1:up] for low, up in zip(boxes.least, boxes.most, strict=True)]
        fewest_rows = np.maximum(boxes.least * self.mean_iterations / boxes.highest, 1.0)
        most_rows = np.maximum(boxes.most * self.mean_iterations / boxes.fewest, 1.0)
        sizes = ROWS_RATIO ** np.arange(int(np.log(most_rows.max()) / np.log(ROWS_RATIO)) + 3)
        per_row = self.decode_query_s(np.asarray(sizes, float), degree)
        # rows between two sizes cost no less, and no more, than at one of those around them
        first = np.maximum(np.searchsorted(sizes, fewest_rows, side="right") - 1, 0)
        last = np.searchsorted(sizes, most_rows) + 1
        decode = [per_row[low:up] for low, up in zip(first, last, strict=True)]
        # sizes that are refused take for ever, and are no configuration's
        timed = [[part[np.isfinite(part)] for part in parts] for parts in (encode, decode)]
        least, largest = ([np.array([pick(part) if len(part) else np.inf for part in parts])
                           for parts in timed] for pick in (np.min, np.max))
        fewest = self._nearest(split, least[0], largest[1])
        return np.asarray(wanted & (counts >= fewest)
                          & (counts <= self._nearest(split, largest[0], least[1])))

    def _nearest(self, split: WaaPlans, encode_s: FloatArray, decode_s: FloatArray) -> IntArray:
        with np.errstate(invalid="ignore"):
            share = encode_s / (encode_s + decode_s)
        return split.nearest(np.where(np.isfinite(share), share, 0.5))

    def _encode_table(self, most: int, degree: int) -> tuple[FloatArray, FloatArray]:
        """(batches 1, 2, ..., C_E at each), as far as `most` at least."""
        known = self._encode_known.get(degree)
        if known is None or len(known[0]) < most:
            batches = np.arange(1, 2 * most + 1, dtype=float)
            known = self._encode_known[degree] = batches, self.encode_query_s(batches, degree)
        return known

    @cached_property
    def _encode_known(self) -> dict[int, tuple[FloatArray, FloatArray]]:
        return {}


class WaaM(Waa):
    """Devices so that the fullest is as empty as can be, with as many queries as are wanted."""

    name = "waa-m"

    def divide(self, split: WaaPlans, points: WaaPoints, degree: int) -> IntArray:
        batch, groups = points.batch, points.groups
        fullest = self._fullest(split, batch, groups, self._may_be(split, points, points))
        found: IntArray = split.encode_devices[np.argmin(fullest, axis=0)]
        return found

    def divisions(self, split: WaaPlans, boxes: Boxes, wanted: BoolArray) -> BoolArray:
        low = WaaPoints(batch=boxes.least.astype(float), groups=boxes.highest.astype(float))
        high = WaaPoints(batch=boxes.most.astype(float), groups=boxes.fewest.astype(float))
        # the fewer are looked at, the less is ruled out: that is sound
        wanted = wanted & self._may_be(split, low, high)
        least = self._fullest(split, low.batch, low.groups, wanted)
        most = self._fullest(split, high.batch, high.groups, wanted)
        return np.asarray(wanted & (least <= most.min(axis=0)))

    def _may_be(self, split: WaaPlans, low: WaaPoints, high: WaaPoints) -> BoolArray:
        """[counts of encode devices, boxes] those that may be the best: even with all bytes spread
        evenly over a pool's devices, others are worse than the best of these is at worst."""
        counts = split.encode_devices
        even = self.memory.evenly(counts, low.batch, self._wanted(low.batch))
        worst = np.empty(len(low.batch))
        likely = np.argmin(even, axis=0)
        for place in np.unique(likely):
            rows = np.flatnonzero(likely == place)
            worst[rows] = self._held(split, int(counts[place]), WaaPoints(
                batch=high.batch[rows], groups=high.groups[rows]))
        found: BoolArray = even <= worst
        found[likely, np.arange(len(worst))] = True
        return found

    def _wanted(self, batch: FloatArray) -> FloatArray:
        """Queries in the system as it is meant to be."""
        return np.asarray(np.ceil(batch * (self.problem.lengths.outputs.mean + 1)))

    def _fullest(self, split: WaaPlans, batch: FloatArray, groups: FloatArray,
                 wanted: BoolArray) -> FloatArray:
        """[counts of encode devices, configs] bytes; infinite where not wanted."""
        found = np.full(wanted.shape, np.inf)
        for place, count in enumerate(split.encode_devices):
            rows = np.flatnonzero(wanted[place])
            if len(rows):
                found[place, rows] = self._held(split, int(count), WaaPoints(
                    batch=batch[rows], groups=groups[rows]))
        return found

    def _held(self, split: WaaPlans, count: int, points: WaaPoints) -> FloatArray:
        return self.memory.fullest(split.plan(count), points.batch, points.groups,
                                   self._wanted(points.batch))
