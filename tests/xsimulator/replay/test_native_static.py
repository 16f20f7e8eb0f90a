"""Replays of static batches by csrc/replay/replay.cpp are those of the rule itself, to the
bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from problems import TakenAsTrue, problem_of, roofline_of
from replayed_both_ways import same_both_ways

from xgpt.core.errors import XgptError
from xgpt.core.job import FixedSchedule
from xgpt.core.lengths import joint_empirical
from xgpt.core.queries import QueryLengths
from xprofiler.timing import TimingFacts
from xrunner.rules.static import StaticRule
from xsimulator import native
from xsimulator.replay import native_replay
from xsimulator.replay.job import Replayer
from xsimulator.rough.forms import fixed_estimate

LONGEST = 320  # tokens of a query with its output

pytestmark = pytest.mark.skipif(native.native() is None, reason="there is no compiler")


def job_of(rng, model, *, is_padded=False):
    """(replayer, queries) of a small job on one to four stages."""
    size = int(rng.integers(1, 120))
    inputs, outputs = rng.integers(1, 200, size), rng.integers(1, LONGEST - 200, size)
    outputs[rng.random(size) < rng.choice([0.1, 0.9, 1.0])] = 1  # 1.0: nothing is decoded
    problem = problem_of(model, "a40-4", joint_empirical(np.stack([inputs, outputs], axis=1)))
    timing, (degree, gpus) = roofline_of(problem), [(1, 0), (2, 4), (4, 4)][rng.integers(3)]
    if is_padded:
        timing = TakenAsTrue(problem.model, problem.cluster.device, problem.dtype)
        timing.facts = TimingFacts(step_overhead_s=2.0**-10, is_padded=True)
    estimate = fixed_estimate("ft", problem, timing, FixedSchedule(
        encode_batch=4, decode_micro_batches=1, tp_degree=degree, tp_gpus=gpus))
    most = np.minimum(outputs + rng.integers(0, 40), LONGEST - inputs)
    return Replayer(problem, timing, estimate), QueryLengths(inputs=inputs, outputs=outputs,
                                                             most_outputs=most)


def rule_of(rng):
    """A static rule; of some, groups' shares hold few queries."""
    groups = int(rng.integers(1, 6))
    return StaticRule(encode_batch=int(rng.integers(1, 41)), num_groups=groups,
                      encode_micro_batches=groups * int(rng.integers(1, 7)),
                      kv_tokens=groups * int(rng.integers(LONGEST, 5000)))


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("model", ["opt-13b", "t5-11b"])
def test_a_replay_is_that_of_the_rule(monkeypatch, model, is_padded):
    steps = batches = 0
    for seed in range(40):
        replayer, queries = job_of(np.random.default_rng(seed), model, is_padded=is_padded)
        quick = same_both_ways(monkeypatch, lambda seed=seed, r=replayer, q=queries: r.run(
            q, rules=[rule_of(np.random.default_rng(seed + 100))], arrival_s=2.5))
        steps += len(quick.pools[0].steps)
        batches += quick.pools[0].steps[-1].phase + 1
    assert batches > 100 and steps > 20 * batches, (steps, batches)


def test_a_query_that_never_fits_is_named_in_the_same_words(monkeypatch):
    replayer, queries = job_of(np.random.default_rng(5), "opt-13b")
    inputs = queries.inputs.copy()
    inputs[3] = 9000
    queries, words = replace(queries, inputs=inputs), []
    for library in (native.native(), None):
        monkeypatch.setattr(native_replay, "native", lambda library=library: library)
        with pytest.raises(XgptError, match="query 3 reserves") as refusal:
            replayer.run(queries, rules=[rule_of(np.random.default_rng(1))])
        words.append(str(refusal.value))
    assert words[0] == words[1]
