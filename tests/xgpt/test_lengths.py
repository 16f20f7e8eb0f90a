"""Length distributions: moments, limits, quantiles, and joint ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xgpt.lengths import JointLengths, empirical, joint_empirical, truncated_normal


@pytest.mark.parametrize(("mean", "std", "maximum"), [
    (32, 13, 80), (128, 68, 320), (192, 93, 480), (64, 30, 160), (256, 134, 640), (64, 23, 128),
    (500, 5, 512), (3, 1, 512)])
def test_moments_are_those_asked_for(mean: float, std: float, maximum: int) -> None:
    # tokens are the continuous length rounded up, which adds 1/2 to the mean and 1/12 to the
    # variance, less what piles up at the ends
    lengths = truncated_normal(mean, std, maximum)
    assert lengths.mean == pytest.approx(mean + 0.5, abs=0.02)
    assert lengths.std == pytest.approx(np.sqrt(std**2 + 1 / 12), abs=0.02)


def test_a_std_beyond_truncation_keeps_the_parents_moments() -> None:
    lengths = truncated_normal(256, 252, 512)
    assert "parent" in lengths.note
    assert lengths.mean == pytest.approx(256.5, abs=0.1)  # symmetric about 256
    assert lengths.std < 512 / np.sqrt(12)


def test_no_spread_is_one_length() -> None:
    lengths = truncated_normal(7, 0, 20)
    assert (lengths.mean, lengths.std, lengths.quantile(0.01), lengths.max) == (7, 0, 7, 20)


@given(maximum=st.integers(1, 3000), part=st.floats(0.001, 1),
       spread=st.just(0.0) | st.floats(1e-5, 1.0))
@settings(max_examples=60, deadline=None)
def test_any_moments_give_a_distribution_within_its_range(maximum: int, part: float,
                                                          spread: float) -> None:
    mean = max(part * maximum, min(1.0, maximum))
    lengths = truncated_normal(mean, spread * maximum, maximum)
    assert np.isfinite(lengths.pmf).all() and lengths.pmf.sum() == pytest.approx(1)
    assert lengths.max == maximum and 1 <= lengths.mean <= maximum


def test_a_hair_of_spread_is_a_distribution_too() -> None:
    assert truncated_normal(40, 1e-6, 80).quantile(0.5) == 40


def test_quantile_is_the_smallest_length_that_reaches_it() -> None:
    lengths = empirical([1, 2, 3, 4])
    assert [lengths.quantile(q) for q in (0.25, 0.26, 0.5, 0.75, 1.0)] == [1, 2, 2, 3, 4]


def test_empirical_counts_what_was_seen() -> None:
    lengths = empirical([2, 2, 5])
    assert lengths.pmf == pytest.approx([0, 2 / 3, 0, 0, 1 / 3])
    assert (lengths.max, lengths.mean) == (5, pytest.approx(3))
    assert "3 queries" in lengths.note


@pytest.mark.parametrize("bad", [[], [0, 1]])
def test_empirical_refuses_empty_and_zero_lengths(bad: list[int]) -> None:
    with pytest.raises(AssertionError):
        empirical(bad)


def test_samples_follow_the_distribution_and_the_seed() -> None:
    lengths = truncated_normal(32, 13, 80)
    first = lengths.sample(20_000, np.random.default_rng(1))
    assert first.mean() == pytest.approx(lengths.mean, rel=0.02)
    assert first.min() >= 1 and first.max() <= 80
    assert (first == lengths.sample(20_000, np.random.default_rng(1))).all()


def test_joint_lengths_keep_the_correlation_that_marginals_lose() -> None:
    pairs = np.array([[10, 1], [20, 2], [30, 3]])
    joint = joint_empirical(pairs)
    assert joint.correlation == pytest.approx(1)
    assert joint.mean_input_given_output() == pytest.approx([10, 20, 30])
    inputs, outputs = joint.sample(50, np.random.default_rng(0))
    assert (inputs == 10 * outputs).all()


def test_independent_lengths_have_one_mean_input() -> None:
    joint = JointLengths(inputs=empirical([4, 6]), outputs=empirical([1, 3]))
    assert joint.correlation == 0
    assert joint.mean_input_given_output() == pytest.approx([5, 5, 5])


def test_outputs_nobody_saw_take_the_mean_input() -> None:
    joint = joint_empirical(np.array([[10, 1], [30, 3]]))
    assert joint.mean_input_given_output() == pytest.approx([10, 20, 30])


def test_correlation_of_constant_lengths_is_zero() -> None:
    assert joint_empirical(np.array([[5, 1], [5, 2]])).correlation == 0
