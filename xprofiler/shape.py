"""A table of few points, with the places between them filled in the shape that the roofline gives.

An operator takes a fixed time, one for the bytes that it moves and one for its operations
(xprofiler.work). What each of the three costs here is fitted to the points that were measured, none
below zero, by their relative errors. The points themselves stay what was measured: between them the
fitted curve follows their ratios to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import combinations
from typing import NamedTuple

import numpy as np

from xgpt.core.lengths import FloatArray
from xgpt.core.model import ModelSpec
from xprofiler.completion import LEAST_S, within_neighbours
from xprofiler.points import Kind, Point
from xprofiler.timing import Operator
from xprofiler.work import work

# What each kind of point tells of, and where (xprofiler.measure.recorder), that is worth filling:
# of the other tables a step has little.
SHAPED = frozenset({
    Operator.LAYER_REST, Operator.DECODE_REST, Operator.DECODE_ATTENTION,
    Operator.ENCODE_ATTENTION, Operator.CROSS_ATTENTION, Operator.ENCODER_REST, Operator.CROSS_KV,
    Operator.HEAD})
_CACHED = frozenset({Operator.DECODE_ATTENTION, Operator.CROSS_ATTENTION})
_LITTLE_WEIGHT = 0.03  # of usual costs against a point
_MOST_FOLLOWED = 1.5  # a curve follows the points' ratios to it so far, either way

Curve = Callable[[FloatArray, FloatArray], FloatArray]


class Measured(NamedTuple):
    """Points of one table: `x`, `y`, `seconds` [points]."""

    x: FloatArray
    y: FloatArray
    seconds: FloatArray


def places(points: Iterable[Point], operator: Operator) -> set[tuple[float, float]]:
    """Where these points tell of the operator."""
    found: set[tuple[float, float]] = set()
    for kind, x, y in points:
        is_decode, is_encode = kind in (Kind.DECODE, Kind.CROSS), kind in (
            Kind.ENCODE, Kind.ENCODER)
        match operator:
            case Operator.LAYER_REST | Operator.HEAD | Operator.DECODE_REST:
                if is_decode or (kind is Kind.REST and operator is Operator.LAYER_REST):
                    found.add((x, 0))
            case Operator.DECODE_ATTENTION | Operator.CROSS_ATTENTION:
                if kind is Kind.CROSS or (is_decode and operator is Operator.DECODE_ATTENTION):
                    found.add((x, y))
            case Operator.ENCODE_ATTENTION:
                if is_encode:
                    found.add((x, y))
            case Operator.ENCODER_REST | Operator.CROSS_KV:
                if kind is Kind.ENCODER:
                    found.add((x * y, 0))
    return found


def features(model: ModelSpec, operator: Operator, degree: int, x: FloatArray,
             y: FloatArray) -> FloatArray:
    """[sizes, features] of what the operator does: once, (over a cache) for each query, elements
    that it moves, operations."""
    least = work(model, operator, x, y, tp_degree=degree, item_bytes=1)
    # of a query encoded with others the fixed time is a share
    once = 1 / np.maximum(y, 1.0) if operator is Operator.ENCODE_ATTENTION else np.ones_like(x)
    # attention over a cache also has something to do for each query, however short
    each = [x] if operator in _CACHED else []
    return np.stack([once, *each, least.num_bytes, least.flops], axis=-1)


def costs_of(model: ModelSpec, operator: Operator, degree: int, table: Measured,
             usual: FloatArray | None = None) -> FloatArray:
    """[features] seconds that each feature costs, by a table of at least one point. Of one model
    what is done once and what its weights' bytes take cannot be told apart: where that matters they
    are as near to the `usual` costs as the points leave room for."""
    scaled = features(model, operator, degree, table.x, table.y) / np.maximum(
        table.seconds, LEAST_S)[:, None]
    if usual is None:
        return _least_squares(scaled, np.ones(len(scaled)))
    weights = np.r_[np.ones(len(scaled)), np.full(len(usual), _LITTLE_WEIGHT)]
    return _least_squares(np.vstack([scaled, _LITTLE_WEIGHT * np.diag(1 / usual)]), weights)


def fitted(model: ModelSpec, operator: Operator, degree: int, table: Measured) -> Curve:
    """The curve of the roofline's shape through a table of at least one point."""
    costs = costs_of(model, operator, degree, table)
    return lambda x, y: np.maximum(features(model, operator, degree, x, y) @ costs, LEAST_S)


def filled(model: ModelSpec, operator: Operator, degree: int, table: Measured,
           wanted: Iterable[tuple[float, float]]) -> Measured:
    """The table, and after its points the places wanted that it lacks."""
    known = set(zip(table.x.tolist(), table.y.tolist(), strict=True))
    lacking = sorted(place for place in wanted if place not in known)
    if not lacking:
        return table
    curve = fitted(model, operator, degree, table)
    x, y = np.array(lacking, float).T
    ratios = np.log(np.maximum(table.seconds, LEAST_S) / curve(table.x, table.y))
    most = np.log(_MOST_FOLLOWED)
    followed = np.exp(np.clip(_nearby(table, ratios, x, y), -most, most))
    every = Measured(np.append(table.x, x), np.append(table.y, y),
                     np.append(table.seconds, curve(x, y) * followed))
    return every if operator is Operator.ENCODE_ATTENTION else _in_order(every, len(table.x))


def _nearby(table: Measured, values: FloatArray, x: FloatArray, y: FloatArray) -> FloatArray:
    """What the table's points have, at other places: the mean by the nearness of their
    magnitudes."""
    apart = (np.log1p(x)[:, None] - np.log1p(table.x)) ** 2 + (
        np.log1p(y)[:, None] - np.log1p(table.y)) ** 2
    weights = 1 / np.maximum(apart, 1e-9)
    return np.asarray((weights * values).sum(axis=1) / weights.sum(axis=1))


def _in_order(every: Measured, known: int) -> Measured:
    """What was filled, after the first `known` points, between measured ones of less and of more
    work."""
    xs, column = np.unique(every.x, return_inverse=True)
    ys, row = np.unique(every.y, return_inverse=True)
    values, is_known = np.full((len(ys), len(xs)), np.nan), np.zeros((len(ys), len(xs)), bool)
    values[row, column] = every.seconds
    is_known[row[:known], column[:known]] = True
    # a cell that nobody wanted is in nobody's way
    kept = within_neighbours(np.where(np.isnan(values), np.inf, values), is_known)
    return every._replace(seconds=kept[row, column])


def _least_squares(scaled: FloatArray, wanted: FloatArray) -> FloatArray:
    """[features] costs, none below 0, that bring `scaled` [points, features] nearest to what is
    `wanted` [points]. Of few points as few features are taken as tell them."""
    count = scaled.shape[1]
    best, least = np.zeros(count), np.inf
    for size in range(1, min(count, len(scaled)) + 1):
        for taken in combinations(range(count), size):
            own = scaled[:, taken]
            scale = np.maximum(np.abs(own).max(axis=0), LEAST_S)
            costs = np.linalg.lstsq(own / scale, wanted, rcond=None)[0] / scale
            error = float(np.sum((own @ costs - wanted) ** 2))
            if (costs >= 0).all() and error < least - 1e-12:
                best, least = np.zeros(count), error
                best[list(taken)] = costs
    return best
