"""Figures of a schedule on its own stages, and what is asked twice but evaluated once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from toy_jobs import estimate_of, roofline_of, toy_problem

from xgpt.core.lengths import joint_empirical, truncated_normal
from xgpt.core.queries import QueryLengths
from xscheduler import evaluator as module
from xscheduler.evaluator import Evaluator, predict


def evaluator(**given) -> Evaluator:
    problem = toy_problem(**given)
    return Evaluator(problem, roofline_of(problem))


@pytest.mark.parametrize("policy", ["rra", "waa-c"])
def test_a_schedule_keeps_its_stages_under_other_lengths(policy) -> None:
    own = evaluator()
    variables = {"decode_iterations": 4} if policy == "rra" else {"decode_micro_batches": 2}
    estimate = estimate_of(own.problem, policy, encode_batch=4, **variables)
    assert own.estimate(estimate) == estimate
    assert own.latency_s(estimate) == pytest.approx(estimate.figures.latency_s)
    longer = Evaluator(replace(own.problem, lengths=replace(
        own.problem.lengths, outputs=truncated_normal(15, 4, 20))), own.timing)
    changed = longer.estimate(estimate)
    assert changed.deployment.stages == estimate.deployment.stages
    assert changed.figures.latency_s == longer.latency_s(estimate) > estimate.figures.latency_s


def test_replays_are_made_once(monkeypatch) -> None:
    own = evaluator(num_queries=30)
    estimate = estimate_of(own.problem, encode_batch=4, decode_iterations=4)
    asked = []
    for name in ("replay_checked", "predict"):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given, real=real, name=name, **more: (
            asked.append(name), real(*given, **more))[1])
    assert own.replayed_latency_s(estimate) == own.replayed_latency_s(estimate)
    assert own.job(estimate, 1) == own.job(estimate, 1) != own.job(estimate, 2)
    assert asked == ["replay_checked", "predict", "predict"]


def test_outputs_that_are_to_be_observed_are_predicted_each_at_its_own_cap() -> None:
    """Drawn for any query, the one long output would be cut at another's cap."""
    caps = np.array([2] * 13 + [18])
    inputs = np.full(len(caps), 8)
    problem = toy_problem(num_queries=len(caps))
    problem = replace(problem, observes=True,
                      lengths=joint_empirical(np.stack([inputs, caps], axis=1)),
                      queries=QueryLengths(inputs=inputs, most_outputs=caps))
    estimate = estimate_of(problem, encode_batch=4, decode_iterations=4)
    predicted = predict(problem, roofline_of(problem), estimate)
    assert predicted is not None
    assert predicted.output_tokens_per_s * predicted.wall_s == pytest.approx(caps.sum())
