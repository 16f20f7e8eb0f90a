"""What RRA's groups are dealt in chunks: by the rule's own classes, by csrc, and in a replay."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from compilers import has_compiler
from problems import problem_of, roofline_of

from xgpt.core.lengths import JointLengths, empirical, joint_empirical, truncated_normal
from xrunner.rules.batch_sizer import BatchSizer
from xsimulator.policies.rra.closed_form import Rra
from xsimulator.policies.rra.config import RraConfig
from xsimulator.policies.rra.dealt import LAPS, Dealt, Rule, cells_by_rule, cells_of, spread
from xsimulator.replay.job import planned_queries, replay_job

RULES = [Rule(1, 1, 64, 1), Rule(1, 5, 8, 3), Rule(3, 9, 32, 2), Rule(2, 106, 4, 3),
         Rule(37, 4, 100, 4), Rule(29, 10, 25, 8), Rule(400, 3, 2048, 16), Rule(5, 7, 4000, 16)]


def heavy(count: int, seed: int = 0) -> np.ndarray:
    return np.exp(np.random.default_rng(seed).normal(4, 1.6, count)).astype(np.int64) + 1


@pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")
@pytest.mark.parametrize("adjustment", [0.0, 0.1])
@pytest.mark.parametrize("rule", RULES)
def test_the_native_deal_is_the_rules(rule: Rule, adjustment: float) -> None:
    for count in (3, 200):
        inputs = heavy(count)
        sizer = BatchSizer(mean_input=float(inputs.mean()), adjustment=adjustment)
        for quick, slow in zip(cells_of(inputs, sizer, rule), cells_by_rule(inputs, sizer, rule),
                               strict=True):
            assert np.array_equal(quick, slow)


@pytest.mark.parametrize("rule", [Rule(1, 5, 8, 3), Rule(3, 9, 32, 2), Rule(2, 30, 500, 4)])
def test_what_is_dealt_and_encoded_is_that_of_a_replay(rule: Rule) -> None:
    inputs, outputs = np.minimum(heavy(60), 800), np.full(60, 9)
    problem = problem_of(lengths=joint_empirical(np.stack([inputs, outputs], axis=1)))
    timing = roofline_of(problem)
    found = Rra(problem, timing).estimate(RraConfig(
        encode_batch=rule.batch, decode_iterations=rule.iterations, encode_chunk=rule.chunk,
        decode_micro_batches=rule.groups))
    roomy = replace(found, figures=replace(found.figures, decode_batch=1000.0))
    result = replay_job(problem, timing, roomy, planned_queries(
        problem, np.tile(inputs, LAPS), np.tile(outputs, LAPS)))
    cells = cells_of(inputs, BatchSizer(mean_input=float(inputs.mean())), rule)
    phases = int(np.searchsorted(np.cumsum(cells.counts.sum(axis=1)), len(inputs)))
    encoded = np.zeros((len(cells.every), rule.groups), np.int64)
    for step in result.pools[0].steps:
        if step.phase < len(encoded):
            encoded[step.phase, step.group] += sum(chunk.tokens for chunk in step.chunks)
    assert phases > 5
    assert np.array_equal(encoded[:phases], np.diff(cells.before, axis=0)[:phases])


def test_queries_begin_in_order_and_every_tokens_chunk_is_counted() -> None:
    inputs, stays = heavy(300), np.arange(300) % 17
    for rule in RULES:
        found = Dealt.of(inputs, stays, BatchSizer(mean_input=float(inputs.mean()),
                                                   adjustment=0.1), rule)
        assert (found.joins >= found.begins).all() and (found.joins >= 0).all()
        assert (found.joins < len(found.every) * rule.iterations).all()
        for group in range(rule.groups):
            own = found.group == group
            assert (np.diff(found.begins[own]) >= 0).all()
            assert (np.diff(found.joins[own]) >= 0).all()
        times = -(-rule.iterations // found.every)[:, None]
        assert (found.tokens <= times * rule.chunk).all() and (found.chunks <= times).all()


@pytest.mark.parametrize("count", [40, 256])
def test_the_mean_of_spread_inputs_is_theirs_however_far_they_reach(count: int) -> None:
    inputs = np.array([20] * 399 + [60_000])
    lengths = JointLengths(inputs=empirical(inputs), outputs=truncated_normal(40, 15, 100))
    found, stays = spread(lengths, count, 1)
    assert found.mean() == pytest.approx(lengths.inputs.mean, rel=0.01)
    assert stays.mean() == pytest.approx(lengths.outputs.mean - 1, rel=0.05)
    assert all(np.array_equal(*pair) for pair in zip((found, stays), spread(lengths, count, 1),
                                                      strict=True))
