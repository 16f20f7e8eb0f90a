"""The simulator's replay, fed with a run's lengths, decides what the run decided, step for step.

Of WAA's pools that holds where the clock has no say. What is encoded together, and in which order,
never depends on it; when a batch reaches the decode pool, and so which step it joins, does, unless
one batch is in the system at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from examples import some
from replayed import problem_of, replayed_steps, run_steps
from toy_runs import ranks_of, run_in_process, run_waa_in_process
from toys import generate, random_queries

from xgpt.core.job import FixedSchedule
from xgpt.core.policies import policy as row_of
from xgpt.core.queries import QueryLengths
from xgpt.core.schedule import Estimate
from xprofiler.roofline import Roofline
from xrunner.query import PreparedQuery
from xrunner.rules.steps import rules_for
from xsimulator.replay.job import replay_job
from xsimulator.rough.forms import fixed_estimate

Made = Callable[[str], tuple[Path, Any]]
Work = tuple[Path, list[PreparedQuery], np.ndarray]


def lengths_of(queries: list[PreparedQuery], outputs: np.ndarray) -> QueryLengths:
    return QueryLengths(inputs=np.array([len(q.input_ids) for q in queries]), outputs=outputs,
                        most_outputs=np.array([q.max_new_tokens for q in queries]))


@pytest.fixture(scope="module")
def works(made: Made) -> Callable[[str], Work]:
    """(model, queries, output tokens that transformers gives to each), by family."""

    @cache
    def make(family: str) -> Work:
        directory, model = made(family)
        queries = [replace(q, max_new_tokens=q.max_new_tokens + 5)
                   for q in random_queries(24, seed=11, longest=40)]
        return directory, queries, np.array([len(generate(model, q)) for q in queries])

    return make


@pytest.fixture
def work(request: pytest.FixtureRequest, works: Callable[[str], Work]) -> Work:
    return works(request.param)


RRA = [((1,), FixedSchedule(encode_batch=6, decode_iterations=4, decode_micro_batches=2)),
       ((1, 1), FixedSchedule(encode_batch=9, decode_iterations=3)),
       ((2, 1), FixedSchedule(encode_batch=5, decode_iterations=7, tp_degree=2, tp_gpus=2)),
       ((2, 2), FixedSchedule(encode_batch=3, decode_iterations=2, tp_degree=2, tp_gpus=4,
                          decode_micro_batches=3))]
BASELINES = [("ft", (1, 1), FixedSchedule(encode_batch=9, decode_micro_batches=2)),
             ("ft", (1,), FixedSchedule(encode_batch=5, decode_micro_batches=3)),
             ("dsi", (1, 1, 1), FixedSchedule(encode_batch=7, decode_micro_batches=2,
                                             encode_micro_batches=4)),
             ("orca", (1,), FixedSchedule(max_active=6)),
             ("orca", (2, 1), FixedSchedule(max_active=7, tp_degree=2, tp_gpus=2)),
             ("vllm", (1, 1), FixedSchedule(max_active=9, token_budget=60)),
             ("sarathi", (1, 1), FixedSchedule(max_active=9, token_budget=12))]
WAA = [(2, FixedSchedule(encode_batch=4)),
       (2, FixedSchedule(encode_batch=6, decode_micro_batches=2)),
       (4, FixedSchedule(encode_batch=3, decode_micro_batches=3)),
       (4, FixedSchedule(encode_batch=4, decode_micro_batches=2, tp_degree=2, tp_gpus=2))]


FAMILIES, DECODER_ONLY = ("llama", "t5"), ("orca", "vllm", "sarathi")


def in_turns(cases: list[Any], is_in_both: Callable[[Any], bool] = lambda case: False,
             is_large: Callable[[Any], bool] = lambda case: False) -> list[Any]:
    """Each case before False and True, behind either family: always with one flag and one family
    in turn, or with both flags where the case asks for it, or not where it is large; the others
    with `-m slow`."""
    def is_always(case: Any) -> bool:
        if is_large(case[1:]):
            return False
        place = cases.index(case[1:-1])
        family = "llama" if case[1] in DECODER_ONLY else FAMILIES[place // 2 % 2]
        return case[0] == family and (is_in_both(case[1:]) or place % 2 == case[-1])

    return some([(family, *case, flag) for family in FAMILIES for case in cases
                 for flag in (False, True)], is_always)


@pytest.mark.parametrize(("work", "degrees", "config", "is_tight"), in_turns(
    RRA, is_large=lambda case: case[0] == (2, 2)), indirect=["work"])
def test_a_run_and_its_replay_take_the_same_steps(work: Work, degrees: tuple[int, ...],
                                                  config: FixedSchedule, is_tight: bool) -> None:
    directory, queries, outputs = work
    inputs = np.array([len(q.input_ids) for q in queries])
    problem = problem_of(directory, np.stack([inputs, outputs], axis=1), sum(degrees))
    timing = Roofline(problem.model, problem.cluster.device, problem.dtype)
    estimate: Estimate = fixed_estimate("rra", problem, timing, config)
    most = max(q.reserve_tokens for q in queries)
    # tight: the budget holds two or three queries a group, so that admission waits for room
    kv_tokens = estimate.deployment.num_groups * (2 * most if is_tight else 40 * most)
    estimate = estimate.changed(kv_tokens=kv_tokens)
    assert tuple(stage.tp_degree for stage in estimate.deployment.stages) == degrees
    sink, executors = run_in_process(directory, queries, stages=estimate.deployment.stages,
                                     rule=rules_for(estimate)[0])
    finished = {r.query.index: len(r.output_ids) for r in sink.results}
    assert [finished[q.index] for q in queries] == outputs.tolist()
    result = replay_job(problem, timing, estimate, lengths_of(queries, outputs))
    expected = replayed_steps(result.pools[0])
    assert all(run_steps(executor) == expected for executor in executors)
    assert len({step[4] for step in expected}) > 2


# those that evict where memory is tight do so there alone
@pytest.mark.parametrize(("work", "policy", "degrees", "config", "is_tight"), in_turns(
    BASELINES, lambda case: case[0] in ("vllm", "sarathi")), indirect=["work"])
def test_a_baseline_and_its_replay_take_the_same_steps(
        work: Work, policy: str, degrees: tuple[int, ...], config: object,
        is_tight: bool) -> None:
    directory, queries, outputs = work
    inputs = np.array([len(q.input_ids) for q in queries])
    problem = problem_of(directory, np.stack([inputs, outputs], axis=1), sum(degrees))
    if problem.model.is_encoder_decoder and row_of(policy).is_decoder_only:
        pytest.skip("decoder-only models")
    timing = Roofline(problem.model, problem.cluster.device, problem.dtype)
    estimate: Estimate = fixed_estimate(policy, problem, timing, config)
    most = -(-max(q.reserve_tokens for q in queries) // 16) * 16
    estimate = estimate.changed(kv_tokens=estimate.deployment.num_groups * most * (
        2 if is_tight else 40))
    assert tuple(stage.tp_degree for stage in estimate.deployment.stages) == degrees
    sink, executors = run_in_process(directory, queries, stages=estimate.deployment.stages,
                                     rule=rules_for(estimate)[0])
    finished = {r.query.index: len(r.output_ids) for r in sink.results}
    assert [finished[q.index] for q in queries] == outputs.tolist()
    result = replay_job(problem, timing, estimate, lengths_of(queries, outputs))
    pool = result.pools[0]
    expected = [(step.kind.value, step.group, step.phase, step.iteration, encoded + decoded,
                 tokens + decoded) for step, encoded, decoded, tokens in zip(
        pool.steps, pool.encoded.tolist(), pool.decoded.tolist(), pool.tokens.tolist(),
        strict=True)]
    for executor in executors:
        assert [record[:6] for record in executor.log if record.kind != "cross_kv"] == expected
    assert (result.preemptions > 0) == (is_tight and policy in ("vllm", "sarathi"))


@pytest.mark.parametrize(("work", "devices", "config", "is_alone"), in_turns(
    WAA, is_large=lambda case: (case[1].tp_degree or 1) > 1), indirect=["work"])
def test_two_pools_and_their_replay_take_the_same_steps(work: Work, devices: int,
                                                        config: FixedSchedule,
                                                        is_alone: bool) -> None:
    """`is_alone`: one batch is in the system at a time (their size divides the job)."""
    directory, queries, outputs = work
    inputs = np.array([len(q.input_ids) for q in queries])
    problem = problem_of(directory, np.stack([inputs, outputs], axis=1), devices)
    timing = Roofline(problem.model, problem.cluster.device, problem.dtype)
    estimate: Estimate = fixed_estimate("waa-c", problem, timing, config)
    if is_alone:
        estimate = estimate.changed(max_in_system=config.encode_batch, adjustment=0.0)
    rules = rules_for(estimate)
    sink, executors = run_waa_in_process(directory, queries, estimate.deployment.pools, rules)
    finished = {r.query.index: len(r.output_ids) for r in sink.results}
    assert [finished[q.index] for q in queries] == outputs.tolist()
    pools = replay_job(problem, timing, estimate, lengths_of(queries, outputs)).pools
    for pool, deployed in zip(pools, estimate.deployment.pools, strict=True):
        if deployed.role == "encode" or is_alone:
            expected = replayed_steps(pool)
            assert all(run_steps(executors[rank]) == expected for rank in ranks_of(deployed)), (
                deployed.role)
            assert len(expected) >= 4


@pytest.mark.parametrize("work", ["llama"], indirect=True)
@pytest.mark.parametrize(("devices", "groups", "chunk"), [(2, 1, 5), (3, 2, 40)])
def test_a_decode_pool_that_encodes_all_and_its_replay_take_the_same_steps(
        work: Work, devices: int, groups: int, chunk: int) -> None:
    """All inputs are left to it at once, so that no step hangs on when word of another comes."""
    directory, queries, outputs = work
    inputs = np.array([len(q.input_ids) for q in queries])
    problem = problem_of(directory, np.stack([inputs, outputs], axis=1), devices)
    timing = Roofline(problem.model, problem.cluster.device, problem.dtype)
    estimate: Estimate = fixed_estimate("waa-m", problem, timing, FixedSchedule(
        encode_batch=4, decode_micro_batches=groups, encode_chunk=chunk))
    estimate = estimate.changed(max_in_system=2 * len(queries), planned_active=len(queries),
                                stock_tokens=int(inputs.sum()), kv_tokens=100_000)
    rules = rules_for(estimate)
    sink, executors = run_waa_in_process(directory, queries, estimate.deployment.pools, rules)
    finished = {r.query.index: len(r.output_ids) for r in sink.results}
    assert [finished[q.index] for q in queries] == outputs.tolist()
    _, pool = replay_job(problem, timing, estimate, lengths_of(queries, outputs)).pools
    expected = [(step.kind.value, step.group, step.phase, step.iteration, encoded + decoded,
                 tokens + decoded) for step, encoded, decoded, tokens in zip(
        pool.steps, pool.encoded.tolist(), pool.decoded.tolist(), pool.tokens.tolist(),
        strict=True)]
    decoding = estimate.deployment.decoding
    assert all([record[:6] for record in executors[rank].log] == expected
               for rank in ranks_of(decoding))
    assert {step[0] for step in expected} == {"encode", "mixed", "decode"}
    assert not executors[0].log
