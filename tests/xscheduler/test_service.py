"""The deployment of a service, against every candidate tried by itself."""

import math
from dataclasses import replace

import pytest
from problems import roofline_of, uniform_problem

from xgpt.core.arrivals import Arrivals
from xgpt.core.constraint import Bound
from xgpt.core.controls import FixedSchedule
from xgpt.core.errors import InfeasibleError
from xgpt.core.lengths import JointLengths, truncated_normal
from xscheduler.capacity import Load, highest_rate
from xscheduler.planner import PlanOptions, plan
from xscheduler.progress import Watch
from xscheduler.service import Candidate, ServiceSearch

LENGTHS = JointLengths(inputs=truncated_normal(256, 81, 512), outputs=truncated_normal(32, 13, 80))
FAST = FixedSchedule(policies=("sarathi", "vllm"), token_budget=512, tp_degree=1)


def problem_of(*, ttft_s=1.0, tpot_s=0.1, devices=2, fixed=FAST, attainment=0.9, rate=None,
               objective="throughput"):
    problem = uniform_problem("opt-1.3b", "L4", devices, LENGTHS, math.inf)
    bounds = (Bound(limit_s=math.inf, kind="queries"), *(
        Bound(metric=metric, limit_s=limit_s, kind="queries")
        for metric, limit_s in (("ttft", ttft_s), ("tpot", tpot_s))))
    return replace(problem, fixed=fixed, arrivals=Arrivals(rate=rate), constraint=replace(
        problem.constraint, bounds=bounds, attainment=attainment, objective=objective))


def search_of(problem):
    return ServiceSearch(problem=problem, timing=roofline_of(problem), watch=Watch(),
                         requests=2000)


def by_hand(problem):
    """The highest capacity of all candidates, in requests/s."""
    search, best = search_of(problem), 0.0
    for cell, replays in search.cells:
        for point in map(tuple, cell.points.tolist()):
            one = Candidate(cell=cell, replays=replays, point=point, estimated_qps=1.0,
                            copies=cell.copies)
            best = max(best, highest_rate(search.trials(one)).qps)
    return best


@pytest.mark.parametrize(("ttft_s", "tpot_s"), [(1.0, 0.1), (0.3, 0.03)])
def test_no_candidate_has_a_higher_capacity(ttft_s, tpot_s):
    problem = problem_of(ttft_s=ttft_s, tpot_s=tpot_s)
    search = search_of(problem)
    search.has_margin = False
    found = search.best()
    assert found.capacity_qps >= 0.98 * by_hand(problem)
    account = search.account
    assert account.candidates == (
        account.replayed + account.by_bound + account.by_estimate + account.refused)


def test_the_limits_hold_near_the_capacity_with_another_seed():
    problem = problem_of()
    schedule = plan(problem, roofline_of(problem), PlanOptions())
    served = schedule.served
    assert served.is_at_capacity and served.attainment >= 0.9
    assert served.capacity.qps <= served.capacity.bare_qps <= 1.02 * served.capacity.saturated_qps
    assert served.capacity.lowest_qps <= served.capacity.qps <= served.capacity.highest_qps
    search = search_of(problem)
    cell, replays = next((cell, replays) for cell, replays in search.cells
                         if cell.policy == schedule.estimate.policy
                         and cell.copies == schedule.deployment.replicas)
    one = Candidate(cell=cell, replays=replays, copies=cell.copies, estimated_qps=1.0,
                    point=tuple(schedule.estimate.variables[name]
                                for name in ("max_active", "token_budget")),
                    slower=schedule.margin.factor)
    assert search.trials(one, load=Load(problem, 77)).at(0.95 * served.capacity.qps).holds


def test_the_fewest_devices_that_keep_the_limits_at_a_rate():
    alone = plan(problem_of(devices=1), roofline_of(problem_of(devices=1)), PlanOptions())
    rate = 1.5 * alone.served.capacity.qps
    problem = problem_of(devices=4, rate=rate, objective="devices")
    schedule = plan(problem, roofline_of(problem), PlanOptions())
    assert schedule.estimate.num_devices == 2
    assert schedule.served.capacity.qps >= rate == schedule.served.rate
    one = problem_of(devices=1, rate=rate)
    with pytest.raises(InfeasibleError, match=r"at most .* requests/s keep ttft_s 1.*1 more dev"):
        plan(one, roofline_of(one), PlanOptions())
    many = problem_of(devices=1, rate=1e6)  # more devices than a refusal tries
    with pytest.raises(InfeasibleError, match=r"at most [^;]*$"):
        plan(many, roofline_of(many), PlanOptions())
    never = problem_of(devices=1, ttft_s=1e-4)
    with pytest.raises(InfeasibleError, match="at any rate"):
        plan(never, roofline_of(never), PlanOptions())
