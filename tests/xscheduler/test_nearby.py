"""Schedules beside one: the same but for how many queries are taken at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from problems import problem_of, roofline_of

from xgpt.core.job import FixedSchedule
from xscheduler.evaluator import Evaluator
from xscheduler.nearby import LEAST, MOST, nearby
from xscheduler.planner import PlanOptions, plan


@pytest.mark.parametrize(("policy", "variable"), [
    ("rra", "encode_batch"), ("waa-m", "encode_batch"), ("orca", "max_active")])
def test_as_many_queries_are_taken_as_the_bound_has_room_for(policy: str, variable: str) -> None:
    problem = problem_of(lengths="S", latency_s=7.0)
    problem = replace(problem, fixed=FixedSchedule(policies=(policy,)))
    evaluator = Evaluator(problem, roofline_of(problem))
    own = evaluator.estimate(plan(problem, evaluator.timing, PlanOptions(
        horizon="steady", is_brief=True)).estimate.one_copy)
    less = nearby(evaluator, own, 0.98 * own.figures.latency_s)
    assert less is not None and less.figures.latency_s <= 0.98 * own.figures.latency_s
    assert less.deployment.stages == own.deployment.stages
    size, before = less.variables[variable], own.variables[variable]
    assert size is not None and before is not None
    assert LEAST * before - 1 <= size <= MOST * before + 1
    for name in ("decode_iterations", "encode_chunk", "decode_micro_batches", "token_budget"):
        assert less.variables.get(name) == own.variables.get(name)
    back = nearby(evaluator, less, own.figures.latency_s)
    assert back is not None
    assert back.figures.throughput_qps >= max(less.figures.throughput_qps,
                                              own.figures.throughput_qps * (1 - 1e-9))
    assert nearby(evaluator, own, 0.1 * own.figures.latency_s) is None
    fixed = replace(problem, fixed=replace(problem.fixed, **{variable: before}))
    assert nearby(Evaluator(fixed, evaluator.timing), own, own.figures.latency_s) is None
