"""vLLM's encode steps where some queries are done with their first token, or all are."""

from __future__ import annotations

import numpy as np
import pytest
from problems import problem_of, roofline_of

from xgpt.core.lengths import JointLengths, empirical
from xsimulator.policies.continuous.closed_form import sarathi, vllm
from xsimulator.policies.continuous.config import ContinuousConfig
from xsimulator.policies.continuous.query_sizes import SIZES
from xsimulator.policies.continuous.waves import encode_steps
from xsimulator.replay.job import planned_queries, replay_job
from xsimulator.replay.steady import steady_figures


def by_the_rule(freed: int, share: float, most: int) -> tuple[float, float]:
    """(encode steps of a phase, each of `most` queries at most; what a query which decodes waits
    for, half by steps, half by queries, in mean steps): slots are filled until all have one."""
    rng, phases = np.random.default_rng(0), []
    for _ in range(2000):
        left, own = freed, list[tuple[int, int]]()
        while left:
            taken = min(left, most)
            own.append((taken, int(rng.binomial(taken, share))))
            left -= own[-1][1]
        phases.append(own)
    steps = float(np.mean([len(own) for own in phases]))
    each = sum(taken for own in phases for taken, _ in own) / len(phases) / steps
    waits = [(len(own) - place + sum(taken for taken, _ in own[place:]) / each) / 2 - 1
             for own in phases for place, (_, stays) in enumerate(own) for _ in range(stays)]
    return steps, float(np.mean(waits))


@pytest.mark.parametrize("share", [1.0, 0.9, 0.5, 0.1])
@pytest.mark.parametrize("freed", [1, 3, 14, 134])
def test_slots_are_filled_in_as_many_steps_as_by_the_rule(freed: int, share: float) -> None:
    queries, ample = np.full((1, SIZES), freed / share), np.array([1e9])
    found = encode_steps(20 * queries, queries, share, ample, ample)
    steps, after = by_the_rule(freed, share, 10**9)
    assert found.number[0] == pytest.approx(steps, rel=0.12)
    assert found.after[0] == pytest.approx(after, rel=0.15, abs=0.1)
    assert found.number[0] * found.tokens.mean() == pytest.approx(20 * freed / share)
    assert (np.diff(found.tokens[0]) >= -1e-9).all()


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_budget_takes_them_in_parts(share: float) -> None:
    queries, budget = np.full((1, SIZES), 134 / share), np.array([400.0])
    found = encode_steps(20 * queries, queries, share, budget, budget)
    steps, after = by_the_rule(134, share, 20)
    assert found.number[0] == pytest.approx(steps, rel=0.15)
    assert found.after[0] == pytest.approx(after, rel=0.15)
    assert found.tokens.max() <= 400 * (1 + 1e-9)


def test_each_configuration_is_by_itself() -> None:
    rng = np.random.default_rng(3)
    queries = np.sort(rng.uniform(1, 60, (5, SIZES)), axis=1)
    tokens, budget = 30 * queries, rng.uniform(100, 900, 5)
    together = encode_steps(tokens, queries, 0.7, budget, 0.9 * budget)
    for row in range(5):
        own = slice(row, row + 1)
        alone = encode_steps(tokens[own], queries[own], 0.7, budget[own], 0.9 * budget[own])
        for one, other in zip(together, alone, strict=True):
            np.testing.assert_allclose(one[own], other, rtol=1e-6)


@pytest.mark.parametrize("slots", [14, 134])
@pytest.mark.parametrize(("policy", "outputs"), [
    (vllm, [1]), (vllm, [1, 2]), (vllm, [1, 2, 3]), (vllm, [2, 3]),
    (vllm, [1, *range(1, 40)]), (sarathi, [1]), (sarathi, [1, 2])])
def test_outputs_of_a_token_or_two_are_answered_as_in_the_replay(policy, outputs, slots) -> None:
    """Up to 2.6 times as many queries a second were promised, of one token 6 times, and a latency
    of a fifth."""
    lengths = JointLengths(inputs=empirical(range(20, 61)), outputs=empirical(outputs))
    problem = problem_of(lengths=lengths, quantile=0.99)
    timing = roofline_of(problem)
    found = policy(problem, timing).estimate(ContinuousConfig(
        max_active=slots, token_budget=1500, tp_degree=4, tp_gpus=4))
    drawn = lengths.sample(5000, np.random.default_rng(1))
    replayed = steady_figures(replay_job(problem, timing, found, planned_queries(
        problem, *drawn)), problem.constraint, lengths.outputs)
    assert found.figures.throughput_qps == pytest.approx(replayed.throughput_qps, rel=0.04)
    assert found.figures.latency_s == pytest.approx(replayed.latency_s, rel=0.12)
