"""Whether a configuration may be chosen: one place for what all searches ask."""

import math
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from xgpt.core.lengths import BoolArray, FloatArray, IntArray
from xprofiler.interpolation import REFUSED_BEYOND
from xsimulator.policies.figures import EstimateArrays

SLACK = 1e-9  # queries: a mean that is a whole number but for rounding counts as that


class Limit(IntEnum):
    """What forbids a configuration, in the order in which it is named."""

    NONE = 0
    MEMORY = 1
    QUERIES = 2
    RANGE = 3
    LATENCY = 4

    @property
    def words(self) -> str:
        """The limit as it is shown; "" for NONE."""
        return ("", "memory", "number of queries", "measured range", "latency")[self]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What is asked of a configuration besides room in memory.

    queries: most that may be present. latency_s: most that the constraint's latency may be.
    stretch: the largest size over the largest that was measured (REFUSED_BEYOND: the timing source
    answers nothing beyond it). is_timed: its throughput must be known."""

    queries: float = math.inf
    latency_s: float = math.inf
    stretch: float = math.inf
    is_timed: bool = False


def admissible(figures: EstimateArrays, limits: Limits) -> BoolArray:
    """[configs] whether each fits into memory and keeps every limit:

        present <= queries + SLACK, stretch <= limit, (is_timed) throughput > 0, latency <= limit"""
    return np.asarray(forbidding(figures, limits) == Limit.NONE)


def forbidding(figures: EstimateArrays, limits: Limits) -> IntArray:
    """[configs] the first Limit that each breaks, 0 where it is admissible."""
    broken = breaches(figures, limits)
    return np.select(list(broken.values()), list(broken), 0).astype(np.int64)


def breaches(figures: EstimateArrays, limits: Limits) -> dict[Limit, BoolArray]:
    """[configs] whether each breaks a limit, by the limit."""
    is_refused = beyond_range(figures.stretch, limits.stretch)
    if limits.is_timed:
        is_refused = is_refused | ~(figures.throughput_qps > 0)
    return {Limit.MEMORY: ~figures.fits, Limit.QUERIES: figures.present > limits.queries + SLACK,
            Limit.RANGE: is_refused, Limit.LATENCY: ~(figures.latency_s <= limits.latency_s)}


def crowding(fits: BoolArray, present: FloatArray, stretch: FloatArray, queries: float) -> IntArray:
    """[configs] the first Limit but latency that each breaks, where no more is known of it."""
    return np.select([~fits, present > queries + SLACK, beyond_range(stretch)],
                     [Limit.MEMORY, Limit.QUERIES, Limit.RANGE], 0).astype(np.int64)


def beyond_range(stretch: FloatArray, limit: float = REFUSED_BEYOND) -> BoolArray:
    """[configs] whether sizes lie so far beyond those measured that the source refuses them."""
    return np.asarray(stretch > limit)
