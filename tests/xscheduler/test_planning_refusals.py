"""A refusal says what is in the way, and what can be had is then had."""

import math
from dataclasses import replace
from typing import Any

import pytest
from problems import Refusing, problem_of, roofline_of, toy_problem
from problems import roofline_of as toy_times

from xgpt.core.errors import InfeasibleError
from xgpt.core.job import FixedSchedule
from xprofiler.roofline import Roofline
from xscheduler.found_schedule import SearchPlanner
from xscheduler.planner import PlanOptions, plan

STEADY = PlanOptions(horizon="steady", is_brief=True)


@pytest.mark.parametrize("confidence", [0.5, 0.9])
@pytest.mark.parametrize("fixed", [
    FixedSchedule(), FixedSchedule(policies=("rra",), encode_chunk=0),
    FixedSchedule(policies=("waa-c",)), FixedSchedule(policies=("sarathi",), replicas=2)])
def test_the_tightest_bound_that_is_named_is_accepted(fixed: FixedSchedule,
                                                      confidence: float) -> None:
    own = replace(problem_of("opt-13b", "a40-4", latency_s=0.1), fixed=fixed)
    own = replace(own, constraint=replace(own.constraint, confidence=confidence))
    timing = Roofline(own.model, own.cluster.device, own.dtype)
    with pytest.raises(InfeasibleError, match="The tightest that can be met is") as refusal:
        plan(own, timing, STEADY)
    tightest_s = refusal.value.tightest_s
    assert 0.1 < tightest_s < 60
    if confidence > 0.5:
        assert "with its margin" in str(refusal.value)
    found = plan(replace(own, constraint=own.constraint.with_latency(limit_s=tightest_s)), timing,
                 STEADY)
    assert found.figures.latency_s * found.margin.factor <= tightest_s * (1 + 1e-9)


def test_weights_that_no_device_holds_are_named_with_what_they_take() -> None:
    own = problem_of("gpt3-39b", "a40-4")
    one = replace(own, cluster=own.cluster.with_nodes(devices_per_node=1))
    with pytest.raises(InfeasibleError, match="there is too little memory.*more devices"):
        plan(one, roofline_of(one), STEADY)


def test_fixed_values_that_take_the_memory_are_named() -> None:
    fixed = FixedSchedule(policies=("rra",), encode_batch=60_000, decode_iterations=1)
    own = replace(problem_of("opt-13b", "a40-4"), fixed=fixed)
    with pytest.raises(InfeasibleError, match=r"schedule.encode_batch = 60000") as refusal:
        plan(own, roofline_of(own), STEADY)
    assert "too little memory" in str(refusal.value)


def test_too_few_queries_for_what_is_fixed_are_counted() -> None:
    fixed = FixedSchedule(policies=("rra",), encode_batch=8, decode_iterations=4)
    own = replace(problem_of("opt-13b", "a40-4"), fixed=fixed, num_queries=3)
    with pytest.raises(InfeasibleError, match="the job has 3 queries, and the fewest") as refusal:
        SearchPlanner(own, roofline_of(own)).best(math.inf, has_margin=False)
    assert math.isinf(refusal.value.tightest_s)
    many = replace(own, num_queries=3000)
    assert SearchPlanner(many, roofline_of(many)).best(math.inf, has_margin=False)


@pytest.mark.parametrize("policy", ["rra", "waa-m", "ft", "vllm"])
def test_a_profile_that_ends_before_the_job_is_named(policy: str) -> None:
    own = toy_problem(fixed=FixedSchedule(policies=(policy,), tp_degree=1))
    timing: Any = Refusing(toy_times(own), 0.0)
    with pytest.raises(InfeasibleError, match="was measured for smaller sizes"):
        plan(own, timing, STEADY)
