"""Output lengths while queries are still at work: the estimate is unbiased where the mean of those
that are done is not, and drift is told from chance."""

import numpy as np
import pytest

from xgpt.core.lengths import JointLengths, empirical, truncated_normal
from xscheduler.live.observed import Observation, drift_of, joint_of, observed_lengths

PLANNED = truncated_normal(50, 25, 120)


def at_work(lengths: np.ndarray, per_phase: int, iterations: int, phases: int,
            inputs: np.ndarray | None = None) -> Observation:
    """RRA's view after `phases`: each admitted `per_phase` of `lengths`, in order."""
    count = per_phase * phases
    own = lengths[:count]
    age = (phases - np.arange(count) // per_phase) * iterations
    given = np.full(count, 30) if inputs is None else inputs[:count]
    pairs = np.stack([given, np.minimum(own, age)], axis=1)
    return Observation(finished=pairs[own <= age], active=pairs[own > age])


def test_the_estimate_is_unbiased_while_the_mean_of_those_done_is_far_too_low() -> None:
    rng = np.random.default_rng(3)
    found, naive, errors = [], [], []
    for _ in range(200):
        seen = at_work(PLANNED.sample(1000, rng), per_phase=25, iterations=15, phases=9)
        own = observed_lengths(seen, PLANNED, longest=120)
        found.append(own.outputs.mean)
        errors.append(own.mean_error)
        naive.append(seen.finished[:, 1].mean())
    assert np.mean(found) == pytest.approx(PLANNED.mean, rel=0.01)
    assert np.mean(naive) < 0.9 * PLANNED.mean
    assert np.mean(errors) == pytest.approx(np.std(found), rel=0.2), "what it says of its own error"


def test_the_last_queries_alone_do_not_bias_it_either() -> None:
    """A window of the latest queries, as a long run keeps: nobody in it has been there for long."""
    rng = np.random.default_rng(4)
    found, unknown = [], []
    for _ in range(100):
        seen = at_work(PLANNED.sample(400, rng), per_phase=40, iterations=10, phases=8)
        own = observed_lengths(seen, PLANNED, longest=120)
        found.append(own.outputs.mean)
        unknown.append(own.unknown)
    assert np.mean(found) == pytest.approx(PLANNED.mean, rel=0.01)
    assert np.mean(unknown) == pytest.approx(PLANNED.pmf[80:].sum(), rel=0.1)


def test_all_done_is_the_plain_distribution() -> None:
    lengths = np.array([3, 5, 5, 9, 2, 3, 3, 7])
    seen = Observation(finished=np.stack([lengths, lengths], axis=1),
                       active=np.zeros((0, 2), np.int64))
    own = observed_lengths(seen, PLANNED, longest=120)
    np.testing.assert_allclose(own.outputs.pmf, empirical(lengths).pmf, atol=1e-12)
    assert own.unknown == 0 and own.outputs.num_samples == 8
    assert own.mean_error == pytest.approx(lengths.std() / np.sqrt(8), rel=1e-9)


def test_what_nobody_was_watched_for_is_as_planned_or_else_at_the_cap() -> None:
    active = np.array([[30, 10], [30, 10]])
    seen = Observation(finished=np.array([[30, 4], [30, 8]]), active=active)
    own = observed_lengths(seen, PLANNED, longest=120)
    assert own.unknown == pytest.approx(0.5)
    rest = PLANNED.pmf[10:]
    np.testing.assert_allclose(own.outputs.pmf[10:], 0.5 * rest / rest.sum(), atol=1e-12)
    beyond = observed_lengths(seen, empirical([6, 10]), longest=64).outputs
    assert beyond.max == 64 and beyond.pmf[-1] == pytest.approx(0.5)


def drift(actual, count: int, seed: int, quantile: float = 0.99, threshold: float = 0.1):
    seen = at_work(actual.sample(2 * count, np.random.default_rng(seed)), per_phase=count // 8,
                   iterations=20, phases=12)
    return drift_of(PLANNED, observed_lengths(seen, PLANNED, 240), threshold=threshold,
                    quantile=quantile)


def test_chance_is_no_drift_and_a_longer_mean_is() -> None:
    assert sum(bool(drift(PLANNED, 200, seed)) for seed in range(200)) <= 4
    longer = truncated_normal(65, 25, 140)
    assert all(drift(longer, 200, seed).is_mean for seed in range(40))
    assert not any(drift(longer, 200, seed, threshold=0.6).is_mean for seed in range(20))
    figures = drift(longer, 400, 0)
    assert figures.planned_mean == PLANNED.mean
    assert figures.observed_mean == pytest.approx(65, rel=0.08)


def test_a_longer_tail_is_drift_though_the_mean_stays() -> None:
    tails = empirical(np.concatenate([PLANNED.sample(9000, np.random.default_rng(0)) * 9 // 10 + 1,
                                      np.full(600, 150)]))
    assert tails.mean == pytest.approx(50, rel=0.06)
    found = drift(tails, 400, 1)
    assert found.is_reach and not found.is_mean
    assert found.observed_reach == 150 > 1.1 * found.planned_reach


def test_inputs_stay_with_their_outputs_where_the_two_are_correlated() -> None:
    rng = np.random.default_rng(5)
    outputs = PLANNED.sample(1000, rng)
    planned = JointLengths(inputs=truncated_normal(40, 20, 90), outputs=PLANNED)
    like = np.clip(outputs + rng.integers(-8, 9, 1000), 1, None)
    found = []
    for inputs in (like, rng.permutation(like)):
        seen = at_work(outputs, per_phase=25, iterations=15, phases=12, inputs=inputs)
        found.append(joint_of(seen, observed_lengths(seen, PLANNED, 120), planned))
    together, apart = found
    assert np.corrcoef(*together.pairs.T)[0, 1] > 0.9
    assert together.outputs.mean == pytest.approx(PLANNED.mean, rel=0.08)
    assert together.inputs.mean == pytest.approx(like.mean(), rel=0.08)
    assert together.outputs.num_samples == apart.outputs.num_samples < 300
    assert apart.pairs is None and apart.inputs is planned.inputs
