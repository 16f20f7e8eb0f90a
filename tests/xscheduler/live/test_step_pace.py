"""Steps that count as slower or quicker than planned: slower ones soon and closely, quicker ones
once they have lasted. Steps are reported as ranks report them, a few at a time."""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from problems import estimate_of, roofline_of, toy_problem
from watched_jobs import steps_of

from xgpt.core.lengths import JointLengths, empirical, truncated_normal
from xrunner.files.heartbeat import ReportedStep
from xrunner.step_record import equal_input_tokens
from xscheduler.live.observations import Observation, joint_lengths, length_drift, observed_lengths
from xscheduler.live.step_monitor import (
    LASTING_S,
    LONG,
    MOST_PATIENCE,
    SWIFT,
    Ratio,
    StepDrift,
    StepMonitor,
    StepSample,
    expected_s,
)
from xsimulator.replay.step_clock import StepClocks, StepSizes

_FAST = toy_problem(per_node=2)
PROBLEM = replace(_FAST, cluster=replace(_FAST.cluster, device=replace(
    _FAST.cluster.device, bandwidth_bytes_per_s=1e9)))  # steps are long against their overhead
TIMING = roofline_of(PROBLEM)
ESTIMATE = estimate_of(PROBLEM, encode_batch=4, decode_iterations=4)
THRESHOLD, AT_ONCE = 0.15, 8


class Told:
    """Reports of decode steps of all stages, each a factor times the source's seconds."""

    def __init__(self) -> None:
        self.pace = StepMonitor(PROBLEM, TIMING, ESTIMATE, threshold=THRESHOLD, longest=100)
        self._now_s = 0.0
        self._steps = {stage: [step for step in own if step.kind == "decode"] for stage, own in (
            steps_of(PROBLEM, TIMING, ESTIMATE, lambda kind, stage: 1.0, count=AT_ONCE).items())}

    def tell(self, factors: Iterator[float] | float, most: int = 1600, *,
             is_by_second: bool = False) -> tuple[int, StepDrift] | None:
        """Until there is a drift: (steps that it took, the drift); None after `most` without.
        `factors`: of each step, or of all that are told of in a second."""
        of: Callable[[], float] = (lambda: factors) if isinstance(factors, float) else (
            lambda: next(factors))
        for count in range(AT_ONCE, most + 1, AT_ONCE):
            factor = [of()] * AT_ONCE if is_by_second else [of() for _ in range(AT_ONCE)]
            self._now_s += 1
            for stage, own in self._steps.items():
                self.pace.add_report(stage, stage, self._now_s, [
                    step._replace(seconds=step.seconds * times)
                    for step, times in zip(own, factor, strict=True)])
            if (found := self.pace.drift()) is not None:
                self.pace.accept(found)
                return count, found
        return None


def test_slower_steps_count_after_a_few_of_them():
    told = Told()
    assert told.tell(1.0, most=200) is None
    found = told.tell(1.5)
    assert found is not None
    count, drift = found
    assert count <= SWIFT.length < LONG.length / 2
    assert drift.now["decode"].factor == drift.planned["decode"].factor == pytest.approx(1.5)
    assert drift.slowed == pytest.approx(1.5) and told.tell(1.5) is None, "that is known now"


def test_a_burst_of_fewer_steps_changes_nothing():
    told = Told()
    assert told.tell(1.0, most=200) is None
    assert told.tell(3.0, most=SWIFT.length // 2) is None
    assert told.tell(1.0, most=400) is None


def test_quicker_steps_must_last_and_longer_each_time_they_were_a_lull():
    told, waits = Told(), []
    for _ in range(6):
        assert told.tell(1.5) is not None
        found = told.tell(1.0)
        assert found is not None and found[1].slowed < 1
        waits.append(found[0])
    lasted_s = [count / AT_ONCE - 1 for count in waits]  # 8 steps are told of a second
    assert lasted_s[:4] == [2**k * LASTING_S for k in range(4)]
    assert lasted_s[4:] == [MOST_PATIENCE * LASTING_S] * 2, "and no longer than that"


def test_quicker_steps_are_planned_with_by_halves():
    """Times of smaller batches say little of the larger ones that would follow."""
    told = Told()
    assert told.tell(1.6) is not None
    halves = []
    for _ in range(2):
        found = told.tell(1.0)
        assert found is not None and found[1].now["decode"].factor == pytest.approx(1.0)
        halves.append(found[1].planned["decode"].factor)
    assert halves == pytest.approx([math.sqrt(1.6), 1.0], rel=0.01)
    assert told.tell(1.0) is None, "all of it is planned with"


def test_steps_that_are_quicker_at_times_change_nothing():
    """Quicker in the mean of any 30 s, but not all the time: the slowest part is planned with."""
    told = Told()
    assert told.tell(1.6) is not None
    slow_now_and_then = itertools.cycle([1.2] * 9 + [1.6] * 6)  # seconds, of 8 steps each
    assert told.tell(slow_now_and_then, most=800, is_by_second=True) is None
    told = Told()
    assert told.tell(1.6) is not None
    found = told.tell(itertools.cycle([1.1, 1.15, 1.25, 1.3]), most=800, is_by_second=True)
    assert found is not None
    assert found[1].now["decode"].factor == pytest.approx(1.2, rel=0.03)
    told = Told()
    assert told.tell(1.6) is not None
    found = told.tell(iter([1.0] * 12 + [1.3] * 5), most=17 * AT_ONCE, is_by_second=True)
    assert found is not None and found[1].now["decode"].factor == pytest.approx(1.3, rel=0.03)


def test_slower_steps_are_planned_with_one_standard_error_more():
    told = Told()
    pulses = iter([1.0, 1.0, 3.0] * 1000)
    found = told.tell(pulses)
    assert found is not None
    now, planned = found[1].now["decode"], found[1].planned["decode"]
    assert now.factor == pytest.approx(5 / 3, rel=0.1)
    assert 1.03 * now.factor < planned.factor < 1.2 * now.factor
    assert told.pace.factors["decode"] == planned
    assert told.tell(pulses) is None, "the mean is less than what is planned with"


@pytest.mark.parametrize(("groups", "factor"), [(1, 1.5), (2, 2.0), (5, 2.0)])
def test_a_slow_stage_counts_as_far_as_it_holds_up_the_others(groups, factor):
    """One of two equal stages takes twice as long. A single group waits for both of them, several
    groups wait for the slow one."""
    slow, quick = [Ratio(math.log(2), 8, 0.02)] * 3, [Ratio(0.0, 8, 0.02)] * 3
    seen = StepSample(groups, {0: quick, 1: slow})
    assert seen.slowest == 1 and seen.expected_s == 0.02
    assert [math.exp(own.log) for own in (seen.mean, seen.median)] == pytest.approx([factor] * 2)
    assert StepSample(groups, {0: quick, 1: quick}).mean == (0.0, 0.0)
    # stages that are held up in turn are as slow as each is in the mean, and no slower
    turns = [slow[0], quick[0]] * 8
    in_turn = StepSample(groups, {0: turns, 1: [*turns[1:], turns[0]]})
    assert math.exp(in_turn.mean.log) == pytest.approx(1.5)


# --- observed output lengths ------------------------------------------------------------------


PLANNED = truncated_normal(50, 25, 120)


def at_work(lengths: np.ndarray, per_phase: int, iterations: int, phases: int,
            inputs: np.ndarray | None = None) -> Observation:
    """RRA's observation after `phases`: each admitted `per_phase` requests of `lengths`, in
    order."""
    count = per_phase * phases
    own = lengths[:count]
    age = (phases - np.arange(count) // per_phase) * iterations
    given = np.full(count, 30) if inputs is None else inputs[:count]
    pairs = np.stack([given, np.minimum(own, age)], axis=1)
    return Observation(finished=pairs[own <= age], active=pairs[own > age])


def test_the_estimate_is_unbiased_while_the_mean_of_finished_requests_is_too_low():
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


def test_the_latest_requests_alone_do_not_bias_the_estimate():
    """A window of the latest requests, as a long run keeps. None in it has been active for long."""
    rng = np.random.default_rng(4)
    found, unknown = [], []
    for _ in range(100):
        seen = at_work(PLANNED.sample(400, rng), per_phase=40, iterations=10, phases=8)
        own = observed_lengths(seen, PLANNED, longest=120)
        found.append(own.outputs.mean)
        unknown.append(own.unknown)
    assert np.mean(found) == pytest.approx(PLANNED.mean, rel=0.01)
    assert np.mean(unknown) == pytest.approx(PLANNED.pmf[80:].sum(), rel=0.1)


def test_finished_requests_alone_give_the_empirical_distribution():
    lengths = np.array([3, 5, 5, 9, 2, 3, 3, 7])
    seen = Observation(finished=np.stack([lengths, lengths], axis=1),
                       active=np.zeros((0, 2), np.int64))
    own = observed_lengths(seen, PLANNED, longest=120)
    np.testing.assert_allclose(own.outputs.pmf, empirical(lengths).pmf, atol=1e-12)
    assert own.unknown == 0 and own.outputs.num_samples == 8
    assert own.mean_error == pytest.approx(lengths.std() / np.sqrt(8), rel=1e-9)


def test_lengths_beyond_the_observed_ones_are_the_planned_ones_or_the_cap():
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
    return length_drift(PLANNED, observed_lengths(seen, PLANNED, 240), threshold=threshold,
                    quantile=quantile)


def test_chance_is_no_drift_and_a_longer_mean_is():
    assert sum(bool(drift(PLANNED, 200, seed)) for seed in range(200)) <= 4
    longer = truncated_normal(65, 25, 140)
    assert all(drift(longer, 200, seed).is_mean for seed in range(40))
    assert not any(drift(longer, 200, seed, threshold=0.6).is_mean for seed in range(20))
    figures = drift(longer, 400, 0)
    assert figures.planned_mean == PLANNED.mean
    assert figures.observed_mean == pytest.approx(65, rel=0.08)


def test_a_longer_tail_is_drift_though_the_mean_stays():
    tails = empirical(np.concatenate([PLANNED.sample(9000, np.random.default_rng(0)) * 9 // 10 + 1,
                                      np.full(600, 150)]))
    assert tails.mean == pytest.approx(50, rel=0.06)
    found = drift(tails, 400, 1)
    assert found.is_quantile_off and not found.is_mean
    assert found.observed_quantile == 150 > 1.1 * found.planned_quantile


def test_inputs_stay_with_their_outputs_where_the_two_are_correlated():
    rng = np.random.default_rng(5)
    outputs = PLANNED.sample(1000, rng)
    planned = JointLengths(inputs=truncated_normal(40, 20, 90), outputs=PLANNED)
    like = np.clip(outputs + rng.integers(-8, 9, 1000), 1, None)
    found = []
    for inputs in (like, rng.permutation(like)):
        seen = at_work(outputs, per_phase=25, iterations=15, phases=12, inputs=inputs)
        found.append(joint_lengths(seen, observed_lengths(seen, PLANNED, 120), planned))
    together, apart = found
    assert np.corrcoef(*together.pairs.T)[0, 1] > 0.9
    assert together.outputs.mean == pytest.approx(PLANNED.mean, rel=0.08)
    assert together.inputs.mean == pytest.approx(like.mean(), rel=0.08)
    assert together.outputs.num_samples == apart.outputs.num_samples < 300
    assert apart.pairs is None and apart.inputs is planned.inputs


@pytest.mark.parametrize("spans", [
    [(0, 40)] * 3, [(60, 20)] * 4, [(75, 5)], [(79, 1)] * 5, [(0, 80), (64, 16)], [(0, 2)] * 9])
def test_a_step_is_timed_by_what_it_encodes_behind_shared_tokens(spans):
    """Steps that encode inputs of at most 80 tokens, of which the cache has some already."""
    clock = StepClocks(PROBLEM, TIMING).of(ESTIMATE.deployment.pools[0].stages, 80)
    tokens = sum(count for _, count in spans)
    step = ReportedStep("encode", len(spans), tokens, 0, 0.0, 0, equal_input_tokens(spans), 1.0)
    wanted = clock.seconds(StepSizes(spans=spans, tokens=tokens, encoded=len(spans), decoded=0,
                                     context=0.0, longest=0.0, moved=0.0, handed=0))
    assert expected_s(clock, step) == pytest.approx(wanted, rel=1e-3)
