"""Sampling error of a latency limit on a share of the job's requests.

The job's N requests are a sample of the planned length distribution. If a share q of them must keep
the limit, the k = ceil(q N) quickest must. The k-th of N independent values lies at the quantile U
~ Beta(k, N + 1 - k) of their distribution (order statistics), not at q. Example: with 32 requests
and q = 0.99 it is the slowest, and with 95 % confidence its quantile is below 0.998."""

import math
from collections.abc import Callable
from functools import cache

import numpy as np

from xgpt.core.lengths import FloatArray, IntArray, Lengths, synthetic_lengths
from xgpt.core.problem import Problem

LEVELS = 40  # chosen: equally likely cases that stand for a distribution
_MOST = 1 - 1e-9


def quantile_levels(problem: Problem) -> FloatArray:
    """[levels] rising, equally likely quantiles of the planned lengths at which the deciding
    request of the job may lie. One level if the job's outputs are known; none if the limit is on a
    request of one length, or the job has no end."""
    constraint, count = problem.constraint, problem.num_queries
    if constraint.kind != "queries" or math.isinf(constraint.latency_s) or not count:
        return np.empty(0)
    outputs = _known_outputs(problem)
    if outputs is not None:
        return np.array([_own_level(problem.lengths.outputs, outputs, constraint.quantile)])
    return _beta_levels(constraint.quantile, count * problem.copies)


def log_ratios(levels: FloatArray, quantile: float,
                  seconds: Callable[[float], float]) -> FloatArray:
    """[levels] log(latency at the level / latency at `quantile`). `seconds(level)` returns the
    latency at a quantile of the output lengths."""
    if not len(levels):
        return np.zeros(1)
    nodes = np.unique(levels[[0, len(levels) // 2, -1]])  # the others are interpolated
    expected_s = seconds(quantile)
    logarithms = [math.log(seconds(float(level)) / expected_s) for level in nodes]
    # the lengths of a tail grow with -log(1 - quantile)
    return np.asarray(np.interp(-np.log1p(-levels), -np.log1p(-nodes), logarithms))


@cache
def _beta_levels(quantile: float, count: int) -> FloatArray:
    from scipy.special import betaincinv  # slow to import

    kept = _kept(quantile, count)
    chances = (np.arange(LEVELS) + 0.5) / LEVELS
    return np.asarray(np.minimum(betaincinv(kept, count + 1 - kept, chances), _MOST))


def _kept(quantile: float, count: int) -> int:
    """Number of requests, of `count`, that must keep the limit."""
    return max(math.ceil(quantile * count - 1e-9), 1)


def _known_outputs(problem: Problem) -> IntArray | None:
    """[requests] output tokens of the job's own requests, over all replicas; None if unknown."""
    count = problem.num_queries
    if problem.is_synthetic and count is not None:
        return synthetic_lengths(problem.lengths, count * problem.copies, problem.seed)[1]
    known = problem.queries
    if known is None or known.outputs is None or not known.most_outputs.any():
        return None
    return known.outputs[known.most_outputs > 0]  # no schedule can answer the others


def _own_level(planned: Lengths, outputs: IntArray, quantile: float) -> float:
    """Quantile, in the planned distribution, of the longest output that must keep the limit. Among
    outputs of equal length its rank decides."""
    count = len(outputs)
    kept = _kept(quantile, count)
    own = int(np.partition(outputs, kept - 1)[kept - 1])
    below, same = int((outputs < own).sum()), int((outputs == own).sum())
    shorter = float(planned.pmf[:own - 1].sum())
    chance = float(planned.pmf[own - 1]) if own <= planned.max else 0.0
    return min(max(shorter + chance * (kept - below) / (same + 1), 1e-9), _MOST)
