"""Measured points as a function of (x, y): piecewise linear, vectorised, monotone where wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xprofiler.completion import LEAST_S, BoolArray, continued, fill, growing, within_neighbours

FloatArray = NDArray[np.float64]

REFUSED_BEYOND = 4.0  # times the largest measured size: nothing is said about more than that


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What physics says of a table.

    `grows_with_y`: more of y never takes less time, and beyond the last y the line goes on; else
    the values are shares that settle, and stay as they are beyond it. `through_zero`: no work
    takes no time (an operator), or there is a fixed cost (a message). `is_power`: between two x,
    and beyond the last, time is a power of x (attention over a whole input, between linear and
    quadratic: a chord would lie far above it), not a line. `grows_with_x`: more of x never takes
    less time (attention over a whole input may: a longer one takes other tiles).
    """

    grows_with_x: bool = True
    grows_with_y: bool = True
    through_zero: bool = True
    is_power: bool = False


class Grid:
    """Seconds over (x) or (x, y): exact at the points, except where one lies below another of less
    work: both then get their mean, for the search rests on times that grow with work. Between 0 and
    the first x a time falls to 0 with x, as the expected time of a step that only sometimes
    happens does. Beyond the last point it goes on as it rose since half of it; an operator's beyond
    `REFUSED_BEYOND` times it is infinite (a message's goes on)."""

    def __init__(self, x: ArrayLike, y: ArrayLike, seconds: ArrayLike,
                 shape: Shape | None = None) -> None:
        """`x`, `y`, `seconds` [points]; cells of the grid that were not measured are filled
        (xprofiler.completion). Raises ValueError where there is no point, two at one place, or a
        power of no size."""
        self._shape = shape = Shape() if shape is None else shape
        xs, column = np.unique(np.asarray(x, float), return_inverse=True)
        ys, row = np.unique(np.asarray(y, float), return_inverse=True)
        values = np.full((len(ys), len(xs)), np.nan)
        values[row, column] = np.asarray(seconds, float)
        known = np.isfinite(values)
        if not len(xs) or known.sum() != np.size(seconds):
            raise ValueError("a table needs points, one at each place, of finite times")
        if shape.is_power and xs[0] <= 0:
            raise ValueError("a power of x needs x above 0")
        filled = fill(xs, ys, values)
        if shape.grows_with_x and shape.grows_with_y:
            filled = within_neighbours(filled, known)
        grown = growing(filled, along_x=shape.grows_with_x, along_y=shape.grows_with_y)
        self.xs, self.ys, self.values = xs, ys, grown
        self.moved = int((~np.isclose(grown, filled, rtol=1e-9))[row, column].sum())
        self._extend(grown)

    def _extend(self, grown: FloatArray) -> None:
        """The table that is looked up: with a column at REFUSED_BEYOND times the last x, a row at
        as much of the last y, and a column of no work."""
        shape, xs, ys = self._shape, self.xs, self.ys
        table = continued(xs, grown, REFUSED_BEYOND, axis=1, is_power=shape.is_power,
                          starts_at_zero=shape.through_zero)
        self._xs, self._ys = np.append(xs, REFUSED_BEYOND * xs[-1]), ys
        if len(ys) > 1 and shape.grows_with_y:
            table = continued(ys, table, REFUSED_BEYOND, axis=0, is_power=False,
                              starts_at_zero=False)
            self._ys = np.append(ys, REFUSED_BEYOND * ys[-1])
        table[:, -1:] = growing(table[:, -1:], along_x=False, along_y=shape.grows_with_y)
        table[-1:] = growing(table[-1:], along_x=shape.grows_with_x, along_y=False)
        if shape.through_zero and xs[0] > 0 and not shape.is_power:
            self._xs, table = np.append(0.0, self._xs), np.pad(table, ((0, 0), (1, 0)))
        self._table = table
        self._at = np.log(self._xs) if shape.is_power else self._xs  # what is linear between them

    def __call__(self, x: ArrayLike, y: ArrayLike = 0.0) -> FloatArray:
        """Seconds at (x, y), broadcast."""
        x, y = np.asarray(x, float), np.asarray(y, float)
        at = np.log(np.maximum(x, self.xs[0])) if self._shape.is_power else x
        if not self._shape.through_zero:
            at = np.maximum(at, self._xs[0])  # a message smaller than the smallest costs as much
        column, share_x = _locate(at, self._at)
        if len(self.ys) == 1:
            seconds = self._between(0, column, share_x)
        else:
            # below the first y as there; shares stay beyond the last as they are there
            row, share_y = _locate(np.clip(y, self._ys[0], self._ys[-1]), self._ys)
            low = self._between(row, column, share_x)
            seconds = low + share_y * (self._between(row + 1, column, share_x) - low)
        if self._shape.is_power:
            seconds = seconds * np.minimum(x / self.xs[0], 1.0)
        if self._shape.through_zero:
            seconds = np.where(self._is_refused(x, y), np.inf, seconds)
        shape = np.broadcast_shapes(x.shape, y.shape)
        result: FloatArray = (seconds if seconds.shape == shape
                              else np.broadcast_to(seconds, shape))
        return result

    def _is_refused(self, x: FloatArray, y: FloatArray) -> BoolArray:
        refused = x > REFUSED_BEYOND * self.xs[-1]
        if self._shape.grows_with_y and len(self.ys) > 1:
            refused = refused | ((y > REFUSED_BEYOND * self.ys[-1]) & (x > 0))
        return np.asarray(refused)

    def _between(self, row: NDArray[np.intp] | int, column: NDArray[np.intp],
                 share: FloatArray) -> FloatArray:
        first, second = self._table[row, column], self._table[row, column + 1]
        if self._shape.is_power:
            return np.asarray(first * (second / np.maximum(first, LEAST_S)) ** share)
        return np.asarray(first + share * (second - first))


def interpolation_errors(x: Sequence[float], seconds: Sequence[float], *,
                         is_power: bool = False) -> FloatArray:
    """[points] how far each point lies from the line (`is_power`: the power of x) between its
    neighbours, relative; 0 at the ends. A quarter of it estimates the error in the middle of an
    interval beside the point."""
    xs, values = np.asarray(x, float), np.maximum(np.asarray(seconds, float), LEAST_S)
    errors = np.zeros(len(xs))
    if len(xs) > 2:
        ends = (np.log(xs), np.log(values)) if is_power else (xs, values)
        share = (ends[0][1:-1] - ends[0][:-2]) / (ends[0][2:] - ends[0][:-2])
        line = ends[1][:-2] + share * (ends[1][2:] - ends[1][:-2])
        errors[1:-1] = np.abs((np.exp(line) if is_power else line) / values[1:-1] - 1)
    return errors


def _locate(at: FloatArray, grid: FloatArray) -> tuple[NDArray[np.intp], FloatArray]:
    """(index of the grid point at or before, share of the way to the next; beyond 1 after it)."""
    index = np.clip(np.searchsorted(grid, at, side="right") - 1, 0, len(grid) - 2)
    start = grid[index]
    return index, (at - start) / (grid[index + 1] - start)
