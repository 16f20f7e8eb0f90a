"""KV entries in blocks: each query finds its own, no block is had twice and none is lost, whatever
joins, grows and goes; and what a rule admits is there, in as many blocks as it counts."""

import random
from itertools import product
from typing import Any

import pytest
import torch
from examples import examples, some
from hypothesis import given
from hypothesis import strategies as st
from implementations import SOURCES, TORCH
from replays import answers_of, generated
from toy_runs import run_in_process
from toys import random_queries

from xgpt.core.model import ModelSpec
from xrunner.engine.kv import BlockPool, KvCache, Room, kv_shape
from xrunner.rules.iteration import OrcaRule
from xrunner.rules.paged import BLOCK_TOKENS, PagedRule, sarathi, vllm
from xrunner.rules.rra import RraRule
from xrunner.rules.slots import GroupSlots
from xrunner.rules.steps import Step, kv_budget

SPEC = ModelSpec(name="toy", family="llama", num_layers=2, hidden_size=8, num_heads=2,
                 num_kv_heads=1, vocab_size=11, intermediate_size=8)
SLOTS, CAPACITY = 6, 70


def cache_of(count: int, size: int = 16) -> KvCache:
    room = Room(SLOTS, CAPACITY, count * size, 1)
    shape = kv_shape(SPEC, torch.float32, slots=count, capacity=size)
    return KvCache(shape, room=room)


class Written:
    """A group's queries, and what of the cache is theirs."""

    def __init__(self, cache: KvCache) -> None:
        self.cache, self.slots = cache, GroupSlots[int]()
        self.expected: dict[int, torch.Tensor] = {}
        self.next = 0

    def step(self, removed: set[int], joining: int, tokens: dict[int, int]) -> None:
        """Slots are freed, queries join them and those behind, and slots get more tokens."""
        self.slots.vacate([self.slots.seats[slot] for slot in removed])
        for slot in removed:
            del self.expected[self.slots.seats[slot]]
        new = list(range(self.next, self.next + joining))
        self.next += joining
        seating = self.slots.seat(new, is_reused=True)
        self.cache.free(seating.removed)
        self.cache.place(joining, seating.replaced)
        for query in new:
            self.expected[query] = torch.empty(2, 2, 1, 0, 4)
        lengths = self.cache.lengths
        grown = {slot: lengths[slot] + more for slot, more in tokens.items()}
        table = self.cache.room_for(list(grown.values()), list(grown))
        for slot, more in tokens.items():
            query = self.slots.seats[slot]
            at, values = torch.arange(lengths[slot], grown[slot]), torch.randn(2, 2, 1, more, 4)
            where = table.places(torch.full_like(at, slot), at)
            for i, (block, within) in enumerate(zip(*where, strict=True)):
                self.cache.store[:, :, block, :, within] = values[:, :, :, i]
            self.expected[query] = torch.cat([self.expected[query], values], dim=3)
            self.cache.grow(slot, more)

    def check(self) -> None:
        self.cache.check_integrity(least=0)
        (table, size), lengths = self.cache.room_for([]), self.cache.lengths
        assert self.cache.pool.num_taken == sum(-(-n // size) for n in lengths)
        for slot, (query, length) in enumerate(zip(self.slots.seats, lengths, strict=True)):
            own = table[slot, :-(-length // size)]
            found = self.cache.store[:, :, own].transpose(2, 3).flatten(3, 4)[:, :, :, :length]
            assert torch.equal(found, self.expected[query])


@examples(60)
@given(st.data(), st.sampled_from([1, 16, 32, 128]))
def test_each_query_finds_its_own_entries_whatever_joins_grows_and_goes(data, size):
    width = -(-CAPACITY // size)
    written = Written(cache_of(SLOTS * width, size))
    for _ in range(data.draw(st.integers(1, 10))):
        there = len(written.slots.seats)
        removed = data.draw(st.sets(st.integers(0, there - 1))) if there else set()
        joining = data.draw(st.integers(0, SLOTS - there + len(removed)))
        after, kept = there - len(removed) + joining, written.cache.lengths
        # who sits where is the cache's to say: any slot may get as many tokens as any may have
        longest = max(kept, default=0)
        tokens = {slot: data.draw(st.integers(0, CAPACITY - longest))
                  for slot in data.draw(st.sets(st.integers(0, after - 1)))} if after else {}
        written.step(removed, joining, tokens)
        written.check()
    assert written.cache.peak_bytes <= written.cache.num_bytes


def test_a_pool_gives_no_block_that_is_not_there():
    pool = BlockPool(kv_shape(SPEC, torch.float32, slots=3, capacity=1))
    taken = pool.take(3)
    assert sorted(taken) == [0, 1, 2]
    with pytest.raises(AssertionError, match="more was admitted than planned"):
        pool.take(1)
    pool.give_back([taken[1]])
    assert pool.take(1) == [taken[1]] and pool.most_taken == 3


def test_blocks_are_not_copied_where_slots_move():
    written = Written(cache_of(30))
    written.step(set(), 4, {0: 40, 1: 17, 2: 3, 3: 33})
    before = written.cache.store.clone()
    written.step({0, 1}, 0, {})
    written.check()
    assert torch.equal(written.cache.store, before)


@given(st.integers(1, 40), st.integers(1, 300), st.integers(0, 3000), st.sampled_from([1, 16]),
       st.sampled_from([16, 32, 128]), st.integers(1, 3), st.integers(0, 2**20))
def test_there_are_blocks_for_whatever_the_budget_admits(slots, capacity, tokens, unit, size,
                                                         groups, seed):
    room, rng = Room(slots, capacity, tokens // unit * unit, unit, groups), random.Random(seed)
    left, taken = room.tokens, 0
    for _ in range(slots * groups):
        length = rng.randint(1, capacity)
        counted = -(-length // unit) * unit
        if counted <= left:
            left -= counted
            taken += -(-length // size)
    assert taken <= room.num_blocks(size)
    if unit == size:
        assert room.num_blocks(size) * size <= room.tokens, "not a token more than was planned"


TIGHT = 6 * BLOCK_TOKENS


def rule_of(policy: str, groups: int = 1) -> OrcaRule | PagedRule:
    if policy == "orca":
        return OrcaRule(num_groups=groups, max_active=5 * groups, kv_tokens=100 * groups)
    kind = vllm if policy == "vllm" else sarathi
    return kind(num_groups=groups, max_active=5 * groups, kv_tokens=TIGHT * groups,
                token_budget=40 if policy == "vllm" else 9)


class Counting:
    """A paged rule that notes, after each decision, the blocks that its groups hold."""

    def __init__(self, rule: PagedRule) -> None:
        self._rule, self.most = rule, [0] * rule.num_groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rule, name)

    def decide(self) -> Step | None:
        step = self._rule.decide()
        for i, own in enumerate(self._rule.groups):
            self.most[i] = max(self.most[i], own.num_blocks - own.free)
        return step


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("policy", ["vllm", "sarathi"])
@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_run_has_the_blocks_that_its_rule_counts(made, policy, num_stages):
    rule = rule_of(policy, groups=num_stages)
    assert isinstance(rule, PagedRule)
    counting, queries = Counting(rule), random_queries(12)
    sink, executors = run_in_process(made("llama")[0], queries, num_stages=num_stages,
                                     rule=counting)
    assert len(sink.results) == len(queries)
    for executor in executors:
        pools = [own.cache.pool for own in executor.groups]
        assert [pool.count for pool in pools] == [TIGHT // BLOCK_TOKENS] * num_stages
        if policy == "vllm":
            assert [pool.most_taken for pool in pools] == counting.most
        else:  # the rule holds all of an input's blocks from its first chunk on
            assert all(0 < pool.most_taken <= most
                       for pool, most in zip(pools, counting.most, strict=True))
        assert executor.rows_compacted == 0
        most = sum(pool.most_taken for pool in pools)
        planned, had = executor.kv_bytes
        assert had * sum(pool.count for pool in pools) == planned * most


@pytest.mark.parametrize(("implementation", "policy"), some(
    product([TORCH, SOURCES], ["orca", "vllm", "sarathi"]),
    lambda case: case[0] is TORCH or case[1] == "vllm"), ids=str)
def test_torch_and_the_cuda_sources_answer_as_generate_does(made, small_blocks, implementation,
                                                            policy):
    # the emulated launches take their time
    (directory, model), queries = made("llama"), random_queries(8 if implementation is TORCH else 4)
    with implementation.using():
        sink, _ = run_in_process(directory, queries, num_stages=1, rule=rule_of(policy))
    assert answers_of(sink) == generated(model, queries)


def test_rules_that_leave_queries_where_they_are_ask_for_blocks():
    rra = RraRule(encode_batch=4, decode_iterations=5, num_groups=2, max_active=12, kv_tokens=999)
    assert kv_budget(rra) is None and kv_budget(rra, in_blocks=True) == (999 // 2, 1, False)
    assert kv_budget(rule_of("orca", 2)) == (100, 1, False)
    assert kv_budget(rule_of("vllm", 2)) == (TIGHT, BLOCK_TOKENS, False)
