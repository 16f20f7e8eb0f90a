"""Queries for which WAA's decode pools have room at most, before anything is laid out: of what is
spread evenly over each pool's devices (WaaMemory.evenly)."""

import numpy as np

from xgpt.core.lengths import FloatArray
from xsimulator.policies.waa.memory import WaaMemory
from xsimulator.policies.waa.plan_bounds import MEMORY_SIZES
from xsimulator.policies.waa.plans import WaaPlans

MOST_IN_SYSTEM = 1e9  # where memory does not say


def held_by_division(memory: WaaMemory, capacity_bytes: float, split: WaaPlans) -> FloatArray:
    """No more queries can be in the decode pool [counts of encode devices]."""
    sizes = MEMORY_SIZES
    even = memory.evenly(split.encode_devices, np.ones(len(sizes)), sizes)
    fits = (even <= capacity_bytes).sum(axis=1)
    return np.asarray(sizes[np.minimum(fits, len(sizes) - 1)])


def most_in_system(memory: WaaMemory, capacity_bytes: float, split: WaaPlans) -> float:
    """No more queries can be in the decode pool, whatever the division."""
    def fits(count: float) -> bool:
        held = memory.evenly(split.encode_devices, np.ones(1), np.array([count]))
        return bool(held.min() <= capacity_bytes)

    low, high = 1.0, 2.0
    while fits(high) and high < MOST_IN_SYSTEM:
        low, high = high, 2 * high
    while high > 1.01 * low:
        middle = 0.5 * (low + high)
        low, high = (middle, high) if fits(middle) else (low, middle)
    return high
