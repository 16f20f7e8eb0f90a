"""What no continuously batching configuration of one plan answers more than, line by line
(continuous.bounds says why), under one latency bound after the other."""

import math
from typing import NamedTuple

import numpy as np

from xgpt.core.lengths import BoolArray, FloatArray, IntArray
from xsimulator.plans import StagePlan
from xsimulator.policies.continuous.bounds import RATES, ContinuousBounds, Lines

WALKED = 1.003  # of what steps of as many as memory holds answer, whose evictions scatter
PASSES = 2  # of looking at RATES values of y together
_EXPONENTS = 1 - np.arange(RATES) / (RATES - 1)
_EVENLY = np.linspace(0.0, 1.0, RATES)
LEAST_RATE = 2.0**-14  # of the largest y, or half of what one query at a time comes to


class Limit(NamedTuple):
    """[lines] what no configuration exceeds, and the queries at a time at which that would be."""

    throughput_qps: FloatArray
    active: FloatArray


class PlanLimits:
    """The limits of one plan's lines: what does not hang on the latency bound is found once."""

    def __init__(self, bounds: ContinuousBounds, plan: StagePlan, lines: Lines) -> None:
        self._bounds, self._at, self._most_active = bounds, bounds.held(plan, lines), (
            lines.most_active)
        self._top_qps = self._qps(np.arange(len(lines.least)), self._at.top)

    def limit(self, rows: IntArray, latency_bound_s: float) -> Limit:
        """No configuration of the lines `rows` that keeps the bound answers more."""
        at, bounds = self._at, self._bounds
        qps, high = self._top_qps[rows], at.top[rows]
        if not math.isinf(latency_bound_s):
            # most lines keep the bound at any rate, or at none: neither needs a look at several
            is_able = bounds.least_latency_s(at, rows, high[:, None])[:, 0] <= latency_bound_s
            if len(slow := np.flatnonzero(~is_able)):
                high[slow], is_able[slow] = self._largest_kept(rows[slow], latency_bound_s)
                qps[slow] = self._qps(rows[slow], high[slow])
            qps = np.where(is_able, qps, 0.0)
        active = at.groups * high * (bounds.iterations + 1)
        return Limit(qps, np.minimum(active, self._most_active[rows]))

    def _qps(self, rows: IntArray, rates: FloatArray) -> FloatArray:
        """[rows] at these rates, 0 where a line has no room."""
        at = self._at.take(rows)
        interval_s = self._bounds.interval_s(self._at, rows, rates[:, None])[:, 0]
        qps = at.groups * rates / np.maximum(interval_s, 1e-300)
        qps = np.where(at.is_crowded & (rates >= at.top), WALKED * qps, qps)
        return np.where(at.held > 0, qps, 0.0)

    def _largest_kept(self, rows: IntArray,
                      latency_bound_s: float) -> tuple[FloatArray, BoolArray]:
        """[rows] (a rate up to `top` that no rate which keeps the bound exceeds, whether there is
        one that does)."""
        top = self._at.top[rows]
        one = self._at.decoding[rows] / (2 * (self._bounds.iterations + 1))
        least = np.minimum(LEAST_RATE, one / np.maximum(top, 1e-300))[:, None]
        shares = least ** _EXPONENTS
        low, high, place = np.zeros(len(top)), top, np.arange(len(top))
        for number in range(PASSES):
            rates = low[:, None] + (high - low)[:, None] * (
                _EVENLY if number else shares)
            rates[:, -1] = high
            is_kept = self._bounds.least_latency_s(self._at, rows, rates) <= latency_bound_s
            last = RATES - 1 - np.argmax(is_kept[:, ::-1], axis=1)  # the largest that is kept
            last = np.where(is_kept.any(axis=1), last, 0)
            low, high = rates[place, last], rates[place, np.minimum(last + 1, RATES - 1)]
        return high, np.asarray(is_kept.any(axis=1))
