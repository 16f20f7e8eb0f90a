"""What searches under several latency bounds share is the time it takes, not what is found."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from problems import problem_of, roofline_of

from xgpt.core.job import FixedSchedule
from xscheduler.planner import Planner, PlanOptions
from xscheduler.search import Scheduler

BOUNDS_S = (math.inf, 12.0, 6.0)


@pytest.mark.parametrize("policy", ["ft", pytest.param("dsi", marks=pytest.mark.slow)])
def test_a_bound_s_best_does_not_depend_on_the_bounds_before_it(policy):
    problem = replace(problem_of(), fixed=FixedSchedule(policies=(policy,)))
    timing = roofline_of(problem)
    shared = Scheduler(problem, timing)
    in_turn = [shared.find(bound_s).estimate for bound_s in BOUNDS_S]
    alone = [Scheduler(problem, timing).find(bound_s).estimate for bound_s in BOUNDS_S]
    assert [one.variables for one in in_turn] == [one.variables for one in alone]
    assert [one.figures.throughput_qps for one in in_turn] == pytest.approx(
        [one.figures.throughput_qps for one in alone], rel=1e-9)


def test_a_configuration_is_evaluated_once():
    problem = replace(problem_of(), fixed=FixedSchedule(policies=("ft",)))
    search = Scheduler(problem, roofline_of(problem))
    search.find(8.0)
    evaluated = search.num_evaluated
    search.find(8.0)
    assert search.num_evaluated == evaluated > 0


@pytest.mark.parametrize("policy", ["rra", pytest.param("ft", marks=pytest.mark.slow)])
def test_without_a_margin_the_bound_is_kept_as_the_closed_form_has_it(policy):
    problem = replace(problem_of(), fixed=FixedSchedule(policies=(policy,)))
    timing = roofline_of(problem)
    bare = Planner(problem, timing, PlanOptions(horizon="steady", has_margin=False)).plan(6.0)
    kept = Planner(problem, timing, PlanOptions(horizon="steady")).plan(6.0)
    assert bare.margin.factor == 1.0 and not bare.explanation
    assert bare.figures.latency_s <= 6.0
    assert bare.figures.throughput_qps >= kept.figures.throughput_qps
    brief = Planner(problem, timing, PlanOptions(horizon="steady", is_brief=True)).plan(6.0)
    assert brief.estimate == kept.estimate and not brief.explanation
    assert brief.proof.unbounded_qps is None
