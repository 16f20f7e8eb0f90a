"""Schedules beside one: the same but for how many queries are taken at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from problems import problem_of, roofline_of

from xgpt.core.job import FixedSchedule
from xscheduler.evaluator import Evaluator
from xscheduler.nearby import LEAST, MOST, nearby
from xsimulator.policies import make_policy
from xsimulator.policies.continuous.config import ContinuousConfig
from xsimulator.policies.rra.config import RraConfig
from xsimulator.policies.waa.config import WaaConfig


@pytest.mark.parametrize(("policy", "variable", "config"), [
    ("rra", "encode_batch", RraConfig(encode_batch=24, decode_iterations=12, tp_gpus=0)),
    ("waa-m", "encode_batch", WaaConfig(encode_batch=4, decode_micro_batches=2, tp_gpus=0)),
    ("orca", "max_active", ContinuousConfig(max_active=80, token_budget=0, tp_gpus=0))])
def test_as_many_queries_are_taken_as_the_bound_has_room_for(policy: str, variable: str,
                                                             config: Any) -> None:
    problem = replace(problem_of(lengths="S"), fixed=FixedSchedule(policies=(policy,)))
    form: Any = make_policy(policy, problem, roofline_of(problem))
    latency_s = form.estimate(config).figures.latency_s
    problem = replace(problem, constraint=problem.constraint.with_latency(
        limit_s=1.001 * latency_s))
    evaluator = Evaluator(problem, roofline_of(problem))
    own = evaluator.estimate(form.estimate(config))
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
