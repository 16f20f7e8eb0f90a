"""What uneven batches cost an encode pool: by hand, at its limits, and against the replay."""

from __future__ import annotations

import numpy as np
import pytest
from problems import problem_of, roofline_of

from xgpt.core import catalog
from xgpt.core.lengths import empirical
from xsimulator.policies.waa.closed_form import Waa
from xsimulator.policies.waa.config import WaaConfig
from xsimulator.policies.waa.divisions import FixedDivision
from xsimulator.policies.waa.unevenness import Unevenness, UnevenPool, _between_s
from xsimulator.replay.job import planned_queries, replay_job
from xsimulator.replay.steady import steady_figures

EVEN = empirical([100] * 9)
UNEVEN = catalog.task("S").inputs


def lengthened(inputs, stages, handover=0.25, adjustment=0.1):
    found = Unevenness(inputs, adjustment)
    steps = np.ones((len(found.batches), stages))
    return found.lengthened([UnevenPool(steps, steps, np.full(len(found.batches), handover))])[0]


def test_even_batches_follow_each_other_at_the_slowest_stage():
    np.testing.assert_allclose(lengthened(EVEN, 6), 1.0)
    np.testing.assert_allclose(lengthened(EVEN, 6, handover=3.0), 1.0)


def test_the_longest_path_is_that_of_the_recurrence():
    rng = np.random.default_rng(3)
    shares = rng.uniform(0.2, 1.8, (2, 150))
    steps, handover = np.array([[1.0, 0.7, 0.9], [0.5, 1.2, 1.0]]), np.array([0.3, 2.0])
    pool = UnevenPool(steps, steps, handover)
    many = np.ones((2, 7))
    longer = UnevenPool(many, many, np.array([0.2, 0.4]))  # worked out beside it
    for row in range(2):
        ends = np.zeros((150, 4))
        for n in range(150):
            before = ends[n - 1] if n else np.zeros(4)
            free = ends[n - 5, 3] if n >= 5 else 0.0  # three stages, two steps more
            for j, seconds in enumerate([*(shares[row, n] * steps[row]),
                                         shares[row, n] * handover[row]]):
                free = ends[n, j] = max(free, before[j]) + seconds
        found = _between_s(shares, [longer, pool])[1, row]
        assert found == pytest.approx((ends[-1, 3] - ends[99, 3]) / 50)
    np.testing.assert_array_equal(_between_s(shares, [longer])[0],
                                  _between_s(shares, [longer, pool])[0])


def test_the_loss_grows_with_the_stages_and_falls_with_the_batch():
    few, many = lengthened(UNEVEN, 2), lengthened(UNEVEN, 12)
    assert (many >= few - 0.01).all() and many[0] > few[0] + 0.1
    assert (np.diff(many) < 0).all(), "of one, two and three queries"
    assert lengthened(UNEVEN, 1)[0] < 1.02 < many[2]


def test_batches_that_are_kept_even_lose_nothing_and_those_that_are_not_do():
    adjusted, raw = Unevenness(UNEVEN, 0.1), Unevenness(UNEVEN, 0.0)
    np.testing.assert_array_equal(adjusted.batches, [1, 2, 3])
    assert (adjusted.interpolated(lengthened(UNEVEN, 12), np.array([4.0, 80.0])) == 1).all()
    of_raw = raw.interpolated(lengthened(UNEVEN, 12, adjustment=0.0), np.array([4.0, 8.0, 1e4]))
    assert of_raw[0] > of_raw[1] > 1 and of_raw[2] == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize(("devices", "batch"), [(3, 1), (6, 3), (12, 2)])
def test_a_full_encode_pool_is_as_quick_as_in_the_replay(devices, batch):
    problem = problem_of("gpt3-39b", lengths="S", quantile=0.95)
    timing = roofline_of(problem, padded=False)
    waa = Waa("waa-m", problem, timing, lambda *_: FixedDivision(devices))
    found = waa.estimate(WaaConfig(encode_batch=batch, decode_micro_batches=3))
    steps = waa.times.encode_steps(waa.split(1, 0).plan(devices), np.array([float(batch)]))
    plain = batch / steps.max()
    assert found.figures.throughput_qps < 0.99 * plain, "else this test shows nothing"
    inputs, outputs = problem.lengths.sample(4000, np.random.default_rng(1))
    result = replay_job(problem, timing, found, planned_queries(problem, inputs, outputs))
    steady = steady_figures(result, problem.constraint, problem.lengths.outputs)
    assert steady is not None
    assert found.figures.throughput_qps == pytest.approx(steady.throughput_qps, rel=0.05)
