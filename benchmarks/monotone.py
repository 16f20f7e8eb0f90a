"""How far from monotone a quantity is along a control variable (paper section 7.8, Table 5).

The paper counts points at which "the monotonicity property" does not hold within a tolerance, and
states neither which points are compared nor how. Two readings, for a quantity meant to rise:

    extreme     a point is not monotone if it lies below the largest of all before it
    neighbour   if it lies below the one before it

by more than the tolerance, an amount of the quantity itself. The first is what a search that prunes
by corners of boxes needs, and never counts fewer points.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

from xgpt.core.lengths import FloatArray

Reading = Literal["extreme", "neighbour"]


class Count(NamedTuple):
    """Points that are not monotone, among all points."""

    not_monotone: int
    points: int

    @property
    def share(self) -> float:
        return self.not_monotone / self.points if self.points else 0.0


def shortfalls(values: FloatArray, axis: int, reading: Reading = "extreme") -> FloatArray:
    """As `values`: how far each point lies below those before it along `axis`; 0 where it does
    not, NaN where `values` is (no such point). Gaps are stepped over."""
    ordered = np.moveaxis(np.asarray(values, float), axis, -1)
    is_point = ~np.isnan(ordered)
    places = np.where(is_point, np.arange(ordered.shape[-1]), -1)
    before = np.full(places.shape, -1)
    before[..., 1:] = np.maximum.accumulate(places, axis=-1)[..., :-1]
    reference = np.fmax.accumulate(ordered, axis=-1) if reading == "extreme" else ordered
    earlier = np.take_along_axis(reference, np.maximum(before, 0), axis=-1)
    below = np.where(before >= 0, np.maximum(earlier - ordered, 0.0), 0.0)
    return np.moveaxis(np.where(is_point, below, np.nan), -1, axis)


def count(values: FloatArray, axis: int, tolerance: float,
          reading: Reading = "extreme") -> Count:
    """Points of `values`, NaN where there is none, that are not monotone along `axis` within
    `tolerance` (in the unit of `values`)."""
    below = shortfalls(values, axis, reading)
    return Count(not_monotone=int((below > tolerance).sum()), points=int((~np.isnan(below)).sum()))


def worst(values: FloatArray, axis: int) -> float:
    """The largest shortfall below the largest value before, as a share of that value."""
    below = shortfalls(values, axis)
    if not np.isfinite(below).any():
        return 0.0
    before = below + values
    return float(np.nanmax(np.where(before > 0, below / np.where(before > 0, before, 1.0), 0.0)))
