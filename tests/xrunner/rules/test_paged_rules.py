"""vLLM's and Sarathi's rules: blocks, evictions, budgets, and that every query is served once."""

from collections import Counter
from dataclasses import dataclass, field

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from xrunner.rules.paged import BLOCK_TOKENS, PagedRule, blocks_of, sarathi, vllm
from xrunner.rules.steps import Step, StepKind


@dataclass
class Model:
    """What an engine knows of each query, kept the plain way: tokens in the cache by query."""

    inputs: list[int]
    iterations: list[int]
    made: dict[int, int] = field(default_factory=dict)  # tokens generated so far
    held: dict[int, int] = field(default_factory=dict)  # running: tokens in the cache
    partial: dict[int, int] = field(default_factory=dict)  # being encoded: tokens done
    group_of: dict[int, int] = field(default_factory=dict)
    evictions: int = 0

    def to_encode(self, query: int) -> int:
        return self.inputs[query] + self.made.get(query, 0)

    def blocks(self) -> int:
        """Of all queries; one being encoded holds those of all its input."""
        return (sum(map(blocks_of, self.held.values()))
                + sum(blocks_of(self.to_encode(q)) for q in self.partial))

    def take(self, step: Step) -> None:
        for query in step.evicted:
            if query in self.partial:  # it begins at its first chunk again
                del self.partial[query]
            else:
                del self.held[query]
                self.evictions += 1
        if step.kind is not StepKind.ENCODE:
            for query in [q for q in self.held if self.group_of[q] == step.group]:
                self.held[query] += 1
                self.made[query] += 1
        for chunk in step.chunks:
            if chunk.first == 0:
                assert chunk.query not in self.partial, "its row is still held"
                self.partial[chunk.query] = 0
            self.group_of[chunk.query] = step.group
            assert chunk.first == self.partial[chunk.query] and chunk.tokens > 0
            self.partial[chunk.query] += chunk.tokens
        for query in step.joined:
            self.group_of[query] = step.group
            if step.chunks:
                assert self.partial.pop(query) == self.to_encode(query)
            self.held[query] = self.to_encode(query)
            self.made[query] = self.made.get(query, 0) + 1


def drive(rule: PagedRule, inputs: list[int],
          iterations: list[int]) -> tuple[list[Step], Model]:
    """Runs the rule to its end over a plain model of the cache."""
    model, steps = Model(inputs, iterations), []
    for query, tokens in enumerate(inputs):
        assert rule.submit(query, tokens + max(iterations) + 1, tokens)
    while (group := rule.next_group()) is not None:
        for query in [q for q in model.held if model.group_of[q] == group]:
            assert model.made[query] <= iterations[query] + 1
            if model.made[query] == iterations[query] + 1:
                del model.held[query]
                rule.finish(query)
        step = rule.decide()
        if step is None:
            continue
        steps.append(step)
        model.take(step)
        assert rule.reserved_tokens == model.blocks() * BLOCK_TOKENS
        running = Counter(model.group_of[q] for q in (*model.held, *model.partial))
        assert all(count <= rule.group_max_active for count in running.values())
        assert len(steps) < 100_000
    assert not model.held and not model.partial and rule.reserved_tokens == 0
    assert [model.made[q] for q in range(len(inputs))] == [n + 1 for n in iterations]
    return steps, model


def test_vllm_encodes_before_it_decodes_and_as_many_as_the_budget_holds():
    rule = vllm(num_groups=1, max_active=4, kv_tokens=1600, token_budget=100)
    steps, _ = drive(rule, [40, 40, 40, 10, 30], [3, 1, 3, 3, 2])
    seen = [(s.kind.value, s.joined) for s in steps[:5]]
    assert seen == [("encode", (0, 1)), ("encode", (2, 3)), ("decode", ()), ("encode", (4,)),
                    ("decode", ())]


def test_vllm_evicts_the_latest_admitted_when_blocks_run_out():
    rule = vllm(num_groups=1, max_active=9, kv_tokens=4 * BLOCK_TOKENS, token_budget=100)
    steps, model = drive(rule, [16, 16], [40, 3])
    # after 1 decode step each holds 2 blocks: 4 in all; the first query's third one is not there
    assert model.evictions == 0
    rule = vllm(num_groups=1, max_active=9, kv_tokens=4 * BLOCK_TOKENS, token_budget=100)
    steps, model = drive(rule, [16, 16], [40, 20])
    evicting = next(s for s in steps if s.evicted)
    assert evicting.evicted == (1,) and evicting.kind is StepKind.DECODE
    assert steps.index(evicting) == 17, "one encode step and 16 decode steps before"
    assert [s.joined for s in steps if s.kind is StepKind.ENCODE] == [(0, 1), (1,)]


def test_sarathi_fills_a_step_with_chunks_beside_the_running_queries():
    rule = sarathi(num_groups=1, max_active=8, kv_tokens=1600, token_budget=32)
    steps, _ = drive(rule, [20, 50, 5], [4, 1, 1])
    chunks = [[(c.query, c.first, c.tokens) for c in s.chunks] for s in steps[:4]]
    assert chunks == [[(0, 0, 20), (1, 0, 12)], [(1, 12, 31)], [(1, 43, 7), (2, 0, 5)], []]
    assert [s.kind.value for s in steps[:4]] == ["encode", "mixed", "mixed", "decode"]
    assert [s.joined for s in steps[:3]] == [(0,), (), (1, 2)]


@pytest.mark.parametrize("kind", ["vllm", "sarathi"])
@examples(60)
@given(num_groups=st.integers(1, 3), more=st.integers(0, 9), blocks=st.integers(5, 14),
       budget=st.integers(8, 90), data=st.data(),
       inputs=st.lists(st.integers(1, 40), min_size=1, max_size=25))
def test_every_query_gets_its_tokens_within_blocks_slots_and_budget(
        kind, num_groups, more, blocks, budget, data, inputs):
    make = vllm if kind == "vllm" else sarathi
    kv_tokens = num_groups * blocks * BLOCK_TOKENS
    rule = make(num_groups=num_groups, max_active=num_groups + more, kv_tokens=kv_tokens,
                token_budget=budget)
    iterations = data.draw(st.lists(st.integers(0, 39), min_size=len(inputs), max_size=len(inputs)))
    steps, _ = drive(rule, inputs, iterations)
    assert rule.next_group() is None
    for step in steps:
        assert sum(chunk.tokens for chunk in step.chunks) <= budget
        if kind == "vllm" and len(step.joined) > 1:
            assert sum(inputs[q] for q in step.joined) <= budget


def test_memory_that_binds_leads_to_evictions_and_plenty_to_none():
    """Guards the test above: its cases do reach the path that evicts."""
    for make in (vllm, sarathi):
        evictions = []
        for blocks in (8, 80):
            rule = make(num_groups=1, max_active=8, kv_tokens=blocks * BLOCK_TOKENS,
                        token_budget=64)
            evictions.append(drive(rule, [20] * 20, [30] * 20)[1].evictions)
        assert evictions[0] > 0 and evictions[1] == 0
        rule = make(num_groups=2, max_active=4, kv_tokens=64, token_budget=8)
        assert rule.submit(0, 32, 20) and not rule.submit(1, 33, 20), "can never fit: told at once"
