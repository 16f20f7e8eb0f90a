"""RRA's closed form against the replay of a long job by RRA's own rule, and its basic laws."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import problems
import pytest
from problems import problem_of
from representative import some

from xgpt.core.errors import InputError, UnknownNameError
from xgpt.core.lengths import JointLengths, empirical
from xgpt.core.problem import Problem
from xgpt.core.queries import QueryLengths
from xgpt.core.schedule import Estimate
from xrunner.rules.rra import RraRule, rra_rule
from xsimulator.layer_times import LayerTimes
from xsimulator.policies import make_policy
from xsimulator.policies.rra.closed_form import Rra
from xsimulator.policies.rra.config import RraConfig
from xsimulator.replay.job import Replayer, planned_queries, replay_job
from xsimulator.replay.predict import JobPrediction, job_replays, mean_of
from xsimulator.replay.steady import steady_figures
from xsimulator.stage_times import StageTimes


def evaluate(problem, timing, configs):
    return Rra(problem, timing).evaluate(configs)


def estimate(problem, timing, config):
    return Rra(problem, timing).estimate(config)


def roofline_of(problem, *, padded=True):
    return problems.roofline_of(problem, padded=padded)


def replayed(problem, found, num_queries, *, padded, seed=0):
    inputs, outputs = problem.lengths.sample(num_queries, np.random.default_rng(seed))
    return replay_job(problem, roofline_of(problem, padded=padded), found,
                      planned_queries(problem, inputs, outputs)), outputs


CASES = [
    ("opt-13b", "a40-4", "S", RraConfig(encode_batch=49, decode_iterations=7), True),
    ("opt-13b", "a40-4", "S", RraConfig(encode_batch=49, decode_iterations=7), False),
    ("opt-13b", "a40-4", "S",
     RraConfig(encode_batch=49, decode_iterations=7, tp_degree=4, tp_gpus=4), True),
    ("opt-13b", "a40-4", "S",
     RraConfig(encode_batch=20, decode_iterations=16, tp_degree=2, tp_gpus=2), True),
    ("opt-13b", "a40-4", "T", RraConfig(encode_batch=8, decode_iterations=40), True),
    ("opt-13b", "a40-4", "S", RraConfig(encode_batch=3, decode_iterations=30), True),
    ("t5-11b", "a40-8", "C1", RraConfig(encode_batch=20, decode_iterations=16), True),
]


@pytest.mark.parametrize(("model", "cluster", "task", "config", "padded"), some(
    CASES, lambda case: CASES.index(case) in (1, 2, 3, 6)))
def test_agrees_with_the_replay_of_a_long_job(model, cluster, task, config, padded):
    problem = problem_of(model, cluster, task)
    found = estimate(problem, roofline_of(problem, padded=padded), config)
    result, outputs = replayed(problem, found, max(2500, 250 * config.encode_batch), padded=padded)
    assert found.figures.throughput_qps == pytest.approx(steady_figures(
        result, problem.constraint, problem.lengths.outputs).throughput_qps, rel=0.03)
    longest = problem.lengths.outputs.quantile(0.99)
    alike = np.abs(outputs - longest) <= 1
    alike &= result.times.start_s < 0.7 * result.makespan_s
    assert found.figures.latency_s == pytest.approx(result.latency_s[alike].mean(), rel=0.05)


def test_no_step_of_a_group_starts_before_its_tokens_are_back():
    problem = problem_of()
    found = estimate(problem, roofline_of(problem), RraConfig(encode_batch=9, decode_iterations=5))
    result, _ = replayed(problem, found, 100, padded=True)
    pool, back = result.pools[0], {}
    for step, start, end in zip(pool.steps, pool.start_s[:, 0], pool.end_s[:, -1], strict=True):
        assert start >= back.get(step.group, 0.0) * (1 - 1e-12)
        back[step.group] = end


def test_replay_of_one_query_is_the_sum_of_its_steps():
    lengths = JointLengths(inputs=empirical([10]), outputs=empirical([3]))
    problem = problem_of(lengths=lengths)
    found = estimate(problem, roofline_of(problem), RraConfig(encode_batch=1, decode_iterations=2))
    result, _ = replayed(problem, found, 1, padded=True)
    times = StageTimes(LayerTimes.of(problem, roofline_of(problem)), problem.cluster,
                       found.deployment.stages)
    attention = times.encode_attention_s(np.array([10]), 1)
    expected = times.encode_s(10.0, 1.0, {d: v[0] for d, v in attention.items()}).sum()
    expected += times.decode_s(1.0, 11.0).sum() + times.decode_s(1.0, 12.0).sum()
    assert result.makespan_s == pytest.approx(expected)
    assert result.latency_s.tolist() == pytest.approx([expected])


def test_context_of_a_step_is_that_of_its_queries():
    """Two groups' worth by hand: inputs 10 and 4 together, then the longer one leaves."""
    lengths = JointLengths(inputs=empirical([10, 4]), outputs=empirical([2, 4]))
    problem = problem_of(lengths=lengths)
    found = estimate(problem, roofline_of(problem), RraConfig(
        encode_batch=2, decode_iterations=3, decode_micro_batches=1))
    rule = RraRule(encode_batch=2, decode_iterations=3, num_groups=1, max_active=2, kv_tokens=100)
    result = replay_job(problem, roofline_of(problem), found, planned_queries(
        problem, np.array([10, 4]), np.array([2, 4])), rules=[rule])
    pool = result.pools[0]
    assert (pool.encoded + pool.decoded).tolist() == [2, 2, 1, 1]
    assert pool.context[pool.decoded > 0].tolist() == [8, 6, 7]


def predicted(problem: Problem, found: Estimate, count: int, *, seed: int,
              **more: Any) -> JobPrediction:
    return mean_of(job_replays(Replayer(problem, roofline_of(problem), found), count,
                               np.random.default_rng(seed), **more))


def test_prediction_of_a_job_lies_below_the_steady_state_and_above_its_share():
    problem = problem_of()
    found = estimate(problem, roofline_of(problem), RraConfig(encode_batch=9, decode_iterations=8))
    short, long = (predicted(problem, found, count, seed=0, replays=2) for count in (72, 1500))
    assert short.throughput_qps < long.throughput_qps < 1.03 * found.figures.throughput_qps
    assert long.throughput_qps > 0.9 * found.figures.throughput_qps
    assert short.wall_s == pytest.approx(72 / short.throughput_qps, rel=0.05)
    assert 0 < short.latency_p50_s <= short.latency_p99_s <= short.wall_s


def test_prediction_depends_on_the_generator_alone():
    problem = problem_of()
    found = estimate(problem, roofline_of(problem), RraConfig(encode_batch=9, decode_iterations=8))
    known = QueryLengths(inputs=np.full(60, 100), most_outputs=np.full(60, 80))
    twice = [predicted(problem, found, 60, seed=4, known=known) for _ in range(2)]
    assert twice[0] == twice[1]


def test_arrays_equal_one_configuration_at_a_time():
    problem = problem_of()
    configs = [RraConfig(encode_batch=b, decode_iterations=n, tp_degree=t, tp_gpus=g)
               for b in (1, 3, 40) for n in (1, 7, 79) for t, g in ((1, 0), (2, 4), (4, 4))]
    together = evaluate(problem, roofline_of(problem), configs)
    for row, config in enumerate(configs):
        alone = estimate(problem, roofline_of(problem), config)
        assert together.throughput_qps[row] == pytest.approx(alone.figures.throughput_qps, rel=1e-9)
        assert together.latency_s[row] == pytest.approx(alone.figures.latency_s, rel=1e-9)
        assert together.fits[row] == alone.figures.fits
        assert together.memory_bytes[row] == pytest.approx(max(alone.figures.memory_bytes), abs=1)


def test_stages_hold_every_layer_once_in_order():
    problem = problem_of("gpt3-39b", "a40-16")
    rra = Rra(problem, roofline_of(problem))
    for degree, gpus in ((1, 0), (2, 6), (4, 8), (8, 16)):
        stages = rra.plans.both(degree, gpus).stages
        ranks = [rank for stage in stages for rank in stage.ranks]
        assert ranks == list(range(16))
        first = 0
        for stage in stages:
            assert stage.first_layer == first and stage.num_layers >= 1
            first += stage.num_layers
        assert first == problem.model.num_layers


def test_encoder_decoder_stages_split_both_kinds_of_layers():
    problem = problem_of("t5-11b", "a40-8")
    stages = Rra(problem, roofline_of(problem)).plans.both(1, 0).stages
    assert sum(stage.num_layers for stage in stages) == problem.model.num_layers
    assert sum(s.num_encoder_layers for s in stages) == problem.model.num_encoder_layers
    assert all(stage.num_encoder_layers >= 1 for stage in stages)


@pytest.mark.parametrize(("degree", "gpus", "what"), [
    (3, 3, "attention heads"), (4, 6, "multiple"), (2, 0, "degree 1"), (4, 8, "4 devices")])
def test_plans_the_model_or_cluster_cannot_hold_are_refused(degree, gpus, what):
    problem = problem_of()
    with pytest.raises(InputError, match=what):
        estimate(problem, roofline_of(problem), RraConfig(
            encode_batch=1, decode_iterations=1, tp_degree=degree, tp_gpus=gpus))


def test_outputs_of_one_token_need_no_decoding():
    lengths = JointLengths(inputs=empirical([50, 70]), outputs=empirical([1]))
    problem = problem_of(lengths=lengths)
    found = estimate(problem, roofline_of(problem), RraConfig(encode_batch=8, decode_iterations=1))
    assert found.figures.decode_batch == 0
    assert found.figures.latency_s >= found.figures.encode_s / 2
    assert found.figures.period_s == pytest.approx(found.figures.encode_s, rel=0.5)


def test_a_query_that_reserves_more_than_the_longest_output_is_planned_for():
    config = RraConfig(encode_batch=8, decode_iterations=8)
    plain = problem_of()
    generous = replace(plain, default_max_tokens=400)
    small, large = (estimate(p, roofline_of(p), config) for p in (plain, generous))
    assert large.deployment.kv_tokens > small.deployment.kv_tokens
    assert large.figures.throughput_qps == small.figures.throughput_qps
    assert rra_rule(large).submit(0, plain.lengths.inputs.max + 400)
    predicted(generous, large, 20, seed=0, replays=1)


def test_both_kinds_of_bound_are_met_by_the_quantile_of_the_output_length():
    config = RraConfig(encode_batch=8, decode_iterations=8)
    latencies = []
    for kind in ("sequence", "queries"):
        problem = problem_of(kind=kind)
        latencies.append(estimate(problem, roofline_of(problem), config).figures.latency_s)
    assert latencies[0] == latencies[1]


def test_unknown_policy_names_the_known_ones():
    problem = problem_of()
    assert isinstance(make_policy("rra", problem, roofline_of(problem)), Rra)
    with pytest.raises(UnknownNameError, match="rra"):
        make_policy("rr", problem, roofline_of(problem))


def test_two_groups_of_a_query_each_take_no_longer_than_one_group_of_both() -> None:
    problem = problem_of("gpt3-39b", lengths="S")  # 16 stages, one after the other
    found = Rra(problem, roofline_of(problem)).evaluate([
        RraConfig(encode_batch=2, decode_iterations=200, decode_micro_batches=groups)
        for groups in (1, 2)])
    # both decode at once, until the longer one is done: 5 % longer where each had time of its own
    assert found.period_s[1] < found.period_s[0] < 1.03 * found.period_s[1]
