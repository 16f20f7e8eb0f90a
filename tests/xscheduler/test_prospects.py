"""Bounds that hold jointly: the search obeys them, replays keep them, and a job is done in time."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
from problems import Refusing, estimate_of, roofline_of, toy_problem

from xgpt.core.constraint import Bound, Metric
from xgpt.core.errors import InfeasibleError
from xgpt.core.job import FixedSchedule
from xgpt.core.problem import Problem
from xgpt.core.schedule import Schedule
from xgpt.core.schedule_file import from_json, to_json
from xscheduler.evaluator import Evaluator
from xscheduler.planner import Planner, PlanOptions

RRA = FixedSchedule(policies=("rra",), encode_chunk=0)
ONE_COPY = replace(RRA, replicas=1)


def bounded(problem: Problem, latency_s: float = math.inf, **limits_s: float) -> Problem:
    further = [Bound(metric=metric, limit_s=limit_s, kind="queries", quantile=0.9)
               for metric, limit_s in limits_s.items()]
    constraint = problem.constraint.with_latency(limit_s=latency_s)
    return replace(problem, constraint=replace(constraint, bounds=(*constraint.bounds, *further)))


@pytest.fixture(scope="module")
def free() -> Schedule:
    problem = toy_problem(fixed=ONE_COPY)
    return Planner(problem, roofline_of(problem)).plan()


@pytest.mark.parametrize("metric", ["ttft", "tpot"])
def test_a_bound_on_the_tokens_pace_is_kept_by_the_replay(free: Schedule, metric: Metric) -> None:
    problem = toy_problem(fixed=ONE_COPY)
    limit_s = 0.6 * getattr(free.figures, f"{metric}_s")
    asked = bounded(problem, **{metric: limit_s})
    schedule = Planner(asked, roofline_of(problem)).plan()
    assert schedule.figures.throughput_qps <= 1.02 * free.figures.throughput_qps
    (prospect,) = schedule.prospects
    assert prospect.is_kept and prospect.metric == metric
    again = Evaluator(asked, roofline_of(problem)).replay(schedule.estimate, 4000, seed=8)
    seconds = (again.times.encoding_s if metric == "ttft" else
               again.times.tpot_s(again.output_tokens))
    assert np.quantile(seconds[400:-400], 0.9) <= 1.03 * limit_s
    assert from_json(to_json(schedule)) == schedule


def test_a_bound_that_cannot_be_met_is_named_with_what_can_be_had() -> None:
    problem = toy_problem(fixed=ONE_COPY)
    for metric, words in (("ttft", "the time to the first token"),
                          ("tpot", "the time per output token")):
        asked = bounded(problem, **{metric: 1e-6})
        with pytest.raises(InfeasibleError, match=f"bound of 1 us on {words}: the least seen is"):
            Planner(asked, roofline_of(problem)).plan()


@pytest.mark.parametrize("policy", ["rra", "vllm"])
def test_where_the_profile_refuses_all_a_bound_on_the_tokens_pace_is_not_blamed(
        policy: str) -> None:
    problem = toy_problem(fixed=replace(ONE_COPY, policies=(policy,), tp_degree=1))
    with pytest.raises(InfeasibleError, match="was measured for smaller sizes"):
        Planner(bounded(problem, ttft=1.0), Refusing(roofline_of(problem), 0.0)).plan()


def test_a_job_is_done_in_time_or_refused_with_the_shortest_time() -> None:
    problem = toy_problem(num_queries=150, fixed=RRA)
    timing = roofline_of(problem)
    schedule = Planner(problem, timing).plan()
    job = Evaluator(problem, timing).job(schedule.estimate, 3)
    assert job is not None and not schedule.prospects
    in_time = Planner(bounded(problem, makespan=1.01 * job.wall_s), timing).plan()
    assert in_time.estimate == schedule.estimate
    (prospect,) = in_time.prospects
    assert prospect.expected_s == pytest.approx(job.wall_s) and prospect.is_kept
    with pytest.raises(InfeasibleError, match="no schedule answers the 150 queries within") as why:
        Planner(bounded(problem, makespan=0.9 * job.wall_s), timing).plan()
    (shortest,) = re.findall(r"the shortest time that can be had is (\S+) s", str(why.value))
    assert Planner(bounded(problem, makespan=float(shortest)), timing).plan().prospects[0].is_kept
    steady = PlanOptions(horizon="steady")  # of a job without end nothing is asked
    assert Planner(bounded(problem, makespan=1e-6), timing, steady).plan().prospects == ()


def test_a_makespan_has_a_margin() -> None:
    problem = toy_problem(num_queries=400, fixed=RRA)
    unsure = replace(bounded(problem, makespan=1e9), constraint=replace(
        bounded(problem, makespan=1e9).constraint, drift=0.2))
    (prospect,) = Planner(unsure, roofline_of(problem)).plan().prospects
    assert 1.05 < prospect.with_margin_s / prospect.expected_s < 1.35


def test_what_a_closed_form_says_of_the_first_token_and_later_ones() -> None:
    problem = toy_problem(outputs=(12, 5, 30))
    estimate = estimate_of(problem, encode_batch=8, decode_iterations=6)
    figures, tokens = estimate.figures, problem.lengths.outputs.quantile(0.99)
    assert figures.ttft_s is not None and figures.tpot_s is not None
    assert figures.ttft_s + (tokens - 1) * figures.tpot_s == pytest.approx(figures.latency_s)
