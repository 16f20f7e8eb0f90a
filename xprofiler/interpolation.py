"""Interpolates measured points (x, y): piecewise linear, vectorised, monotone where wanted."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xgpt.core.lengths import BoolArray, FloatArray

IndexArray = NDArray[np.intp]

REFUSED_BEYOND = 4.0  # times the largest measured size: nothing is said about more than that
LEAST_S = 1e-12  # shorter times count as this where a logarithm or a ratio is taken
_LEAST_POWER, _MOST_POWER = 1.0, 2.0  # exponents of prefill attention's time in the input's length


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Known properties of a table's times.

    `grows_with_x`: more of x never takes less time. Prefill attention may: longer inputs take other
    tiles. `grows_with_y`: more of y never takes less time, and times rise beyond the last y; else
    they stay. `through_zero`: no work takes no time (operators); else there is a fixed cost
    (messages). `is_power`: time between two x and beyond the last is a power of x, not a line."""

    grows_with_x: bool = True
    grows_with_y: bool = True
    through_zero: bool = True
    is_power: bool = False


class Grid:
    """Seconds as a function of x, or of (x, y), exact at the measured points. Where a point lies
    below one of less work both get their mean, as the search needs times that grow with work.

    Between 0 and the first x times fall to 0 with x, like the expected time of a step that happens
    only sometimes. Beyond the last point they rise with the slope since half of it; an operator's
    beyond `REFUSED_BEYOND` times the last point are infinite."""

    def __init__(self, x: ArrayLike, y: ArrayLike, seconds: ArrayLike,
                 shape: Shape | None = None) -> None:
        """`x`, `y`, `seconds` [points]; `fill` fills the grid's other cells. Raises ValueError for
        no points, for two at one place, and for a power of x at x = 0."""
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
        self.xs, self.ys = xs, ys
        self.values = growing(filled, along_x=shape.grows_with_x, along_y=shape.grows_with_y)
        # the lookup table adds a column at REFUSED_BEYOND times the last x, a row at as many times
        # the last y, and a column of no work
        table = continued(xs, self.values, REFUSED_BEYOND, axis=1, is_power=shape.is_power,
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
        self._at = np.log(self._xs) if shape.is_power else self._xs  # the axis to be linear in
        widths, self._columns = np.diff(self._at), len(self._at) - 1
        rises = np.diff(np.log(np.maximum(table, LEAST_S)) if shape.is_power else table, axis=1)
        self._start = table[:, :-1].ravel()
        # none where the only point is at 0
        self._slope = (rises / np.where(widths > 0, widths, 1.0)).ravel()
        self._heights = np.repeat(np.diff(self._ys), self._columns)

    def __call__(self, x: ArrayLike, y: ArrayLike = 0.0) -> FloatArray:
        """Seconds at (x, y), broadcast against each other."""
        x, y = np.asarray(x, float), np.asarray(y, float)
        shape = x.shape if x.shape == y.shape else np.broadcast_shapes(x.shape, y.shape)
        x, y = _once(x), _once(y)
        at = np.log(np.maximum(x, self.xs[0])) if self._shape.is_power else x
        if not self._shape.through_zero:
            at = np.maximum(at, self._xs[0])  # a message smaller than the smallest costs as much
        cell, along_x = _located(self._at, at)
        if len(self._ys) == 1:
            seconds = self._in_row(cell, along_x)
        else:
            # below the first y as there; shares stay beyond the last as they are there
            row, along_y = _located(self._ys, np.clip(y, self._ys[0], self._ys[-1]))
            cell = cell + row * self._columns
            low, high = self._in_row(cell, along_x), self._in_row(cell + self._columns, along_x)
            seconds = low + along_y / self._heights.take(cell) * (high - low)
        if self._shape.is_power:
            seconds = seconds * np.minimum(x / self.xs[0], 1.0)
        if self._shape.through_zero and not self._is_within(x, y):
            seconds = np.where(self._is_refused(x, y), np.inf, seconds)
        result: FloatArray = np.asarray(seconds)
        return result if result.shape == shape else np.broadcast_to(result, shape)

    def _in_row(self, cell: IndexArray, along_x: FloatArray) -> FloatArray:
        """Seconds at the distance `along_x` from the first point of a table's cell."""
        rise = self._slope.take(cell)
        rise *= along_x
        if self._shape.is_power:
            return np.asarray(np.exp(rise) * self._start.take(cell))
        rise += self._start.take(cell)
        return rise

    def _is_within(self, x: FloatArray, y: FloatArray) -> bool:
        """Whether no size is refused: a quick test, which nearly always holds."""
        return bool(x.max(initial=0.0) <= REFUSED_BEYOND * self.xs[-1] and (
            len(self._ys) == 1 or y.max(initial=0.0) <= REFUSED_BEYOND * self.ys[-1]))

    def _is_refused(self, x: FloatArray, y: FloatArray) -> BoolArray:
        refused = x > REFUSED_BEYOND * self.xs[-1]
        if self._shape.grows_with_y and len(self._ys) > 1:
            refused = refused | ((y > REFUSED_BEYOND * self.ys[-1]) & (x > 0))
        return np.asarray(refused)


def _located(points: FloatArray, at: FloatArray) -> tuple[IndexArray, FloatArray]:
    """(index of the point at or before, distance from it) along ascending points; the index is at
    least 0 and at most the last but one."""
    index = points[1:-1].searchsorted(at, side="right")
    return index, at - points.take(index)


def interpolation_errors(x: Sequence[float], seconds: Sequence[float], *,
                         is_power: bool = False) -> FloatArray:
    """Relative distance of each point from the line (`is_power`: the power of x) between its
    neighbours, [points]; 0 at both ends. A quarter of it estimates the error in the middle of an
    interval beside the point."""
    xs, values = np.asarray(x, float), np.maximum(np.asarray(seconds, float), LEAST_S)
    errors = np.zeros(len(xs))
    if len(xs) > 2:
        ends = (np.log(xs), np.log(values)) if is_power else (xs, values)
        share = (ends[0][1:-1] - ends[0][:-2]) / (ends[0][2:] - ends[0][:-2])
        line = ends[1][:-2] + share * (ends[1][2:] - ends[1][:-2])
        errors[1:-1] = np.abs((np.exp(line) if is_power else line) / values[1:-1] - 1)
    return errors


def _once(values: FloatArray) -> FloatArray:
    """`values` with axes that were broadcast cut to length 1."""
    if 0 not in values.strides:
        return values
    return values[tuple(slice(0, 1) if step == 0 else slice(None) for step in values.strides)]


# Completing a table: gaps filled, noise smoothed, continued beyond its end. `values` [y, x] are
# seconds; NaN stands for a cell that was not measured.

def fill(xs: FloatArray, ys: FloatArray, values: FloatArray) -> FloatArray:
    """`values` [y, x] with its NaN cells filled. Rows measured at the first and the last x follow
    the fullest of them, in the ratio that measured cells show. Other rows follow, in the same way,
    an interpolation in y between those rows."""
    filled, known = values.copy(), np.isfinite(values)
    if known.all():
        return filled
    spanning = np.flatnonzero(known[:, 0] & known[:, -1])
    if not len(spanning):
        spanning = np.array([known.sum(axis=1).argmax()])
    fullest = spanning[known[spanning].sum(axis=1).argmax()]
    line, has = filled[fullest], known[fullest]
    line[~has] = np.interp(xs[~has], xs[has], line[has])
    for row in spanning[spanning != fullest]:
        filled[row] = _following(xs, values[row], filled[fullest])
    for row in set(range(len(ys))) - set(spanning.tolist()):
        between = np.array([np.interp(ys[row], ys[spanning], column)
                            for column in filled[spanning].T])
        filled[row] = _following(xs, values[row], between)
    return filled


def within_neighbours(filled: FloatArray, known: BoolArray) -> FloatArray:
    """`filled` [y, x] with each cell that is not `known` clipped between the known cells of less
    and of more work: a guess must not move a measurement. Times must grow along both axes."""
    below = np.where(known, filled, -np.inf)
    above = np.where(known, filled, np.inf)
    for axis in (0, 1):
        below = np.maximum.accumulate(below, axis=axis)
        above = np.flip(np.minimum.accumulate(np.flip(above, axis), axis=axis), axis)
    return np.where(known, filled, np.clip(filled, below, np.maximum(above, below)))


def growing(values: FloatArray, *, along_x: bool, along_y: bool) -> FloatArray:
    """`values` [y, x] made never to fall along the chosen axes: neighbours that do get their mean
    (isotonic regression of the logarithms)."""
    axes = [axis for axis, grows in ((1, along_x), (0, along_y)) if grows]
    grown = values
    for axis in axes:
        if (np.diff(grown, axis=axis) < 0).any():
            grown = np.apply_along_axis(_isotonic, axis, grown)
    for axis in axes:  # what the second pass may have undone of the first
        grown = np.maximum.accumulate(grown, axis=axis)
    return grown


def continued(sizes: FloatArray, values: FloatArray, factor: float, *, axis: int, is_power: bool,
              starts_at_zero: bool) -> FloatArray:
    """`values` with one more row or column, extrapolated to `factor` times the last of `sizes`.

    The slope is taken from half the last size on, as close points extrapolate badly. `is_power`: a
    power of the size between 1 and 2 instead of a line. `starts_at_zero`: with no point at or below
    half, times grow in proportion to the size; else they stay."""
    half = int(np.searchsorted(sizes, sizes[-1] / 2, side="right")) - 1
    if is_power and len(sizes) > 1:
        half = max(half, 0)  # a power is kept within its limits, however close the points
    last = values.take(-1, axis=axis)
    if half < 0 or half == len(sizes) - 1:
        # nothing at or below half: from no work at all, or, at a fixed cost, as it is
        beyond = last * (factor if starts_at_zero else 1.0)
    elif is_power:
        first = values.take(half, axis=axis)
        power = np.log(np.maximum(last, LEAST_S) / np.maximum(first, LEAST_S)) / np.log(
            sizes[-1] / sizes[half])
        beyond = last * factor ** np.clip(power, _LEAST_POWER, _MOST_POWER)
    else:
        first = values.take(half, axis=axis)
        slope = np.maximum(last - first, 0.0) / (sizes[-1] - sizes[half])
        beyond = last + slope * (factor - 1) * sizes[-1]
    return np.concatenate([values, np.expand_dims(beyond, axis)], axis=axis)


def _isotonic(line: FloatArray) -> FloatArray:
    if (np.diff(line) >= 0).all():
        return line
    fitted = _pooled(np.log(np.maximum(line, LEAST_S)).tolist())
    # a point that is in no one's way stays exactly what was measured
    return np.where(np.isclose(np.exp(fitted), line, rtol=1e-9), line, np.exp(fitted))


def _pooled(values: Sequence[float]) -> FloatArray:
    """The nearest values that never fall, by pooling neighbours that do. (scipy's version takes
    longer to import than a profile to read.)"""
    sums: list[float] = []
    counts: list[int] = []
    for value in values:
        total, count = value, 1
        while sums and sums[-1] * count > total * counts[-1]:
            total, count = total + sums.pop(), count + counts.pop()
        sums.append(total)
        counts.append(count)
    return np.repeat(np.array(sums) / np.array(counts), counts)


def _following(xs: FloatArray, measured: FloatArray, guide: FloatArray) -> FloatArray:
    """`measured` [x] with its gaps filled from `guide` [x] times the ratio of the two, which is
    interpolated along log(1 + x)."""
    known, size = np.isfinite(measured), np.log1p(xs)
    ratio = measured[known] / np.maximum(guide[known], LEAST_S)
    return np.where(known, measured, guide * np.interp(size, size[known], ratio))
