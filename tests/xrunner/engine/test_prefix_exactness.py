"""Tokens with shared prefixes equal those without, by every policy that shares: of nested prefixes,
samples and scored continuations, where requests are evicted, on one rank and on several. Each run
takes the steps of its replay, and encodes what is not shared."""

from itertools import product
from typing import Any

import pytest
from examples import some
from holding import rule_of
from prefix_queries import nested
from replays import answers_of, generated
from toy_runs import run_in_process

from xgpt.core.controls import Admission
from xrunner.rules.room import Rooms
from xrunner.rules.steps import Step

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
