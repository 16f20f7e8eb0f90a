"""Which latency bounds are searched with: the same with a floor as without one, wherever margins
leap."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pytest
from toy_jobs import estimate_of, schedule_of, toy_problem

from xgpt.core.errors import BeatenError, InfeasibleError
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate, Schedule
from xscheduler import within
from xscheduler.targets import FAR, GROW, NEAREST, SHRINK_UNKNOWN, WORTH, Targets, Unsafe
from xscheduler.uncertainty import MarginParts
from xscheduler.within import ROUNDS, PlannedWithin, plan_within

BOUND_S = 1.0
PROBLEM = toy_problem(latency_s=BOUND_S)
LONGER = replace(PROBLEM.lengths)
ESTIMATE = estimate_of(PROBLEM, encode_batch=4, decode_iterations=4)
BASE = schedule_of(PROBLEM, ESTIMATE)


@dataclass(frozen=True)
class Candidate:
    """A schedule: its latency, that for longer outputs, its throughput, its margin for lengths and
    what a replay adds to that."""

    latency_s: float
    longer_s: float
    qps: float
    lengths: float
    model: float = 1.0

    @cached_property
    def schedule(self) -> Schedule:
        return BASE.changed(estimate=ESTIMATE.changed(
            latency_s=self.latency_s, throughput_qps=self.qps))

    @property
    def is_safe(self) -> bool:
        return self.latency_s * self.lengths * self.model <= BOUND_S


class Landscape:
    """All schedules there are, and their margins: what a real policy's search and doubts come to,
    without their time. Keeps what was searched with and replayed."""

    problem, least_factor, longer = PROBLEM, 1.0, LONGER
    evaluator = None  # nobody looks beside a schedule here

    def __init__(self, candidates: list[Candidate], *, is_longer: bool = True) -> None:
        self._all, self._is_longer = candidates, is_longer
        self._of = {one.latency_s: one for one in candidates}
        self.targets: list[float] = []
        self.replayed: list[float] = []

    def margin(self, estimate: Estimate, *, is_replayed: bool = True) -> MarginParts:
        own = self._of[estimate.figures.latency_s]
        if is_replayed:
            self.replayed.append(own.qps)
        model = own.model if is_replayed else 1.0
        return MarginParts(factor=own.lengths * model, lengths=own.lengths, model=model,
                           sentence="")

    def with_own_lengths(self, schedule: Schedule) -> Schedule:
        return schedule

    def best(self, target_s: float, floor_qps: float, *, is_longer: bool = False) -> Schedule:
        self.targets.append(target_s)
        within = [one for one in self._all if target_s >= (
            one.longer_s if is_longer else one.latency_s)]
        if not within:
            raise InfeasibleError("nothing")
        found = max(within, key=lambda one: one.qps)
        if found.qps <= floor_qps:
            raise BeatenError(found.qps)
        return found.schedule

    def planned(self, floor_qps: float = 0.0) -> PlannedWithin | None:
        """None: nothing that is safe and better than the floor."""
        self.targets, self.replayed = [], []

        def of_problem(problem: Problem) -> Schedule:
            assert problem.lengths is LONGER
            return self.best(problem.constraint.latency_s, floor_qps, is_longer=True)

        try:
            found = plan_within(
                self, lambda bound_s: self.best(bound_s, floor_qps),  # type: ignore[arg-type]
                search_problem=of_problem if self._is_longer else None, floor_qps=floor_qps)
        except InfeasibleError:
            return None
        return found if found.is_safe else None


@pytest.fixture(autouse=True)
def nothing_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The landscape's schedules are all there are (test_nearby.py has those beside others)."""
    monkeypatch.setattr(within, "nearby", lambda evaluator, estimate, latency_s: None)


def landscape(seed: int) -> Landscape:
    """Schedules whose margins have nothing to do with each other."""
    rng = np.random.default_rng(seed)
    latencies = np.sort(rng.uniform(0.4, 1.1, int(rng.integers(2, 60))))
    rates = 100 * np.cumprod(1 + rng.exponential(0.03, len(latencies)))
    candidates = []
    for latency_s, qps in zip(latencies, rates, strict=True):
        lengths = float(1 + rng.exponential(rng.choice([0.02, 0.3])))
        candidates.append(Candidate(
            latency_s=float(latency_s), qps=float(qps), lengths=lengths,
            longer_s=float(latency_s * rng.uniform(1, 1.3)),
            model=float(1 + rng.exponential(0.1) * (rng.random() < 0.3))))
    return Landscape(candidates, is_longer=bool(rng.random() < 0.6))


@pytest.mark.parametrize("seed", [0, *(
    pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))])
def test_a_floor_costs_no_more_than_it_is_worth(seed: int) -> None:
    """Over 60 landscapes with margins at random, at floors all over them: what a policy has by
    itself is had beside the floor, too."""
    num_found = 0
    for one in range(60):
        land = landscape(60 * seed + one)
        alone = land.planned()
        alone_qps = 0.0 if alone is None else alone.schedule.figures.throughput_qps
        targets = list(land.targets)
        for share in (0.3, 0.7, 0.9, 0.97, 0.985, 1.0, 1.2):
            floor_qps = share * max(alone_qps, 100.0)
            found = land.planned(floor_qps)
            qps = 0.0 if found is None else found.schedule.figures.throughput_qps
            assert max(qps, floor_qps) * (1 + WORTH) >= alone_qps
            assert qps == 0 or qps > floor_qps
            if qps > floor_qps:
                num_found += 1
                assert found is not None
                assert land._of[found.schedule.figures.latency_s].is_safe
            if share == 0.3 and alone is not None:
                assert land.targets == targets and qps == alone_qps
    assert num_found > 60, "else floors were too high to tell"


def test_a_schedule_of_less_than_the_floor_does_not_hide_a_safe_one_above_it() -> None:
    """As found in a toy: under the tightest target nothing, then one of less than the floor, then
    one of more; the one above all is not safe, and its margin alone would not lead there."""
    land = Landscape([
        Candidate(0.80, 0.80, 227.0, 1.2), Candidate(0.83, 0.83, 270.0, 1.2),
        Candidate(0.88, 0.88, 300.0, 1.3), Candidate(0.98, 0.98, 400.0, 1.4)])
    for floor_qps in (0.0, 200.0, 231.0, 260.0):
        found = land.planned(floor_qps)
        assert found is not None and found.schedule.figures.throughput_qps == 270.0
        assert len(land.targets) <= ROUNDS + 1
    assert land.planned(271.0) is None


def test_no_replay_is_asked_for_in_vain() -> None:
    land = Landscape([Candidate(0.5, 0.5, 100.0, 1.01), Candidate(0.6, 0.6, 120.0, 1.1),
                      Candidate(0.99, 0.99, 200.0, 1.5)])
    assert land.planned(119.9) is None
    assert not land.replayed, "the only one that is safe has no more than the floor"
    found = land.planned(100.0)
    assert found is not None and land.replayed == [120.0]


def unsafe(target_s: float, factor: float, qps: float = 100.0, *, lengths: float = 1.0,
           model: float = 1.0) -> Unsafe:
    return Unsafe(target_s, target_s * factor, qps,
                  MarginParts(factor=factor, lengths=lengths, model=model, sentence=""))


def test_what_is_beaten_and_what_is_safe_lead_to_the_same_targets() -> None:
    """The rule sees no figures of either."""
    targets = Targets(BOUND_S, 0.9)
    assert targets.next_s(had_qps=0.0, safe_qps=0.0) == 0.9
    targets.beaten(0.9)
    assert targets.next_s(had_qps=0.0, safe_qps=0.0) == GROW * 0.9
    targets.unsafe(unsafe(1.0, 1.05), 1.0)
    aimed_s = targets.next_s(had_qps=0.0, safe_qps=0.0)
    assert aimed_s == pytest.approx(1 / 1.05)
    for had_qps, safe_qps in ((50.0, 0.0), (50.0, 50.0), (97.0, 90.0)):
        assert targets.next_s(had_qps=had_qps, safe_qps=safe_qps) == aimed_s
    assert targets.next_s(had_qps=100 / (1 + WORTH), safe_qps=0.0) is None


def test_between_nothing_and_a_leap_the_middle_is_tried() -> None:
    """Where margins are even, what nothing meets tells that there is nothing; one that a replay
    shows to be FAR off, or one for lengths, does not."""
    def after(high: Unsafe, low_s: float) -> float | None:
        targets = Targets(BOUND_S, low_s)
        targets.begin_below(high)
        targets.empty(low_s)
        return targets.next_s(had_qps=0.0, safe_qps=0.0)

    assert after(unsafe(1.0, 2.1), 0.5) is None
    assert after(unsafe(1.0, 1.2), 0.5) == pytest.approx(1 / 1.2), "the margin leads above it"
    assert after(unsafe(1.0, 2.1, model=FAR - 0.01), 0.5) is None
    assert after(unsafe(1.0, 2.1, model=2.1), 0.5) == pytest.approx(0.5**0.5)
    assert after(unsafe(1.0, 2.1, lengths=2.1), 0.5) == pytest.approx(0.5**0.5)
    assert after(unsafe(1.0, 2.1, lengths=2.1), 1 / FAR + 0.01) is None
    assert after(unsafe(1.0, float("inf"), lengths=float("inf")), 0.9) == pytest.approx(0.9**0.5)


def test_an_unsafe_one_leads_down_and_two_near_each_other_end_it() -> None:
    targets = Targets(BOUND_S, 0.9)
    targets.unsafe(unsafe(0.9, float("inf")), 0.8)
    assert targets.next_s(had_qps=0.0, safe_qps=0.0) == SHRINK_UNKNOWN * 0.8
    targets.unsafe(unsafe(0.6, 1.8), 0.6)
    assert targets.next_s(had_qps=0.0, safe_qps=0.0) == pytest.approx(0.6 / 1.08)
    targets.beaten(0.59)
    assert targets.next_s(had_qps=90.0, safe_qps=0.0) is not None
    assert targets.next_s(had_qps=96.0, safe_qps=96.0) is None, "not STEEP"
    targets.beaten(0.6 / NEAREST + 1e-6)
    assert targets.next_s(had_qps=0.0, safe_qps=0.0) is None
