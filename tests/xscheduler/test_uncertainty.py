"""Margins: what they cover, what they say, and that bounds are kept as often as promised."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from toy_jobs import estimate_of, roofline_of, schedule_of, toy_problem

from xgpt.core.errors import InfeasibleError
from xgpt.core.lengths import JointLengths, Lengths, empirical, joint_empirical, truncated_normal
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate, Schedule
from xprofiler.profile import Profile, ProfileMetadata, Sample, TableKey
from xprofiler.profile_timing import ProfileTiming, TableError
from xprofiler.timing import TimingSource
from xscheduler import evaluator
from xscheduler.evaluator import Evaluator
from xscheduler.live.pinned import pinned_policy
from xscheduler.uncertainty import Doubts, MarginParts, upper_limit
from xscheduler.within import plan_within
from xsimulator.policies.rra.closed_form import Rra
from xsimulator.policies.rra.config import RraConfig, RraConfigs

CONFIG = {"encode_batch": 12, "decode_iterations": 6}
BOUND_S = 0.05
SIZES = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0)


def observed(problem: Problem, count: int, seed: int = 0) -> Problem:
    """The problem with outputs known from so many queries."""
    outputs = empirical(problem.lengths.outputs.sample(count, np.random.default_rng(seed)))
    return replace(problem, lengths=replace(problem.lengths, outputs=outputs))


def doubts_of(problem: Problem, timing: TimingSource | None = None) -> Doubts:
    return Doubts(problem, Evaluator(problem, timing or roofline_of(problem)))


def margin_of(problem: Problem, estimate: Estimate | None = None, **constraint: float):
    problem = replace(problem, constraint=replace(problem.constraint, **constraint))
    return doubts_of(problem).margin(estimate or estimate_of(problem, **CONFIG))


# --- what is covered, and what is not ---------------------------------------------------------


def test_nothing_uncertain_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluator, "pinned_policy", None)  # not even an evaluation
    found = margin_of(toy_problem(latency_s=0.1), estimate_of(toy_problem(), **CONFIG))
    assert (found.factor, found.timing, found.lengths, found.drift) == (1, 1, 1, 1)
    assert "not covered" in found.sentence and "given" in found.sentence


def test_an_infinite_bound_needs_no_margin() -> None:
    found = margin_of(observed(toy_problem(), 50), drift=0.2)
    assert found.factor == 1 and "no bound" in found.sentence


def test_more_observations_leave_a_smaller_margin() -> None:
    factors = [margin_of(observed(toy_problem(latency_s=0.1), n)).lengths
               for n in (60, 6000, 600_000)]
    assert factors == sorted(factors, reverse=True)
    assert factors[0] > 1.05 > 1.01 > factors[-1] >= 1


@pytest.mark.parametrize("spread", [0.0, 0.03])
def test_limits_rise_with_confidence(spread: float) -> None:
    logs = np.random.default_rng(0).normal(0.01, 0.1, 40)
    limits = [upper_limit(logs, spread, c) for c in (0.5, 0.8, 0.9, 0.95, 0.97, 0.98, 0.999)]
    assert limits == sorted(limits) and limits[0] < limits[-1]


def test_margins_rise_with_confidence_and_repeat_exactly() -> None:
    problem = observed(toy_problem(latency_s=0.1), 100)
    factors = [margin_of(problem, confidence=c).factor for c in (0.6, 0.95, 0.99)]
    assert factors == sorted(factors) and factors[0] < factors[-1]
    assert margin_of(problem) == margin_of(problem)


def test_limit_of_a_normal_alone() -> None:
    assert upper_limit(np.zeros(1), 0.02, 0.95) == pytest.approx(0.02 * 1.6449, rel=1e-3)


def test_drift_is_the_worst_of_the_drifted_latencies() -> None:
    problem = toy_problem(latency_s=0.1)
    found = margin_of(problem, drift=0.2)
    assert found.drift == found.factor > 1.1
    assert "20%" in found.sentence
    assert margin_of(problem, drift=0.1).factor < found.factor


def test_layers_stay_where_the_schedule_has_them() -> None:
    """Other lengths would move them."""
    problem = toy_problem(latency_s=0.1)
    other = replace(problem, lengths=replace(
        problem.lengths, outputs=truncated_normal(60, 10, 100)))
    estimate = estimate_of(problem, "waa-c", encode_batch=4, decode_micro_batches=2)
    assert estimate_of(other, "waa-c", encode_batch=4, decode_micro_batches=2
                       ).deployment.stages != estimate.deployment.stages
    doubts = doubts_of(problem)
    assert doubts.with_own_lengths(schedule_of(problem, estimate)).estimate == estimate
    expected = pinned_policy(estimate, other, roofline_of(problem)).evaluate(
        [_config(estimate)]).latency_s[0]
    assert doubts._variant("x", other.lengths).latency_s(estimate) == pytest.approx(expected)


def _config(estimate: Estimate):
    from xsimulator.policies import make_config

    return make_config(estimate.policy, estimate)[0]


# --- profiles ---------------------------------------------------------------------------------


def profile_timing(noisy: str = "", scatter: float = 0.0, bend: float = 0.0) -> ProfileTiming:
    """Times that grow with a line's exactness. `noisy`: the table whose samples scatter, or whose
    second point lies off the line by `bend`."""
    rates = {"layer_rest": 1e-6, "embed": 1e-8, "head": 1e-7, "encode_attention": 2e-7,
             "decode_attention": 1e-7}
    tables = {}
    for name, rate in rates.items():
        points = []
        for y in (16.0, 64.0, 256.0) if "attention" in name else (0.0,):
            for place, x in enumerate(SIZES):
                seconds = rate * x * (y / 16 if name == "decode_attention" else 1.0)
                wide = scatter if name == noisy else 0.0
                if name == noisy and place == 2:
                    seconds *= 1 + bend
                points.append(Sample(x=x, y=y, samples_s=tuple(
                    seconds * (1 + wide * k) for k in (-2, -1, 0, 1, 2))))
        tables[TableKey(name)] = tuple(points)
    metadata = ProfileMetadata(model="toy", model_shape="m", device="toy", dtype="float16", ranks=4,
                               threads_per_rank=1, kernels="k", libraries="none", is_padded=False)
    problem = toy_problem()
    return ProfileTiming(Profile(metadata=metadata, tables=tables), roofline_of(problem))


def profile_margin(timing: ProfileTiming):
    problem = toy_problem(latency_s=1.0)
    rra = Rra(problem, timing)
    estimate = rra.estimate(RraConfig(encode_batch=12, decode_iterations=6))
    return doubts_of(problem, timing).margin(estimate)


def test_a_profile_without_noise_on_lines_needs_no_margin() -> None:
    found = profile_margin(profile_timing())
    assert found.factor == pytest.approx(1, abs=1e-6)
    assert "not covered" in found.sentence  # the messages are the roofline's


def test_planted_noise_is_found_and_weighed_by_its_share() -> None:
    errors = profile_timing("layer_rest", scatter=0.05).table_errors()
    quartiles = 0.1  # of samples at -10, -5, 0, 5, 10 %: 5 % on either side
    assert errors[TableKey("layer_rest")].noise == pytest.approx(
        1.25 * quartiles / 1.35 / math.sqrt(5), rel=1e-6)
    assert errors[TableKey("head")].relative == pytest.approx(0, abs=1e-12)
    rest = profile_margin(profile_timing("layer_rest", scatter=0.05)).factor
    head = profile_margin(profile_timing("head", scatter=0.05)).factor
    assert 1 < head < rest < math.exp(1.645 * errors[TableKey("layer_rest")].noise) * 1.001
    assert rest > 1 + 0.2 * 1.645 * errors[TableKey("layer_rest")].noise
    assert profile_margin(profile_timing("layer_rest", scatter=0.1)).factor > rest


def test_a_planted_bend_is_an_error_between_points() -> None:
    straight, bent = (profile_timing("layer_rest", bend=b).table_errors()[TableKey("layer_rest")]
                      for b in (0.0, 0.2))
    assert straight.interpolation == pytest.approx(0, abs=1e-9)
    # the bent point and its two neighbours are missed by other lines
    assert 0.2 / 1.2 / 4 / math.sqrt(3) < bent.interpolation < 0.2


def test_too_few_samples_tell_no_noise() -> None:
    timing = profile_timing()
    bare = replace(timing.profile, tables={
        key: tuple(replace(p, samples_s=p.samples_s[:1]) for p in points)
        for key, points in timing.profile.tables.items()})
    errors = ProfileTiming(bare, roofline_of(toy_problem())).table_errors()
    assert all(error.unknown == 1 and error.noise == 0 for error in errors.values())
    assert "too few samples" in profile_margin(
        ProfileTiming(bare, roofline_of(toy_problem()))).sentence


def test_errors_of_tables_add_as_squares(monkeypatch: pytest.MonkeyPatch) -> None:
    def factor(rest: float, attention: float) -> float:
        errors = {TableKey("layer_rest"): TableError(rest, 0.0, 0.0),
                  TableKey("decode_attention"): TableError(attention, 0.0, 0.0)}
        monkeypatch.setattr(ProfileTiming, "table_errors", lambda self: errors)
        return math.log(profile_margin(profile_timing()).factor)

    first, second = factor(0.02, 0.0), factor(0.0, 0.1)
    assert min(first, second) > 0.001
    assert factor(0.02, 0.1) == pytest.approx(math.hypot(first, second), rel=0.02)


# --- planning within --------------------------------------------------------------------------


GRID = RraConfigs.of([RraConfig(encode_batch=b, decode_iterations=n)
                      for b in range(2, 41) for n in range(1, 20)])


class GridSearch:
    """The best of a grid of RRA's configurations; keeps the figures of the last problem."""

    def __init__(self, grid: RraConfigs = GRID) -> None:
        self.calls, self._grid = 0, grid
        self._lengths: JointLengths | None = None

    def __call__(self, problem: Problem) -> Schedule:
        self.calls += 1
        if problem.lengths is not self._lengths:
            self._lengths = problem.lengths
            self._rra = Rra(problem, roofline_of(problem))
            self._figures = self._rra.evaluate(self._grid)
        found = self._figures
        is_free = found.fits & (found.latency_s <= problem.constraint.latency_s)
        if not is_free.any():
            raise InfeasibleError("the grid has none")
        row = int(np.where(is_free, found.throughput_qps, 0.0).argmax())
        return schedule_of(problem, self._rra.estimate(RraConfig(
            encode_batch=int(self._grid.encode_batch[row]),
            decode_iterations=int(self._grid.decode_iterations[row]))))


def planned(problem: Problem, *, longer: bool = True, grid: RraConfigs = GRID):
    search = GridSearch(grid)

    def within(bound_s: float) -> Schedule:
        return search(replace(problem, constraint=problem.constraint.with_latency(limit_s=bound_s)))

    return plan_within(doubts_of(problem), within,
                       search_problem=search if longer else None), search


def true_latency_s(problem: Problem, estimate: Estimate, outputs: Lengths) -> float:
    truth = replace(problem, lengths=replace(problem.lengths, outputs=outputs))
    policy = pinned_policy(estimate, truth, roofline_of(problem))
    return float(policy.evaluate([_config(estimate)]).latency_s[0])


def test_a_certain_problem_is_searched_once() -> None:
    found, search = planned(toy_problem(latency_s=BOUND_S))
    assert search.calls == 1 and found.cost == 0 and found.margin.factor == 1


@pytest.mark.parametrize("longer", [True, False])
def test_what_is_planned_keeps_the_bound_with_its_own_margin(longer: bool) -> None:
    problem = observed(toy_problem(latency_s=BOUND_S), 200)
    found, _ = planned(problem, longer=longer)
    assert found.is_safe and found.margin.factor > 1 and 0 < found.cost < 0.8
    assert found.schedule.estimate.figures.latency_s * found.margin.factor <= BOUND_S
    assert found.schedule.bound.limit_s == BOUND_S
    again = doubts_of(problem).margin(found.schedule.estimate)
    assert again == found.margin
    assert found.schedule.proof.bound_qps >= found.schedule.estimate.figures.throughput_qps


def test_planning_for_longer_outputs_beats_tightening_the_bound() -> None:
    """Over several samples: the best within a tighter bound sits at the next edge of a phase."""
    problems = [observed(toy_problem(latency_s=BOUND_S), 200, seed) for seed in (2, 3)]
    costs = [[planned(problem, longer=longer)[0].cost for problem in problems]
             for longer in (True, False)]
    assert np.mean(costs[0]) < np.mean(costs[1])


def test_a_bound_that_only_a_schedule_without_margin_keeps_is_infeasible() -> None:
    problem = observed(toy_problem(), 40)
    least = min(Rra(problem, roofline_of(problem)).evaluate(GRID).latency_s)
    tight = replace(
        problem, constraint=problem.constraint.with_latency(limit_s=1.001 * float(least))
    )
    with pytest.raises(InfeasibleError, match="with its margin") as raised:
        planned(tight)
    assert "40 queries" in str(raised.value)


@pytest.mark.parametrize("longer", [True, False])
def test_a_margin_beyond_the_profile_leaves_smaller_schedules(
        monkeypatch: pytest.MonkeyPatch, longer: bool) -> None:
    """Resampled lengths may make a batch larger than any that was measured."""
    own, reach = Doubts.margin, 6

    def limited(self: Doubts, estimate: Estimate) -> MarginParts:
        found = own(self, estimate)
        return found if estimate.figures.encode_batch <= reach else replace(
            found, factor=math.inf, timing=math.inf)

    monkeypatch.setattr(Doubts, "margin", limited)
    # to the last token before the next are encoded: the latency falls with the batch
    static = RraConfigs.of([RraConfig(encode_batch=b, decode_iterations=40) for b in range(2, 41)])
    problem = observed(toy_problem(latency_s=4 * BOUND_S), 200)
    found, search = planned(problem, longer=longer, grid=static)
    assert found.is_safe and 1 < found.schedule.estimate.figures.encode_batch <= reach
    assert search.calls > 2, "larger ones were found first"


def test_no_safe_schedule_found_is_said() -> None:
    problem = observed(toy_problem(latency_s=BOUND_S), 40)
    estimate = estimate_of(problem, **CONFIG)
    stubborn: Callable[[float], Schedule] = lambda bound_s: schedule_of(  # noqa: E731
        problem, estimate.changed(latency_s=BOUND_S))
    found = plan_within(doubts_of(problem), stubborn)
    assert not found.is_safe and found.margin.sentence.startswith("NOT kept")


class Sketch:
    """RRA on a single device that takes 2 ms a step and 20 us a query in it: quick enough for
    hundreds of plans, with the leaps of latency where a length takes one phase more."""

    def __init__(self, problem: Problem) -> None:
        outputs = problem.lengths.outputs
        self._iterations = np.maximum(outputs.support - 1, 0)
        self._pmf = outputs.pmf
        self._seen = outputs.quantile(problem.constraint.quantile) - 1

    def figures(self, batch: np.ndarray, n_d: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(queries a second, latency)."""
        iteration = 2e-3 + 2e-5 * batch * (self._pmf @ self._iterations) / n_d
        encode = 2e-3 + 2e-4 * batch
        period = encode + n_d * iteration
        before = np.ceil(self._seen / n_d) - 1
        return batch / period, (before * period + encode
                                + (self._seen - before * n_d) * iteration)

    def evaluate(self, configs: Sequence[RraConfig]) -> SimpleNamespace:
        (config,) = configs
        _, latency = self.figures(np.array([config.encode_batch]),
                                  np.array([config.decode_iterations]))
        return SimpleNamespace(latency_s=latency)

    def estimate(self, config: RraConfig) -> Estimate:
        rate, latency = self.figures(np.array([config.encode_batch]),
                                     np.array([config.decode_iterations]))
        return SKETCHED.changed(encode_batch=config.encode_batch, latency_s=float(latency[0]),
                       decode_iterations=config.decode_iterations, throughput_qps=float(rate[0]))


SKETCHED = estimate_of(toy_problem(), **CONFIG)
SKETCH_GRID = (np.repeat(np.arange(2, 200), 19), np.tile(np.arange(1, 20), 198))


def sketch_search(problem: Problem) -> Schedule:
    sketch = Sketch(problem)
    rate, latency = sketch.figures(*SKETCH_GRID)
    is_free = latency <= problem.constraint.latency_s
    if not is_free.any():
        raise InfeasibleError("the grid has none")
    row = int(np.where(is_free, rate, 0.0).argmax())
    return schedule_of(problem, sketch.estimate(RraConfig(
        encode_batch=int(SKETCH_GRID[0][row]), decode_iterations=int(SKETCH_GRID[1][row]))))


def broken(seed: int, trials: int, confidence: float) -> tuple[int, int]:
    """Of so many true distributions with 200 outputs observed of each: bounds broken with a margin
    of this confidence, and without one."""
    rng, with_margin, without = np.random.default_rng(seed), 0, 0
    for _ in range(trials):
        truth = truncated_normal(rng.uniform(7, 12), rng.uniform(3, 5), 20)
        problem = toy_problem(latency_s=float(rng.uniform(0.06, 0.2)))
        problem = replace(
            problem, constraint=replace(problem.constraint, confidence=confidence),
            lengths=replace(problem.lengths, outputs=empirical(truth.sample(200, rng))))
        bound_s = problem.constraint.latency_s

        def within(bound_s: float, own: Problem = problem) -> Schedule:
            constraint = own.constraint.with_latency(limit_s=bound_s)
            return sketch_search(replace(own, constraint=constraint))

        found = plan_within(doubts_of(problem), within, search_problem=sketch_search)
        assert found.is_safe
        real = Sketch(replace(problem, lengths=replace(problem.lengths, outputs=truth)))
        for estimate, is_plain in ((found.schedule.estimate, False),
                                   (within(bound_s).estimate, True)):
            is_broken = real.evaluate([_config(estimate)]).latency_s[0] > bound_s
            with_margin += is_broken and not is_plain
            without += is_broken and is_plain
    return with_margin, without


def test_bounds_are_kept_as_often_as_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a margin about half the bounds break."""
    monkeypatch.setattr(evaluator, "pinned_policy", lambda estimate, problem, _: Sketch(problem))
    with_margin, without = broken(7, 100, 0.95)
    assert with_margin <= 8
    assert 30 <= without <= 70
    # and a lower confidence is not the same promise
    assert broken(7, 50, 0.6)[0] > max(with_margin / 2, 3)


@pytest.mark.slow
def test_bounds_are_kept_as_often_as_promised_by_the_closed_form_itself() -> None:
    rng, trials, kept, plain = np.random.default_rng(7), 100, 0, 0
    for _ in range(trials):
        truth = truncated_normal(rng.uniform(7, 12), rng.uniform(3, 5), 20)
        problem = toy_problem(latency_s=float(rng.uniform(0.05, 0.07)))
        problem = replace(problem, lengths=replace(
            problem.lengths, outputs=empirical(truth.sample(200, rng))))
        bound_s = problem.constraint.latency_s
        kept += true_latency_s(
            problem, planned(problem)[0].schedule.estimate, truth) <= bound_s
        plain += true_latency_s(problem, GridSearch()(problem).estimate, truth) <= bound_s
    assert kept >= 92
    assert 25 <= plain <= 75


def test_pairs_are_resampled_together() -> None:
    rng = np.random.default_rng(3)
    inputs = rng.integers(5, 80, 300)
    pairs = np.stack([inputs, np.clip(inputs // 5 + rng.integers(-1, 2, 300), 1, 20)], axis=1)
    problem = replace(toy_problem(latency_s=0.1), lengths=joint_empirical(pairs))
    found = margin_of(problem)
    assert 1 < found.factor < 1.6 and "300 queries" in found.sentence
