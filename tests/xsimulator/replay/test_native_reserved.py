"""Replays of rules that reserve a query's tokens when they admit it, by csrc/replay/replay.cpp,
are those of the rules themselves, to the bit."""

from __future__ import annotations

from collections import Counter
from functools import partial

import numpy as np
import pytest
from problems import problem_of, roofline_of
from replayed_both_ways import assert_names_one_that_never_fits, same_both_ways

from xgpt.core.controls import EvenBatches, FixedSchedule
from xgpt.core.lengths import joint_empirical
from xgpt.core.problem import QueryLengths
from xrunner.rules.iteration import OrcaRule
from xrunner.rules.rra import RraRule, reserve_facts
from xrunner.rules.steps import StepKind
from xsimulator import native
from xsimulator.replay.job import replay_job
from xsimulator.rough.forms import fixed_estimate

LONGEST = 320  # tokens of a query with its output

pytestmark = pytest.mark.skipif(native.native() is None, reason="there is no compiler")


def job_of(rng, model="opt-13b"):
    """(problem, timing, estimate, queries) of a small job on one to four stages."""
    size = int(rng.integers(20, 160))
    inputs, outputs = rng.integers(1, 200, size), rng.integers(1, LONGEST - 200, size)
    outputs[rng.random(size) < 0.2] = 1
    problem = problem_of(model, "a40-4", joint_empirical(np.stack([inputs, outputs], axis=1)))
    timing, (degree, gpus) = roofline_of(problem), [(1, 0), (2, 4), (4, 4)][rng.integers(3)]
    estimate = fixed_estimate("rra", problem, timing, FixedSchedule(
        encode_batch=4, decode_iterations=9, tp_degree=degree, tp_gpus=gpus))
    return problem, timing, estimate, QueryLengths(inputs=inputs, outputs=outputs,
                                                   most_outputs=outputs)


def rra_of(rng, mean_input, *, has_chunks):
    """Makes the same rule of RRA again and again."""
    groups, even = int(rng.integers(1, 6)), EvenBatches()
    if rng.random() < 0.6:
        even = EvenBatches(adjustment=rng.uniform(0.02, 0.22), mean_input_tokens=mean_input,
                           target_active=rng.integers(3) * rng.uniform(0.5, 30.0))
    return partial(
        RraRule, encode_batch=int(rng.integers(1, 41)), decode_iterations=int(rng.integers(1, 61)),
        num_groups=groups, max_active=groups * int(rng.integers(1, 41)), even=even,
        kv_tokens=groups * int(rng.integers(LONGEST, 6000)),
        encode_chunk=int(rng.integers(1, 90)) if has_chunks else 0)


def orca_of(rng, mean_input):
    """Makes the same rule of ORCA again and again."""
    groups = int(rng.integers(1, 6))
    return partial(OrcaRule, num_groups=groups, max_active=groups + int(rng.integers(60)),
                   kv_tokens=groups * int(rng.integers(LONGEST, 3000)))


RULES = {"rra": partial(rra_of, has_chunks=False), "chunks": partial(rra_of, has_chunks=True),
         "orca": orca_of}


@pytest.mark.parametrize(("name", "num_kinds"), [("rra", 2), ("chunks", 3), ("orca", 3)])
def test_a_replay_is_that_of_the_rule(monkeypatch, name, num_kinds):
    kinds: Counter[StepKind] = Counter()
    for seed in range(60):
        rng = np.random.default_rng(seed)
        given = job_of(rng, ("opt-13b", "t5-11b")[seed % 5 == 4])
        rule = RULES[name](rng, float(given[-1].inputs.mean()))
        quick = same_both_ways(monkeypatch, lambda given=given, rule=rule:
                               replay_job(*given, rules=[rule()]))
        kinds.update(step.kind for step in quick.pools[0].steps)
    assert len(kinds) == num_kinds and min(kinds.values()) > 60, kinds


def facts_of(rule):
    return rule.facts if isinstance(rule, OrcaRule) else reserve_facts(rule)


def test_a_rule_that_has_begun_goes_on_by_itself():
    for make in RULES.values():
        rule = make(np.random.default_rng(1), 9.0)()
        assert facts_of(rule) is not None
        assert rule.submit(0, 90, 50)
        assert facts_of(rule) is None, "it has queries of its own"
        rule.decide()
        assert facts_of(rule) is None


def test_a_query_that_never_fits_is_named(monkeypatch):
    job = job_of(np.random.default_rng(0))
    assert_names_one_that_never_fits(monkeypatch, job)
