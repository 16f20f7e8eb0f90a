"""plan(problem, timing): the one schedule that is shown and executed."""

from dataclasses import replace
from typing import Any

import pytest
from problems import problem_of, roofline_of

from xgpt.core import catalog
from xgpt.core.constraint import latency_constraint
from xgpt.core.errors import InfeasibleError
from xgpt.core.job import FixedSchedule
from xgpt.core.problem import Problem
from xgpt.core.schedule import Status
from xscheduler.planner import Planner, PlanOptions, plan

pytestmark = pytest.mark.usefixtures("short_replays")
STEADY = PlanOptions(horizon="steady")


def job_of(num_queries: int | None = 100, latency_s: float = 12.0, *, observes: bool = False,
           **fixed: Any) -> Problem:
    return replace(
        problem_of(latency_s=latency_s), num_queries=num_queries, observes=observes,
        is_synthetic=num_queries is not None, is_revised=observes,
        constraint=latency_constraint(latency_s), fixed=FixedSchedule(**({"tp_degree": 1} | fixed)))


def test_a_short_job_is_planned_for_its_own_queries_unless_the_steady_state_is_asked_for() -> None:
    problem = job_of(60, policies=("rra",), replicas=1, encode_chunk=0)
    own, steady = (plan(problem, roofline_of(problem), options) for options in (None, STEADY))
    assert own.proof.status == Status.JOB and steady.proof.status != Status.JOB
    assert own.estimate.figures.throughput_qps <= steady.estimate.figures.throughput_qps
    endless = replace(problem, num_queries=None, is_synthetic=False)
    assert plan(endless, roofline_of(problem)).proof.status != Status.JOB


@pytest.mark.parametrize("policy", ["ft", "dsi"])
def test_a_baseline_is_planned_where_the_job_names_it(policy: str) -> None:
    problem = job_of(None, 20.0, policies=(policy,))
    schedule = plan(problem, roofline_of(problem))
    proof = schedule.proof
    assert schedule.estimate.controls.policy == policy and proof.status == Status.WITHIN_GAP
    assert [name for name, _ in proof.policy_bounds] == [policy]
    assert proof.bound_qps == pytest.approx(schedule.figures.throughput_qps * (1 + proof.gap))
    assert proof.unbounded_qps == pytest.approx(schedule.figures.throughput_qps)
    assert schedule.estimate.figures.latency_s * schedule.margin.factor <= 20.0
    assert schedule.explanation
    assert {row.replicas for row in schedule.over_copies} >= {1, 2, 4}


def test_all_policies_are_searched_and_none_alone_is_better() -> None:
    problem = job_of(None, 11.5, tp_degree=None)
    schedule = plan(problem, roofline_of(problem), STEADY)
    # what a grid of sarathi and its neighbours has as its best
    assert schedule.figures.throughput_qps > 39.7
    bounds = dict(schedule.proof.policy_bounds)
    assert set(bounds) == {
        "rra", "waa-c", "waa-m", "orca", "vllm", "sarathi", "ft", "dsi"}
    assert max(bounds.values()) == schedule.proof.bound_qps and schedule.proof.gap < 0.25
    papers = replace(problem, fixed=FixedSchedule(policies=("rra", "waa-c", "waa-m")))
    own = plan(papers, roofline_of(problem), STEADY)
    assert own.figures.throughput_qps <= 1.01 * schedule.figures.throughput_qps
    assert own.estimate.policy in papers.fixed.policies


def test_lengths_to_be_observed_begin_with_the_quickest_where_nothing_keeps_the_bound() -> None:
    problem = job_of(400, 0.5, observes=True)
    schedule = plan(problem, roofline_of(problem))
    assert schedule.proof.status == Status.BEGINNING
    assert schedule.estimate.controls.policy == "rra", "it can be changed while it runs"
    with pytest.raises(InfeasibleError, match="The tightest that can be met is"):
        plan(problem, roofline_of(problem), STEADY)
    with pytest.raises(InfeasibleError):
        plan(replace(problem, is_revised=False), roofline_of(problem))


def test_what_only_the_number_of_queries_forbids_is_planned_with_a_note() -> None:
    problem = job_of(3, policies=("rra",), encode_batch=8, decode_iterations=4)
    said: list[str] = []
    schedule = plan(problem, roofline_of(problem), tell=said.append)
    assert schedule.estimate.figures.encode_batch == 8
    assert len(said) == 1 and "the job has 3 queries" in said[0]


def test_one_planner_answers_for_many_bounds_and_for_problems_like_its_own() -> None:
    problem = job_of(None, 12.0, policies=("rra",))
    planner = Planner(problem, roofline_of(problem))
    schedules = [planner.plan(bound_s) for bound_s in (4.0, 12.0)]
    rates = [schedule.estimate.figures.throughput_qps for schedule in schedules]
    assert rates[0] < rates[1] and [s.bound.limit_s for s in schedules] == [4.0, 12.0]
    relaxed = replace(problem, constraint=problem.constraint.with_latency(limit_s=4.0))
    assert planner.of(relaxed).figures.throughput_qps >= (
        planner.steady(4.0).figures.throughput_qps), "by copies of any sizes"
    fewer = replace(problem, cluster=catalog.cluster("a40-8"))
    assert planner.of(fewer).estimate.figures.throughput_qps > rates[1]
