"""plan(problem, timing): the schedule that is shown and executed, and the problems it refuses."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from problems import Refusing, problem_of, roofline_of, timing_of, toy_problem
from problems import roofline_of as toy_times

from xgpt.app.opened_job import OpenedJob, open_file
from xgpt.app.schedule import executable, plan_job
from xgpt.cli.terminal import Terminal
from xgpt.core import catalog
from xgpt.core.cluster import Cluster
from xgpt.core.constraint import latency_constraint
from xgpt.core.controls import FixedSchedule
from xgpt.core.errors import InfeasibleError
from xgpt.core.problem import Problem
from xgpt.core.schedule import Schedule, Status
from xprofiler.roofline import Roofline
from xscheduler.planner import Planner, PlanOptions, plan, plan_with_enough
from xscheduler.progress import Watch
from xscheduler.search_planner import SearchPlanner

pytestmark = pytest.mark.usefixtures("short_replays")
STEADY = PlanOptions(horizon="steady")
BRIEF = PlanOptions(horizon="steady", is_brief=True)


def job_of(num_queries: int | None = 100, latency_s: float = 12.0, *, observes: bool = False,
           **fixed: Any) -> Problem:
    return replace(
        problem_of(latency_s=latency_s), num_queries=num_queries, observes=observes,
        is_synthetic=num_queries is not None, is_revised=observes,
        constraint=latency_constraint(latency_s), fixed=FixedSchedule(**({"tp_degree": 1} | fixed)))


def test_a_short_job_is_planned_for_its_own_queries_unless_the_steady_state_is_asked_for():
    problem = job_of(60, policies=("rra",), replicas=1, encode_chunk=0)
    own, steady = (plan(problem, roofline_of(problem), options) for options in (None, STEADY))
    assert own.proof.status == Status.JOB and steady.proof.status != Status.JOB
    assert own.estimate.figures.throughput_qps <= steady.estimate.figures.throughput_qps
    endless = replace(problem, num_queries=None, is_synthetic=False)
    assert plan(endless, roofline_of(problem)).proof.status != Status.JOB


@pytest.mark.parametrize("policy", ["ft", "dsi"])
def test_a_baseline_is_planned_where_the_job_names_it(policy):
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


def test_all_policies_are_searched_and_none_alone_is_better():
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


def test_lengths_to_be_observed_begin_with_the_quickest_where_nothing_keeps_the_bound():
    problem = job_of(400, 0.5, observes=True)
    schedule = plan(problem, roofline_of(problem))
    assert schedule.proof.status == Status.BEGINNING
    assert schedule.estimate.controls.policy == "rra", "it can be changed while it runs"
    with pytest.raises(InfeasibleError, match="The tightest that can be met is"):
        plan(problem, roofline_of(problem), STEADY)
    with pytest.raises(InfeasibleError):
        plan(replace(problem, is_revised=False), roofline_of(problem))


def test_one_planner_answers_for_many_bounds_and_for_problems_like_its_own():
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


# --- few requests ------------------------------------------------------------------------------


NOTE = "batches will not fill"


def opened(folder: Path, schedule: str, count: int, more: str = "") -> OpenedJob:
    (folder / "job.yaml").write_text(
        f"model: opt-13b\ncluster: a40-4\nworkload: {{requests: {{count: {count}}}, task: S}}\n"
        f"schedule: {{{schedule}}}\n{more}")
    return executable(open_file(folder / "job.yaml", (), Terminal()))


@pytest.mark.parametrize(("schedule", "count"), [
    ("policy: rra, encode_batch: 8, decode_iterations: 4", 1),
    ("policy: rra, encode_batch: 8, decode_iterations: 4", 6),
    ("policy: waa-c, encode_batch: 4", 2), ("policy: orca, max_active: 7", 5),
    ("policy: ft, encode_batch: 16", 3),
    ("policy: sarathi, max_active: 9, token_budget: 64", 4)])
def test_a_schedule_too_large_for_the_job_is_planned(tmp_path, schedule, count, capsys):
    session = opened(tmp_path, schedule, count)
    few = plan_job(session, timing_of(session)).schedule.estimate
    assert f"the job has {count} request" in (said := capsys.readouterr().err) and NOTE in said
    session = opened(tmp_path, schedule, 5000)
    many = plan_job(session, timing_of(session)).schedule.estimate
    assert NOTE not in capsys.readouterr().err
    for name in ("policy", "encode_batch", "decode_iterations", "max_active", "token_budget"):
        if f"{name}: " in schedule:
            assert few.variables[name] == many.variables[name], name


def test_nothing_changes_where_nothing_is_fixed(tmp_path, monkeypatch, capsys):
    session = opened(tmp_path, "policy: rra", 3)
    found = plan_job(session, timing_of(session)).schedule.estimate
    assert found.figures.encode_batch <= 3 and NOTE not in capsys.readouterr().err

    def refuse(problem: Problem) -> None:
        assert problem.num_queries == 3, "planned again"
        raise InfeasibleError("no")

    with pytest.raises(InfeasibleError):
        plan_with_enough(session.problem, refuse, print)  # type: ignore[arg-type]


def test_a_job_that_more_requests_would_not_help_is_refused(tmp_path, capsys):
    session = opened(tmp_path, "policy: rra, encode_batch: 8, decode_iterations: 4", 6,
                     "constraint: {latency_s: 0.001}\n")
    with pytest.raises(InfeasibleError):
        plan_job(session, timing_of(session))
    assert NOTE not in capsys.readouterr().err


# --- a search that ends early -----------------------------------------------------------------


NO_TIME_S = 1e-9
WHOLE = FixedSchedule(encode_chunk=0)


def test_a_time_limit_ends_the_search_and_a_long_one_changes_nothing():
    problem = toy_problem(num_queries=200, fixed=WHOLE)
    timing = roofline_of(problem)
    best = plan(problem, timing, STEADY)
    cut, limited = (plan(problem, timing, PlanOptions(horizon="steady", max_seconds=seconds))
                    for seconds in (NO_TIME_S, 1e9))
    assert cut.proof.status == Status.LIMIT and best.proof.status != Status.LIMIT
    assert cut.figures.throughput_qps <= best.figures.throughput_qps <= cut.proof.bound_qps
    assert limited.proof.status != Status.LIMIT and limited.estimate == best.estimate


def test_a_plan_without_time_keeps_its_bound_with_its_margin():
    problem = toy_problem(latency_s=1.0, fixed=WHOLE)
    timing = roofline_of(problem)
    limited = plan(problem, timing, PlanOptions(horizon="steady", max_seconds=NO_TIME_S))
    assert limited.proof.status == Status.LIMIT
    assert limited.figures.latency_s * limited.margin.factor <= 1.0
    assert limited.figures.throughput_qps <= limited.proof.bound_qps


def test_a_search_says_how_far_it_is():
    problem, watch = toy_problem(), Watch()
    Planner(problem, roofline_of(problem), PlanOptions(horizon="steady"), watch=watch).plan()
    assert "of them simulated" in watch.words


def test_only_time_inside_the_watch_counts():
    watch = Watch(math.inf)
    assert watch.seconds == 0
    with watch, watch:
        pass
    spent = watch.seconds
    assert spent > 0 and watch.seconds == spent
    watch.note(6400, 64)
    assert watch.words == "6,400 configurations, 64 of them simulated"
    watch.reset()
    assert watch.seconds == 0 and watch.words == ""


# --- refusals ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("fixed", "confidence"), [
    (FixedSchedule(), 0.9), (FixedSchedule(policies=("rra",), encode_chunk=0), 0.5),
    (FixedSchedule(policies=("waa-c",)), 0.9),
    (FixedSchedule(policies=("sarathi",), replicas=2), 0.5),
    (FixedSchedule(policies=("sarathi",), replicas=2), 0.9)])
def test_the_tightest_bound_that_is_named_is_accepted(fixed, confidence):
    own = replace(problem_of("opt-13b", "a40-4", latency_s=0.1), fixed=fixed)
    own = replace(own, constraint=replace(own.constraint, confidence=confidence))
    timing = Roofline(own.model, own.cluster.device, own.dtype)
    with pytest.raises(InfeasibleError, match="The tightest that can be met is") as refusal:
        plan(own, timing, BRIEF)
    tightest_s = refusal.value.tightest_s
    assert 0.1 < tightest_s < 60
    if confidence > 0.5:
        assert "with its margin" in str(refusal.value)
    found = plan(replace(own, constraint=own.constraint.with_latency(limit_s=tightest_s)), timing,
                 BRIEF)
    assert found.figures.latency_s * found.margin.factor <= tightest_s * (1 + 1e-9)


def test_weights_that_no_device_holds_are_named_with_what_they_take():
    own = problem_of("gpt3-39b", "a40-4")
    one = replace(own, cluster=replace(own.cluster, devices_per_node=1))
    with pytest.raises(InfeasibleError, match="there is too little memory.*more devices"):
        plan(one, roofline_of(one), BRIEF)


def test_fixed_values_that_take_the_memory_are_named():
    fixed = FixedSchedule(policies=("rra",), encode_batch=60_000, decode_iterations=1)
    own = replace(problem_of("opt-13b", "a40-4"), fixed=fixed)
    with pytest.raises(InfeasibleError, match=r"schedule.encode_batch = 60000") as refusal:
        plan(own, roofline_of(own), BRIEF)
    assert "too little memory" in str(refusal.value)


def test_too_few_queries_for_what_is_fixed_are_counted():
    fixed = FixedSchedule(policies=("rra",), encode_batch=8, decode_iterations=4)
    own = replace(problem_of("opt-13b", "a40-4"), fixed=fixed, num_queries=3)
    with pytest.raises(InfeasibleError, match="has 3 requests, and every configuration") as refusal:
        SearchPlanner(own, roofline_of(own)).best(math.inf, has_margin=False)
    assert math.isinf(refusal.value.tightest_s)
    many = replace(own, num_queries=3000)
    assert SearchPlanner(many, roofline_of(many)).best(math.inf, has_margin=False)


@pytest.mark.parametrize("policy", ["rra", "waa-m", "ft", "vllm"])
def test_a_profile_that_ends_before_the_job_is_named(policy):
    own = toy_problem(fixed=FixedSchedule(policies=(policy,), tp_degree=1))
    timing: Any = Refusing(toy_times(own), 0.0)
    with pytest.raises(InfeasibleError, match="was measured for smaller sizes"):
        plan(own, timing, BRIEF)


def endless(model: str, device: str, link: str, num_nodes: int) -> Problem:
    """A model on two of these GPUs, on one node or two, without a limit."""
    return Problem(
        model=catalog.model(model), dtype="bfloat16", lengths=catalog.task("S"),
        cluster=Cluster(name="few", device=catalog.device(device), num_nodes=num_nodes,
                        devices_per_node=2, intra_link=catalog.link(link),
                        inter_link=catalog.link("ib-400g")),
        constraint=latency_constraint(latency_s=math.inf), num_queries=None,
        fixed=FixedSchedule(policies=("sarathi",)), default_max_tokens=80)


def simple_and_fastest(problem: Problem, timing: Roofline) -> tuple[Schedule, Schedule, float]:
    """(the schedule that is chosen, the fastest one, the share of throughput between them)."""
    simple = Planner(problem, timing).steady()
    fastest = SearchPlanner(problem, timing, is_brief=True).best(math.inf, has_margin=False)
    return simple, fastest, 1 - simple.figures.throughput_qps / fastest.figures.throughput_qps


def test_of_near_ties_the_simplest_is_taken_and_what_it_gives_up_is_said():
    """One replica across both nodes is 1 to 2 % faster than one in each node."""
    problem = endless("opt-13b", "A40", "pcie4-x16-p2p", 2)
    simple, fastest, lost = simple_and_fastest(
        problem, Roofline(problem.model, problem.cluster.device, problem.dtype))
    assert fastest.deployment.devices_per_replica > 2, "else this test shows nothing"
    assert simple.deployment.devices_per_replica == 2, "within a node"
    assert lost < 0.025
    (note,) = (note for note in simple.estimate.notes if "simpler placement" in note)
    assert "% less throughput" in note


def test_one_stage_ties_with_a_pipeline_within_the_typical_error_of_its_times():
    problem = endless("qwen3-32b", "A100-80", "nvlink3", 1)
    timing = Roofline(problem.model, problem.cluster.device, problem.dtype, engine="vllm")
    simple, fastest, lost = simple_and_fastest(problem, timing)
    assert [len(one.deployment.stages) for one in (fastest, simple)] == [2, 1]
    assert 0.02 < lost <= timing.doubt(1, 2).typical, "more than a tie of measured layouts"
    assert simple.proof.gap >= lost / (1 - lost), "the bound is that of the fastest, too"
