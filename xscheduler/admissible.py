"""Whether a configuration may be chosen: one place for what all searches ask."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from xgpt.core.constraint import Constraint
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
    TTFT = 5
    TPOT = 6

    @property
    def words(self) -> str:
        """The limit as it is shown; "" for NONE."""
        return ("", "memory", "number of queries", "measured range", "latency", "first token",
                "time per token")[self]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What is asked of a configuration besides room in memory.

    queries: most that may be present. latency_s, ttft_s, tpot_s: most that these figures may be.
    stretch: the largest size over the largest that was measured (REFUSED_BEYOND: the timing source
    answers nothing beyond it). is_timed: its throughput must be known."""

    queries: float = math.inf
    latency_s: float = math.inf
    ttft_s: float = math.inf
    tpot_s: float = math.inf
    stretch: float = math.inf
    is_timed: bool = False

    @classmethod
    def of(cls, constraint: Constraint, **others: Any) -> Limits:
        """With the constraint's bounds on the first token and on each later one; that on latency,
        which searches move, is among the `others`."""
        return cls(ttft_s=constraint.limit_s("ttft"), tpot_s=constraint.limit_s("tpot"), **others)


def admissible(figures: EstimateArrays, limits: Limits) -> BoolArray:
    """[configs] whether each fits into memory and keeps every limit:

        present <= queries + SLACK, stretch <= limit, (is_timed) throughput > 0, latency <= limit,
        time to first token <= limit, time per token <= limit"""
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
            Limit.RANGE: is_refused, Limit.LATENCY: ~(figures.latency_s <= limits.latency_s),
            Limit.TTFT: ~(figures.ttft_s <= limits.ttft_s),
            Limit.TPOT: ~(figures.tpot_s <= limits.tpot_s)}


def crowding(fits: BoolArray, present: FloatArray, stretch: FloatArray, queries: float) -> IntArray:
    """[configs] the first Limit but latency that each breaks, where no more is known of it."""
    # one choice in another takes a tenth of the time that np.select does
    return np.where(fits, np.where(present > queries + SLACK, int(Limit.QUERIES), np.where(
        beyond_range(stretch), int(Limit.RANGE), 0)), int(Limit.MEMORY))


def crowding_or_pace(figures: EstimateArrays, limits: Limits) -> IntArray:
    """[configs] the first Limit but latency that each breaks, the tokens' pace among them."""
    crowded = crowding(figures.fits, figures.present, figures.stretch, limits.queries)
    return np.where(crowded > 0, crowded, np.where(figures.ttft_s <= limits.ttft_s, np.where(
        figures.tpot_s <= limits.tpot_s, 0, int(Limit.TPOT)), int(Limit.TTFT)))


def beyond_range(stretch: FloatArray, limit: float = REFUSED_BEYOND) -> BoolArray:
    """[configs] whether sizes lie so far beyond those measured that the source refuses them."""
    return np.asarray(stretch > limit)
