"""Distributions of input and output lengths, in tokens (paper section 6; design.md section 3.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

FloatArray: TypeAlias = NDArray[np.float64]
IntArray: TypeAlias = NDArray[np.int64]


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
        return np.arange(1, self.max + 1)

    @property
    def mean(self) -> float:
        return float(self.pmf @ self.support)

    @property
    def std(self) -> float:
        return float(np.sqrt(max(float(self.pmf @ (self.support - self.mean) ** 2), 0.0)))

    def quantile(self, q: float) -> int:
        """Smallest length k with P(length <= k) >= q."""
        assert 0 < q <= 1, f"{q = }"
        return min(int(np.searchsorted(np.cumsum(self.pmf), q - 1e-12)) + 1, self.max)

    def sample(self, count: int, rng: np.random.Generator) -> IntArray:
        return rng.choice(self.support, size=count, p=self.pmf)


def truncated_normal(mean: float, std: float, maximum: int) -> Lengths:
    """Truncated normal on (0, maximum] *whose own* mean and std are as given, discretised by
    P(k) = F(k) - F(k - 1).

    The paper's Table 3 states moments of the truncated distribution, so the parent normal is
    solved for. Where no parent exists (a std beyond what truncation allows, as for the inputs of
    its tasks S and T) the figures are taken as the parent's own, and `note` says so.
    """
    assert 0 < mean <= maximum and std >= 0, f"{mean = } {std = } {maximum = }"
    if std == 0:
        pmf = np.zeros(maximum)
        pmf[max(round(mean), 1) - 1] = 1.0
        return Lengths(pmf=pmf, note=f"constant {max(round(mean), 1)}")
    parent = _solve_parent(mean, std, maximum)
    if parent is None:
        note = f"mean {mean:g} and std {std:g} taken as the parent normal's: no truncation has them"
        location, scale = mean, std
    else:
        location, scale = parent
        note = f"truncated normal on (0, {maximum}] with mean {mean:g} and std {std:g}"
    from scipy import special  # here, because a third of a second is much for `--help`

    edges = (np.arange(maximum + 1) - location) / scale
    # log-space differences stay exact where the parent's centre lies far outside (0, max]
    upper, lower = special.log_ndtr(edges[1:]), special.log_ndtr(edges[:-1])
    flip = edges[:-1] > 0
    upper[flip] = special.log_ndtr(-edges[:-1][flip])
    lower[flip] = special.log_ndtr(-edges[1:][flip])
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

    @property
    def correlation(self) -> float:
        if self.pairs is None or self.inputs.std == 0 or self.outputs.std == 0:
            return 0.0
        return float(np.corrcoef(self.pairs[:, 0], self.pairs[:, 1])[0, 1])

    def mean_input_given_output(self) -> FloatArray:
        """E[input | output = k] for k = 1..outputs.max; the overall mean where P(k) = 0."""
        overall = np.full(self.outputs.max, self.inputs.mean)
        if self.pairs is None:
            return overall
        counts = np.bincount(self.pairs[:, 1], minlength=self.outputs.max + 1)[1:]
        sums = np.bincount(self.pairs[:, 1], weights=self.pairs[:, 0],
                           minlength=self.outputs.max + 1)[1:]
        return np.where(counts > 0, sums / np.maximum(counts, 1), overall)

    def sample(self, count: int, rng: np.random.Generator) -> tuple[IntArray, IntArray]:
        """(inputs, outputs), each of shape [count]."""
        if self.pairs is None:
            return self.inputs.sample(count, rng), self.outputs.sample(count, rng)
        rows = self.pairs[rng.integers(len(self.pairs), size=count)]
        return rows[:, 0], rows[:, 1]


def joint_empirical(pairs: IntArray, note: str = "") -> JointLengths:
    """Joint distribution of observed (input, output) pairs; pairs: [num_samples, 2]."""
    return JointLengths(inputs=empirical(pairs[:, 0], note), outputs=empirical(pairs[:, 1], note),
                        pairs=np.asarray(pairs, dtype=np.int64))


def _truncated_moments(location: float, scale: float, maximum: float) -> tuple[float, float]:
    """Mean and std of the normal(location, scale) truncated to (0, maximum]."""
    from scipy import special

    a, b = -location / scale, (maximum - location) / scale
    if a > 0:  # mirror, so that the log-space differences below stay in the accurate tail
        mean, std = _truncated_moments(maximum - location, scale, maximum)
        return maximum - mean, std
    log_mass = special.log_ndtr(b) + np.log1p(-np.exp(special.log_ndtr(a) - special.log_ndtr(b)))
    density_a = np.exp(-0.5 * a * a - log_mass) / np.sqrt(2 * np.pi)
    density_b = np.exp(-0.5 * b * b - log_mass) / np.sqrt(2 * np.pi)
    shift = density_a - density_b
    variance = 1 + a * density_a - b * density_b - shift**2
    return float(location + scale * shift), float(scale * np.sqrt(max(variance, 0.0)))


def _solve_parent(mean: float, std: float, maximum: int) -> tuple[float, float] | None:
    """Parent (location, scale) whose truncation to (0, maximum] has this mean and std."""
    from scipy import optimize

    def residual(x: FloatArray) -> FloatArray:
        scale = float(np.exp(x[1])) * maximum
        got_mean, got_std = _truncated_moments(x[0] * maximum, scale, maximum)
        return np.array([(got_mean - mean) / maximum, (got_std - std) / maximum])

    lower, upper = np.array([-30.0, np.log(1e-6)]), np.array([31.0, np.log(30.0)])
    best = None
    for start_scale in (1.0, 3.0, 0.5):
        start = np.clip([mean / maximum, np.log(start_scale * std / maximum)], lower, upper)
        with np.errstate(all="ignore"):
            found = optimize.least_squares(residual, start, xtol=1e-14, ftol=1e-14, gtol=1e-14,
                                           bounds=(lower, upper))
        if np.isfinite(found.cost) and (best is None or found.cost < best.cost):
            best = found
    if best is None or np.abs(best.fun).max() > 1e-6:
        return None
    return float(best.x[0] * maximum), float(np.exp(best.x[1]) * maximum)
