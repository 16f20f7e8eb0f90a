"""Distributions of input and output lengths, in tokens (paper section 6; docs/paper.md)."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from xgpt.core.normal import log_ndtr, truncated_parent

FloatArray: TypeAlias = NDArray[np.float64]
IntArray: TypeAlias = NDArray[np.int64]
BoolArray: TypeAlias = NDArray[np.bool_]
MAX_LENGTH_TOKENS = 2**20  # longest sequence a distribution is made for
_MOMENTS_MET = 1e-3  # of the std (of 1, for skewness): how near changed moments come at least
_SPREAD = 1e-6  # tokens: less is none
_ROOM = (1.0, 1.15, 1.5)  # times the maximum, for a longer tail where a skewness needs it


@lru_cache(maxsize=64)
def _up_to(most: int) -> IntArray:
    """1 to `most`; asked for again and again while a schedule is searched."""
    values = np.arange(1, most + 1)
    values.flags.writeable = False
    return values


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lengths:
    """Probabilities of the lengths 1..max. `pmf[k - 1]` = P(length = k)."""

    pmf: FloatArray  # [max]
    note: str = ""  # how it was obtained, for the report
    num_samples: int | None = None  # observed lengths it rests on; None: given, not estimated

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

    @property
    def mean(self) -> float:
        return _mean_and_std(self)[0]

    @property
    def std(self) -> float:
        return _mean_and_std(self)[1]

    @property
    def skewness(self) -> float:
        """Third standardised moment; 0 for a single length, or what is one but for next to nothing:
        of a spread of 1e-150 tokens the third power has no number."""
        std = self.std
        return float(self.pmf @ ((self.support - self.mean) / std) ** 3) if std > _SPREAD else 0.0

    def quantile(self, q: float) -> int:
        """Smallest length k with P(length <= k) >= q."""
        assert 0 < q <= 1, f"{q = }"
        return _quantile(self, q)

    def sample(self, count: int, rng: np.random.Generator) -> IntArray:
        return rng.choice(self.support, size=count, p=self.pmf)


@lru_cache(maxsize=64)
def _cumulative(lengths: Lengths) -> FloatArray:
    """[support] P(length <= k)."""
    return np.cumsum(lengths.pmf)


@lru_cache(maxsize=256)
def _quantile(lengths: Lengths, q: float) -> int:
    return min(int(np.searchsorted(_cumulative(lengths), q - 1e-12)) + 1, lengths.max)


@lru_cache(maxsize=64)
def _mean_and_std(lengths: Lengths) -> tuple[float, float]:
    """Asked for again and again while a schedule is searched."""
    mean = float(lengths.pmf @ lengths.support)
    variance = float(lengths.pmf @ (lengths.support - mean) ** 2)
    return mean, float(np.sqrt(max(variance, 0.0)))


def truncated_normal(mean: float, std: float, maximum: int) -> Lengths:
    """Truncated normal on (0, maximum] *whose own* mean and std are as given, discretised by
    P(k) = F(k) - F(k - 1).

    The paper's Table 3 states moments of the truncated distribution, so the parent normal is
    solved for. Where no parent exists (a std beyond what truncation allows, as for the inputs of
    its tasks S and T) the figures are taken as the parent's own, and `note` says so."""
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
    """Distribution of observed lengths (each at least 1)."""
    counts = np.bincount(np.asarray(samples, dtype=np.int64))
    assert counts.size > 1 and counts[0] == 0, "lengths start at 1, and there is at least one"
    pmf = counts[1:] / counts[1:].sum()
    return Lengths(pmf=pmf, note=note or f"observed in {len(samples)} queries",
                   num_samples=len(samples))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JointLengths:
    """Joint distribution of (input, output). Without `pairs` the two are independent."""

    inputs: Lengths
    outputs: Lengths
    pairs: IntArray | None = None  # [num_samples, 2] observed (input, output), equally weighted

    def mean_input_given_output(self, power: int = 1) -> FloatArray:
        """E[input ** power | output = k], k = 1..outputs.max; the overall value where P(k) = 0."""
        inputs = self.inputs.support.astype(float) ** power
        overall = np.full(self.outputs.max, float(self.inputs.pmf @ inputs))
        if self.pairs is None:
            return overall
        outputs, size = self.pairs[:, 1], self.outputs.max + 1
        counts = np.bincount(outputs, minlength=size)[1:]
        sums = np.bincount(outputs, self.pairs[:, 0].astype(float) ** power, minlength=size)[1:]
        return np.where(counts > 0, sums / np.maximum(counts, 1), overall)

    def sample(self, count: int, rng: np.random.Generator) -> tuple[IntArray, IntArray]:
        """(inputs, outputs), each of shape [count]."""
        if self.pairs is None:
            return self.inputs.sample(count, rng), self.outputs.sample(count, rng)
        rows = self.pairs[rng.integers(len(self.pairs), size=count)].astype(np.int64)
        return rows[:, 0], rows[:, 1]


def joint_empirical(pairs: IntArray, note: str = "") -> JointLengths:
    """Joint distribution of observed (input, output) pairs; pairs: [num_samples, 2]."""
    return JointLengths(inputs=empirical(pairs[:, 0], note), outputs=empirical(pairs[:, 1], note),
                        pairs=np.asarray(pairs, dtype=np.int64))


def with_moments(lengths: Lengths, *, mean_factor: float = 1.0, std_factor: float = 1.0,
                 skewness_change: float = 0.0, moves: bool = False) -> Lengths:
    """`lengths` with its mean and std times these factors and this much added to its skewness; what
    is not named stays (paper section 7.6).

    A given distribution becomes a skew normal truncated to (0, max'], whose own three moments are
    as wanted, discretised as truncated_normal is. max' is where the old maximum comes to lie when
    mean and std change, (max - mean) std' / std + mean', never less than the old one, and up to
    half more where a longer tail needs it. An observed distribution, and a given one that no skew
    normal matches, has its lengths moved: the same growing function of each, rounded, 1 at least.
    `moves`: so it is whatever the distribution, which is quicker."""
    if (mean_factor, std_factor, skewness_change) == (1.0, 1.0, 0.0):
        return lengths
    wanted = _wanted_moments(lengths, mean_factor, std_factor, skewness_change)
    is_given = lengths.num_samples is None
    pmf: FloatArray | None = None
    if is_given and not moves and lengths.std > 0:
        image = wanted[0] + (lengths.max - lengths.mean) * wanted[1] / lengths.std
        pmf = _skew_normal(wanted, max(lengths.max, int(np.ceil(image))),
                           _ROOM if skewness_change > 0 else _ROOM[:1])
    if pmf is None:
        moved = _moved_lengths(lengths, wanted)
        least = lengths.max if is_given else 0
        pmf = np.bincount(moved, lengths.pmf, minlength=least + 1)[1:].astype(np.float64)
    note = (f"{lengths.note}; mean x {mean_factor:g}, std x {std_factor:g}, skewness "
            f"{skewness_change:+g}")
    return replace(lengths, pmf=pmf / pmf.sum(), note=note)


def with_output_moments(lengths: JointLengths, *, mean_factor: float = 1.0, std_factor: float = 1.0,
                        skewness_change: float = 0.0, moves: bool = False) -> JointLengths:
    """`with_moments` of the outputs. Observed pairs keep their order of outputs, and with it their
    correlation."""
    outputs = with_moments(lengths.outputs, mean_factor=mean_factor, std_factor=std_factor,
                           skewness_change=skewness_change, moves=moves)
    if lengths.pairs is None or outputs is lengths.outputs:
        return replace(lengths, outputs=outputs)
    moved = _moved_lengths(lengths.outputs, _wanted_moments(
        lengths.outputs, mean_factor, std_factor, skewness_change))
    pairs = np.stack([lengths.pairs[:, 0], moved[lengths.pairs[:, 1] - 1]], axis=1)
    return replace(lengths, outputs=outputs, pairs=pairs)


def with_longer_inputs(lengths: JointLengths, factor: float) -> JointLengths:
    """Every input longer by this factor; outputs, and what ties them to inputs, stay."""
    if lengths.pairs is None:
        return replace(lengths, inputs=with_moments(
            lengths.inputs, mean_factor=factor, std_factor=factor, moves=True))
    longer = np.maximum(np.rint(lengths.pairs[:, 0] * factor), 1).astype(np.int64)
    return replace(lengths, inputs=empirical(longer, lengths.inputs.note),
                   pairs=np.stack([longer, lengths.pairs[:, 1]], axis=1))


def bootstrap(lengths: JointLengths, rng: np.random.Generator, *, most: int | None = None,
              smooth: bool = False) -> JointLengths:
    """A distribution as it might have been observed instead: as many lengths as each one rests on
    (`most` at most), drawn from it, in pairs where there are pairs. Given distributions, which rest
    on no sample, stay as they are.

    smooth: drawn lengths are blurred by Silverman's bandwidth, 0.9 std n^(-1/5), so that lengths
    beyond the longest observed are possible: 99 % of 200 observations leave two beyond, and the
    true 99th percentile lies above all of them in one case of eight."""
    if lengths.pairs is not None:
        if lengths.outputs.num_samples is None:
            return lengths
        count = min(lengths.outputs.num_samples, most or lengths.outputs.num_samples)
        pairs = lengths.pairs[rng.integers(len(lengths.pairs), size=count)]
        if smooth:
            pairs = np.stack([_blurred(pairs[:, 0], lengths.inputs, rng),
                              _blurred(pairs[:, 1], lengths.outputs, rng)], axis=1)
        return joint_empirical(pairs, "resampled")
    return replace(lengths, inputs=_resampled(lengths.inputs, rng, most, smooth),
                   outputs=_resampled(lengths.outputs, rng, most, smooth))


def _resampled(lengths: Lengths, rng: np.random.Generator, most: int | None,
               smooth: bool) -> Lengths:
    if lengths.num_samples is None:
        return lengths
    drawn = lengths.sample(min(lengths.num_samples, most or lengths.num_samples), rng)
    return empirical(_blurred(drawn, lengths, rng) if smooth else drawn, "resampled")


def _blurred(drawn: IntArray, lengths: Lengths, rng: np.random.Generator) -> IntArray:
    width = 0.9 * lengths.std * len(drawn) ** -0.2
    blurred: IntArray = np.rint(drawn + width * rng.standard_normal(len(drawn))).astype(np.int64)
    return np.where(blurred < 1, drawn, blurred)  # nothing piles up at 1


def _wanted_moments(lengths: Lengths, mean_factor: float, std_factor: float,
                    skewness_change: float) -> tuple[float, float, float]:
    return lengths.mean * mean_factor, lengths.std * std_factor, lengths.skewness + skewness_change


def _moved_lengths(lengths: Lengths, wanted: tuple[float, float, float]) -> IntArray:
    """[max] what each length of 1..max becomes: a + b (exp(g z) - 1) / g of the standardised
    length z, with a, b, g such that mean, std and skewness are as wanted, as nearly as lengths of
    at least 1 can have them."""
    from scipy import optimize  # here, because a third of a second is much for `--help`

    mean, std, skewness = wanted
    if lengths.std == 0:
        return np.full(lengths.max, max(round(mean), 1))
    z = np.asarray((lengths.support - lengths.mean) / lengths.std, np.float64)
    seen = lengths.pmf > 0
    weights, inner = lengths.pmf[seen], z[seen]

    def moved(x: FloatArray, z: FloatArray) -> FloatArray:
        shape = z if abs(x[2]) < 1e-9 else np.expm1(np.clip(x[2] * z, -50, 50)) / x[2]
        return np.asarray(np.maximum(mean + std * (x[0] + x[1] * shape), 1.0))

    fit = optimize.least_squares(lambda x: _moment_errors(moved(x, inner), weights, wanted),
                                 np.array([0.0, 1.0, 0.0]),
                                 bounds=([-9.0, 1e-3, -2.0], [9.0, 9.0, 2.0]))
    return np.rint(moved(fit.x, z)).astype(np.int64)


def _skew_normal(wanted: tuple[float, float, float], maximum: int,
                 rooms: Sequence[float]) -> FloatArray | None:
    """[max'] probabilities of the skew normal truncated to (0, max'] that has this mean, std and
    skewness, with max' the first of `rooms` times the `maximum` that has one; None where none."""
    for room, bend in itertools.product(rooms, (0.0, 1.0, -1.0)):
        pmf = _fitted(wanted, round(maximum * room), bend)
        if pmf is not None:
            return pmf
    return None


def _fitted(wanted: tuple[float, float, float], maximum: int, bend: float) -> FloatArray | None:
    """Does as _skew_normal for one maximum; the parent's shape is sought from tan(bend) on."""
    from scipy import optimize, special, stats

    mean, std, _ = wanted
    edges, support = np.arange(maximum + 1.0), np.arange(1.0, maximum + 1)

    def parent(x: FloatArray) -> tuple[float, float, float]:
        return float(np.tan(x[2])), float(mean + std * x[0]), float(std * np.exp(x[1]))

    def residual(x: FloatArray) -> FloatArray:
        # densities in the middle of each token: ten times as quick as differences of F, and as good
        shape, location, scale = parent(x)
        z = (support - 0.5 - location) / scale
        logarithms = special.log_ndtr(shape * z) - 0.5 * z * z
        mass = np.exp(logarithms - logarithms.max())
        return _moment_errors(support, mass / mass.sum(), wanted)

    fit = optimize.least_squares(residual, np.array([0.0, 0.1, bend]), max_nfev=40,
                                 bounds=([-8.0, -3.0, -1.55], [8.0, 3.0, 1.55]))
    pmf = np.maximum(np.diff(stats.skewnorm.cdf(edges, *parent(fit.x))), 0.0)
    if not pmf.sum() > 0:
        return None
    pmf /= pmf.sum()
    is_met = np.abs(_moment_errors(support, pmf, wanted)).max() < _MOMENTS_MET
    return np.asarray(pmf) if is_met else None


def _moment_errors(values: FloatArray, weights: FloatArray,
                   wanted: tuple[float, float, float]) -> FloatArray:
    """[3] how far mean and std (in parts of the std) and skewness are from those wanted."""
    mean = float(weights @ values)
    std = float(np.sqrt(max(float(weights @ (values - mean) ** 2), 1e-12)))
    skewness = float(weights @ ((values - mean) / std) ** 3)
    return np.array([(mean - wanted[0]) / wanted[1], std / wanted[1] - 1, skewness - wanted[2]])


def synthetic_lengths(lengths: JointLengths, count: int, seed: int) -> tuple[IntArray, IntArray]:
    """(input tokens, output tokens), both [count], of the requests made with this seed."""
    return lengths.sample(count, np.random.default_rng(seed))
