"""The order that is chosen for a job: by replay, within its limits, only where it is worth it."""

from dataclasses import replace

import numpy as np
import pytest
from problems import problem_of, roofline_of

from xgpt.core.constraint import deadline_bound, latency_constraint
from xgpt.core.controls import Adjustment, FixedSchedule
from xgpt.core.lengths import synthetic_lengths
from xgpt.core.problem import Problem, QueryLengths
from xgpt.core.schedule import Schedule
from xscheduler.evaluator import predict
from xscheduler.ordering import TRIED, in_chosen_order, with_order
from xscheduler.planner import PlanOptions, plan

COUNT = 1000


def job_of(policy: str, count: int = COUNT, **asked) -> tuple[Problem, Schedule]:
    """OPT-13B with task T, outputs known, and the schedule of a policy in the input's order."""
    problem = problem_of(lengths="T")
    problem = replace(problem, num_queries=count, is_synthetic=True,
                      fixed=FixedSchedule(policies=(policy,), replicas=1, tp_degree=4, tp_gpus=4),
                      adjustment=Adjustment(order="input"))
    schedule = plan(problem, roofline_of(problem), PlanOptions(
        has_margin=False, is_brief=True, is_rough=True))
    return replace(problem, adjustment=Adjustment(**asked)), schedule


def makespan_s(problem: Problem, schedule: Schedule) -> float:
    found = predict(in_chosen_order(problem, schedule), roofline_of(problem), schedule.estimate)
    assert found is not None
    return found.wall_s


@pytest.mark.parametrize("policy", ["ft", "rra"])
def test_auto_is_the_quickest_by_replay(policy):
    problem, schedule = job_of(policy)
    found = with_order(problem, roofline_of(problem), schedule)
    seconds = {name: makespan_s(problem, schedule.changed(order=name, window=0))
               for name in ("input", *TRIED)}
    assert found.order == min(seconds, key=seconds.__getitem__) != "input"
    own_s = makespan_s(problem, found)
    assert own_s == pytest.approx(seconds[found.order])
    assert found.order_gain == pytest.approx(1 - own_s / seconds["input"])


def test_an_order_that_is_asked_for_stands_in_the_schedule():
    problem, schedule = job_of("ft", order="shortest-input", window=7)
    found = with_order(problem, roofline_of(problem), schedule)
    assert (found.order, found.window, found.order_gain) == ("shortest-input", 7, 0)
    assert with_order(replace(problem, adjustment=Adjustment(order="input")),
                      roofline_of(problem), schedule) is schedule


def test_equal_requests_and_unknown_lengths_keep_the_inputs_order():
    problem, schedule = job_of("rra")
    unknown = replace(problem, is_synthetic=False)
    assert with_order(unknown, roofline_of(problem), schedule) is schedule
    ones = np.full(COUNT, 90)
    equal = replace(unknown, queries=QueryLengths(inputs=ones, most_outputs=ones, outputs=ones))
    assert with_order(equal, roofline_of(problem), schedule) is schedule


def test_no_order_breaks_a_limit_that_the_inputs_keeps():
    problem, schedule = job_of("rra")
    quickest = with_order(problem, roofline_of(problem), schedule)
    limit_s, beyond_s = (predict(in_chosen_order(problem, one), roofline_of(problem),
                                 one.estimate).latency_p50_s for one in (schedule, quickest))
    assert beyond_s > limit_s
    limited = replace(problem, constraint=latency_constraint(
        latency_s=limit_s, kind="queries", quantile=0.5))
    found = with_order(limited, roofline_of(problem),
                       replace(schedule, bounds=limited.constraint.bounds))
    assert found.order != quickest.order
    assert predict(in_chosen_order(limited, found), roofline_of(problem),
                   found.estimate).latency_p50_s <= limit_s


def test_sampled_outputs_tell_no_gain_from_chance():
    """Equal inputs, outputs unknown: at random is an order, and no better than another."""
    problem, schedule = job_of("rra")
    ones = np.full(COUNT, 128)
    sampled = replace(problem, is_synthetic=False, queries=QueryLengths(
        inputs=ones, most_outputs=np.full(COUNT, problem.lengths.outputs.max)))
    assert with_order(sampled, roofline_of(problem), schedule).order == "input"


def test_a_few_urgent_requests_decide_the_order_if_they_alone_have_deadlines():
    """Lateness is a share of those that have a deadline, here the last thirty of a thousand."""
    problem, schedule = job_of("rra")
    inputs, outputs = synthetic_lengths(problem.lengths, COUNT, problem.seed)
    deadlines_s = np.full(COUNT, np.inf)
    deadlines_s[-30:] = 0.4 * makespan_s(problem, schedule)
    constraint = replace(problem.constraint, bounds=(
        *problem.constraint.bounds, deadline_bound()))
    problem = replace(problem, is_synthetic=False, constraint=constraint, queries=QueryLengths(
        inputs=inputs, most_outputs=outputs, outputs=outputs, deadlines_s=deadlines_s))
    found = with_order(problem, roofline_of(problem), schedule)
    assert found.order == "deadline"
