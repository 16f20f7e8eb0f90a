"""Replays of static batches that are alone, a batch at once, are those of the rule's own turns, to
the bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from problems import problem_of, roofline_of

from xgpt.core.errors import XgptError
from xgpt.core.lengths import joint_empirical
from xgpt.core.queries import QueryLengths
from xrunner.rules.static import StaticRule
from xsimulator.policies import make_policy
from xsimulator.policies.static.config import StaticConfig
from xsimulator.replay import flow, stage_line
from xsimulator.replay.job import Replayer
from xsimulator.replay.pool import PoolHead
from xsimulator.replay.static_alone import takes_whole_batches
from xsimulator.replay.step_clock import StepClock

LONGEST = 320  # tokens of a query with its output
_POOL = ("decoded", "encoded", "tokens", "context", "memory_tokens", "memory_s", "start_s", "end_s")
_TIMES = ("arrival_s", "start_s", "first_token_s", "last_token_s")


def job_of(rng, model, *, is_padded=False):
    """(replayer, queries) of a small job on one to four stages."""
    size = int(rng.integers(1, 120))
    inputs, outputs = rng.integers(1, 200, size), rng.integers(1, LONGEST - 200, size)
    outputs[rng.random(size) < rng.choice([0.1, 0.9, 1.0])] = 1  # 1.0: nothing is decoded
    problem = problem_of(model, "a40-4", joint_empirical(np.stack([inputs, outputs], axis=1)))
    timing, (degree, gpus) = roofline_of(problem), [(1, 0), (2, 4), (4, 4)][rng.integers(3)]
    estimate = make_policy("ft", problem, timing).estimate(StaticConfig(
        encode_batch=4, decode_micro_batches=1, tp_degree=degree, tp_gpus=gpus))
    most = np.minimum(outputs + rng.integers(0, 40), LONGEST - inputs)
    replayer = Replayer(problem, timing, estimate)
    queries = QueryLengths(inputs=inputs, outputs=outputs, most_outputs=most)
    replayer.clocks(queries)[0]._is_padded = is_padded
    return replayer, queries


def rule_of(rng):
    """A static rule; of some, groups' shares hold few queries."""
    groups = int(rng.integers(1, 6))
    return StaticRule(encode_batch=int(rng.integers(1, 41)), num_groups=groups,
                      encode_micro_batches=groups * int(rng.integers(1, 7)),
                      kv_tokens=groups * int(rng.integers(LONGEST, 5000)))


def by_turns(monkeypatch, replayer, queries, rule):
    """The same job by the rule's own turns, as events."""
    with monkeypatch.context() as patched:
        patched.setattr(flow, "is_alone", lambda *given: False)
        return replayer.run(queries, rules=[rule], arrival_s=2.5)


def at_once(replayer, queries, seed):
    return replayer.run(queries, rules=[rule_of(np.random.default_rng(seed + 100))], arrival_s=2.5)


def check_equal(quick, slow, seed):
    assert list(quick.pools[0].steps) == list(slow.pools[0].steps), seed
    for name in _POOL:
        np.testing.assert_array_equal(
            getattr(quick.pools[0], name), getattr(slow.pools[0], name), f"{seed} {name}")
    for name in _TIMES:
        np.testing.assert_array_equal(
            getattr(quick.times, name), getattr(slow.times, name), f"{seed} {name}")
    assert quick.preemptions == slow.preemptions == 0


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("model", ["opt-13b", "t5-11b"])
def test_a_batch_at_once_is_the_rules_turns_of_it(monkeypatch, model, is_padded):
    """With the library and without it."""
    steps = batches = 0
    for seed in range(40):
        replayer, queries = job_of(np.random.default_rng(seed), model, is_padded=is_padded)
        slow = by_turns(monkeypatch, replayer, queries, rule_of(np.random.default_rng(seed + 100)))
        quick = at_once(replayer, queries, seed)
        check_equal(quick, slow, seed)
        with monkeypatch.context() as patched:
            patched.setattr(stage_line, "native", lambda: None)
            check_equal(at_once(replayer, queries, seed), slow, seed)
        steps += len(quick.pools[0].steps)
        batches += quick.pools[0].steps[-1].phase + 1
    assert batches > 100 and steps > 20 * batches, (steps, batches)


def test_nothing_is_done_for_each_round(monkeypatch):
    """The rule decides no step, the head takes no turn, and decode steps are timed together."""
    replayer, queries = job_of(np.random.default_rng(3), "opt-13b")
    asked, usual, many = [], StepClock.seconds, []

    def refused(*given):
        raise AssertionError(given)

    monkeypatch.setattr(PoolHead, "turn", refused)
    monkeypatch.setattr(StaticRule, "decide", refused)
    monkeypatch.setattr(StepClock, "seconds", lambda *given: asked.append(1) or usual(*given))
    all_at_once = StepClock.many
    monkeypatch.setattr(StepClock, "many", lambda *given: many.append(1) or all_at_once(*given))
    pool = replayer.run(queries, rules=[rule_of(np.random.default_rng(3))]).pools[0]
    assert len(asked) == (pool.encoded > 0).sum() and len(many) == 1
    assert (pool.decoded > 0).sum() > 10 * len(asked)


def test_a_rule_within_a_batch_goes_on_by_itself():
    rule = rule_of(np.random.default_rng(1))
    assert takes_whole_batches(rule)
    assert rule.submit(0, 90, 50)
    rule.next_group()
    assert not takes_whole_batches(rule)


def test_a_query_that_never_fits_is_named_in_the_same_words(monkeypatch):
    replayer, queries = job_of(np.random.default_rng(5), "opt-13b")
    inputs = queries.inputs.copy()
    inputs[3], rule = 9000, rule_of(np.random.default_rng(1))
    queries, words = replace(queries, inputs=inputs), []
    with pytest.raises(XgptError, match="query 3 reserves") as refusal:
        replayer.run(queries, rules=[rule])
    words.append(str(refusal.value))
    with pytest.raises(XgptError) as refusal:
        by_turns(monkeypatch, replayer, queries, rule_of(np.random.default_rng(1)))
    assert words == [str(refusal.value)]
