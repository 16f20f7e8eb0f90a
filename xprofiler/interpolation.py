"""Measured points as a function of (x, y): piecewise linear, vectorised, monotone where wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import isotonic_regression

FloatArray = NDArray[np.float64]

_LEAST_S = 1e-12  # what takes less counts as this, where a logarithm or a ratio is taken
REFUSED_BEYOND = 4.0  # times the largest measured size: nothing is said about more than that


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What physics says of a table.

    `grows_with_y`: more of y never takes less time, and beyond the last y the line goes on; else
    the values are shares that settle, and stay as they are beyond it. `through_zero`: no work
    takes no time (an operator), or there is a fixed cost (a message). `is_power`: between two x,
    and beyond the last, time is a power of x (attention over a whole input, between linear and
    quadratic: a chord would lie far above it), not a line.
    """

    grows_with_y: bool = True
    through_zero: bool = True
    is_power: bool = False


class Grid:
    """Seconds over (x) or (x, y): exact at the points, except where one lies below another of less
    work: both then get their mean (isotonic regression of the logarithms), for the search rests on
    times that grow with work. Between 0 and the first x a time falls to 0 with x, as the expected
    time of a step that only sometimes happens does. Beyond the last point the last slope goes on;
    beyond `REFUSED_BEYOND` times it, infinite."""

    def __init__(self, x: ArrayLike, y: ArrayLike, seconds: ArrayLike,
                 shape: Shape | None = None) -> None:
        """`x`, `y`, `seconds` [points]; cells of the grid that were not measured follow the
        fullest row. Raises ValueError where there is no point, or two at one place."""
        shape = Shape() if shape is None else shape
        self._shape = shape
        xs, column = np.unique(np.asarray(x, float), return_inverse=True)
        ys, row = np.unique(np.asarray(y, float), return_inverse=True)
        values = np.full((len(ys), len(xs)), np.nan)
        values[row, column] = np.asarray(seconds, float)
        if not len(xs) or np.isfinite(values).sum() != np.size(seconds):
            raise ValueError("a table needs points, one at each place, of finite times")
        filled = _fill(xs, values)
        grown = _growing(filled, is_along_y=shape.grows_with_y)
        self.xs, self.ys, self.values = xs, ys, grown
        self.moved = int((~np.isclose(grown, filled, rtol=1e-9))[row, column].sum())
        starts_later = shape.through_zero and xs[0] > 0 and not shape.is_power
        self._xs = np.concatenate([[0.0], xs]) if starts_later else xs
        self._table = np.pad(grown, ((0, 0), (1, 0))) if starts_later else grown

    def __call__(self, x: ArrayLike, y: ArrayLike = 0.0) -> FloatArray:
        """Seconds at (x, y), broadcast."""
        x, y = np.asarray(x, float), np.asarray(y, float)
        at_x, share_x = self._place(x)
        if len(self.ys) == 1:
            seconds = self._between(0, at_x, share_x)
        else:
            at_y, share_y = _locate(y, self.ys)
            share_y = np.maximum(share_y, 0.0)  # below the first y: as there
            if not self._shape.grows_with_y:
                share_y = np.minimum(share_y, 1.0)
            seconds = self._between(at_y, at_x, share_x)
            difference = self._between(at_y + 1, at_x, share_x) - seconds
            if self._shape.grows_with_y:
                difference = np.maximum(difference, 0.0)  # lines that cross beyond the last x
            seconds = seconds + share_y * difference
        if self._shape.is_power:
            seconds = seconds * np.minimum(x / self.xs[0], 1.0)
        refused = x > REFUSED_BEYOND * self.xs[-1]
        if self._shape.grows_with_y and len(self.ys) > 1:
            refused = refused | ((y > REFUSED_BEYOND * self.ys[-1]) & (x > 0))
        seconds = np.where(refused, np.inf, seconds)
        shape = np.broadcast_shapes(x.shape, y.shape)
        result: FloatArray = (seconds if seconds.shape == shape
                              else np.broadcast_to(seconds, shape))
        return result

    def _place(self, x: FloatArray) -> tuple[NDArray[np.intp], FloatArray]:
        if self._shape.is_power:
            at = np.maximum(x, self.xs[0])
            return _locate(np.log(at), np.log(self.xs))
        at_x, share = _locate(x, self._xs)
        # a message smaller than the smallest costs as much
        return at_x, share if self._shape.through_zero else np.maximum(share, 0.0)

    def _between(self, row: NDArray[np.intp] | int, column: NDArray[np.intp],
                 share: FloatArray) -> FloatArray:
        first = self._table[row, column]
        if self._table.shape[1] == 1:
            return np.asarray(first + 0 * share)
        second = self._table[row, column + 1]
        if self._shape.is_power:
            return np.asarray(first * (second / np.maximum(first, _LEAST_S)) ** share)
        return np.asarray(first + share * (second - first))


def interpolation_errors(x: Sequence[float], seconds: Sequence[float], *,
                         is_power: bool = False) -> FloatArray:
    """[points] how far each point lies from the line (`is_power`: the power of x) between its
    neighbours, relative; 0 at the ends. A quarter of it estimates the error in the middle of an
    interval beside the point."""
    xs, values = np.asarray(x, float), np.maximum(np.asarray(seconds, float), _LEAST_S)
    errors = np.zeros(len(xs))
    if len(xs) > 2:
        ends = (np.log(xs), np.log(values)) if is_power else (xs, values)
        share = (ends[0][1:-1] - ends[0][:-2]) / (ends[0][2:] - ends[0][:-2])
        line = ends[1][:-2] + share * (ends[1][2:] - ends[1][:-2])
        errors[1:-1] = np.abs((np.exp(line) if is_power else line) / values[1:-1] - 1)
    return errors


def _locate(at: FloatArray, grid: FloatArray) -> tuple[NDArray[np.intp], FloatArray]:
    """(index of the grid point at or before, share of the way to the next; beyond 1 after it)."""
    if len(grid) == 1:
        return np.zeros(at.shape, np.intp), np.zeros(at.shape)
    index = np.clip(np.searchsorted(grid, at, side="right") - 1, 0, len(grid) - 2)
    start = grid[index]
    return index, (at - start) / (grid[index + 1] - start)


def _growing(values: FloatArray, *, is_along_y: bool) -> FloatArray:
    """`values` [y, x], never falling with x (and y)."""
    axes = (1, 0) if is_along_y else (1,)
    grown = values
    for axis in axes:
        if (np.diff(grown, axis=axis) < 0).any():
            grown = np.apply_along_axis(_isotonic, axis, grown)
    for axis in axes:  # what the second pass may have undone of the first
        grown = np.maximum.accumulate(grown, axis=axis)
    return grown


def _isotonic(line: FloatArray) -> FloatArray:
    if (np.diff(line) >= 0).all():
        return line
    fitted = isotonic_regression(np.log(np.maximum(line, _LEAST_S))).x
    # a point that is in no one's way stays exactly what was measured
    return np.where(np.isclose(np.exp(fitted), line, rtol=1e-9), line, np.exp(fitted))


def _fill(xs: FloatArray, values: FloatArray) -> FloatArray:
    """Cells that were not measured, from the fullest row, in its ratio to each other row where both
    were."""
    filled, is_known = values.copy(), np.isfinite(values)
    reference = filled[int(is_known.sum(axis=1).argmax())]
    known = np.isfinite(reference)
    reference[~known] = np.interp(xs[~known], xs[known], reference[known])
    for row, measured in zip(filled, is_known, strict=True):
        if row is not reference and not measured.all():
            ratio = row[measured] / np.maximum(reference[measured], _LEAST_S)
            row[~measured] = reference[~measured] * np.interp(xs[~measured], xs[measured], ratio)
    return filled
