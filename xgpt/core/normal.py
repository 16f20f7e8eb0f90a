"""Normal distributions: chances, quantiles of mixtures, and the parent of a truncated one.

Without scipy: to import what would be used of it takes a third of a second, which is a good part of
what a short job is planned in."""

import math
from collections.abc import Callable
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

Vector = NDArray[np.float64]

_ROOT_2, _ROOT_2_PI = math.sqrt(2), math.sqrt(2 * math.pi)
_FAR = -30.0  # below it the tail is a series; above it erfc is far from underflowing
_TERMS = 10  # of the series: the last is less than 1e-18 of the sum at _FAR
_REACH = 9  # standard deviations: what a normal has beyond them is lost in a float's rounding
_NEAR = 2e-12  # a quantile is found this exactly
_MET = 1e-12  # parts of the maximum by which a parent's moments may miss
_WIDEST = 1 / math.sqrt(12) + 1e-5  # the uniform's standard deviation, in such parts, and a little
_INVERSE = NormalDist().inv_cdf
_STEP, _MOST_STEPS, _MOST_HALVINGS = 1e-6, 60, 20  # of differences; of Newton's method
# of a parent: its location in parts of the maximum, and the logarithm of its scale in such parts
_LOWER, _UPPER = np.array([-30.0, math.log(1e-6)]), np.array([31.0, math.log(30.0)])


def log_ndtr(x: ArrayLike) -> Vector:
    """Logarithm of the chance that a standard normal is at most x, exact in both tails."""
    values = np.asarray(x, float)
    return np.array([_log_ndtr(value) for value in values.ravel().tolist()]).reshape(values.shape)


def ndtri(chance: ArrayLike) -> Vector:
    """What a standard normal stays below with this chance, above 0 and below 1."""
    p = np.asarray(chance, float)
    return np.array([*map(_INVERSE, p.ravel().tolist())], float).reshape(p.shape)


def mixture_quantile(means: Vector, spread: float, chance: float) -> float:
    """What a normal of standard deviation `spread` around one of these means, each as likely, stays
    below with this chance, which is less than the share of means that are finite."""
    finite = means[np.isfinite(means)]
    assert spread > 0 and 0 < chance < len(finite) / len(means), f"{spread = } {chance = }"
    low, high = float(finite.min()) - _REACH * spread, float(finite.max()) + _REACH * spread
    x, before = (low + high) / 2, math.inf
    while abs(x - before) > _NEAR:  # Newton's method, kept between a bound below and one above
        z: list[float] = ((x - means) / spread).tolist()
        missed = chance - sum([0.5 * math.erfc(-value / _ROOT_2) for value in z]) / len(z)
        low, high = (x, high) if missed > 0 else (low, x)
        density = sum([math.exp(-0.5 * value * value) for value in z]) / (
            len(z) * spread * _ROOT_2_PI)
        tried = x + missed / density if density > 0 else math.inf
        before, x = x, tried if low < tried < high else (low + high) / 2
    return x


def truncated_parent(mean: float, std: float, maximum: int) -> tuple[float, float] | None:
    """(location, scale) of the normal whose truncation to (0, maximum] has this mean and std; None
    where none has."""
    # The density of such a normal has a concave logarithm: on (0, maximum] it spreads no further
    # than the uniform does, and there is nothing to look for.
    if std > _WIDEST * maximum:
        return None

    def missed(x: Vector) -> Vector:
        got_mean, got_std = _truncated_moments(float(x[0]) * maximum,
                                               float(np.exp(x[1])) * maximum, maximum)
        return np.array([(got_mean - mean) / maximum, (got_std - std) / maximum])

    with np.errstate(all="ignore"):
        x = _by_newton(missed, np.clip([mean / maximum, np.log(std / maximum)], _LOWER, _UPPER))
    return None if x is None else (float(x[0] * maximum), float(np.exp(x[1]) * maximum))


def _by_newton(missed: Callable[[Vector], Vector], x: Vector) -> Vector | None:
    """Where `missed` is nothing; None where Newton's method does not come there from x."""
    error = missed(x)
    for _ in range(_MOST_STEPS):
        (a, c), (b, d) = [(missed(x + by) - missed(x - by)) / (2 * _STEP)
                          for by in np.eye(2) * _STEP]
        step = np.array([b * error[1] - d * error[0], c * error[0] - a * error[1]]) / (
            a * d - b * c)
        for share in 2.0 ** -np.arange(_MOST_HALVINGS):
            tried = x + share * step
            if not ((tried >= _LOWER) & (tried <= _UPPER)).all():
                continue
            error_there = missed(tried)
            if np.abs(error_there).max() < np.abs(error).max():
                break
        else:
            break
        x, error = tried, error_there
    return x if np.abs(error).max() < _MET else None


def _truncated_moments(location: float, scale: float, maximum: float) -> tuple[float, float]:
    """Mean and std of the normal(location, scale) truncated to (0, maximum]."""
    a, b = -location / scale, (maximum - location) / scale
    if a > 0:  # mirror, so that the log-space differences below stay in the accurate tail
        mean, std = _truncated_moments(maximum - location, scale, maximum)
        return maximum - mean, std
    log_a, log_b = _log_ndtr(a), _log_ndtr(b)
    log_mass = log_b + np.log1p(-np.exp(log_a - log_b))
    density_a = np.exp(-0.5 * a * a - log_mass) / _ROOT_2_PI
    density_b = np.exp(-0.5 * b * b - log_mass) / _ROOT_2_PI
    shift = density_a - density_b
    variance = 1 + a * density_a - b * density_b - shift**2
    return float(location + scale * shift), float(scale * np.sqrt(max(variance, 0.0)))


def _log_ndtr(x: float) -> float:
    if x > -1:
        return math.log1p(-0.5 * math.erfc(x / _ROOT_2))
    if x > _FAR:
        return math.log(0.5 * math.erfc(-x / _ROOT_2))
    square, term, total = x * x, 1.0, 1.0
    for k in range(1, _TERMS):
        term *= -(2 * k - 1) / square
        total += term
    return -0.5 * square - math.log(-x * _ROOT_2_PI) + math.log(total)
