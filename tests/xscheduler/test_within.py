"""Planning within a bound with its margin: bounds are kept as often as promised."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from doubted import CONFIG, config_of, doubts_of, observed
from toy_jobs import estimate_of, roofline_of, schedule_of, toy_problem

from xgpt.core.errors import BeatenError, InfeasibleError
from xgpt.core.lengths import JointLengths, Lengths, empirical, truncated_normal
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate, Schedule
from xscheduler import evaluator
from xscheduler.live.pinned import pinned_policy
from xscheduler.uncertainty import Doubts, MarginParts
from xscheduler.within import _Judged, plan_within
from xsimulator.policies.rra.closed_form import Rra
from xsimulator.policies.rra.config import RraConfig, RraConfigs

BOUND_S = 0.05
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
    return float(policy.evaluate([config_of(estimate)]).latency_s[0])


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

    def limited(self: Doubts, estimate: Estimate, *, is_replayed: bool = True) -> MarginParts:
        found = own(self, estimate, is_replayed=is_replayed)
        return found if estimate.figures.encode_batch <= reach else replace(
            found, factor=math.inf, timing=math.inf)

    monkeypatch.setattr(Doubts, "margin", limited)
    # to the last token before the next are encoded: the latency falls with the batch
    static = RraConfigs.of([RraConfig(encode_batch=b, decode_iterations=40) for b in range(2, 41)])
    problem = observed(toy_problem(latency_s=4 * BOUND_S), 200)
    found, search = planned(problem, longer=longer, grid=static)
    assert found.is_safe and 1 < found.schedule.estimate.figures.encode_batch <= reach
    assert search.calls > 2, "larger ones were found first"


def test_a_margin_that_is_too_much_before_a_replay_asks_for_none(
        monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay costs more than all else, and only adds to the margin."""
    own, asked = Doubts.margin, []

    def counted(self: Doubts, estimate: Estimate, *, is_replayed: bool = True) -> MarginParts:
        if is_replayed:
            asked.append(estimate.figures.latency_s)
        return own(self, estimate, is_replayed=is_replayed)

    monkeypatch.setattr(Doubts, "margin", counted)
    problem = observed(toy_problem(latency_s=BOUND_S), 200)
    found, search = planned(problem, longer=False)
    before = [doubts_of(problem).margin(found.free.estimate, is_replayed=False).factor,
              doubts_of(problem).margin(found.free.estimate).factor]
    assert before[0] == before[1] > 1, "nothing is replayed here"
    assert found.is_safe and found.schedule.estimate.figures.latency_s in asked
    assert 0 < len(asked) - 1 < search.calls and BOUND_S not in asked[:-1]


@pytest.mark.parametrize(("more", "is_asked"), [(0.0005, False), (0.002, True)])
def test_hardly_more_than_what_is_safe_is_worth_no_replay(
        monkeypatch: pytest.MonkeyPatch, more: float, is_asked: bool) -> None:
    own, asked = Doubts.margin, []

    def counted(self: Doubts, estimate: Estimate, *, is_replayed: bool = True) -> MarginParts:
        asked.append(is_replayed)
        return own(self, estimate, is_replayed=is_replayed)

    problem = toy_problem(latency_s=BOUND_S)
    first = schedule_of(problem, estimate_of(problem, **CONFIG).changed(latency_s=BOUND_S / 2))
    judged = _Judged(doubts_of(problem), 0.0)
    assert judged.judge(first, BOUND_S) is None and len(judged.safe) == 1
    monkeypatch.setattr(Doubts, "margin", counted)
    qps = (1 + more) * first.figures.throughput_qps
    assert judged.judge(first.changed(estimate=first.estimate.changed(throughput_qps=qps)),
                        BOUND_S) is None
    assert any(asked) == is_asked and len(judged.safe) == 1 + is_asked


def test_what_lies_between_two_sizes_is_found_beside_what_searches_found() -> None:
    """Searches see each ninth batch: what has room for more takes more, and keeps the bound with
    its own margin."""
    batches = range(3, 60, 9)
    for seed in (1, 2, 3):
        problem = observed(toy_problem(latency_s=BOUND_S), 200, seed)
        found, _ = planned(problem, grid=RraConfigs.of([
            RraConfig(encode_batch=b, decode_iterations=n) for b in batches
            for n in range(1, 20)]))
        estimate = found.schedule.estimate
        assert found.is_safe and estimate.figures.encode_batch not in batches
        assert estimate.figures.latency_s * found.margin.factor <= BOUND_S
        assert found.margin == doubts_of(problem).margin(estimate)
        assert found.schedule.proof.gap >= 0


def test_what_is_no_better_than_what_is_had_is_left() -> None:
    problem = observed(toy_problem(latency_s=BOUND_S), 200)
    search = GridSearch()

    def within(bound_s: float) -> Schedule:
        return search(replace(problem, constraint=problem.constraint.with_latency(limit_s=bound_s)))

    found = plan_within(doubts_of(problem), within)
    calls = search.calls
    with pytest.raises(BeatenError):
        plan_within(doubts_of(problem), within, floor_qps=found.free.figures.throughput_qps)
    assert search.calls == calls + 1, "its best without a margin is no better"
    again = plan_within(doubts_of(problem), within,
                        floor_qps=found.schedule.figures.throughput_qps / 2)
    assert again.schedule.estimate == found.schedule.estimate


@pytest.mark.parametrize("is_certain", [True, False])
def test_what_is_safe_at_once_is_searched_for_again_to_the_narrower_gap(is_certain: bool) -> None:
    problem = toy_problem(latency_s=BOUND_S)
    problem = problem if is_certain else observed(problem, 200)
    search, asked = GridSearch(), []

    def within(bound_s: float) -> Schedule:
        asked.append(bound_s)
        return search(replace(problem, constraint=problem.constraint.with_latency(limit_s=bound_s)))

    rough = GridSearch(RraConfigs.of([RraConfig(encode_batch=b, decode_iterations=n)
                                      for b in range(2, 41, 3) for n in range(1, 20)]))
    found = plan_within(doubts_of(problem), within, search_first=lambda bound_s: rough(
        replace(problem, constraint=problem.constraint.with_latency(limit_s=bound_s))))
    best = plan_within(doubts_of(problem), within)
    assert found.is_safe and found.schedule.figures.throughput_qps == pytest.approx(
        best.schedule.figures.throughput_qps, rel=0.02)
    assert rough.calls == 1 and asked.count(BOUND_S) == 1 + is_certain


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
        rate, latency = self.figures(np.array([one.encode_batch for one in configs]),
                                     np.array([one.decode_iterations for one in configs]))
        none = np.zeros(len(configs))
        return SimpleNamespace(latency_s=latency, throughput_qps=rate, fits=none == 0, present=none,
                               stretch=none, ttft_s=none, tpot_s=none)

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
            is_broken = real.evaluate([config_of(estimate)]).latency_s[0] > bound_s
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
