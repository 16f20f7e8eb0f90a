# owner tb
"""Batching rules of small numbers, and such that queries wait in."""

from __future__ import annotations

from typing import Any

from xrunner.rules.iteration import OrcaRule
from xrunner.rules.paged import lightllm, mixed, sarathi, vllm
from xrunner.rules.rra import RraRule
from xrunner.rules.static import StaticRule
from xrunner.rules.steps import Step, StepKind


def holding(rule: Any, count: int, *sizes: int) -> Any:
    """The rule, once it has taken queries 0, 1 and so on of these sizes."""
    for query in range(count):
        assert rule.submit(query, *sizes) is not False
    return rule


def rule_of(policy: str, *, groups: int = 1, batch: int = 6, kv_tokens: int = 10_000,
            encode: int = 4, iterations: int = 5, chunk: int = 0, budget: int = 40) -> Any:
    """A rule of small numbers. `batch`: queries at a time, of all groups; `encode`, `iterations`,
    `chunk`: RRA's encode batch, decode iterations and chunk; `budget`: tokens of a step."""
    own = {"num_groups": groups, "kv_tokens": kv_tokens}
    if policy == "rra":
        return RraRule(encode_batch=encode, decode_iterations=iterations, max_active=batch,
                       encode_chunk=chunk, **own)
    if policy in ("ft", "dsi"):
        return StaticRule(encode_batch=batch, **own,
                          encode_micro_batches=groups * (2 if policy == "dsi" else 1))
    if policy == "orca":
        return OrcaRule(max_active=batch, **own)
    make = {"vllm": vllm, "sarathi": sarathi, "mixed": mixed, "lightllm": lightllm}[policy]
    return make(max_active=batch, token_budget=budget, **own)


def drive(rule: RraRule | OrcaRule, outputs: dict[int, int]) -> list[Step]:
    """Runs the rule to its end; query q needs outputs[q] tokens, the first from its encoding."""
    steps: list[Step] = []
    left = dict(outputs)
    active: list[list[int]] = [[] for _ in range(rule.num_groups)]
    while (group := rule.next_group()) is not None:
        for query in [q for q in active[group] if left[q] == 0]:
            active[group].remove(query)
            rule.finish(query)
        step = rule.decide()
        if step is None:
            continue
        steps.append(step)
        active[group] += step.joined
        for query in step.joined if step.kind is StepKind.ENCODE else active[group]:
            left[query] -= 1  # who joins gets the first token, whoever decodes another
        assert len(active[group]) <= rule.group_max_active
        assert len(steps) < 100_000
    assert not any(left.values())
    return steps
