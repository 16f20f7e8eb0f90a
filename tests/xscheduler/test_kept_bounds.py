"""Limits are kept with their margins: the replayed figure times the factor."""

import math
import re
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from problems import Refusing, estimate_of, problem_of, replay_checked, roofline_of, toy_problem

from xgpt.core.constraint import Bound
from xgpt.core.controls import FixedSchedule
from xgpt.core.errors import InfeasibleError
from xgpt.core.problem import Problem
from xgpt.core.schedule import Schedule
from xgpt.core.schedule_file import from_json, to_json
from xgpt.core.units import parse_seconds
from xprofiler.roofline import Roofline
from xscheduler.evaluator import Evaluator
from xscheduler.planner import Planner, PlanOptions, plan
from xscheduler.replicas import problem_of_replica
from xsimulator.replay.job import planned_queries, replay_job
from xsimulator.replay.steady_state import SteadyFigures

SCATTER = 1.02  # of a latency over seeds of a replay
FIXED = FixedSchedule(policies=("rra", "waa-m", "sarathi"), tp_degree=1, tp_gpus=0)


@cache
def planned(latency_s: float, confidence: float = 0.8, *, drift: float = 0.0,
            fixed: FixedSchedule = FIXED) -> tuple[Problem, Schedule]:
    own = problem_of("opt-13b", "a40-4", latency_s=latency_s)
    own = replace(own, fixed=fixed, constraint=replace(
        own.constraint, confidence=confidence, drift=drift))
    timing = Roofline(own.model, own.cluster.device, own.dtype)
    return own, plan(own, timing, PlanOptions(horizon="steady", is_brief=True))


def replayed(own: Problem, schedule: Schedule) -> SteadyFigures:
    """A replay with other requests than the search used."""
    timing = Roofline(own.model, own.cluster.device, own.dtype)
    found = replay_checked(problem_of_replica(own, schedule.estimate.one_copy), timing,
                           schedule.estimate.one_copy, seed=77)
    assert found is not None
    return found


def test_a_margin_grows_with_the_confidence_and_costs_throughput():
    found = [planned(12.0, confidence)[1] for confidence in (0.5, 0.8, 0.95)]
    factors = [schedule.margin.factor for schedule in found]
    qps = [schedule.figures.throughput_qps for schedule in found]
    assert 1.0 == factors[0] < factors[1] < factors[2]
    assert qps[2] < 0.98 * min(qps[:2]) and found[2].margin.cost > 0


@pytest.mark.parametrize("confidence", [0.5, 0.8, 0.95])
def test_the_replayed_latency_keeps_the_bound_with_its_margin(confidence):
    own, schedule = planned(12.0, confidence)
    assert schedule.figures.latency_s * schedule.margin.factor <= 12.0 * (1 + 1e-9)
    assert replayed(own, schedule).latency_s * schedule.margin.factor <= 12.0 * SCATTER


def test_longer_outputs_than_planned_have_a_margin():
    rra = FixedSchedule(policies=("rra",), tp_degree=1, tp_gpus=0, replicas=1)
    own, drifting = (planned(7.0, 0.5, drift=drift, fixed=rra)[1] for drift in (0.0, 0.2))
    assert drifting.margin.factor > 1.05 * own.margin.factor
    assert drifting.figures.throughput_qps < own.figures.throughput_qps


# --- several bounds ---------------------------------------------------------------------------


RRA = FixedSchedule(policies=("rra",), encode_chunk=0)
ONE_COPY = replace(RRA, replicas=1)


def bounded(problem: Problem, latency_s: float = math.inf, **limits_s: float) -> Problem:
    further = [Bound(metric=metric, limit_s=limit_s, kind="queries", quantile=0.9)
               for metric, limit_s in limits_s.items()]
    constraint = problem.constraint.with_latency(limit_s=latency_s)
    return replace(problem, constraint=replace(constraint, bounds=(*constraint.bounds, *further)))


@pytest.fixture(scope="module")
def free():
    problem = toy_problem(fixed=ONE_COPY)
    return Planner(problem, roofline_of(problem)).plan()


@pytest.mark.parametrize("metric", ["ttft", "tpot"])
def test_a_tpot_limit_is_kept_beside_the_latency_limit(free, metric):
    problem = toy_problem(fixed=ONE_COPY)
    limit_s = 0.6 * getattr(free.figures, f"{metric}_s")
    latency_s = free.figures.latency_s
    asked = bounded(problem, latency_s, **{metric: limit_s})
    schedule = Planner(asked, roofline_of(problem)).plan()
    assert schedule.figures.throughput_qps <= 1.02 * free.figures.throughput_qps
    (prospect,) = schedule.prospects
    assert prospect.is_kept and prospect.metric == metric
    again = replay_job(asked, roofline_of(problem), schedule.estimate, planned_queries(
        asked, *asked.lengths.sample(4000, np.random.default_rng(8))))
    seconds = (again.times.first_token_s - again.times.start_s if metric == "ttft" else
               again.times.tpot_s(again.output_tokens))
    assert np.quantile(seconds[400:-400], 0.9) <= 1.03 * limit_s
    assert np.quantile(again.times.latency_s[400:-400], 0.99) <= 1.03 * latency_s
    assert from_json(to_json(schedule)) == schedule


def test_an_impossible_limit_is_named_with_a_possible_one():
    problem = toy_problem(fixed=ONE_COPY)
    for metric, words in (("ttft", "the time to the first token"),
                          ("tpot", "the time per output token")):
        asked = bounded(problem, **{metric: 1e-6})
        with pytest.raises(InfeasibleError, match=f"limit of 1 us on {words}: the least found is"):
            Planner(asked, roofline_of(problem)).plan()


@pytest.mark.parametrize("policy", ["rra", "vllm"])
def test_a_tpot_limit_is_not_blamed_if_the_profile_is_too_small(policy):
    problem = toy_problem(fixed=replace(ONE_COPY, policies=(policy,), tp_degree=1))
    with pytest.raises(InfeasibleError, match="was measured for smaller sizes"):
        Planner(bounded(problem, ttft=1.0), Refusing(roofline_of(problem), 0.0)).plan()


def test_a_job_is_done_in_time_or_refused_with_the_shortest_time():
    problem = toy_problem(num_queries=150, fixed=RRA)
    timing = roofline_of(problem)
    schedule = Planner(problem, timing).plan()
    job = Evaluator(problem, timing).job(schedule.estimate)
    assert job is not None and not schedule.prospects
    in_time = Planner(bounded(problem, makespan=1.01 * job.wall_s), timing).plan()
    assert in_time.estimate == schedule.estimate
    (prospect,) = in_time.prospects
    assert prospect.expected_s == pytest.approx(job.wall_s) and prospect.is_kept
    with pytest.raises(InfeasibleError, match="no schedule answers the 150 requests within") as why:
        Planner(bounded(problem, makespan=0.9 * job.wall_s), timing).plan()
    (shortest,) = re.findall(r" need (.+?)(?:, |\. |$)", str(why.value))
    limit_s = parse_seconds(shortest)
    assert Planner(bounded(problem, makespan=limit_s), timing).plan().prospects[0].is_kept
    steady = PlanOptions(horizon="steady")  # of a job without end nothing is asked
    assert Planner(bounded(problem, makespan=1e-6), timing, steady).plan().prospects == ()


def test_a_makespan_has_a_margin():
    problem = toy_problem(num_queries=400, fixed=RRA)
    unsure = replace(bounded(problem, makespan=1e9), constraint=replace(
        bounded(problem, makespan=1e9).constraint, drift=0.2))
    (prospect,) = Planner(unsure, roofline_of(problem)).plan().prospects
    assert 1.02 < prospect.with_margin_s / prospect.expected_s < 1.35


def test_ttft_and_tpot_of_the_rough_formula():
    problem = toy_problem(outputs=(12, 5, 30))
    estimate = estimate_of(problem, encode_batch=8, decode_iterations=6)
    figures, tokens = estimate.figures, problem.lengths.outputs.quantile(0.99)
    assert figures.ttft_s is not None and figures.tpot_s is not None
    assert figures.ttft_s + (tokens - 1) * figures.tpot_s == pytest.approx(figures.latency_s)
