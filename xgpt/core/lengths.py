"""Distributions of input and output lengths, in tokens (paper section 6; docs/reproducing.md)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from statistics import NormalDist
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray: TypeAlias = NDArray[np.float64]
IntArray: TypeAlias = NDArray[np.int64]
BoolArray: TypeAlias = NDArray[np.bool_]
MAX_LENGTH_TOKENS = 2**20  # longest sequence a distribution is made for
_SPREAD = 1e-6  # chosen: a standard deviation of fewer tokens counts as 0


@lru_cache(maxsize=64)
def _up_to(most: int) -> IntArray:
    """1 to `most`, [most]; cached, for a search asks for it again and again."""
    values = np.arange(1, most + 1)
    values.flags.writeable = False
    return values


@dataclass(frozen=True, kw_only=True, eq=False)
class Lengths:
    """Distribution of lengths 1 to max, in tokens: `pmf[k - 1]` = P(length = k). Moments and
    quantiles are cached, for a search asks for them again and again."""

    pmf: FloatArray  # [max]
    note: str = ""  # its origin, for the report
    num_samples: int | None = None  # observed lengths that it rests on; None: given

    def __post_init__(self) -> None:
        total = float(self.pmf.sum())
        assert self.pmf.ndim == 1 and self.pmf.size > 0, f"{self.pmf.shape = }"
        assert bool((self.pmf >= 0).all()) and abs(total - 1) < 1e-9, f"{total = }"

    @property
    def max(self) -> int:
        return int(self.pmf.size)

    @property
    def support(self) -> IntArray:
        return _up_to(self.max)

    @cached_property
    def mean(self) -> float:
        return float(self.pmf @ self.support)

    @cached_property
    def std(self) -> float:
        return float(np.sqrt(max(float(self.pmf @ (self.support - self.mean) ** 2), 0.0)))

    @property
    def skewness(self) -> float:
        """Third standardised moment; 0 where all lengths are (almost) equal, as the third power of
        a tiny spread underflows."""
        std = self.std
        return float(self.pmf @ ((self.support - self.mean) / std) ** 3) if std > _SPREAD else 0.0

    @cached_property
    def cumulative(self) -> FloatArray:
        """P(length <= k), [max]."""
        return np.cumsum(self.pmf)

    def quantile(self, q: float) -> int:
        """Smallest length k with P(length <= k) >= q."""
        assert 0 < q <= 1, f"{q = }"
        return _quantile(self, q)

    def sample(self, count: int, rng: np.random.Generator) -> IntArray:
        return rng.choice(self.support, size=count, p=self.pmf)


@lru_cache(maxsize=256)
def _quantile(lengths: Lengths, q: float) -> int:
    return min(int(np.searchsorted(lengths.cumulative, q - 1e-12)) + 1, lengths.max)


def truncated_normal(mean: float, std: float, maximum: int) -> Lengths:
    """Lengths of a normal truncated to (0, maximum] whose mean and std, after truncation, are as
    given; discretised by P(k) = F(k) - F(k - 1).

    The paper's Table 3 states moments of the truncated distribution, so the parent normal is
    solved for. Where none exists (a std beyond what truncation allows, as for the inputs of tasks S
    and T) mean and std are taken as the parent's, and `note` says so."""
    assert 0 < mean <= maximum and std >= 0, f"{mean = } {std = } {maximum = }"
    if std == 0:
        pmf = np.zeros(maximum)
        pmf[max(round(mean), 1) - 1] = 1.0
        return Lengths(pmf=pmf, note=f"constant {max(round(mean), 1)}")
    parent = truncated_parent(mean, std, maximum)
    if parent is None:
        note = f"mean {mean:g} and std {std:g} taken as the parent normal's: no truncation has them"
        location, scale = mean, std
    else:
        location, scale = parent
        note = f"truncated normal on (0, {maximum}] with mean {mean:g} and std {std:g}"
    edges = (np.arange(maximum + 1) - location) / scale
    # log-space differences stay exact where the parent's centre lies far outside (0, max]
    below, above = log_ndtr(edges), log_ndtr(-edges)
    is_right = edges[:-1] > 0
    upper = np.where(is_right, above[:-1], below[1:])
    lower = np.where(is_right, above[1:], below[:-1])
    log_pmf = upper + np.log1p(-np.exp(np.minimum(lower - upper, -1e-300)))
    pmf = np.exp(log_pmf - log_pmf.max())
    return Lengths(pmf=pmf / pmf.sum(), note=note)


def empirical(samples: Sequence[int] | IntArray, note: str = "") -> Lengths:
    """Lengths as observed in `samples` (tokens, each at least 1)."""
    counts = np.bincount(np.asarray(samples, dtype=np.int64))
    assert counts.size > 1 and counts[0] == 0, "lengths start at 1, and there is at least one"
    pmf = counts[1:] / counts[1:].sum()
    return Lengths(pmf=pmf, note=note or f"observed in {len(samples)} requests",
                   num_samples=len(samples))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JointLengths:
    """Joint distribution of input and output lengths; independent without `pairs`."""

    inputs: Lengths
    outputs: Lengths
    pairs: IntArray | None = None  # [num_samples, 2] observed (input, output), equally weighted

    def mean_input_given_output(self, power: int = 1) -> FloatArray:
        """E[input ** power | output = k] for k = 1 to max, [outputs.max]; the overall mean where
        P(k) = 0."""
        inputs = self.inputs.support.astype(float) ** power
        overall = np.full(self.outputs.max, float(self.inputs.pmf @ inputs))
        if self.pairs is None:
            return overall
        outputs, size = self.pairs[:, 1], self.outputs.max + 1
        counts = np.bincount(outputs, minlength=size)[1:]
        sums = np.bincount(outputs, self.pairs[:, 0].astype(float) ** power, minlength=size)[1:]
        return np.where(counts > 0, sums / np.maximum(counts, 1), overall)

    def sample(self, count: int, rng: np.random.Generator) -> tuple[IntArray, IntArray]:
        """(input tokens, output tokens) drawn at random, each [count]."""
        if self.pairs is None:
            return self.inputs.sample(count, rng), self.outputs.sample(count, rng)
        rows = self.pairs[rng.integers(len(self.pairs), size=count)].astype(np.int64)
        return rows[:, 0], rows[:, 1]


def joint_empirical(pairs: IntArray, note: str = "") -> JointLengths:
    """Joint distribution of observed (input, output) pairs, [num_samples, 2]."""
    return JointLengths(inputs=empirical(pairs[:, 0], note), outputs=empirical(pairs[:, 1], note),
                        pairs=np.asarray(pairs, dtype=np.int64))


def with_output_moments(lengths: JointLengths, *, mean_factor: float = 1.0, std_factor: float = 1.0,
                        skewness_change: float = 0.0) -> JointLengths:
    """`lengths` with the outputs' mean and std multiplied, and their skewness changed (paper
    section 7.6). One growing function moves every length, to 1 at least, so that observed pairs
    keep their correlation."""
    outputs = lengths.outputs
    if (mean_factor, std_factor, skewness_change) == (1.0, 1.0, 0.0):
        return lengths
    moved = _moved_lengths(outputs, (outputs.mean * mean_factor, outputs.std * std_factor,
                                     outputs.skewness + skewness_change))
    note = (f"{outputs.note}; mean x {mean_factor:g}, std x {std_factor:g}, skewness "
            f"{skewness_change:+g}")
    pairs = None if lengths.pairs is None else np.stack(
        [lengths.pairs[:, 0], np.rint(moved)[lengths.pairs[:, 1] - 1].astype(np.int64)], axis=1)
    return replace(lengths, outputs=_with_moved(outputs, moved, note), pairs=pairs)


def with_longer_inputs(lengths: JointLengths, factor: float) -> JointLengths:
    """`lengths` with every input multiplied by `factor`; outputs and pairs stay."""
    inputs = lengths.inputs
    if lengths.pairs is None:
        return replace(lengths, inputs=_with_moved(
            inputs, np.maximum(inputs.support * factor, 1.0), inputs.note))
    longer = np.maximum(np.rint(lengths.pairs[:, 0] * factor), 1).astype(np.int64)
    return replace(lengths, inputs=empirical(longer, inputs.note),
                   pairs=np.stack([longer, lengths.pairs[:, 1]], axis=1))


def bootstrap(lengths: JointLengths, rng: np.random.Generator, most: int) -> JointLengths:
    """A bootstrap sample of observed lengths: as many as `lengths` rests on (at most `most`) drawn
    from it, in pairs if it has pairs. Distributions that were given, not observed, stay.

    Drawn lengths are blurred by Silverman's bandwidth, 0.9 std n^(-1/5), so that lengths beyond
    the longest observed are possible. Of 200 observations 99 % leave two beyond, and in one case of
    eight the true 99th percentile lies above all of them."""
    if lengths.pairs is None:
        return replace(lengths, inputs=_resampled(lengths.inputs, rng, most),
                       outputs=_resampled(lengths.outputs, rng, most))
    count = len(lengths.pairs)
    pairs = lengths.pairs[rng.integers(count, size=min(count, most))]
    return joint_empirical(np.stack([_blurred(pairs[:, 0], lengths.inputs, rng),
                                     _blurred(pairs[:, 1], lengths.outputs, rng)], axis=1),
                           "resampled")


def _resampled(lengths: Lengths, rng: np.random.Generator, most: int) -> Lengths:
    if lengths.num_samples is None:
        return lengths
    drawn = lengths.sample(min(lengths.num_samples, most), rng)
    return empirical(_blurred(drawn, lengths, rng), "resampled")


def _blurred(drawn: IntArray, lengths: Lengths, rng: np.random.Generator) -> IntArray:
    width = 0.9 * lengths.std * len(drawn) ** -0.2
    blurred: IntArray = np.rint(drawn + width * rng.standard_normal(len(drawn))).astype(np.int64)
    return np.where(blurred < 1, drawn, blurred)  # nothing piles up at 1


def _with_moved(lengths: Lengths, moved: FloatArray, note: str) -> Lengths:
    """`lengths` with length k replaced by `moved[k - 1]` (>= 1), [max]. Observed lengths are
    rounded; others are split between the two whole numbers beside, which keeps the mean."""
    is_observed = lengths.num_samples is not None
    moved = np.rint(moved) if is_observed else moved
    lower, size = moved.astype(np.int64), 1 + int(np.ceil(moved.max()))
    size = size if is_observed else max(size, 1 + lengths.max)
    low, high = (np.bincount(at, lengths.pmf * share, minlength=size)[1:size]
                 for at, share in ((lower, 1 - moved + lower), (lower + 1, moved - lower)))
    return replace(lengths, pmf=(low + high) / np.sum(low + high), note=note)


def _moved_lengths(lengths: Lengths, wanted: tuple[float, float, float]) -> FloatArray:
    """New values of the lengths 1 to max, [max], whose (mean, std, skewness) are as near to
    `wanted` as lengths of at least 1 allow. A standardised length z becomes
    a + b (exp(g z) - 1) / g; a, b and g are fitted."""
    from scipy import optimize  # imported here: a third of a second is much for `--help`

    mean, std, skewness = wanted
    if lengths.std == 0:
        return np.full(lengths.max, max(float(round(mean)), 1.0))
    z = np.asarray((lengths.support - lengths.mean) / lengths.std, np.float64)
    seen = lengths.pmf > 0
    weights, inner = lengths.pmf[seen], z[seen]

    def moved(x: FloatArray, z: FloatArray) -> FloatArray:
        shape = z if abs(x[2]) < 1e-9 else np.expm1(np.clip(x[2] * z, -50, 50)) / x[2]
        return np.asarray(np.maximum(mean + std * (x[0] + x[1] * shape), 1.0))

    fit = optimize.least_squares(lambda x: _moment_errors(moved(x, inner), weights, wanted),
                                 np.array([0.0, 1.0, 0.0]),
                                 bounds=([-9.0, 1e-3, -2.0], [9.0, 9.0, 2.0]))
    return moved(fit.x, z)


def _moment_errors(values: FloatArray, weights: FloatArray,
                   wanted: tuple[float, float, float]) -> FloatArray:
    """Errors of mean and std (in units of the wanted std) and skewness, [3]."""
    mean = float(weights @ values)
    std = float(np.sqrt(max(float(weights @ (values - mean) ** 2), 1e-12)))
    skewness = float(weights @ ((values - mean) / std) ** 3)
    return np.array([(mean - wanted[0]) / wanted[1], std / wanted[1] - 1, skewness - wanted[2]])


def synthetic_lengths(lengths: JointLengths, count: int, seed: int) -> tuple[IntArray, IntArray]:
    """(input tokens, output tokens), both [count], of synthetic requests made with `seed`."""
    return lengths.sample(count, np.random.default_rng(seed))


_ROOT_2, _ROOT_2_PI = math.sqrt(2), math.sqrt(2 * math.pi)
_FAR = -30.0  # below it the tail is a series; above it erfc is far from underflowing
_TERMS = 10  # of the series: the last is less than 1e-18 of the sum at _FAR
_REACH = 9  # standard deviations beyond which a normal is lost in a float's rounding
_NEAR = 2e-12  # tolerance of a quantile
_MET = 1e-12  # tolerance of a parent's moments, in parts of the maximum
_WIDEST = 1 / math.sqrt(12) + 1e-5  # the uniform's standard deviation, in such parts, and a little
_INVERSE = NormalDist().inv_cdf
_STEP, _MOST_STEPS, _MOST_HALVINGS = 1e-6, 60, 20  # of differences; of Newton's method
# limits of a parent's location and of the logarithm of its scale, in parts of the maximum
_LOWER, _UPPER = np.array([-30.0, math.log(1e-6)]), np.array([31.0, math.log(30.0)])


# Normal distributions without scipy, whose import takes a third of a second: a good part of a short
# job's planning time.
def log_ndtr(x: ArrayLike) -> FloatArray:
    """Logarithm of P(standard normal <= x), exact in both tails, in the shape of x."""
    values = np.asarray(x, float)
    return np.array([_log_ndtr(value) for value in values.ravel().tolist()]).reshape(values.shape)


def ndtri(chance: ArrayLike) -> FloatArray:
    """Quantile of the standard normal at `chance` (above 0, below 1), in the shape of `chance`."""
    p = np.asarray(chance, float)
    return np.array([*map(_INVERSE, p.ravel().tolist())], float).reshape(p.shape)


def mixture_quantile(means: FloatArray, spread: float, chance: float) -> float:
    """Quantile at `chance` of an equal mixture of normals with these `means` and the standard
    deviation `spread`. `chance` must be below the share of means that are finite."""
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
    if there is none."""
    # Such a density has a concave logarithm, so on (0, maximum] it spreads no further than the
    # uniform does.
    if std > _WIDEST * maximum:
        return None

    def missed(x: FloatArray) -> FloatArray:
        got_mean, got_std = _truncated_moments(float(x[0]) * maximum,
                                               float(np.exp(x[1])) * maximum, maximum)
        return np.array([(got_mean - mean) / maximum, (got_std - std) / maximum])

    with np.errstate(all="ignore"):
        x = _by_newton(missed, np.clip([mean / maximum, np.log(std / maximum)], _LOWER, _UPPER))
    return None if x is None else (float(x[0] * maximum), float(np.exp(x[1]) * maximum))


def _by_newton(missed: Callable[[FloatArray], FloatArray], x: FloatArray) -> FloatArray | None:
    """The root of `missed` that Newton's method finds from x; None if it finds none."""
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
