"""Figures of a schedule on its own stages, by the rough formula and by replay."""

from dataclasses import replace

import numpy as np
import pytest
from problems import estimate_of, roofline_of, toy_problem

from xgpt.core.lengths import joint_empirical, truncated_normal
from xgpt.core.queries import QueryLengths
from xscheduler.evaluator import Evaluator, predict


def evaluator(**given) -> Evaluator:
    problem = toy_problem(**given)
    return Evaluator(problem, roofline_of(problem))


@pytest.mark.parametrize("policy", ["rra", "waa-c"])
def test_a_schedule_keeps_its_stages_under_other_lengths(policy) -> None:
    own = evaluator()
    variables = {"decode_iterations": 4} if policy == "rra" else {"decode_micro_batches": 2}
    estimate = estimate_of(own.problem, policy, encode_batch=4, **variables)
    assert own.seconds(estimate, "latency") == pytest.approx(estimate.figures.latency_s)
    assert own.seconds(estimate, "ttft") == pytest.approx(estimate.figures.ttft_s)
    assert own.seconds(estimate, "makespan") == pytest.approx(1 / estimate.figures.throughput_qps)
    longer = Evaluator(replace(own.problem, lengths=replace(
        own.problem.lengths, outputs=truncated_normal(15, 4, 20))), own.timing)
    assert longer.seconds(estimate, "latency") > own.seconds(estimate, "latency")
    before, after = own.shown(estimate), longer.shown(estimate)
    assert after.figures.latency_s > before.figures.latency_s
    for shown in (before, after):
        assert (shown.controls, shown.deployment) == (estimate.controls, estimate.deployment)


@pytest.mark.parametrize("policy", ["rra", "waa-c"])
def test_what_is_shown_is_within_the_formulas_error(policy) -> None:
    own = evaluator()
    variables = {"decode_iterations": 4} if policy == "rra" else {"decode_micro_batches": 2}
    estimate = estimate_of(own.problem, policy, encode_batch=8, **variables)
    shown = own.shown(estimate).figures
    assert shown.throughput_qps == pytest.approx(estimate.figures.throughput_qps, rel=0.15)
    assert shown.latency_s == pytest.approx(own.seconds(estimate, "latency"), rel=0.15)


def test_copies_answer_as_many_times_the_queries_of_one() -> None:
    own = evaluator(per_node=2)
    estimate = estimate_of(own.problem, encode_batch=4, decode_iterations=4)
    one = own.shown(estimate).figures
    four = Evaluator(toy_problem(nodes=4, per_node=2), own.timing)
    shown = four.shown(estimate.in_copies(4)).figures
    assert shown.throughput_qps == pytest.approx(4 * one.throughput_qps)
    assert shown.latency_s == pytest.approx(one.latency_s)


def test_the_same_question_has_the_same_answer() -> None:
    first, second = evaluator(num_queries=30), evaluator(num_queries=30)
    estimate = estimate_of(first.problem, encode_batch=4, decode_iterations=4)
    assert first.shown(estimate) == second.shown(estimate)
    assert first.job(estimate, 2) == first.job(estimate, 2) == second.job(estimate, 2)


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
