"""Baselines executed: greedy float32 tokens equal transformers' `generate`, query by query, with
static batches, with queries that join while others decode, and with queries that are evicted."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from examples import some
from holding import rule_of
from replays import answers_of, generated
from toy_runs import Collector, run_in_process
from toys import FAMILIES, T5_FAMILIES, random_queries

from xrunner.engine import kv as blocks
from xrunner.engine.stage import StageExecutor
from xrunner.query import PreparedQuery, Sampling
from xrunner.rules.steps import BatchingRule, Step

Made = Callable[[str], tuple[Path, Any]]
Answered = Callable[[str], tuple[list[PreparedQuery], dict[int, list[int]]]]
STATIC = [("ft", (1,), 2), ("ft", (1, 1), 2), ("dsi", (1, 1), 2), ("dsi", (1, 1, 1), 1)]
CONTINUOUS = [("orca", (1,), 1), ("orca", (1, 1), 2), ("vllm", (1,), 1), ("vllm", (1, 1), 2),
              ("sarathi", (1,), 1), ("sarathi", (1, 1), 2)]
TIGHT = 6 * 16  # KV tokens of a group: six blocks, where a query may need three


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """A query of these has several; in those that CPUs take it would have one."""
    monkeypatch.setitem(blocks.BLOCK_TOKENS, "cpu", 16)


def own_rule(policy: str, groups: int, *, batch: int = 5, kv_tokens: int = TIGHT) -> BatchingRule:
    """`batch`: queries at a time, in each group."""
    is_paged = policy in ("vllm", "sarathi")
    return rule_of(policy, groups=groups, batch=batch * groups, budget=9 if policy == "sarathi"
                   else 40, kv_tokens=kv_tokens * groups if is_paged else 10_000)


class Watched:
    """A rule that counts what it decided."""

    def __init__(self, rule: BatchingRule) -> None:
        self._rule, self.counts = rule, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rule, name)

    def decide(self) -> Step | None:
        step = self._rule.decide()
        if step is not None:
            self.counts[step.kind.value] += 1
            self.counts["evicted"] += len(step.evicted)
            self.counts["in part"] += any(chunk.first > 0 for chunk in step.chunks)
            self.counts["together"] += len(step.joined) > 1
        return step


def run(answered: Answered, family: str, made: Made, policy: str, degrees: Sequence[int],
        groups: int, **sizes: int) -> tuple[Collector, list[StageExecutor], Counter[str]]:
    queries, answers = answered(family)
    rule = Watched(own_rule(policy, groups, **sizes))
    sink, executors = run_in_process(made(family)[0], queries, degrees=degrees, rule=rule)
    assert answers_of(sink) == answers
    orders = [[record[:6] for record in e.log if record.kind != "cross_kv"] for e in executors]
    assert all(order == orders[0] for order in orders), "ranks took different steps"
    return sink, executors, rule.counts


def in_turns(families: Sequence[str], cases: list[tuple[str, tuple[int, ...], int]]) -> list[Any]:
    """Each family with all of the cases: with every fourth one always."""
    return some([(family, *case) for family in families for case in cases],
                lambda case: (families.index(case[0]) + cases.index(case[1:])) % 4 == 0)


@pytest.mark.parametrize(("family", "policy", "degrees", "groups"), in_turns(
    ["llama", "opt", "t5", "gpt2"], STATIC))
def test_static_batches_answer_as_generate_does(answered, made, family, policy, degrees, groups):
    sink, executors, counts = run(answered, family, made, policy, degrees, groups)
    assert counts["encode"] >= 4 and counts["decode"] > 20
    assert all(e.rows_compacted == 0 for e in executors)
    # queries of a batch end together, however few tokens they have
    ends = Counter(round(r.last_token_s, 9) for r in sink.results)
    assert len(ends) == (2 if groups == 2 else 4)


@pytest.mark.parametrize(("family", "policy", "degrees", "groups"), in_turns(
    ["llama", "qwen2", "opt", "gpt2"], CONTINUOUS))
def test_continuous_batches_answer_as_generate_does(answered, made, family, policy, degrees,
                                                    groups):
    _, _, counts = run(answered, family, made, policy, degrees, groups)
    if policy == "vllm":
        assert counts["encode"] and counts["decode"] and not counts["mixed"]
        assert counts["together"]
    else:
        assert counts["mixed"] > 4
    assert bool(counts["evicted"]) == (policy != "orca")
    assert bool(counts["in part"]) == (policy == "sarathi")


@pytest.mark.parametrize(("policy", "degrees"), some(
    [("ft", (2,)), ("dsi", (2, 1)), ("orca", (2, 1)), ("vllm", (1, 2)), ("sarathi", (2,))],
    lambda case: case[0] in ("dsi", "vllm", "sarathi")))
def test_tensor_parallel_stages_run_baselines(answered, made, policy, degrees):
    run(answered, "llama", made, policy, degrees, len(degrees))


@pytest.mark.parametrize(("policy", "batch"), some(
    product(["ft", "dsi", "orca", "vllm", "sarathi"], [1, 17]),
    lambda case: case in (("ft", 1), ("vllm", 1), ("sarathi", 17))))
def test_one_query_at_a_time_and_all_at_once(answered, made, policy, batch):
    run(answered, "llama", made, policy, (1, 1), 2, batch=batch)


@pytest.mark.parametrize("policy", ["orca", "vllm"])
def test_those_who_join_take_the_rows_of_those_who_left(answered, made, policy):
    """While queries wait, rows are moved only where two leave at once."""
    _, executors, _ = run(answered, "llama", made, policy, (1,), 1, batch=4, kv_tokens=4 * 64)
    assert executors[0].rows_compacted <= 5


def test_dead_rows_go_on_beyond_the_models_positions(made):
    """OPT has 128 learned positions; a long input's row is decoded on with the longest output."""

    directory, model = made("opt")
    first, second = random_queries(2, seed=4)
    queries = [replace(first, input_ids=first.input_ids * 40, index=0),
               replace(second, max_new_tokens=100, is_forced=True, index=1)]
    queries[0] = replace(queries[0], input_ids=queries[0].input_ids[:120], max_new_tokens=8,
                         is_forced=True)
    sink, _ = run_in_process(directory, queries, degrees=(1, 1), rule=own_rule("ft", 1))
    assert answers_of(sink) == generated(model, queries)


def test_the_same_seed_draws_the_same_text_under_every_policy(made):
    directory, _ = made("llama")
    queries = [replace(q, is_forced=True, max_new_tokens=14, sampling=Sampling(
        temperature=0.9, top_k=20 if q.index % 2 else None, top_p=0.9, seed=q.index))
        for q in random_queries(9)]
    texts = []
    for policy in ("ft", "orca", "vllm", "sarathi"):
        rule = Watched(own_rule(policy, 2, kv_tokens=4 * 16))
        sink, _ = run_in_process(directory, queries, degrees=(1, 1), rule=rule)
        texts.append({r.query.index: r.output_ids for r in sink.results})
        assert bool(rule.counts["evicted"]) == (policy in ("vllm", "sarathi"))
    sink, _ = run_in_process(directory, queries, num_stages=1)
    assert all(text == {r.query.index: r.output_ids for r in sink.results} for text in texts)


@pytest.mark.parametrize("policy", ["dsi", "orca", "vllm", "sarathi"])
def test_stopping_early_ends_every_stage(answered, made, policy):
    queries, answers = answered("llama")
    sink, _ = run_in_process(made("llama")[0], queries, degrees=(1, 1, 1),
                             rule=own_rule(policy, 3, batch=2), sink=Collector(stop_after=5))
    assert 5 <= len(sink.results) < len(queries)
    assert all(list(r.output_ids) == answers[r.query.index] for r in sink.results)


@pytest.mark.slow
@pytest.mark.parametrize("family", [*FAMILIES, *T5_FAMILIES])
@pytest.mark.parametrize("degrees", [(1,), (2,), (1, 1), (2, 1), (1, 2), (1, 1, 1), (2, 2)])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_every_layout(answered, made, family, degrees, groups):
    policies = ("ft", "dsi") if family in T5_FAMILIES else ("ft", "dsi", "orca", "vllm", "sarathi")
    for policy in policies:
        for batch in (1, 3, 8):
            run(answered, family, made, policy, degrees, groups, batch=batch)
