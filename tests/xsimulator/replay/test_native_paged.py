"""Replays of paged KV by csrc/replay/replay.cpp are those of the rules themselves, to the bit,
evictions included."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from problems import problem_of, roofline_of
from replayed_both_ways import assert_names_one_that_never_fits, same_both_ways

from xgpt.core.controls import FixedSchedule
from xgpt.core.lengths import joint_empirical
from xgpt.core.problem import QueryLengths
from xsimulator import native
from xsimulator.replay.job import replay_job
from xsimulator.rough.forms import fixed_estimate

pytestmark = pytest.mark.skipif(native.native() is None, reason="there is no compiler")


def planned(policy, rng, model="opt-13b"):
    """(problem, timing, estimate, queries) of a small job that has hardly room for its queries."""
    size = int(rng.integers(30, 120))
    inputs, outputs = rng.integers(1, 200, size), rng.integers(1, 120, size)
    outputs[rng.random(size) < 0.2] = 1
    problem = problem_of(model, "a40-4", joint_empirical(np.stack([inputs, outputs], axis=1)))
    timing, (degree, gpus) = roofline_of(problem), [(1, 0), (2, 4), (4, 4)][rng.integers(3)]
    estimate = fixed_estimate(policy, problem, timing, FixedSchedule(
        max_active=int(rng.integers(4, 60)), token_budget=int(rng.integers(20, 400)),
        tp_degree=degree, tp_gpus=gpus))
    (pool,) = estimate.deployment.pools
    kv_tokens = pool.num_groups * int(rng.integers(330, 1500))
    deployment = replace(estimate.deployment, pools=(replace(pool, kv_tokens=kv_tokens),))
    queries = QueryLengths(inputs=inputs, outputs=outputs, most_outputs=outputs)
    return problem, timing, replace(estimate, deployment=deployment), queries


@pytest.mark.parametrize("policy", ["sarathi", "vllm"])
def test_a_replay_is_that_of_the_rule(monkeypatch, policy):
    evicted = 0
    for seed in range(18):
        model = ("opt-13b", "t5-11b")[seed % 3 == 2]
        given = planned(policy, np.random.default_rng(seed), model)
        quick = same_both_ways(monkeypatch, lambda given=given: replay_job(*given))
        evicted += quick.preemptions
    assert evicted > 20, "else there was room for all"


def test_a_query_that_never_fits_is_named(monkeypatch):
    job = planned("sarathi", np.random.default_rng(0))
    assert_names_one_that_never_fits(monkeypatch, job)
