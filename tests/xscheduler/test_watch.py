"""A search that ends early: what it says it has proved holds, and without a limit the clock decides
nothing."""

import math

from problems import roofline_of, toy_problem

from xgpt.core.job import FixedSchedule
from xgpt.core.schedule import Status
from xscheduler.planner import PlanOptions, plan
from xscheduler.watch import Watch

NO_TIME_S = 1e-9
WHOLE = FixedSchedule(encode_chunk=0)


def test_a_search_cut_short_stays_below_what_there_is_and_below_its_own_bound() -> None:
    problem = toy_problem(num_queries=200, fixed=WHOLE)
    timing = roofline_of(problem)
    best = plan(problem, timing, PlanOptions(horizon="steady"))
    cut = plan(problem, timing, PlanOptions(horizon="steady", max_seconds=NO_TIME_S))
    assert cut.proof.status == Status.LIMIT and best.proof.status != Status.LIMIT
    assert cut.figures.throughput_qps <= best.figures.throughput_qps <= cut.proof.bound_qps


def test_with_time_enough_the_schedule_is_the_one_without_a_limit() -> None:
    problem = toy_problem(fixed=WHOLE)
    timing = roofline_of(problem)
    limited = plan(problem, timing, PlanOptions(horizon="steady", max_seconds=1e9))
    assert limited.proof.status != Status.LIMIT
    assert limited.estimate == plan(problem, timing, PlanOptions(horizon="steady")).estimate


def test_a_plan_without_time_keeps_its_bound_with_its_margin() -> None:
    problem = toy_problem(latency_s=1.0, fixed=WHOLE)
    timing = roofline_of(problem)
    limited = plan(problem, timing, PlanOptions(horizon="steady", max_seconds=NO_TIME_S))
    assert limited.proof.status == Status.LIMIT
    assert limited.figures.latency_s * limited.margin.factor <= 1.0
    assert limited.figures.throughput_qps <= limited.proof.bound_qps


def test_only_what_is_watched_counts_and_a_new_schedule_begins_anew() -> None:
    watch = Watch(math.inf)
    assert watch.seconds == 0
    with watch, watch:
        pass
    spent = watch.seconds
    assert spent > 0 and watch.seconds == spent
    assert not watch.ends(64, 2.0, 3.0) and "best 2 queries/s, at most 3 possible" in watch.words
    watch.reset()
    assert watch.seconds == 0 and watch.words == ""
