"""A safe schedule is looked for policy by policy: the best over all is no worse than any alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from doubted import observed
from toy_jobs import estimate_of, roofline_of, schedule_of, toy_problem

from xgpt.core.errors import BeatenError, InfeasibleError, InputError
from xgpt.core.job import FixedSchedule
from xgpt.core.policies import searched_policies
from xgpt.core.problem import Problem
from xgpt.core.schedule import Schedule
from xscheduler.by_policy import plan_by_policy
from xscheduler.planner import PlanOptions, plan
from xscheduler.search import GAP
from xscheduler.targets import WORTH
from xscheduler.uncertainty import MarginParts
from xscheduler.within import PlannedWithin

PROBLEM = toy_problem(latency_s=0.05)
BOUNDS = (("rra", 12.0), ("sarathi", 11.0), ("orca", 10.0), ("waa-c", 7.0))


def schedule(qps: float, latency_s: float = 0.04) -> Schedule:
    estimate = estimate_of(PROBLEM, encode_batch=4, decode_iterations=4)
    return schedule_of(PROBLEM, estimate, throughput_qps=qps, latency_s=latency_s)


FREE = schedule(12.0).changed(policy_bounds=BOUNDS)


def planned(qps: float, *, factor: float = 1.1, is_safe: bool = True) -> PlannedWithin:
    one = schedule(qps)
    return PlannedWithin(schedule=one, free=one, cost=0.0, is_safe=is_safe,
                         margin=MarginParts(factor=factor, sentence=""))


def nothing(name: str, floor_qps: float) -> float:
    return 0.0


class Plans:
    """What each policy comes to alone; keeps what was asked."""

    def __init__(self, **found: PlannedWithin) -> None:
        self.asked: list[tuple[str, float]] = []
        self._found = {name.replace("_", "-"): one for name, one in found.items()}

    def __call__(self, name: str, floor_qps: float) -> PlannedWithin:
        self.asked.append((name, floor_qps))
        if name not in self._found:
            raise InfeasibleError(f"{name} has none")
        return self._found[name]


def test_another_policy_than_that_of_the_best_without_a_margin_may_win_with_it() -> None:
    plans = Plans(rra=planned(6.0), sarathi=planned(9.9), waa_c=planned(7.0))
    found = plan_by_policy(FREE, plans, promise=nothing, gap=GAP)
    assert found.schedule.figures.throughput_qps == 9.9 and found.free is FREE
    # orca could be better, waa-c could not
    assert plans.asked == [("rra", 0.0), ("sarathi", 6.0), ("orca", 9.9)]


@pytest.mark.parametrize("had_qps", [9.4, 8.0])
def test_what_has_nothing_beside_a_promise_at_first_sight_is_planned_all_the_same(
        had_qps: float) -> None:
    """Nothing at first sight is no proof."""
    plans = Plans(rra=planned(6.0), sarathi=planned(had_qps), orca=planned(9.8))
    promised = {"rra": 6.1, "sarathi": 9.5, "orca": 0.0}
    found = plan_by_policy(FREE, plans, promise=lambda name, floor_qps: promised[name], gap=GAP)
    assert found.schedule.figures.throughput_qps == 9.8
    assert plans.asked == [("sarathi", 0.0), ("rra", had_qps), ("orca", had_qps)]


def test_what_promises_most_with_its_margin_is_planned_first() -> None:
    plans, asked = Plans(rra=planned(6.0), sarathi=planned(9.9), waa_c=planned(7.0)), []

    def promise(name: str, floor_qps: float) -> float:
        asked.append((name, floor_qps))
        return {"rra": 6.1, "sarathi": 10.0}[name]

    found = plan_by_policy(FREE, plans, promise=promise, gap=GAP)
    assert found.schedule.figures.throughput_qps == 9.9
    # orca cannot promise more
    assert asked == [("rra", 0.0), ("sarathi", 6.1)]
    assert plans.asked == [("sarathi", 0.0), ("rra", 9.9), ("orca", 9.9)]


def test_what_is_unsafe_is_no_floor_and_yields_to_what_is_safe() -> None:
    plans = Plans(rra=planned(11.0, is_safe=False), waa_c=planned(1.0))
    found = plan_by_policy(FREE, plans, promise=nothing, gap=GAP)
    assert found.schedule.figures.throughput_qps == 1.0
    assert [floor for _, floor in plans.asked] == [0.0] * 4
    nearest = plan_by_policy(FREE, Plans(rra=planned(11.0, factor=1.4, is_safe=False),
                                         orca=planned(8.0, is_safe=False)),
                             promise=nothing, gap=GAP)
    assert not nearest.is_safe and nearest.schedule.figures.throughput_qps == 8.0


def test_the_best_without_a_margin_is_left_at_where_it_is_safe() -> None:
    plans = Plans(rra=planned(12.0), sarathi=planned(13.0))
    found = plan_by_policy(FREE, plans, promise=nothing, gap=GAP)
    assert found.schedule.figures.throughput_qps == 12.0
    assert plans.asked == [("rra", 0.0)]
    plans = Plans(rra=planned(6.0), sarathi=planned(9.0))
    plan_by_policy(FREE, plans, promise=nothing, gap=GAP, cuts=lambda: True)
    assert plans.asked == [("rra", 0.0)], "the clock has ended it"


def test_where_no_policy_has_any_the_best_one_s_refusal_is_told() -> None:
    with pytest.raises(InfeasibleError, match="rra has none"):
        plan_by_policy(FREE, Plans(), promise=nothing, gap=GAP)


def test_above_what_is_had_elsewhere_only_what_promises_more_is_planned() -> None:
    plans = Plans(rra=planned(6.0), sarathi=planned(9.9), orca=planned(9.0))
    promises = {"rra": 0.0, "sarathi": 9.9, "orca": 9.5}
    found = plan_by_policy(FREE, plans, promise=lambda name, floor_qps: promises[name], gap=GAP,
                           floor_qps=8.0)
    assert found.schedule.figures.throughput_qps == 9.9
    # waa-c's own bound is below what is had; of orca no proof was asked for beyond the best
    assert [name for name, _ in plans.asked] == ["sarathi", "orca"]
    with pytest.raises(BeatenError):
        plan_by_policy(FREE, Plans(), promise=nothing, gap=GAP, floor_qps=8.0)


def doubtful(seed: int) -> Problem:
    """A toy problem with a bound near the tightest, whose lengths are in doubt."""
    rng = np.random.default_rng(seed)
    problem = toy_problem(
        latency_s=float(rng.uniform(0.018, 0.04)), per_node=int(rng.integers(1, 3)), memory=6e8,
        outputs=(float(rng.uniform(8, 11)), 4, 20))
    problem = replace(problem, constraint=replace(
        problem.constraint, drift=float(rng.choice([0.0, 0.1]))))
    return observed(problem, 200, seed) if rng.random() < 0.5 else problem


def safe_qps(problem: Problem) -> float:
    """Queries/s of what is planned with its margin; 0 where there is nothing."""
    try:
        found = plan(problem, roofline_of(problem), PlanOptions(horizon="steady", is_brief=True))
    except (InfeasibleError, InputError):  # of one device WAA has no two pools
        return 0.0
    assert found.proof.bound_qps >= found.figures.throughput_qps * (1 - 1e-9)
    is_safe = found.figures.latency_s * found.margin.factor <= problem.constraint.latency_s
    return found.figures.throughput_qps if is_safe else 0.0


@pytest.mark.usefixtures("short_replays")
# 2: what passes the margin lies above a schedule of less than another policy has; 31: the best
# without a margin is Sarathi's, with it RRA's; 58: RRA has nothing at first sight, and then most
@pytest.mark.parametrize("seed", [
    pytest.param(seed, marks=() if seed in {46, 58} else pytest.mark.slow) for seed in range(61)])
def test_all_policies_together_are_no_worse_than_any_alone(seed: int) -> None:
    problem = replace(doubtful(seed), fixed=FixedSchedule(replicas=1))
    together = safe_qps(problem)
    for name in searched_policies():
        alone = safe_qps(replace(problem, fixed=FixedSchedule(policies=(name,), replicas=1)))
        assert together * (1 + GAP + WORTH) >= alone, name
