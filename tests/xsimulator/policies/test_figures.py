"""Figures of many configurations, and one of them put together as an Estimate."""

from __future__ import annotations

import numpy as np
import pytest

from xgpt.core import catalog
from xprofiler.roofline import Roofline
from xsimulator.policies import make_config, make_policy
from xsimulator.policies.figures import by_plan, gathered

POLICIES = {
    "rra": {"encode_batch": 12, "decode_iterations": 8},
    "waa-c": {"encode_batch": 4, "decode_micro_batches": 2},
    "waa-m": {"encode_batch": 4, "decode_micro_batches": 2},
    "ft": {"encode_batch": 16, "decode_micro_batches": 2},
    "dsi": {"encode_batch": 16, "decode_micro_batches": 2, "encode_micro_batches": 6},
    "orca": {"max_active": 20}, "vllm": {"max_active": 20, "token_budget": 1024},
    "sarathi": {"max_active": 20, "token_budget": 256}}


def test_columns_are_gathered_row_by_row():
    columns = gathered(4, [(np.array([2, 0]), {"a": np.array([20.0, 0.0])}),
                           ([1, 3], {"a": np.array([10.0, 30.0])})])
    assert columns["a"].tolist() == [0.0, 10.0, 20.0, 30.0]


def test_rows_of_one_plan_stay_in_their_order():
    rows = by_plan([(2, 4), (1, 0), (2, 4), (2, 2)])
    assert {plan: own.tolist() for plan, own in rows.items()} == {
        (2, 4): [0, 2], (1, 0): [1], (2, 2): [3]}


@pytest.mark.parametrize("name", POLICIES)
def test_an_estimate_says_what_the_arrays_say(name, problem_of):
    problem = problem_of("opt-13b", "a40-4", "S")
    policy = make_policy(name, problem, Roofline(
        problem.model, problem.cluster.device, problem.dtype))
    config, missing = make_config(name, Values(tp_degree=2, tp_gpus=2, **POLICIES[name]))
    assert not missing
    estimate, arrays = policy.estimate(config), policy.evaluate([config])
    figures, ranks = flat(estimate), range(problem.cluster.num_devices)
    for key in ("throughput_qps", "latency_s", "period_s", "encode_s", "decode_batch"):
        assert figures[key] == pytest.approx(getattr(arrays, key)[0]), key
    assert figures["output_tokens_per_s"] == pytest.approx(
        arrays.throughput_qps[0] * problem.lengths.outputs.mean)
    assert len(figures["memory_bytes"]) == len(ranks), "each rank holds something"
    assert max(figures["memory_bytes"]) == int(np.ceil(arrays.memory_bytes[0]))
    assert figures["fits"] == arrays.fits[0]
    assert [rank for stage in figures["stages"] for rank in stage.ranks] == list(ranks)
    assert estimate.notes[0].startswith("times: ")
