"""A table of measured times made whole: gaps filled, noise smoothed, continued beyond its end.

All functions work on `values` [y, x], seconds; NaN stands for a cell that was not measured."""

from collections.abc import Sequence

import numpy as np

from xgpt.core.lengths import BoolArray, FloatArray

LEAST_S = 1e-12  # what takes less counts as this, where a logarithm or a ratio is taken
_LEAST_POWER, _MOST_POWER = 1.0, 2.0  # of the length, that attention over an input takes in time


def fill(xs: FloatArray, ys: FloatArray, values: FloatArray) -> FloatArray:
    """Cells that were not measured. Rows known from the first to the last x follow the fullest of
    them, in the ratio that the measured cells show. What those rows say of another y, by lines
    between them, is what the other rows follow, in the same way."""
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
    """Filled cells kept between the measured ones of less and of more work: a guess must not move
    what was measured. For tables whose times grow along both axes."""
    below = np.where(known, filled, -np.inf)
    above = np.where(known, filled, np.inf)
    for axis in (0, 1):
        below = np.maximum.accumulate(below, axis=axis)
        above = np.flip(np.minimum.accumulate(np.flip(above, axis), axis=axis), axis)
    return np.where(known, filled, np.clip(filled, below, np.maximum(above, below)))


def growing(values: FloatArray, *, along_x: bool, along_y: bool) -> FloatArray:
    """`values`, never falling along these axes: where they do, both neighbours get their mean
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
    """`values` with one more row or column, at `factor` times the last of `sizes`. The slope is
    that from half the last size on: two points close together say nothing of what lies far off.
    `is_power`: a power of the size, between linear and quadratic, instead of a line."""
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
    """The nearest values that never fall: whatever falls behind its neighbour is pooled with it.
    (scipy has the same, in a module that takes longer to import than a profile to read.)"""
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
    """`measured` [x], with its gaps filled from `guide` in the ratio of the two, which changes with
    the magnitude of x."""
    known, size = np.isfinite(measured), np.log1p(xs)
    ratio = measured[known] / np.maximum(guide[known], LEAST_S)
    return np.where(known, measured, guide * np.interp(size, size[known], ratio))
