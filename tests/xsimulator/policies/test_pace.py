"""What closed forms say of a query's first token and its later ones, against the replay."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from problems_suite import TOYS
from toy_jobs import roofline_of, toy_problem

from xgpt.core.job import FixedSchedule
from xscheduler.evaluator import Evaluator
from xsimulator.policies import make_config, make_policy

CASES = {
    "rra": {"encode_batch": 12, "decode_iterations": 6},
    "waa-c": {"encode_batch": 4, "decode_micro_batches": 2},
    "dsi": {"encode_batch": 32, "decode_micro_batches": 2, "encode_micro_batches": 8},
    "orca": {"max_active": 40}, "vllm": {"max_active": 64, "token_budget": 512},
    "sarathi": {"max_active": 64, "token_budget": 128}}


@pytest.mark.parametrize(("model", "policy"), [
    *(("decoder", policy) for policy in CASES),
    *(("encoder-decoder", policy) for policy in ("rra", "waa-c", "dsi"))])
def test_the_tokens_pace_is_that_of_the_replay(model: str, policy: str) -> None:
    problem = replace(toy_problem(outputs=(30, 12, 60), memory=3e9), model=TOYS[model])
    timing = roofline_of(problem)
    config, missing = make_config(policy, replace(
        FixedSchedule(policies=(policy,), tp_degree=1, tp_gpus=0), **CASES[policy]))
    assert not missing
    estimate = make_policy(policy, problem, timing).estimate(config)
    result = Evaluator(problem, timing).replay(estimate, 1600, seed=3)
    steady, times = slice(400, 1200), result.times
    ttft_s, tpot_s = estimate.figures.ttft_s, estimate.figures.tpot_s
    assert ttft_s == pytest.approx(times.encoding_s[steady].mean(), rel=0.1)
    length = problem.lengths.outputs.quantile(0.99)
    is_near = np.abs(result.output_tokens[steady] - length) <= 4
    decoding_s = (times.last_token_s - times.first_token_s)[steady][is_near]
    assert is_near.sum() >= 5
    assert tpot_s == pytest.approx(
        (decoding_s / (result.output_tokens[steady][is_near] - 1)).mean(), rel=0.06)
