"""Deadlines in the plan of a job: the share of its requests in time by replay, what is chosen for
it, and how many requests are late by every order."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from problems import roofline_of, toy_problem

from xgpt.core.constraint import deadline_bound
from xgpt.core.controls import ORDERS, Adjustment, FixedSchedule
from xgpt.core.errors import InfeasibleError
from xgpt.core.lengths import joint_empirical
from xgpt.core.problem import Problem, QueryLengths
from xscheduler.evaluator import predict
from xscheduler.planner import PlanOptions
from xscheduler.planner import plan as planned
from xsimulator.replay.prediction import EndTimes
from xsimulator.roofline_limit import num_surely_late


def plan(problem, timing):
    return planned(problem, timing, PlanOptions(is_brief=True))


def problem_of(deadlines_s, attainment=0.95, count=60, order="input", chunk=0) -> Problem:
    """A job of `count` requests of known lengths, all of one deadline or each of its own."""
    rng, toy = np.random.default_rng(7), toy_problem(
        per_node=2, fixed=FixedSchedule(policies=("rra",), encode_chunk=chunk))
    inputs, outputs = rng.integers(2, 9, count), rng.integers(1, 20, count)
    return replace(
        toy, num_queries=count, adjustment=Adjustment(order=order),
        lengths=joint_empirical(np.stack([inputs, outputs], axis=1)),
        constraint=replace(toy.constraint, bounds=(
            *toy.constraint.bounds, deadline_bound(attainment=attainment))),
        queries=QueryLengths(inputs=inputs, most_outputs=outputs, outputs=outputs,
                             deadlines_s=np.array(np.broadcast_to(deadlines_s, count), float)))


def test_the_share_in_time_and_the_deadlines_that_would_do():
    ends = EndTimes(np.array([1.0, 2.0, 3.0, 8.0]), np.array([2.0, 2.0, 2.0, 2.0]))
    assert (ends.in_time(), ends.in_time(2.5), ends.in_time(delay_s=0.5)) == (0.5, 0, 0.25)
    assert [ends.stretch(share) for share in (0.25, 0.5, 0.75, 1.0)] == [0.5, 1, 1.5, 4]


def test_at_least_so_many_are_late_by_every_order():
    """Against every subset of seven requests: those in time must be so in order of deadline."""
    rng = np.random.default_rng(3)
    for _ in range(20):
        problem = problem_of(rng.uniform(1e-6, 5e-5, 7), count=7)
        lengths = problem.queries
        alone = [replace(problem, num_queries=1, queries=lengths.take(np.array([row])))
                 for row in range(7)]
        seconds = np.array([_prefill_s(one) for one in alone])
        order = np.argsort(lengths.deadlines_s)
        most = max(size for size in range(8) for own in combinations(order, size) if np.all(
            np.cumsum(seconds[[*own]]) <= lengths.deadlines_s[[*own]]))
        assert num_surely_late(problem) == 7 - most


def _prefill_s(problem):
    """The least deadline at which the only request of a problem is not surely late."""
    low, high = 0.0, 1e-3
    for _ in range(60):
        middle = (low + high) / 2
        own = replace(problem.queries, deadlines_s=np.array([middle]))
        low, high = (middle, high) if num_surely_late(replace(problem, queries=own)) else (
            low, middle)
    return high


def test_the_schedule_with_enough_in_time_is_chosen_and_none_refused_with_what_can():
    rising = np.linspace(1, 3, 60)
    free = problem_of(1e9 * rising, attainment=0.3, chunk=None)
    timing = roofline_of(free)
    fastest = plan(free, timing).estimate
    tight_s = 0.97e9 * rising * predict(free, timing, fastest).ends.stretch(0.3)
    tight = problem_of(tight_s, attainment=0.3, chunk=None)
    assert predict(tight, timing, fastest).ends.in_time() < 0.3
    found = plan(tight, timing)
    (prospect,) = found.prospects
    assert prospect.is_kept and prospect.in_time >= 0.3
    assert prospect.in_time == predict(tight, timing, found.estimate).ends.in_time()
    with pytest.raises(InfeasibleError, match="Lower constraint.attainment to 0") as refused:
        plan(problem_of(tight_s, attainment=0.9), timing)
    assert refused.value.exit_code == 3
    longer = 1.001 * refused.value.tightest_s / tight_s[-1]
    enough = plan(problem_of(tight_s * longer, attainment=0.9), timing)
    assert enough.prospects[0].is_kept


def test_the_order_by_deadlines_has_in_time_what_the_input_order_has_not():
    """The last fifth of the requests is wanted first."""
    free = problem_of(1e9)
    timing = roofline_of(free)
    took_s = predict(free, timing, plan(free, timing).estimate).wall_s
    wanted_s = np.where(np.arange(60) < 48, 1e9, 0.5 * took_s)
    for order in ("deadline", "auto"):
        found = plan(problem_of(wanted_s, order=order), timing)
        assert found.order in ({order} if order == "deadline" else {*ORDERS} - {"input"})
        assert found.prospects[0].is_kept
    with pytest.raises(InfeasibleError, match="0.95 of the requests with a deadline"):
        plan(problem_of(wanted_s), timing)
