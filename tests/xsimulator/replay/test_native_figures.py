"""Figures of a replay without its steps are those of its records."""

from dataclasses import replace

import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from problems import TakenAsTrue, problem_of, roofline_of

from xgpt.core.errors import XgptError
from xgpt.core.job import FixedSchedule
from xgpt.core.lengths import joint_empirical
from xsimulator import native
from xsimulator.replay import native_replay
from xsimulator.replay.figures import steady_replay
from xsimulator.replay.job import Replayer, planned_queries, replay_job
from xsimulator.replay.steady import steady_figures
from xsimulator.rough.forms import fixed_estimate

pytestmark = pytest.mark.skipif(native.native() is None, reason="there is no compiler")

PLANS = [(1, 0), (2, 2), (2, 4), (4, 4)]


@st.composite
def configs(draw):
    """(policy, configuration)"""
    def size(most):
        return draw(st.integers(1, most))

    degree, gpus = draw(st.sampled_from(PLANS))
    plan = {"tp_degree": degree, "tp_gpus": gpus}
    policy = draw(st.sampled_from(["vllm", "sarathi", "orca", "rra", "chunks", "waa-c", "waa-m",
                                   "ft", "dsi"]))
    if policy in ("vllm", "sarathi", "orca"):
        return policy, FixedSchedule(max_active=size(60) + 3, token_budget=size(300) + 20,
                                        **plan)
    if policy in ("rra", "chunks"):
        return "rra", FixedSchedule(encode_batch=size(30), decode_iterations=size(40),
                                encode_chunk=size(90) if policy == "chunks" else 0, **plan)
    batch, groups = size(20), size(3)
    if policy in ("ft", "dsi"):
        return policy, FixedSchedule(encode_batch=batch, decode_micro_batches=groups, **plan)
    return policy, FixedSchedule(encode_batch=batch, decode_micro_batches=groups, tp_degree=1,
                             tp_gpus=0)


def job_of(seed, model, kind):
    """(problem, timing, queries)"""
    rng = np.random.default_rng(seed)
    size = int(rng.integers(4, 300))
    inputs = rng.integers(1, rng.integers(2, 200), size)
    outputs = rng.integers(1, rng.integers(2, 120), size)
    problem = problem_of(model, "a40-4", joint_empirical(np.stack([inputs, outputs], axis=1)),
                         kind=kind, quantile=0.9)
    return problem, roofline_of(problem), planned_queries(problem, inputs, outputs)


def same(found, other):
    if found is None or other is None:
        return found is other
    return all(np.allclose(getattr(found, name), getattr(other, name), rtol=1e-9, atol=0,
                           equal_nan=True) for name in found.__dataclass_fields__)


@examples(200)
@given(st.integers(0, 10**6), st.sampled_from(["opt-13b", "t5-11b"]),
       st.sampled_from(["sequence", "queries"]), configs(), st.booleans(),
       st.sampled_from([1.0, 1.0, 1.7]))
def test_they_are_those_of_the_records(seed, model, kind, found, is_native, sharing):
    problem, timing, queries = job_of(seed, model, kind)
    timing.facts = replace(timing.facts, sharing=sharing)
    policy, config = found
    try:
        estimate = fixed_estimate(policy, problem, timing, config)
        result = replay_job(problem, timing, estimate, queries)
    except XgptError:
        return
    with pytest.MonkeyPatch.context() as patch:
        if not is_native:
            patch.setattr(native_replay, "native", lambda: None)
        figures = steady_replay(problem, timing, estimate, queries)
        bare = Replayer(problem, timing, estimate, has_steps=False).run(queries)
    assert same(figures, steady_figures(result, problem.constraint, problem.lengths.outputs))
    np.testing.assert_array_equal(bare.times.last_token_s, result.times.last_token_s)
    assert bare.preemptions == result.preemptions
    assert bool(bare.pools) != is_native


class Measured(TakenAsTrue):
    """Of sizes up to 90 alone."""

    def operator_s(self, operator, x, y=0.0, *, tp_degree=1):
        seconds = super().operator_s(operator, x, y, tp_degree=tp_degree)
        return np.where(np.asarray(x) > 90, np.inf, seconds)


@pytest.mark.parametrize(("policy", "config"), [
    ("sarathi", FixedSchedule(max_active=40, token_budget=64, tp_degree=1, tp_gpus=0)),
    ("vllm", FixedSchedule(max_active=40, token_budget=6000, tp_degree=1, tp_gpus=0)),
    ("rra", FixedSchedule(encode_batch=60, decode_iterations=9, tp_degree=1, tp_gpus=0)),
    ("ft", FixedSchedule(encode_batch=80, decode_micro_batches=2, tp_degree=1, tp_gpus=0)),
    ("waa-m", FixedSchedule(encode_batch=9, decode_micro_batches=1, tp_degree=1, tp_gpus=0))])
def test_what_is_larger_than_any_that_was_timed_has_no_figures(policy, config):
    problem, _, queries = job_of(1, "opt-13b", "sequence")
    timing = Measured(problem.model, problem.cluster.device, problem.dtype)
    estimate = fixed_estimate(policy, problem, roofline_of(problem), config)
    assert Replayer(problem, timing, estimate).native(queries) is not None
    assert steady_replay(problem, timing, estimate, queries) is None
