"""The simulator's replay, fed with a run's lengths, decides what the run decided, step for step.

Of WAA's pools that holds where the clock has no say. What is encoded together, and in which order,
never depends on it; when a batch reaches the decode pool, and so which step it joins, does, unless
one batch is in the system at a time.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from examples import some
from replays import answers_of, estimated, generated, problem_for, replayed, steps_of, whole_steps
from toy_runs import ranks_of, run_in_process, run_waa_in_process
from toys import random_queries

from xgpt.core.controls import Batches
from xrunner.rules.static import StaticRule
from xrunner.rules.steps import rules_for

# policy, tensor-parallel degrees of the stages, variables
RRA = [("rra", (1,), {"encode_batch": 6, "decode_iterations": 4, "decode_micro_batches": 2}),
       ("rra", (1, 1), {"encode_batch": 9, "decode_iterations": 3}),
       ("rra", (2, 1), {"encode_batch": 5, "decode_iterations": 7, "tp_degree": 2, "tp_gpus": 2}),
       ("rra", (2, 2), {"encode_batch": 3, "decode_iterations": 2, "tp_degree": 2, "tp_gpus": 4,
                        "decode_micro_batches": 3})]
BASELINES = [("ft", (1, 1), {"encode_batch": 9, "decode_micro_batches": 2}),
             ("ft", (1,), {"encode_batch": 5, "decode_micro_batches": 3}),
             ("dsi", (1, 1, 1), {"encode_batch": 7, "decode_micro_batches": 2,
                                 "encode_micro_batches": 4}),
             ("orca", (1,), {"max_active": 6}),
             ("orca", (2, 1), {"max_active": 7, "tp_degree": 2, "tp_gpus": 2}),
             ("vllm", (1, 1), {"max_active": 9, "token_budget": 60}),
             ("sarathi", (1, 1), {"max_active": 9, "token_budget": 12}),
             ("mixed", (1, 1), {"max_active": 9, "token_budget": 60}),
             ("lightllm", (1,), {"max_active": 9, "token_budget": 60})]
EVICTING = ("vllm", "sarathi", "mixed")
WAA = [(2, {"encode_batch": 4}), (2, {"encode_batch": 6, "decode_micro_batches": 2}),
       (4, {"encode_batch": 3, "decode_micro_batches": 3}),
       (4, {"encode_batch": 4, "decode_micro_batches": 2, "tp_degree": 2, "tp_gpus": 2})]
# RRA in chunks: family, degrees, chunk, encode batch, iterations, whether memory is tight
CHUNKS = [("llama", (1,), 5, 4, 6, False), ("llama", (1, 1), 13, 6, 4, False),
          ("llama", (1, 1), 1000, 5, 3, True), ("opt", (1,), 13, 3, 1, False),
          ("gpt2", (1, 1), 5, 9, 12, True), ("qwen2", (2, 1), 9, 5, 4, False)]
FAMILIES, DECODER_ONLY = ("llama", "t5"), ("orca", *EVICTING, "lightllm")


@pytest.fixture(scope="module")
def work(made):
    """(model's folder, queries, what transformers answers to each by index), by family."""

    @cache
    def make(family: str) -> tuple[Any, ...]:
        directory, model = made(family)
        queries = [replace(q, max_new_tokens=q.max_new_tokens + 5)
                   for q in random_queries(24, seed=11, longest=40)]
        return directory, queries, generated(model, queries)

    return make


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
                 for flag in (False, True)
                 if family != "t5" or case[0] not in DECODER_ONLY], is_always)


def check_pipeline(work: Any, policy: str, degrees: tuple[int, ...], variables: dict[str, int],
                   is_tight: bool) -> tuple[Any, list[Any]]:
    """`is_tight`: the budget holds two or three queries a group, so that admission waits for room,
    or some are evicted. (the replay, its steps)"""
    directory, queries, expected = work
    outputs = [len(expected[q.index]) for q in queries]
    problem = problem_for(directory, queries, outputs, sum(degrees))
    estimate = estimated(policy, problem, **variables)
    most = -(-max(q.reserve_tokens for q in queries) // 16) * 16
    estimate = estimate.changed(
        kv_tokens=estimate.deployment.num_groups * most * (2 if is_tight else 40))
    assert tuple(stage.tp_degree for stage in estimate.deployment.stages) == degrees
    sink, executors = run_in_process(directory, queries, stages=estimate.deployment.stages,
                                     rule=rules_for(estimate)[0])
    assert answers_of(sink) == expected
    result = replayed(problem, estimate, queries, outputs)
    steps = whole_steps(result.pools[0])
    assert all(steps_of(executor.log) == steps for executor in executors)
    assert policy != "rra" or len({step[4] for step in steps}) > 2
    return result, steps


# those that evict where memory is tight do so there alone
@pytest.mark.parametrize(("family", "policy", "degrees", "variables", "is_tight"), [
    *in_turns(RRA, is_large=lambda case: case[1] == (2, 2)),
    *in_turns(BASELINES, lambda case: case[0] in EVICTING)])
def test_a_run_and_its_replay_take_the_same_steps(work, family, policy, degrees, variables,
                                                  is_tight):
    result, _ = check_pipeline(work(family), policy, degrees, variables, is_tight)
    assert (result.preemptions > 0) == (is_tight and policy in EVICTING)


@pytest.mark.parametrize(("family", "degrees", "chunk", "batch", "iterations", "is_tight"), CHUNKS)
def test_chunks_answer_as_generate_does_and_are_replayed(made, answered, family, degrees, chunk,
                                                         batch, iterations, is_tight):
    tp = {"tp_degree": max(degrees), "tp_gpus": max(degrees) if max(degrees) > 1 else 0}
    result, steps = check_pipeline(
        (made(family)[0], *answered(family)), "rra", degrees,
        {"encode_batch": batch, "decode_iterations": iterations, "encode_chunk": chunk, **tp},
        is_tight)
    pool = result.pools[0]
    assert "mixed" in {step[0] for step in steps} and max(pool.tokens) <= chunk
    assert any(part.first for step in pool.steps for part in step.chunks) == (chunk < 1000)


class Foresight:
    """Forecasts that most outputs outgrow."""

    def first(self, input_tokens, cap):
        return min(2 + input_tokens % 7, cap)

    def beyond(self, input_tokens, written, cap):
        return min(written + 3, cap)

    def ended(self, input_tokens, written):
        pass


@pytest.mark.parametrize(("policy", "degrees", "variables"), [
    ("ft", (1,), {"encode_batch": 5, "decode_micro_batches": 3}),
    ("ft", (2, 1), {"encode_batch": 6, "decode_micro_batches": 1, "tp_degree": 2, "tp_gpus": 2}),
    ("dsi", (1, 1), {"encode_batch": 7, "decode_micro_batches": 2, "encode_micro_batches": 4})])
def test_batches_that_end_with_their_forecasts_answer_the_same(work, policy, degrees, variables):
    """Requests that outgrow them wait again, with the tokens that they have."""
    directory, queries, expected = work("llama")
    outputs = [len(expected[query.index]) for query in queries]
    problem = problem_for(directory, queries, outputs, sum(degrees))
    estimate = estimated(policy, problem, **variables)

    def rule():
        own = StaticRule(
            encode_batch=variables["encode_batch"], num_groups=estimate.deployment.num_groups,
            encode_micro_batches=estimate.controls.encode_micro_batches,
            kv_tokens=estimate.deployment.kv_tokens, batches=Batches(most=6), evicts=True)
        own.forecaster = Foresight()
        return own

    sink, executors = run_in_process(directory, queries, stages=estimate.deployment.stages,
                                     rule=rule())
    assert answers_of(sink) == expected
    result = replayed(problem, estimate, queries, outputs, rules=[rule()])
    assert result.preemptions > len(queries)
    steps = whole_steps(result.pools[0])
    assert all(steps_of(executor.log) == steps for executor in executors)


def check_pools(work: Any, policy: str, devices: int, variables: dict[str, int],
                changes: Callable[[list[Any]], dict[str, Any]]) -> tuple[Any, Any, Any]:
    """(deployed pools, executors by rank, replayed pools) of a run by an estimate with changes, of
    its queries."""
    directory, queries, expected = work
    outputs = [len(expected[q.index]) for q in queries]
    problem = problem_for(directory, queries, outputs, devices)
    estimate = estimated(policy, problem, **variables)
    estimate = estimate.changed(**changes(queries))
    sink, executors = run_waa_in_process(directory, queries, estimate.deployment.pools,
                                         rules_for(estimate))
    assert answers_of(sink) == expected
    return estimate.deployment.pools, executors, replayed(problem, estimate, queries, outputs).pools


@pytest.mark.parametrize(("family", "devices", "variables", "is_alone"), in_turns(
    WAA, is_large=lambda case: case[1].get("tp_degree", 1) > 1))
def test_two_pools_and_their_replay_take_the_same_steps(work, family, devices, variables, is_alone):
    """`is_alone`: one batch is in the system at a time (their size divides the job)."""
    pools, executors, found = check_pools(
        work(family), "waa-c", devices, variables, lambda queries: {
            "max_in_system": variables["encode_batch"], "adjustment": 0.0} if is_alone else {})
    for pool, deployed in zip(found, pools, strict=True):
        if deployed.role == "encode" or is_alone:
            expected = whole_steps(pool)
            assert all(steps_of(executors[rank].log) == expected for rank in ranks_of(deployed)), (
                deployed.role)
            assert len(expected) >= 4


@pytest.mark.parametrize(("devices", "groups", "chunk"), [(2, 1, 5), (3, 2, 40)])
def test_a_decode_pool_that_encodes_all_and_its_replay_take_the_same_steps(
        work, devices, groups, chunk):
    """All inputs are left to it at once, so that no step hangs on when word of another comes."""
    pools, executors, (_, pool) = check_pools(
        work("llama"), "waa-m", devices,
        {"encode_batch": 4, "decode_micro_batches": groups, "encode_chunk": chunk},
        lambda queries: {"max_in_system": 2 * len(queries), "planned_active": len(queries),
                         "stock_tokens": sum(len(q.input_ids) for q in queries),
                         "kv_tokens": 100_000})
    expected = whole_steps(pool)
    assert all(steps_of(executors[rank].log) == expected for rank in ranks_of(pools[1]))
    assert {step[0] for step in expected} == {"encode", "mixed", "decode"}
    assert not executors[0].log
