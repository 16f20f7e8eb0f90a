"""Convex functions below the step times of a plan. By Jensen's inequality they bound the mean time
of any mix of steps from below.

They also hold for times that are not monotone. They lie below the largest function that rises with
the size while its ratio to the size falls."""

from __future__ import annotations

from functools import cache, cached_property, lru_cache

import numpy as np

from xgpt.core.lengths import FloatArray
from xsimulator.rough.ranges import MOST_QUERIES
from xsimulator.stage_times import StageKinds

AN_OCTAVE = 32  # chosen: sizes of the grid in an octave
MOST_ROWS = float(MOST_QUERIES)  # largest size of the grid; the smallest is its inverse
RATIO, HALVINGS = 1.01, 12  # chosen: of sizes for which bounds are computed; of bisection
ROWS: FloatArray = RATIO ** np.arange(np.log(MOST_ROWS) / np.log(RATIO))


class ConvexSteps:
    """Convex functions below the times of one plan's steps, one for each kind of stage."""

    def __init__(self, kinds: StageKinds) -> None:
        """kinds: stages with lower bounds on their times (xsimulator.stage_times.least_times)."""
        self._times, self.last = kinds.times, kinds.kind_of[-1]
        self.rows = [_below(seconds) for seconds in self._times.encode_rows_s(_sizes()).T]
        self.head = _below(self._times.ends_s(_sizes()))
        self.degrees = [stage.tp_degree for stage in self._times.stages]
        self.number = np.bincount(kinds.kind_of).tolist()  # stages of each kind

    @cached_property
    def decode_rows(self) -> list[ConvexTimes]:
        """[kinds] functions of the rows of steps that only decode, with the output head."""
        seconds = self._times.decode_rows_s(_sizes())
        seconds[..., self.last] += self._times.first_tokens_s(_sizes())
        return [_below(own) for own in seconds.T]


@cache
def _sizes() -> FloatArray:
    octaves = 2.0 ** np.arange(0, np.ceil(np.log2(MOST_ROWS)))
    return np.append(1 / MOST_ROWS, np.outer(octaves, 1 + np.arange(AN_OCTAVE) / AN_OCTAVE).ravel())


def _below(seconds: FloatArray) -> ConvexTimes:
    """The convex function below `seconds`, which are given for the grid of sizes."""
    sizes = _sizes()
    rising = np.minimum.accumulate(seconds[::-1])[::-1]
    falling = sizes * np.minimum.accumulate(seconds / sizes)
    return _of_these(np.minimum(rising, falling).tobytes())


@lru_cache(maxsize=256)
def _of_these(seconds: bytes) -> ConvexTimes:
    """The convex function for these seconds, kept: many plans have stages of equal times."""
    return ConvexTimes(_sizes(), np.frombuffer(seconds))


class ConvexTimes:
    """A convex function of the step size: the maximum of tangents to step times at a few slopes."""

    def __init__(self, sizes: FloatArray, seconds: FloatArray) -> None:
        """seconds: of `sizes`; they rise, seconds / size falls, unknown ones are infinite."""
        is_timed = np.isfinite(seconds)
        self._sizes, self._seconds = sizes[is_timed], seconds[is_timed]
        if not len(self._sizes):
            self._sizes, self._seconds = np.ones(1), np.zeros(1)
        nodes = np.arange(0, len(self._sizes), AN_OCTAVE // 2)
        of_nodes, at = self._seconds[nodes], self._sizes[nodes]
        slopes = (of_nodes[1:] - of_nodes[:-1]) / (at[1:] - at[:-1])
        slopes = np.unique(np.append(slopes, 0.0))
        offsets = (self._seconds - slopes[:, None] * self._sizes).min(axis=1)
        # tangents with a negative offset come from dips, and exceed the times beyond the grid
        is_below = offsets >= 0
        # (slopes, offsets, sizes from which on each line after the first is the highest)
        self.lines = highest_lines(slopes[is_below], offsets[is_below])

    def mean_s(self, sizes: FloatArray) -> FloatArray:
        """Lower bound on the mean seconds of steps whose mean size is `sizes`."""
        slopes, offsets, begins = self.lines
        place = np.searchsorted(begins, sizes, side="right")
        return np.asarray(offsets[place] + slopes[place] * sizes)

    def whole_s(self, size: FloatArray, pieces: FloatArray) -> FloatArray:
        """Lower bound on the seconds of `size` in total, in at least so many pieces."""
        return np.asarray(pieces * self.mean_s(size / pieces))


def highest_lines(slopes: FloatArray,
                  offsets: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Upper envelope of lines with rising slopes over sizes from 0 on, as (slopes, offsets,
    begins). begins: [lines - 1] size from which on each line after the first is the highest."""
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
