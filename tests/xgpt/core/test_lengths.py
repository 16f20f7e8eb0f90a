"""Length distributions: moments, limits, quantiles, and joint ones."""

from __future__ import annotations

import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from xgpt.core.lengths import (
    JointLengths,
    Lengths,
    bootstrap,
    empirical,
    joint_empirical,
    truncated_normal,
    with_output_moments,
)


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
@examples(60)
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


def correlation(joint: JointLengths) -> float:
    return float(np.corrcoef(*joint.pairs.T)[0, 1])


def test_joint_lengths_keep_the_correlation_that_marginals_lose() -> None:
    pairs = np.array([[10, 1], [20, 2], [30, 3]])
    joint = joint_empirical(pairs)
    assert correlation(joint) == pytest.approx(1)
    assert joint.mean_input_given_output() == pytest.approx([10, 20, 30])
    inputs, outputs = joint.sample(50, np.random.default_rng(0))
    assert (inputs == 10 * outputs).all()


def test_independent_lengths_have_one_mean_input() -> None:
    joint = JointLengths(inputs=empirical([4, 6]), outputs=empirical([1, 3]))
    assert joint.pairs is None
    assert joint.mean_input_given_output() == pytest.approx([5, 5, 5])


def test_outputs_nobody_saw_take_the_mean_input() -> None:
    joint = joint_empirical(np.array([[10, 1], [30, 3]]))
    assert joint.mean_input_given_output() == pytest.approx([10, 20, 30])


CHANGES = ({"mean_factor": 0.85}, {"mean_factor": 1.3}, {"std_factor": 0.7}, {"std_factor": 1.15},
           {"skewness_change": -0.4}, {"skewness_change": 0.2})


def is_changed(before, after, mean_factor=1.0, std_factor=1.0, skewness_change=0.0):
    assert after.mean == pytest.approx(before.mean * mean_factor, abs=0.02 * before.std)
    assert after.std == pytest.approx(before.std * std_factor, rel=0.02)
    assert after.skewness == pytest.approx(before.skewness + skewness_change, abs=0.03)


@pytest.mark.parametrize("change", CHANGES, ids=str)
@pytest.mark.parametrize("moments", [(32, 13, 80), (192, 93, 480)])
def test_one_moment_of_a_given_distribution_changes_and_the_others_stay(moments, change) -> None:
    before = truncated_normal(*moments)
    after = with_output_moments(JointLengths(inputs=before, outputs=before), **change)
    is_changed(before, after.outputs, **change)
    assert after.inputs is before and after.outputs.num_samples is None


def test_lengths_that_are_one_but_for_next_to_nothing_have_no_skewness() -> None:
    nearly = Lengths(pmf=np.array([1e-200, 1.0]))
    assert nearly.std > 0 and nearly.skewness == 0


def observed_pairs() -> JointLengths:
    rng = np.random.default_rng(0)
    inputs = rng.normal(200, 60, 2000).clip(1)
    outputs = (0.4 * inputs + rng.normal(20, 12, 2000)).clip(1)
    return joint_empirical(np.stack([inputs, outputs], axis=1).astype(np.int64))


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_observed_pairs_change_together(change) -> None:
    before = observed_pairs()
    after = with_output_moments(before, **change)
    is_changed(before.outputs, after.outputs, **change)
    assert correlation(after) == pytest.approx(correlation(before), abs=0.01)
    assert after.pairs is not None and before.pairs is not None
    assert (after.pairs[:, 0] == before.pairs[:, 0]).all()
    assert empirical(after.pairs[:, 1]).pmf == pytest.approx(after.outputs.pmf)
    assert after.outputs.num_samples == 2000


def test_no_change_is_the_same_distribution() -> None:
    before = observed_pairs()
    assert with_output_moments(before).outputs is before.outputs
    given = truncated_normal(7, 0, 20)
    assert with_output_moments(JointLengths(inputs=given, outputs=given),
                               mean_factor=1.3).outputs.mean == 9


def test_bootstrap_leaves_given_distributions_alone() -> None:
    lengths = JointLengths(inputs=truncated_normal(32, 13, 80), outputs=truncated_normal(9, 4, 20))
    drawn = bootstrap(lengths, np.random.default_rng(0))
    assert drawn.inputs is lengths.inputs and drawn.outputs is lengths.outputs


def test_bootstrap_scatters_as_the_sample_does() -> None:
    """The mean of n lengths has a standard deviation of std / sqrt(n)."""
    outputs = empirical(truncated_normal(128, 68, 320).sample(400, np.random.default_rng(1)))
    lengths = JointLengths(inputs=truncated_normal(32, 13, 80), outputs=outputs)
    rng = np.random.default_rng(2)
    drawn = [bootstrap(lengths, rng) for _ in range(400)]
    assert np.std([d.outputs.mean for d in drawn]) == pytest.approx(outputs.std / 20, rel=0.15)
    assert all(d.inputs is lengths.inputs and d.outputs.num_samples == 400 for d in drawn)
    assert max(d.outputs.max for d in drawn) <= outputs.max
    assert bootstrap(lengths, rng, most=50).outputs.num_samples == 50


def test_bootstrap_draws_pairs_and_repeats_with_its_seed() -> None:
    before = observed_pairs()
    first, second = (bootstrap(before, np.random.default_rng(5)) for _ in range(2))
    assert first.pairs is not None and second.pairs is not None and before.pairs is not None
    assert (first.pairs == second.pairs).all() and len(first.pairs) == 2000
    assert set(map(tuple, first.pairs)) < set(map(tuple, before.pairs))
    assert correlation(first) == pytest.approx(correlation(before), abs=0.05)


def test_a_smooth_bootstrap_reaches_beyond_the_longest_observed() -> None:
    before = observed_pairs()
    rng = np.random.default_rng(6)
    drawn = [bootstrap(before, rng, smooth=True).outputs for _ in range(20)]
    assert np.mean([d.max for d in drawn]) > before.outputs.max
    assert all(d.pmf.size and d.quantile(1e-9) >= 1 for d in drawn)
    assert np.mean([d.mean for d in drawn]) == pytest.approx(before.outputs.mean, rel=0.01)
