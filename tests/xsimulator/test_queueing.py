"""Replays of encodings that arrive at random, beside the formula of their queue."""

import math

import numpy as np
import pytest
from both_replays import TakenAsTrue
from problems import problem_of

from xgpt.core.controls import FixedSchedule
from xgpt.core.lengths import joint_empirical
from xgpt.core.problem import QueryLengths
from xprofiler.timing import TimingFacts
from xscheduler.replicas import problem_on
from xsimulator.queueing import mean_ttft_s
from xsimulator.replay.job import Replayer
from xsimulator.rough.formulas import fixed_estimate

ENCODINGS = 400_000


class OneStep(TakenAsTrue):
    """A step takes the same seconds on every stage, whatever is in it."""

    def operator_s(self, operator, x, y=0.0, *, tp_degree=1):
        return np.zeros(np.broadcast_shapes(np.shape(x), np.shape(y)))

    def message_s(self, kind, num_bytes, link, *, tp_degree=1):
        return np.zeros(np.shape(num_bytes))


def replayed_s(stages: int, rate: float, seed: int) -> float:
    """Mean TTFT where an encoding of 0.1 s is divided over so many stages that only encode."""
    problem = problem_on(problem_of("opt-1.3b", "a40-4", joint_empirical(
        np.ones((9, 2), np.int64))), stages + 1)
    timing = OneStep(problem.model, problem.cluster.device, problem.dtype)
    timing.facts = TimingFacts(is_padded=False, step_overhead_s=0.1 / stages)
    estimate = fixed_estimate("waa-c", problem, timing, FixedSchedule(
        encode_batch=1, decode_micro_batches=1))
    assert len(estimate.deployment.pools[0].stages) == stages
    ones = np.ones(ENCODINGS, np.int64)
    arrival_s = np.random.default_rng(seed).exponential(1 / rate, ENCODINGS).cumsum()
    times = Replayer(problem, timing, estimate, has_steps=False).run(
        QueryLengths(inputs=ones, outputs=ones, most_outputs=ones), arrival_s=arrival_s).times
    return float((times.first_token_s - arrival_s).mean())


@pytest.mark.parametrize(("stages", "rate", "mean_s", "within"), [
    (1, 2, 0.1125, 0.01), (1, 5, 0.1500, 0.01), (1, 8, 0.3000, 0.03),
    (2, 2, 0.10278, 0.01), (2, 5, 0.10833, 0.01), (2, 8, 0.11667, 0.01)])
def test_mean_ttft_is_that_of_the_queue(stages, rate, mean_s, within):
    assert mean_ttft_s(rate, 0.1, 0.1 / stages) == pytest.approx(mean_s, abs=1e-5)
    assert mean_ttft_s(4 * rate, 0.1, 0.1 / stages, replicas=4) == pytest.approx(mean_s, abs=1e-5)
    assert replayed_s(stages, rate, seed=stages) == pytest.approx(mean_s, rel=within)


def test_a_queue_without_end_has_no_mean():
    assert mean_ttft_s(10, 0.1) == mean_ttft_s(11, 0.1) == math.inf
    assert mean_ttft_s(11, 0.1, 0.05) < math.inf
