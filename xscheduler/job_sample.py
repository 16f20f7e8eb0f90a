"""A job's own queries are a sample of the lengths that it is planned for, and a bound on a share of
them is one on that sample. Of N queries, independent, a share q of which is to keep a bound, the
k = ceil(q N) quickest have to: the k-th of N values lies at the level U ~ Beta(k, N + 1 - k) of
their distribution (order statistics of a uniform one), not at q. Of 32 queries, 99 % of which are
to keep it, that is the slowest: with 95 % confidence the level is 0.998."""

import math
from collections.abc import Callable
from functools import cache

import numpy as np

from xgpt.core.lengths import FloatArray, IntArray, Lengths, synthetic_lengths
from xgpt.core.problem import Problem

LEVELS = 40  # chosen: equally likely ones
_MOST = 1 - 1e-9
_ASKED = (0, 13, 26, 36, 39)  # chosen: of the levels: at which a latency is asked for


def levels_of(problem: Problem) -> FloatArray:
    """[levels] rising, equally likely: at which quantile of the lengths planned for the one of the
    problem's own queries may lie that its bound on latency is of. One, where their outputs are
    known; none where the bound is of one length, or the job has no end."""
    constraint, count = problem.constraint, problem.num_queries
    if constraint.kind != "queries" or math.isinf(constraint.latency_s) or not count:
        return np.empty(0)
    outputs = _known_outputs(problem)
    if outputs is not None:
        return np.array([_own_level(problem.lengths.outputs, outputs, constraint.quantile)])
    return _beta_levels(constraint.quantile, count * problem.copies)


def logarithms_at(levels: FloatArray, quantile: float,
                  seconds: Callable[[float], float]) -> FloatArray:
    """[levels] logarithm of what a latency is at each, divided by that at `quantile`. `seconds`: it
    at a level."""
    if not len(levels):
        return np.zeros(1)
    asked = np.unique(levels[[place for place in _ASKED if place < len(levels)]])
    expected_s = seconds(quantile)
    logarithms = [math.log(seconds(float(level)) / expected_s) for level in asked]
    # a tail's lengths rise with the logarithm of what is beyond them
    return np.asarray(np.interp(-np.log1p(-levels), -np.log1p(-asked), logarithms))


@cache
def _beta_levels(quantile: float, count: int) -> FloatArray:
    from scipy.special import betaincinv  # slow to import

    kept = _kept(quantile, count)
    chances = (np.arange(LEVELS) + 0.5) / LEVELS
    return np.asarray(np.minimum(betaincinv(kept, count + 1 - kept, chances), _MOST))


def _kept(quantile: float, count: int) -> int:
    """So many of them have to keep the bound."""
    return max(math.ceil(quantile * count - 1e-9), 1)


def _known_outputs(problem: Problem) -> IntArray | None:
    """Of the problem's own queries, those of the other copies among them."""
    count = problem.num_queries
    if problem.is_synthetic and count is not None:
        return synthetic_lengths(problem.lengths, count * problem.copies, problem.seed)[1]
    known = problem.queries
    if known is None or known.outputs is None or not known.most_outputs.any():
        return None
    return known.outputs[known.most_outputs > 0]  # the others are answered by no schedule


def _own_level(planned: Lengths, outputs: IntArray, quantile: float) -> float:
    """Where the longest of those that have to keep the bound lies in the planned distribution;
    among as many of the same length, as far as it is among them."""
    count = len(outputs)
    kept = _kept(quantile, count)
    own = int(np.partition(outputs, kept - 1)[kept - 1])
    below, same = int((outputs < own).sum()), int((outputs == own).sum())
    shorter = float(planned.pmf[:own - 1].sum())
    chance = float(planned.pmf[own - 1]) if own <= planned.max else 0.0
    return min(max(shorter + chance * (kept - below) / (same + 1), 1e-9), _MOST)
