"""Figures of many configurations, and one of them put together as an Estimate."""

from __future__ import annotations

import math

import numpy as np
import pytest

from xgpt.core import catalog
from xgpt.core.constraint import latency_constraint
from xgpt.core.job import FixedSchedule
from xgpt.core.policies import policy_names
from xgpt.core.problem import Problem
from xprofiler.roofline import Roofline
from xsimulator.policies import make_config, make_policy
from xsimulator.policies.figures import by_plan, gathered
from xsimulator.policies.waa.config import WaaConfig

FIXED = FixedSchedule(
    encode_batch=8, decode_iterations=8, decode_micro_batches=2, encode_micro_batches=6,
    max_active=20, token_budget=1024, tp_degree=2, tp_gpus=2)


def test_columns_are_gathered_row_by_row():
    columns = gathered(4, [(np.array([2, 0]), {"a": np.array([20.0, 0.0])}),
                           ([1, 3], {"a": np.array([10.0, 30.0])})])
    assert columns["a"].tolist() == [0.0, 10.0, 20.0, 30.0]


def test_rows_of_one_plan_stay_in_their_order():
    rows = by_plan([WaaConfig(encode_batch=1, tp_degree=degree, tp_gpus=gpus)
                    for degree, gpus in ((2, 4), (1, 0), (2, 4), (2, 2))])
    assert {plan: own.tolist() for plan, own in rows.items()} == {
        (2, 4): [0, 2], (1, 0): [1], (2, 2): [3]}


@pytest.mark.parametrize("name", policy_names())
def test_an_estimate_says_what_the_arrays_say_and_describes_its_configuration(name):
    lengths = catalog.task("S")
    problem = Problem(
        model=catalog.model("opt-13b"), cluster=catalog.cluster("a40-4"), lengths=lengths,
        dtype="float16", num_queries=None, constraint=latency_constraint(latency_s=math.inf),
        fixed=FixedSchedule(), default_max_tokens=lengths.outputs.max)
    policy = make_policy(name, problem, Roofline(
        problem.model, problem.cluster.device, problem.dtype))
    config, missing = make_config(name, FIXED)
    assert not missing
    estimate, arrays = policy.estimate(config), policy.evaluate([config])
    figures, deployment = estimate.figures, estimate.deployment
    for key in ("throughput_qps", "latency_s", "period_s", "encode_s", "decode_batch", "fits"):
        assert getattr(figures, key) == pytest.approx(getattr(arrays, key)[0]), key
    assert max(figures.memory_bytes) == math.ceil(arrays.memory_bytes[0])
    ranks = [rank for stage in deployment.stages for rank in stage.ranks]
    assert ranks == list(range(len(figures.memory_bytes))) == [0, 1, 2, 3]
    assert deployment.kv_tokens == int(arrays.kv_tokens[0])
    again, _ = make_config(name, estimate)
    assert policy.estimate(again) == estimate
