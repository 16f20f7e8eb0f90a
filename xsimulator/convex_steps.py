"""Convex functions below the times of a plan's steps: what steps of any mix of sizes take in the
mean, at least (by Jensen's inequality). They lie below the largest function that rises with the
size and falls in relation to it, so that they hold for times that are not monotone."""

from __future__ import annotations

from functools import cache, cached_property, lru_cache

import numpy as np

from xgpt.core.lengths import FloatArray
from xsimulator.stage_times import StageKinds

LEAST = 2.0**-10  # chosen: sizes below it count as this
AN_OCTAVE = 32  # chosen: sizes at which times are looked at
TOP = 2.0**20  # chosen: rows of a step at most


class ConvexSteps:
    """Rows and heads of one plan's steps, by kinds of stages."""

    def __init__(self, kinds: StageKinds) -> None:
        """`kinds`: with lower bounds of their times (xsimulator.stage_times.at_least)."""
        self._times, self.last = kinds.times, kinds.kind_of[-1]
        self.rows = [_below(seconds) for seconds in self._times.encode_rows_s(_sizes()).T]
        self.head = _below(self._times.ends_s(_sizes()))
        self.degrees = [stage.tp_degree for stage in self._times.stages]
        self.number = np.bincount(kinds.kind_of).tolist()  # stages of each kind

    @cached_property
    def decode_rows(self) -> list[ConvexTimes]:
        """[kinds] steps that decode alone, the head included."""
        seconds = self._times.decode_rows_s(_sizes())
        seconds[..., self.last] += self._times.first_tokens_s(_sizes())
        return [_below(own) for own in seconds.T]


@cache
def _sizes() -> FloatArray:
    """At which times are looked at."""
    octaves = 2.0 ** np.arange(0, np.ceil(np.log2(TOP)))
    return np.append(LEAST, np.outer(octaves, 1 + np.arange(AN_OCTAVE) / AN_OCTAVE).ravel())


def _below(seconds: FloatArray) -> ConvexTimes:
    """Of steps of these sizes."""
    sizes = _sizes()
    rising = np.minimum.accumulate(seconds[::-1])[::-1]
    falling = sizes * np.minimum.accumulate(seconds / sizes)
    return _of_these(np.minimum(rising, falling).tobytes())


@lru_cache(maxsize=256)
def _of_these(seconds: bytes) -> ConvexTimes:
    """Of steps of these sizes: many plans have stages that take as long."""
    return ConvexTimes(_sizes(), np.frombuffer(seconds))


class ConvexTimes:
    """Of one size: the tangents of its times at a few slopes."""

    def __init__(self, sizes: FloatArray, seconds: FloatArray) -> None:
        """`seconds` of steps of these sizes, which rise and fall in relation to the size; infinite
        where none are timed."""
        is_timed = np.isfinite(seconds)
        self._sizes, self._seconds = sizes[is_timed], seconds[is_timed]
        if not len(self._sizes):
            self._sizes, self._seconds = np.ones(1), np.zeros(1)
        nodes = np.arange(0, len(self._sizes), AN_OCTAVE // 2)
        of_nodes, at = self._seconds[nodes], self._sizes[nodes]
        slopes = (of_nodes[1:] - of_nodes[:-1]) / (at[1:] - at[:-1])
        slopes = np.unique(np.append(slopes, 0.0))
        offsets = (self._seconds - slopes[:, None] * self._sizes).min(axis=1)
        # the others are of dips: beyond the sizes looked at they would be above the times
        is_below = offsets >= 0
        # slopes and offsets of the tangents, and from which size on each but the first counts
        self.lines = highest_lines(slopes[is_below], offsets[is_below])

    def mean_s(self, sizes: FloatArray) -> FloatArray:
        """Seconds that steps of `sizes` in the mean take in the mean, at least."""
        slopes, offsets, begins = self.lines
        place = np.searchsorted(begins, sizes, side="right")
        return np.asarray(offsets[place] + slopes[place] * sizes)

    def whole_s(self, size: FloatArray, pieces: FloatArray) -> FloatArray:
        """Seconds that `size` takes in so many pieces or more, at least."""
        return np.asarray(pieces * self.mean_s(size / pieces))


def highest_lines(slopes: FloatArray,
                  offsets: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Of lines whose slopes rise: (slopes, offsets) of those that are the highest somewhere beyond
    0, and from which size on each but the first is."""
    kept: list[tuple[float, float]] = []
    begins: list[float] = []
    for slope, offset in zip(slopes.tolist(), offsets.tolist(), strict=True):
        while kept:
            crosses = (kept[-1][1] - offset) / (slope - kept[-1][0])
            if crosses > (begins[-1] if begins else 0.0):
                begins.append(crosses)
                break
            kept.pop()
            if begins:
                begins.pop()
        kept.append((slope, offset))
    of_kept = np.array(kept).T.copy()
    return of_kept[0], of_kept[1], np.array(begins)
