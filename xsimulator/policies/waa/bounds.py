"""What no WAA configuration of a box can better: bounds for branch and bound (paper section 5.1).

A box holds ranges of encode_batch B and decode_micro_batches G of one tensor plan. For each number
of encode devices that its configurations may be divided by (xsimulator.policies.waa.closed_form:
the division follows from B and G),

    throughput <= min( largest B / T_E(B), B_D / (E[D] T_iter(B_D)) at the largest B_D )
    latency    >= T_E through the pool + handover + iterations x T_iter at the smallest B_D

with B_D = B E[S] or what Little's law leaves of it, and T_iter = max(G x slowest stage, all stages)
at the smallest G and at the largest, in that order; of many groups with few queries each, at the
least that hold any (xsimulator.policies.waa.few_each). The encode pool's times are tables over
every B, so their least and largest over a range are exact. Of a box whose decode pools take chunks
the encode pool's throughput is none of a limit, but what both encode together is
(xsimulator.policies.waa.chunk_bounds); its latencies are no less than without chunks, which only
make more decode. The decode pool's times are taken from a lower envelope (xsimulator.envelope), so
that T_iter rises with the batch and falls in relation to it."""

import math
from typing import NamedTuple

import numpy as np

from xgpt.core.lengths import BoolArray, FloatArray, IntArray
from xsimulator.policies.waa.closed_form import Waa
from xsimulator.policies.waa.config import WaaBoxes
from xsimulator.policies.waa.held import HeldSizes
from xsimulator.policies.waa.native import bounds_of_pairs
from xsimulator.policies.waa.plan_bounds import PlanBounds
from xsimulator.policies.waa.plans import WaaPlan, WaaPlans
from xsimulator.policies.waa.quick_bounds import QuickBounds

TOLERANCE = 0.001  # of throughput and latency: the decode table is linear in a logarithm
NEW_WORK = 3  # looks into a division's tables that their making takes


class BoxBounds(NamedTuple):
    """[boxes] No configuration has more throughput_qps, or is quicker: seconds of the latency's
    query, until its first token, and between two tokens; nor holds less on its fullest device."""

    most_qps: FloatArray
    latency_s: FloatArray
    ttft_s: FloatArray
    iteration_s: FloatArray
    held_bytes: FloatArray


class WaaBounds:
    """The bounds are for one Waa."""

    def __init__(self, waa: Waa, *, is_modest: bool = False) -> None:
        """`is_modest`: for configurations with modest chunks alone (Waa.modest_chunk)."""
        self.waa = waa
        self.quick = QuickBounds(waa, is_modest=is_modest)
        self._is_modest = is_modest
        self.work = 0  # divisions that were looked at so far, batch of boxes by batch of boxes
        self._begun: set[PlanBounds] = set()

    def _tables(self, plan: WaaPlan) -> PlanBounds:
        """They do not depend on how the devices are divided."""
        kept, key = self.waa.times.kept, (plan, self._is_modest)
        if key not in kept:
            kept[key] = PlanBounds(self.waa, plan, is_modest=self._is_modest)
        tables: PlanBounds = kept[key]
        return tables

    def bound(self, split: WaaPlans, boxes: WaaBoxes, *, worth_qps: float = 0.0,
              latency_bound_s: float = math.inf) -> BoxBounds:
        """Bounds of each of the boxes over the divisions that may be. `worth_qps`: below it, a
        throughput need not be bounded tightly. What takes longer than `latency_bound_s` need not
        count for the throughput."""
        limit = np.zeros(len(boxes))
        # seconds of a latency, of a first token, of an iteration; bytes
        least = np.full((4, len(boxes)), np.inf)
        fits = self.fits(split, boxes)
        quick = np.where(fits, self.quick.by_division(split, boxes, latency_bound_s), 0.0)
        most_quick = quick.max(axis=0)
        is_low = fits.any(axis=0) & (most_quick <= worth_qps)
        limit[is_low] = most_quick[is_low]
        least[:, is_low] = 0.0  # not looked at
        rows = np.flatnonzero(fits.any(axis=0) & ~is_low)
        if not len(rows):
            return BoxBounds(limit, *least)
        wanted = fits & (quick > worth_qps)
        wanted[:, is_low] = False
        # those that are not worth it are no better than their quick bound
        limit[rows] = np.where(fits & ~wanted, quick, 0.0).max(axis=0)[rows]
        least[:, rows] = np.where((fits & ~wanted).any(axis=0), 0.0, np.inf)[rows]
        may_be = np.zeros(wanted.shape, bool)
        may_be[:, rows] = self.waa.division.possible(split, boxes.take(rows), wanted[:, rows])
        left: list[tuple[int, PlanBounds, IntArray]] = []
        places = np.flatnonzero(may_be.any(axis=1))
        plans = [split.plan(count) for count in split.encode_devices[places].tolist()]
        if plans:
            held = np.where(may_be[places], self.waa.memory.fullest_of_many(
                plans, self._halves(boxes)), np.inf)
            least[3] = np.minimum(least[3], held.min(axis=0))
            for place, plan, own in zip(places.tolist(), plans, held, strict=True):
                if len(rows := np.flatnonzero(own <= self.waa.capacity_bytes)):
                    left.append((place, self._tables(plan), rows))
        self.waa.times.lengthen([tables.plan for _, tables, _ in left])
        new = {tables for _, tables, _ in left} - self._begun
        self.work += len(left) + NEW_WORK * len(new)
        self._begun |= new
        if left:
            self._bound_left(left, boxes, latency_bound_s, quick, limit, least)
        least[:3] /= 1 + TOLERANCE
        return BoxBounds(limit * (1 + TOLERANCE), *least)

    def fits(self, split: WaaPlans, boxes: WaaBoxes) -> BoolArray:
        """Where devices may hold the least of a box, were each pool's layers even over its own:
        [counts of encode devices, boxes]."""
        size = boxes.least.astype(float)
        return np.asarray(self.waa.memory.evenly(
            split.encode_devices, size, np.ceil(0.5 * size)) <= self.waa.capacity_bytes)

    def _bound_left(self, left: list[tuple[int, PlanBounds, IntArray]], boxes: WaaBoxes,
                    latency_bound_s: float, quick: FloatArray, limit: FloatArray,
                    least: FloatArray) -> None:
        """Bounds under the divisions that are left, each of some of the boxes, into `limit` and
        `least`."""
        waa, rows = self.waa, np.concatenate([rows for _, _, rows in left])
        which = np.repeat(np.arange(len(left)), [len(rows) for _, _, rows in left])
        own, tables = boxes.take(rows), [tables for _, tables, _ in left]
        found = bounds_of_pairs(waa, tables, which, own, latency_bound_s,
                                is_modest=self._is_modest)
        # what is decoding, with its caches, may not fit
        held = waa.memory.fullest_of_pairs(
            [one.plan for one in tables], which, waa.memory.sizes(own.easiest, np.ceil(
                0.5 * own.least.astype(float) + found.decoding)))
        # the quick bound knows how many rows the latency bound leaves time for
        places = np.array([place for place, _, _ in left])[which]
        np.maximum.at(limit, rows, np.where(held <= waa.capacity_bytes, np.minimum(
            found.most_qps, quick[places, rows]), 0.0))
        for column, seconds in zip(least[:3], (found.latency_s, found.ttft_s, found.iteration_s),
                                   strict=True):
            np.minimum.at(column, rows, seconds)

    def _halves(self, boxes: WaaBoxes) -> HeldSizes:
        """What is held at least, with half a batch in the decode pool."""
        return self.waa.memory.sizes(boxes.easiest, np.ceil(0.5 * boxes.least))

    def least_bytes(self, split: WaaPlans, batch: IntArray) -> FloatArray:
        """No configuration of such a batch [batches], or a larger one, needs less on its fullest
        device."""
        size = batch.astype(float)
        even = self.waa.memory.evenly(split.encode_devices, size, np.ceil(0.5 * size))
        return np.asarray(even.min(axis=0))
