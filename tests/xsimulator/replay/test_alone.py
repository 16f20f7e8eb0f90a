"""A pool that is alone decides its steps first and is timed in the end: what comes of it is what
comes of timing each step when it is decided."""

from __future__ import annotations

import numpy as np
import pytest
from problems import problem_of, roofline_of

from xgpt.core.lengths import joint_empirical
from xsimulator.policies import make_config, make_policy
from xsimulator.policies.continuous.config import ContinuousConfig
from xsimulator.policies.rra.config import RraConfig
from xsimulator.replay import flow
from xsimulator.replay.job import planned_queries, replay_job

PAIRS = np.stack([20 + np.arange(120) * 37 % 300, 1 + np.arange(120) * 7 % 90], axis=1)
GROUPS = {"tp_degree": 1, "tp_gpus": 0}
CASES = [
    ("opt-13b", "rra", RraConfig(encode_batch=9, decode_iterations=12, **GROUPS)),
    ("opt-13b", "rra", RraConfig(encode_batch=2, decode_iterations=60, tp_degree=4, tp_gpus=4)),
    ("opt-13b", "rra", RraConfig(encode_batch=9, decode_iterations=12, encode_chunk=64, **GROUPS)),
    ("opt-13b", "rra", RraConfig(encode_batch=6, decode_iterations=30, tp_degree=2, tp_gpus=2)),
    ("t5-11b", "rra", RraConfig(encode_batch=9, decode_iterations=12, **GROUPS)),
    ("opt-13b", "sarathi", ContinuousConfig(max_active=40, token_budget=90, **GROUPS)),
    ("opt-13b", "sarathi", ContinuousConfig(max_active=25, token_budget=30, tp_degree=4,
                                            tp_gpus=4)),
    ("opt-13b", "vllm", ContinuousConfig(max_active=40, token_budget=512, **GROUPS)),
    ("opt-13b", "orca", ContinuousConfig(max_active=17, **GROUPS)),
]


@pytest.mark.parametrize(("model", "policy", "config"), CASES)
def test_steps_timed_in_the_end_are_those_timed_one_by_one(monkeypatch, model, policy, config):
    problem = problem_of(model, "a40-4", joint_empirical(PAIRS))
    timing = roofline_of(problem)
    estimate = make_policy(policy, problem, timing).estimate(config)
    assert make_config(policy, estimate)
    queries = planned_queries(problem, PAIRS[:, 0], PAIRS[:, 1])
    alone = replay_job(problem, timing, estimate, queries)
    usual, timed = flow.is_alone, []
    monkeypatch.setattr(flow, "is_alone", lambda *given: timed.append(usual(*given)) or False)
    by_events = replay_job(problem, timing, estimate, queries)
    assert timed == [True], "else the two are the same"
    assert alone.pools[0].steps == by_events.pools[0].steps
    for name in ("decoded", "encoded", "tokens", "context", "memory_tokens"):
        np.testing.assert_array_equal(*(getattr(one.pools[0], name)
                                        for one in (alone, by_events)), name)
    for name in ("start_s", "end_s", "memory_s"):
        np.testing.assert_allclose(*(getattr(one.pools[0], name)
                                     for one in (alone, by_events)), rtol=1e-9, err_msg=name)
    for name in ("start_s", "first_token_s", "last_token_s"):
        np.testing.assert_allclose(*(getattr(one.times, name)
                                     for one in (alone, by_events)), rtol=1e-9, err_msg=name)
    assert alone.preemptions == by_events.preemptions
