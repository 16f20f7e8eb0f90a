"""Tokens that stay where they were chosen: who decodes is fed from there, the host takes each
step's tokens once, and where no end hangs on them it asks for the next step first."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from holding import rule_of
from replays import answers_of, estimated, generated, problem_for, replayed, steps_of, whole_steps
from toy_runs import run_in_process, run_waa_in_process, toy_waa_rules, waa_pools
from toys import random_queries

from xrunner.devices import Arriving
from xrunner.engine import stage
from xrunner.engine.group import FED_BACK
from xrunner.engine.stage import StageExecutor
from xrunner.query import PreparedQuery
from xrunner.rules.paged import BLOCK_TOKENS
from xrunner.rules.steps import BatchingRule, StepKind, rules_for

TIGHT = 5 * BLOCK_TOKENS
RULES: dict[str, Callable[[], BatchingRule]] = {
    "rra": lambda: rule_of("rra", batch=12),
    "rra in chunks": lambda: rule_of("rra", batch=12, iterations=3, chunk=9),
    "ft": lambda: rule_of("ft", batch=5), "orca": lambda: rule_of("orca"),
    "vllm": lambda: rule_of("vllm", kv_tokens=TIGHT, budget=60),
    "sarathi": lambda: rule_of("sarathi", kv_tokens=TIGHT, budget=12)}


class Watched(Arriving):
    """Notes when a step's tokens are asked for, and when they are waited for."""

    notes: list[tuple[str, int]]
    is_here = False  # as of a GPU that is at work

    def __init__(self, tensor: torch.Tensor, then: Callable[[], None]) -> None:
        self._number = sum(what == "asked" for what, _ in self.notes)
        self.notes.append(("asked", self._number))
        super().__init__(tensor, then)

    def wait(self) -> torch.Tensor:
        self.notes.append(("known", self._number))
        return super().wait()


@pytest.fixture
def notes(monkeypatch):
    Watched.notes = []
    monkeypatch.setattr(stage, "Arriving", Watched)
    return Watched.notes


@pytest.fixture
def told(monkeypatch):
    """The kind of each step, and the tokens that come with it."""
    steps: list[tuple[StepKind, list[int]]] = []
    execute = StageExecutor.execute

    def noted(self: StageExecutor, message: Any, inputs: torch.Tensor) -> Any:
        if self.model.is_first:
            steps.append((message.kind, inputs.tolist()))
        return execute(self, message, inputs)

    monkeypatch.setattr(StageExecutor, "execute", noted)
    return steps


def forced(queries: list[PreparedQuery]) -> list[PreparedQuery]:
    return [replace(query, is_forced=True) for query in queries]


@pytest.mark.parametrize("is_forced", [False, True], ids=["ends unknown", "ends known"])
@pytest.mark.parametrize("policy", RULES)
def test_the_host_waits_once_a_step_and_is_a_step_ahead_where_ends_are_known(
        made, notes, told, policy, is_forced):
    directory, model = made("llama")
    queries = random_queries(14, seed=3)
    queries = forced(queries) if is_forced else queries
    sink, (executor,) = run_in_process(directory, queries, degrees=(1,), rule=RULES[policy]())
    assert answers_of(sink) == generated(model, queries)
    steps = len(executor.log)
    assert sorted(notes) == sorted((what, n) for what in ("asked", "known") for n in range(steps))
    ahead = [n for n in range(steps - 1)
             if notes.index(("known", n)) > notes.index(("asked", n + 1))]
    # a rule that evicts knows every token before it decides; of an input's part there is none
    assert ahead == ([] if policy in ("vllm", "sarathi") else [
        n for n in range(steps - 1) if is_forced or not executor.log[n].queries])
    assert all(notes.index(("known", n)) < notes.index(("asked", n + 2)) for n in range(steps - 2))
    decoded = [tokens for kind, tokens in told if kind is StepKind.DECODE]
    assert decoded and all(set(tokens) == {FED_BACK} for tokens in decoded)


@pytest.mark.parametrize(("family", "degrees"), [
    ("llama", (1, 1)), ("llama", (2,)), ("llama", "two pools"), ("t5", (1,))])
def test_who_is_told_its_token_and_how_often(made, told, family, degrees):
    """Several ranks are fed by the head; who comes from another pool, or begins an answer, once."""
    directory, model = made(family)
    queries = forced(random_queries(9))
    sink, _ = (run_waa_in_process(directory, queries, waa_pools(directory, [1], [1]),
                                  toy_waa_rules(1)) if degrees == "two pools" else
               run_in_process(directory, queries, degrees=degrees))
    assert answers_of(sink) == generated(model, queries)
    decoded = [token for kind, tokens in told if kind is StepKind.DECODE for token in tokens]
    told_once = {"t5": len(queries), "llama": sum(q.max_new_tokens > 1 for q in queries)}[family]
    assert sum(token != FED_BACK for token in decoded) == (
        len(decoded) if isinstance(degrees, tuple) and sum(degrees) > 1 else told_once)
    assert len(decoded) > told_once


@pytest.mark.parametrize(("policy", "variables"), [
    ("rra", {"encode_batch": 6, "decode_iterations": 4}),
    ("rra", {"encode_batch": 6, "decode_iterations": 4, "decode_micro_batches": 2}),
    ("ft", {"encode_batch": 9, "decode_micro_batches": 2}), ("orca", {"max_active": 6})])
def test_a_head_that_is_ahead_decides_what_the_replay_decides(made, policy, variables):
    directory, _ = made("llama")
    queries = forced(random_queries(24, seed=11, longest=40))
    outputs = [q.max_new_tokens for q in queries]
    problem = problem_for(directory, queries, outputs)
    estimate = estimated(policy, problem, **variables)
    sink, (executor,) = run_in_process(directory, queries, rule=rules_for(estimate)[0],
                                       stages=estimate.deployment.stages)
    assert [len(ids) for _, ids in sorted(answers_of(sink).items())] == outputs
    pool = replayed(problem, estimate, queries, outputs).pools[0]
    assert steps_of(executor.log) == whole_steps(pool)
