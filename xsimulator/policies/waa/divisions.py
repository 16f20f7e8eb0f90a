"""How WAA's devices are divided between encoding and decoding (paper section 4.1)."""

import numpy as np

from xgpt.core.lengths import BoolArray, FloatArray, IntArray
from xsimulator.policies.waa.config import WaaConfigs
from xsimulator.policies.waa.held import HeldSizes
from xsimulator.policies.waa.memory import WaaMemory
from xsimulator.policies.waa.plans import WaaPlans
from xsimulator.policies.waa.pool_times import PoolTimes

AT_ONCE = 20_000  # divisions of configurations whose bytes are worked out though not all are wanted


class FixedDivision:
    """As many devices encode whatever the configuration."""

    def __init__(self, encode_devices: int) -> None:
        self._encode_devices = encode_devices

    def divide(self, split: WaaPlans, configs: WaaConfigs) -> IntArray:
        """So many devices [configs] encode."""
        return np.full(len(configs.batch), self._encode_devices)


class DivisionByTime:
    """WAA-C divides devices in proportion to the time that each phase of a query takes."""

    def __init__(self, times: PoolTimes) -> None:
        self._times = times

    def divide(self, split: WaaPlans, configs: WaaConfigs) -> IntArray:
        rows = configs.batch * self._times.mean_iterations / configs.groups
        return _nearest(
            split, self._times.encode_query_s(configs.batch, split.tp_degree),
            self._times.decode_query_s(np.maximum(rows, 1.0), split.tp_degree))


class DivisionByMemory:
    """WAA-M divides devices so that the fullest is as empty as can be, with as many queries as are
    wanted."""

    def __init__(self, memory: WaaMemory) -> None:
        self._memory = memory

    def divide(self, split: WaaPlans, configs: WaaConfigs) -> IntArray:
        sizes = self._sizes(configs)
        fullest = self._fullest(split, sizes, self._may_be(split, configs, sizes))
        return np.asarray(split.encode_devices[np.argmin(fullest, axis=0)])

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


def _nearest(split: WaaPlans, encode_s: FloatArray, decode_s: FloatArray) -> IntArray:
    with np.errstate(invalid="ignore"):
        share = encode_s / (encode_s + decode_s)
    return split.nearest(np.where(np.isfinite(share), share, 0.5))


Division = FixedDivision | DivisionByTime | DivisionByMemory
