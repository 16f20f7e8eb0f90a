"""Tokens with shared prefixes equal those without, by every policy that shares: of nested prefixes,
samples and scored continuations, where requests are evicted, on one rank and on several. Each run
takes the steps of its replay, and encodes what is not shared."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from examples import some
from holding import rule_of
from implementations import SOURCES, TORCH
from prefix_queries import continuations, nested, sampled
from replays import answers_of, estimated, generated, problem_for, replayed, steps_of, whole_steps
from toy_runs import run_in_process
from toys import random_queries

from xgpt.core.controls import Admission
from xgpt.core.errors import XgptError
from xrunner.checkpoint.source import find_model
from xrunner.ops import invariant
from xrunner.query import Sampling
from xrunner.rules.room import Rooms
from xrunner.rules.steps import Step, rules_for

RULES: dict[str, dict[str, Any]] = {
    "rra": {"encode": 5, "iterations": 3, "batch": 12},
    "rra in chunks": {"encode": 5, "iterations": 3, "batch": 12, "chunk": 40},
    "orca": {"batch": 6}, "sarathi": {"batch": 6, "budget": 48},
    "vllm": {"batch": 6, "budget": 300}}
LAYOUTS = ((1,), (1, 1), (2,))


def rule_named(name: str, groups: int = 1, *, is_tight: bool = False) -> Any:
    """Where it is tight, there is little room beside three levels of prefixes: requests are
    evicted."""
    own, tight = {**RULES[name], "batch": RULES[name]["batch"] * groups}, 176 + 32 * groups
    rule = rule_of(name.split()[0], **own, groups=groups, kv_tokens=tight if is_tight else 4000)
    if is_tight and name not in ("sarathi", "vllm"):
        rule.rooms = Rooms.even(groups, tight, Admission(rule="greedy"))
    return rule


class Watched:
    """A rule whose steps are kept, and the most blocks of `size` that hold what it counts: each
    request and prefix begins and ends within a block."""

    def __init__(self, rule: Any, size: int = 128) -> None:
        self._rule, self._size = rule, size
        self.steps: list[Step] = []
        self.most_blocks = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rule, name)

    def decide(self) -> Step | None:
        step = self._rule.decide()
        self.steps += [] if step is None else [step]
        rooms = self._rule.rooms
        self.most_blocks = max(self.most_blocks, rooms.held // self._size + 2 * (
            len(rooms.room_of) + len(rooms.prefixes.living)))
        return step

    @property
    def shared(self) -> int:
        return sum(start.first for step in self.steps for start in step.starts)


# every pair of a rule and an end, an end and a layout, a layout and a rule, and whether it is tight
@pytest.mark.parametrize(("name", "end", "degrees", "is_tight"), some(
    product(RULES, (127, 128, 129), LAYOUTS, (False, True)),
    lambda case: ([*RULES].index(case[0]) + case[1] + LAYOUTS.index(case[2])) % 3 == 0
    and (case[1] + LAYOUTS.index(case[2])) % 2 == case[3]))
def test_tokens_equal_generate(made, name, end, degrees, is_tight):
    (directory, model), (queries, prefixes) = made("llama"), nested(end)
    rule = Watched(rule_named(name, len(degrees), is_tight=is_tight))
    sink, executors = run_in_process(directory, queries, degrees=degrees, rule=rule,
                                     prefixes=prefixes)
    assert answers_of(sink) == generated(model, queries)
    assert any(step.evicted for step in rule.steps) == is_tight
    inputs = sum(len(query.input_ids) for query in queries)
    for executor in executors:
        pool = executor.groups[0].cache.pool
        encoded = sum(record.tokens - record.decoded for record in executor.log)
        assert encoded + rule.shared == inputs or is_tight
        assert rule.shared > inputs / 2
        assert 0 < pool.most_taken <= rule.most_blocks


@pytest.mark.parametrize("implementation", [TORCH, SOURCES], ids=str)
def test_small_blocks_of_torch_and_the_cuda_sources_are_shared(made, small_blocks, implementation):
    (directory, model), (queries, prefixes) = made("llama"), nested(21, 6, block_tokens=16)
    with implementation.using():
        sink, _ = run_in_process(directory, queries, degrees=(1,), prefixes=prefixes,
                                 rule=rule_named("sarathi"))
    assert answers_of(sink) == generated(model, queries)


@pytest.mark.parametrize("name", RULES)
def test_samples_of_one_prompt_are_those_that_it_has_alone(llama, name):
    first = replace(random_queries(1, longest=60)[0], input_ids=tuple(range(6, 90)) * 2,
                    max_new_tokens=9)
    queries, prefixes = sampled(first, 8)
    answers = [answers_of(run_in_process(llama[0], queries, degrees=(1,), prefixes=shared,
                                         rule=rule_named(name))[0])
               for shared in (None, prefixes)]
    assert answers[0] == answers[1] and len({tuple(own) for own in answers[0].values()}) > 4


@pytest.mark.parametrize("degrees", LAYOUTS)
def test_continuations_of_a_prefix_are_as_likely_as_without(llama, degrees):
    scored, forest = continuations(*nested(127, 6))

    def likelihoods(shared: Any) -> dict[int, list[float]]:
        sink, _ = run_in_process(llama[0], scored, degrees=degrees, prefixes=shared,
                                 rule=rule_named("rra", len(degrees)))
        return {result.query.index: [one.logprob for one in result.likelihoods]
                for result in sink.results}

    found, expected = likelihoods(forest), likelihoods(None)
    assert len(expected) == 24
    for index, values in expected.items():
        assert found[index] == pytest.approx(values, abs=1e-5)


@pytest.fixture
def deterministic() -> Iterator[None]:
    try:
        invariant.set_deterministic(True)
    except XgptError as cause:
        pytest.skip(str(cause))
    yield
    invariant.set_deterministic(False)


@pytest.mark.parametrize(("name", "dtype"), some(
    product(RULES, [torch.bfloat16, torch.float32]),
    lambda case: case[1] is torch.bfloat16 or case[0] == "sarathi"))
def test_deterministic_runs_draw_the_same_tokens(llama, deterministic, name, dtype):
    queries, prefixes = nested(129, 10)
    queries = [replace(query, is_forced=True, sampling=Sampling(
        temperature=3.0 * (query.index % 2), seed=query.index)) for query in queries]
    answers = [answers_of(run_in_process(llama[0], queries, degrees=(1,), prefixes=shared,
                                         rule=rule_named(name), dtype=dtype)[0])
               for shared in (None, prefixes)]
    assert answers[0] == answers[1]


@pytest.fixture(scope="module")
def smollm2() -> Any:
    try:
        return find_model("smollm2-135m", say=lambda message: None).directory
    except XgptError as cause:
        pytest.skip(f"the model is not to be had here: {cause}")


@pytest.mark.slow
@pytest.mark.parametrize("end", [127, 128, 129])
@pytest.mark.parametrize("name", RULES)
def test_the_real_model_answers_as_without(smollm2, name, end):
    """Nested prefixes, eight samples of a prompt, and scored continuations (1e-5); in float32, and
    in bfloat16 with fixed orders of sums. How many tokens differ in plain bfloat16 is printed."""
    queries, prefixes = nested(end, 10)
    samples, whole = sampled(replace(queries[0], max_new_tokens=6), 8)
    targets, likely = continuations(*nested(end, 3))

    def told(of: Any, shared: Any, dtype: torch.dtype) -> list[Any]:
        rule = rule_named("rra" if of is targets else name)
        sink, _ = run_in_process(smollm2, of, degrees=(1,), prefixes=shared, rule=rule, dtype=dtype)
        results = sorted(sink.results, key=lambda result: result.query.index)
        return [result.likelihoods if of is targets else result.output_ids for result in results]

    for dtype, is_fixed in ((torch.float32, False), (torch.bfloat16, True),
                            (torch.bfloat16, False)):
        invariant.set_deterministic(is_fixed)
        try:
            pairs = [(told(of, None, dtype), told(of, shared, dtype)) for of, shared in (
                (queries, prefixes), (samples, whole), (targets, likely))]
        finally:
            invariant.set_deterministic(False)
        if dtype is torch.bfloat16 and not is_fixed:
            differ = [a != b for one in pairs[:2] for own in zip(*one, strict=True)
                      for a, b in zip(*own, strict=False)]
            print(f"{name}: {sum(differ)} of {len(differ)} tokens differ in plain bfloat16")
            continue
        assert pairs[0][0] == pairs[0][1] and pairs[1][0] == pairs[1][1]
        for expected, found in zip(*pairs[2], strict=True):
            assert [one.logprob for one in found] == pytest.approx(
                [one.logprob for one in expected], abs=1e-5 if dtype is torch.float32 else 0)


PLANNED: list[tuple[str, dict[str, Any]]] = [
    ("rra", {"encode_batch": 5, "decode_iterations": 4}),
    ("rra", {"encode_batch": 6, "decode_iterations": 4, "encode_chunk": 50}),
    ("orca", {"max_active": 7}), ("vllm", {"max_active": 9, "token_budget": 300}),
    ("sarathi", {"max_active": 9, "token_budget": 64})]


@pytest.mark.parametrize(("policy", "variables", "stages", "is_tight"), some(
    [(*planned, stages, is_tight) for planned in PLANNED for stages in (1, 2)
     for is_tight in (False, True)],
    lambda case: PLANNED.index(case[:2]) % 2 + 1 == case[2] or case[0] == "sarathi"))
def test_a_run_and_its_replay_take_the_same_steps(made, policy, variables, stages, is_tight):
    (directory, model), (queries, prefixes) = made("llama"), nested(128, 24, seed=3)
    expected = generated(model, queries)
    outputs = [len(expected[query.index]) for query in queries]
    problem = problem_for(directory, queries, outputs, stages)
    estimate = estimated(policy, problem, **variables)
    groups = estimate.deployment.num_groups
    estimate = estimate.changed(kv_tokens=176 + 32 * groups if is_tight else 8000)
    rule = Watched(rules_for(estimate)[0])
    sink, executors = run_in_process(directory, queries, stages=estimate.deployment.stages,
                                     rule=rule, prefixes=prefixes)
    assert answers_of(sink) == expected
    result = replayed(problem, estimate, queries, outputs, prefixes)
    assert [step.chunks for step in result.pools[0].steps] == [step.chunks for step in rule.steps]
    steps = whole_steps(result.pools[0])
    assert all(steps_of(executor.log) == steps for executor in executors)
    assert (result.preemptions > 0) == any(step.evicted for step in rule.steps)
