"""Normal distributions without scipy, beside scipy's."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import optimize, special, stats

from xgpt.core.lengths import log_ndtr, mixture_quantile, ndtri, truncated_parent


def test_logarithms_of_chances_are_exact_in_both_tails() -> None:
    x = np.concatenate([np.linspace(-45, 45, 901), [-1e8, -200.0, 1e8, -np.inf, np.inf]])
    np.testing.assert_allclose(log_ndtr(x), special.log_ndtr(x), rtol=1e-12, atol=1e-300)
    assert log_ndtr(x.reshape(2, -1)).shape == (2, 453)


@pytest.mark.parametrize("chance", [
    np.array([0.5]), np.linspace(0.08, 0.92, 85), np.linspace(0.001, 0.999, 999),
    np.geomspace(1e-300, 0.5, 400), 1 - np.geomspace(1e-15, 0.4, 60), np.array([[0.3, 1e-20]]),
    np.array(0.95),
    np.linspace(0.01, 0.99, 40_000)])
def test_quantiles_are_those_of_scipy(chance: np.ndarray) -> None:
    found = ndtri(chance)
    np.testing.assert_allclose(found, special.ndtri(chance), rtol=2e-15, atol=1e-300)
    assert found.shape == chance.shape


@pytest.mark.parametrize("spread", [1e-4, 0.02, 3.0])
@pytest.mark.parametrize("chance", [0.5, 0.9, 0.95, 0.999])
@pytest.mark.parametrize("count", [1, 41])
def test_a_mixtures_quantile_has_that_chance(count: int, chance: float, spread: float) -> None:
    means = np.random.default_rng(count).normal(0.01, 0.1, count)

    def missed(x: float) -> float:
        return float(special.ndtr((x - means) / spread).mean()) - chance

    wanted = optimize.brentq(missed, means.min() - 9 * spread, means.max() + 9 * spread)
    assert mixture_quantile(means, spread, chance) == pytest.approx(wanted, abs=1e-11)


def test_infinite_means_are_never_below() -> None:
    means = np.array([0.0, np.inf])
    assert mixture_quantile(means, 1.0, 0.25) == pytest.approx(0.0, abs=1e-11)


@pytest.mark.parametrize(("mean", "std", "maximum"), [
    (54, 37, 160), (128, 68, 320), (32, 13, 80), (40, 1e-4, 80), (3, 1.5, 6), (90, 8, 100),
    (200, 115, 400)])
def test_a_parents_truncation_has_the_moments(mean: float, std: float, maximum: int) -> None:
    parent = truncated_parent(mean, std, maximum)
    assert parent is not None
    location, scale = parent
    own = stats.truncnorm(-location / scale, (maximum - location) / scale, location, scale)
    assert own.mean() == pytest.approx(mean, rel=1e-7)
    assert own.std() == pytest.approx(std, rel=1e-5)


@pytest.mark.parametrize(("mean", "std", "maximum"), [(256, 252, 512), (1, 50, 100), (5, 28.9, 100),
                                                    (50, 28.9, 100), (30, 29, 100)])
def test_no_normal_has_a_std_beyond_what_truncation_allows(mean: float, std: float,
                                                           maximum: int) -> None:
    assert truncated_parent(mean, std, maximum) is None
