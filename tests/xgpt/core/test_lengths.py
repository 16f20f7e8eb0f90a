"""Length distributions: moments, limits, quantiles, and joint ones."""

import json
from pathlib import Path

import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize, special, stats

from xgpt.core.errors import InputError
from xgpt.core.lengths import (
    JointLengths,
    Lengths,
    bootstrap,
    empirical,
    joint_empirical,
    log_ndtr,
    mixture_quantile,
    ndtri,
    truncated_normal,
    truncated_parent,
    with_output_moments,
)
from xgpt.job.job_lengths import MAX_MISTAKES, read_lengths


@pytest.mark.parametrize(("mean", "std", "maximum"), [
    (32, 13, 80), (128, 68, 320), (192, 93, 480), (64, 30, 160), (256, 134, 640), (64, 23, 128),
    (500, 5, 512), (3, 1, 512)])
def test_moments_are_those_asked_for(mean, std, maximum):
    # tokens are the continuous length rounded up, which adds 1/2 to the mean and 1/12 to the
    # variance, less what piles up at the ends
    lengths = truncated_normal(mean, std, maximum)
    assert lengths.mean == pytest.approx(mean + 0.5, abs=0.02)
    assert lengths.std == pytest.approx(np.sqrt(std**2 + 1 / 12), abs=0.02)


@given(maximum=st.integers(1, 3000), part=st.floats(0.001, 1),
       spread=st.just(0.0) | st.floats(1e-5, 1.0))
@examples(60)
def test_any_moments_give_a_distribution_within_its_range(maximum, part, spread):
    mean = max(part * maximum, min(1.0, maximum))
    lengths = truncated_normal(mean, spread * maximum, maximum)
    assert np.isfinite(lengths.pmf).all() and lengths.pmf.sum() == pytest.approx(1)
    assert lengths.max == maximum and 1 <= lengths.mean <= maximum


def test_special_distributions_and_samples_that_follow_theirs():
    beyond = truncated_normal(256, 252, 512)  # what truncation allows: the parent's moments
    assert "parent" in beyond.note and beyond.std < 512 / np.sqrt(12)
    assert beyond.mean == pytest.approx(256.5, abs=0.1)  # symmetric about 256
    one = truncated_normal(7, 0, 20)
    assert (one.mean, one.std, one.quantile(0.01), one.max) == (7, 0, 7, 20)
    seen = empirical([2, 2, 5])
    assert seen.pmf == pytest.approx([0, 2 / 3, 0, 0, 1 / 3]) and "3 requests" in seen.note
    assert (seen.max, seen.mean) == (5, pytest.approx(3))
    nearly = Lengths(pmf=np.array([1e-200, 1.0]))
    assert nearly.std > 0 and nearly.skewness == 0
    four = empirical([1, 2, 3, 4])  # the smallest length that reaches a quantile
    assert [four.quantile(q) for q in (0.25, 0.26, 0.5, 0.75, 1.0)] == [1, 2, 2, 3, 4]
    lengths = truncated_normal(32, 13, 80)
    first, again = (lengths.sample(20_000, np.random.default_rng(1)) for _ in range(2))
    assert first.mean() == pytest.approx(lengths.mean, rel=0.02)
    assert first.min() >= 1 and first.max() <= 80 and (first == again).all()


def correlation(joint: JointLengths) -> float:
    return float(np.corrcoef(*joint.pairs.T)[0, 1])


def test_joint_lengths_keep_their_correlation_and_without_a_change_their_distribution():
    joint = joint_empirical(np.array([[10, 1], [20, 2], [30, 3]]))
    assert correlation(joint) == pytest.approx(1)
    assert joint.mean_input_given_output() == pytest.approx([10, 20, 30])
    inputs, outputs = joint.sample(50, np.random.default_rng(0))
    assert (inputs == 10 * outputs).all()
    independent = JointLengths(inputs=empirical([4, 6]), outputs=empirical([1, 3]))
    assert independent.pairs is None
    assert independent.mean_input_given_output() == pytest.approx([5, 5, 5])
    # outputs that nobody saw take the mean input
    assert joint_empirical(np.array([[10, 1], [30, 3]])).mean_input_given_output() == (
        pytest.approx([10, 20, 30]))
    before = observed_pairs()
    assert with_output_moments(before).outputs is before.outputs
    given = truncated_normal(7, 0, 20)
    assert with_output_moments(JointLengths(inputs=given, outputs=given),
                               mean_factor=1.3).outputs.mean == 9


CHANGES = ({"mean_factor": 0.85}, {"mean_factor": 1.3}, {"std_factor": 0.7}, {"std_factor": 1.15},
           {"skewness_change": -0.4}, {"skewness_change": 0.2})


def is_changed(before, after, mean_factor=1.0, std_factor=1.0, skewness_change=0.0):
    assert after.mean == pytest.approx(before.mean * mean_factor, abs=0.02 * before.std)
    assert after.std == pytest.approx(before.std * std_factor, rel=0.02)
    assert after.skewness == pytest.approx(before.skewness + skewness_change, abs=0.03)


@pytest.mark.parametrize("change", CHANGES, ids=str)
@pytest.mark.parametrize("moments", [(32, 13, 80), (192, 93, 480)])
def test_one_moment_of_a_given_distribution_changes_and_the_others_stay(moments, change):
    before = truncated_normal(*moments)
    after = with_output_moments(JointLengths(inputs=before, outputs=before), **change)
    is_changed(before, after.outputs, **change)
    assert after.inputs is before and after.outputs.num_samples is None


def observed_pairs() -> JointLengths:
    rng = np.random.default_rng(0)
    inputs = rng.normal(200, 60, 2000).clip(1)
    outputs = (0.4 * inputs + rng.normal(20, 12, 2000)).clip(1)
    return joint_empirical(np.stack([inputs, outputs], axis=1).astype(np.int64))


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_observed_pairs_change_together(change):
    before = observed_pairs()
    after = with_output_moments(before, **change)
    is_changed(before.outputs, after.outputs, **change)
    assert correlation(after) == pytest.approx(correlation(before), abs=0.01)
    assert (after.pairs[:, 0] == before.pairs[:, 0]).all()
    assert empirical(after.pairs[:, 1]).pmf == pytest.approx(after.outputs.pmf)
    assert after.outputs.num_samples == 2000


def test_a_bootstrap_scatters_as_the_sample_does_repeats_and_reaches_beyond():
    """The mean of n lengths has a standard deviation of std / sqrt(n)."""
    outputs = empirical(truncated_normal(128, 68, 320).sample(400, np.random.default_rng(1)))
    lengths = JointLengths(inputs=truncated_normal(32, 13, 80), outputs=outputs)
    rng = np.random.default_rng(2)
    drawn = [bootstrap(lengths, rng, 1000) for _ in range(400)]
    assert np.std([d.outputs.mean for d in drawn]) == pytest.approx(outputs.std / 20, rel=0.15)
    assert all(d.inputs is lengths.inputs and d.outputs.num_samples == 400 for d in drawn)
    assert bootstrap(lengths, rng, 50).outputs.num_samples == 50
    given = JointLengths(inputs=lengths.inputs, outputs=truncated_normal(9, 4, 20))
    assert bootstrap(given, rng, 1000).outputs is given.outputs, "which nobody saw"
    before = observed_pairs()
    first, second = (bootstrap(before, np.random.default_rng(5), 5000) for _ in range(2))
    assert (first.pairs == second.pairs).all() and len(first.pairs) == 2000
    assert correlation(first) == pytest.approx(correlation(before), abs=0.05)
    rng = np.random.default_rng(6)
    drawn = [bootstrap(before, rng, 5000).outputs for _ in range(20)]
    assert np.mean([d.max for d in drawn]) > before.outputs.max
    assert all(d.pmf.size and d.quantile(1e-9) >= 1 for d in drawn)
    assert np.mean([d.mean for d in drawn]) == pytest.approx(before.outputs.mean, rel=0.01)


def test_logarithms_of_chances_are_exact_in_both_tails():
    x = np.concatenate([np.linspace(-45, 45, 901), [-1e8, -200.0, 1e8, -np.inf, np.inf]])
    np.testing.assert_allclose(log_ndtr(x), special.log_ndtr(x), rtol=1e-12, atol=1e-300)
    assert log_ndtr(x.reshape(2, -1)).shape == (2, 453)


@pytest.mark.parametrize("chance", [
    np.array([0.5]), np.linspace(0.08, 0.92, 85), np.linspace(0.001, 0.999, 999),
    np.geomspace(1e-300, 0.5, 400), 1 - np.geomspace(1e-15, 0.4, 60), np.array([[0.3, 1e-20]]),
    np.array(0.95),
    np.linspace(0.01, 0.99, 40_000)])
def test_quantiles_are_those_of_scipy(chance):
    found = ndtri(chance)
    np.testing.assert_allclose(found, special.ndtri(chance), rtol=2e-15, atol=1e-300)
    assert found.shape == chance.shape


@pytest.mark.parametrize("spread", [1e-4, 0.02, 3.0])
@pytest.mark.parametrize("chance", [0.5, 0.9, 0.95, 0.999])
@pytest.mark.parametrize("count", [1, 41])
def test_a_mixtures_quantile_has_that_chance(count, chance, spread):
    means = np.random.default_rng(count).normal(0.01, 0.1, count)

    def missed(x: float) -> float:
        return float(special.ndtr((x - means) / spread).mean()) - chance

    wanted = optimize.brentq(missed, means.min() - 9 * spread, means.max() + 9 * spread)
    assert mixture_quantile(means, spread, chance) == pytest.approx(wanted, abs=1e-11)
    never = np.append(means, [np.inf] * count)  # is below: each chance is half of what it was
    assert mixture_quantile(never, spread, chance / 2) == pytest.approx(wanted, abs=1e-11)


@pytest.mark.parametrize(("mean", "std", "maximum", "has_parent"), [
    (54, 37, 160, True), (128, 68, 320, True), (32, 13, 80, True), (40, 1e-4, 80, True),
    (3, 1.5, 6, True), (90, 8, 100, True), (200, 115, 400, True),
    # beyond what truncation allows
    (256, 252, 512, False), (1, 50, 100, False), (5, 28.9, 100, False), (50, 28.9, 100, False),
    (30, 29, 100, False)])
def test_a_parents_truncation_has_the_moments(mean, std, maximum, has_parent):
    parent = truncated_parent(mean, std, maximum)
    assert (parent is not None) == has_parent
    if parent is not None:
        location, scale = parent
        own = stats.truncnorm(-location / scale, (maximum - location) / scale, location, scale)
        assert own.mean() == pytest.approx(mean, rel=1e-7)
        assert own.std() == pytest.approx(std, rel=1e-5)


def _file(folder: Path, text: str) -> Path:
    path = folder / "lengths"
    path.write_text(text, encoding="utf-8")
    return path


OURS = '{"id": "a", "index": 0, "input_tokens": 5, "output_tokens": 2, "text": "x"}\n'
OPENAI = json.dumps({"custom_id": "a", "response": {"body": {"usage": {
    "prompt_tokens": 5, "completion_tokens": 2}}}}) + "\n"


@pytest.mark.parametrize("text", [
    "input,output\n5,2\n", "output, input\n 2, 5\n", "5,2\n", "\ufeffinput,output\n\n5,2\n\n",
    "id,prompt_tokens,completion_tokens\nx,5,2\n", '{"input": 5, "output": 2}\n', OURS, OPENAI])
def test_both_sides_are_read_from_every_form(tmp_path, text):
    path = _file(tmp_path, text)
    assert read_lengths(path, "input", "output").tolist() == [[5, 2]]
    assert read_lengths(path, "input").tolist() == [[5]]
    assert read_lengths(path, "output").tolist() == [[2]]


@pytest.mark.parametrize("text", ["7\n8\n", "tokens\n7\n8\n", '{"n": 7}\n{"n": 8}\n'])
def test_a_file_of_one_column_serves_either_side_and_is_no_pair(tmp_path, text):
    path = _file(tmp_path, text)
    with pytest.raises(InputError, match="no column input"):
        read_lengths(path, "input", "output")
    for side in ("input", "output"):
        assert read_lengths(path, side).tolist() == [[7], [8]]


@pytest.mark.parametrize(("text", "line"), [
    ("input,output\n5,0\n", 2), ("input\n5\nx\n", 3), ("input,output\n5\n", 2),
    ("input\n1.5\n", 2), ('{"input": 5}\n{"input": true}\n', 2), ('{"input": 5}\n{"inp', 2),
    ('{"input": 5}\n[]\n', 2), ("", None), ("input,output\n", None), ("a,b\n1,2\n", 2),
    ("input\n5,6\n", 2), ("input\n5\n", 2), ("output\n5\n", 2), ('{"input": 5}\n', 1),
    ("input\n99999999999999999999999\n", 2), ('{"input": 9' + "9" * 30 + "}", 1), ("{}\n", None)])
def test_a_wrong_length_is_reported_with_its_line(tmp_path, text, line):
    with pytest.raises(InputError) as caught:
        values = read_lengths(_file(tmp_path, text), "input")
        read_lengths(_file(tmp_path, text), "output")
        raise AssertionError(values)
    assert [m.line for m in caught.value.mistakes] == [line]


def test_unreadable_files_are_wrong_input_and_of_mistakes_a_page_is_reported(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\x00")
    for path in (tmp_path / "binary", tmp_path / "none", tmp_path):
        with pytest.raises(InputError):
            read_lengths(path, "input")
    with pytest.raises(InputError) as caught:
        read_lengths(_file(tmp_path, "input,output\n" + "x,y\n" * 500), "input", "output")
    assert len(caught.value.mistakes) == MAX_MISTAKES
