"""KV entries in blocks: each query finds its own, no block is had twice and none is lost, whatever
joins, grows and goes; what a rule admits is there, in as many blocks as it counts. RRA and WAA with
their entries so, too: nothing is copied when queries end. In rows of the longest query: compaction
against a plain model of it, growth, zeros."""

import ctypes
import mmap
import random
from itertools import product
from typing import Any

import pytest
import torch
from examples import examples, some
from holding import rule_of
from hypothesis import given
from hypothesis import strategies as st
from implementations import SOURCES, TORCH
from integrity import check_blocks, check_slots
from replays import answers_of, generated
from toy_runs import run_in_process, run_waa_in_process, toy_waa_rules, waa_pools
from toys import random_queries

from xgpt.core.errors import XgptError
from xgpt.core.model import ModelSpec
from xrunner.engine import group
from xrunner.engine import kv as blocks
from xrunner.engine.kv import BlockPool, KvCache, Room, kv_shape
from xrunner.engine.stage import StageExecutor
from xrunner.rules.iteration import OrcaRule
from xrunner.rules.paged import BLOCK_TOKENS, PagedRule, sarathi, vllm
from xrunner.rules.rra import PhaseControls, RraRule
from xrunner.rules.slots import GroupSlots, apply_moves, compaction_moves
from xrunner.rules.steps import Step

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
        self.cache.seat(joining, seating.replaced)
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
        check_slots(self.cache, least=0)
        check_blocks(self.cache)
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


def tight_rule(policy: str, groups: int = 1) -> OrcaRule | PagedRule:
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
        for i, room in enumerate(self._rule.rooms.of_group):
            self.most[i] = max(self.most[i], room.held // BLOCK_TOKENS)
        return step


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("policy", ["vllm", "sarathi"])
@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_run_has_the_blocks_that_its_rule_counts(made, policy, num_stages):
    rule = tight_rule(policy, groups=num_stages)
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
        sink, _ = run_in_process(directory, queries, num_stages=1, rule=tight_rule(policy))
    assert answers_of(sink) == generated(model, queries)


SIZE = 16
QUERIES = random_queries(12)
LONGEST = max(query.reserve_tokens for query in QUERIES)


def rra(*, groups: int = 1, chunk: int = 0, kv_tokens: int = 200) -> RraRule:
    return RraRule(encode_batch=4, decode_iterations=5, num_groups=groups, max_active=12,
                   kv_tokens=kv_tokens * groups, encode_chunk=chunk)


def caches(executor: StageExecutor) -> list[KvCache]:
    found = [own.cache for own in executor.groups]
    assert all(cache.room_for([]) is not None for cache in found), "a table names blocks"
    return found


@pytest.mark.parametrize(("degrees", "groups", "chunk"), some(
    [((1,), 1, 0), ((1, 1), 2, 0), ((2, 1), 3, 0), ((1, 1), 2, 7)],
    lambda case: case[1] == 3 or case[2]))
def test_rra_answers_as_generate_does(made, small_blocks, degrees, groups, chunk):
    directory, model = made("llama")
    sink, executors = run_in_process(directory, QUERIES, degrees=degrees, in_blocks=True,
                                     rule=rra(groups=groups, chunk=chunk))
    assert answers_of(sink) == generated(model, QUERIES)
    for executor in executors:
        assert executor.rows_compacted == 0
        # no group had more than its rule reserves
        assert all(0 < cache.pool.most_taken * SIZE <= 200 + 12 * (SIZE - 1)
                   for cache in caches(executor))


@pytest.mark.parametrize(("encode", "decode", "groups"), some(
    [((1,), (1,), 1), ((2,), (1, 1), 2), ((1,), (2,), 3)], lambda case: case[2] == 2))
def test_what_waa_hands_over_is_put_into_blocks(made, small_blocks, encode, decode, groups):
    directory, model = made("llama")
    rules = toy_waa_rules(len(encode), num_groups=groups, kv_tokens=150)
    sink, executors = run_waa_in_process(directory, QUERIES, waa_pools(directory, encode, decode),
                                         rules, in_blocks=True)
    assert answers_of(sink) == generated(model, QUERIES)
    for rank in range(sum(encode), sum(encode) + sum(decode)):
        own = caches(executors[rank])
        assert len({id(cache.pool) for cache in own}) == 1, "one budget, one pool for all groups"
        assert own[0].pool.count <= -(-(150 + 8 * SIZE) // SIZE)
        assert own[0].pool.most_taken > 0
        assert sum(cache.num_bytes for cache in own) <= own[0].store.nbytes


@pytest.mark.parametrize("rule", [rra, lambda: rule_of("vllm", batch=5, kv_tokens=6 * SIZE)])
def test_the_memory_is_what_is_reserved_not_rows_of_the_longest(
        made, small_blocks, monkeypatch, rule):
    """A device that holds the blocks of a plan, and not as many rows of the longest query; what is
    missing is said before any memory is taken."""
    directory, _ = made("llama")

    def run(own: Any, *, in_blocks: bool = True) -> Any:
        sink, (executor,) = run_in_process(directory, QUERIES, num_stages=1, rule=own,
                                           in_blocks=in_blocks)
        return answers_of(sink), executor

    answers, executor = run(rule())
    (cache,), rows = caches(executor), rule().group_max_active
    assert cache.pool.count * SIZE < rows * LONGEST
    monkeypatch.setattr(group, "free_bytes", lambda device: cache.num_bytes)
    assert run(rule())[0] == answers
    with pytest.raises(XgptError, match=f"12 requests of up to {LONGEST} tokens .* are missing"):
        run(rra(), in_blocks=False)
    monkeypatch.setattr(group, "free_bytes", lambda device: cache.num_bytes - 1)
    with pytest.raises(XgptError, match=f"{cache.pool.count} blocks of 16 tokens.* are missing"):
        run(rule())


def test_a_change_finds_the_blocks_that_room_was_made_for(made, small_blocks):
    directory, model = made("llama")
    rule = rra(kv_tokens=LONGEST)
    rule.make_room(12, 12 * LONGEST)
    assert rule.kv_reserve.tokens == 12 * LONGEST
    rule.change(PhaseControls(encode_batch=6, decode_iterations=3, group_max_active=12,
                              group_kv_tokens=12 * LONGEST), phase=2)
    sink, (executor,) = run_in_process(directory, QUERIES, num_stages=1, rule=rule, in_blocks=True)
    assert answers_of(sink) == generated(model, QUERIES)
    (cache,) = caches(executor)
    assert cache.pool.most_taken * SIZE > LONGEST + SIZE, "more than the first phases could have"


def test_blocks_of_a_query_that_is_done_are_there_for_other_groups_at_once(made, monkeypatch):
    """Blocks of one token, so that no last block has room that nobody counts, and no more of them
    than the encode pool keeps under way: a group whose step is still to come would hold the blocks
    of its last query while another group needs them."""
    monkeypatch.setitem(blocks.BLOCK_TOKENS, "cpu", 1)
    directory, model = made("llama")
    rules = toy_waa_rules(1, encode_batch=1, num_groups=4, max_in_system=8, kv_tokens=LONGEST + 5)
    with TORCH.using():  # the native kernels take blocks of 16 or more
        sink, executors = run_waa_in_process(
            directory, QUERIES, waa_pools(directory, (1,), (1,)), rules, in_blocks=True)
    assert answers_of(sink) == generated(model, QUERIES)
    (pool,) = {cache.pool for cache in caches(executors[1])}
    assert pool.count == LONGEST + 5


def rows_of(slots: int, capacity: int) -> KvCache:
    return KvCache(kv_shape(SPEC, torch.float32, slots=slots, capacity=capacity))


@given(st.integers(0, 40).flatmap(lambda n: st.tuples(
    st.just(n), st.sets(st.integers(0, n - 1)) if n else st.just(set()))))
def test_compaction_keeps_the_survivors_with_the_fewest_moves(case):
    num_active, removed = case
    survivors, moves = list(range(num_active)), compaction_moves(num_active, removed)
    apply_moves(survivors, moves, len(removed))
    assert sorted(survivors) == sorted(set(range(num_active)) - removed)
    behind = set(range(len(survivors), num_active)) - removed
    assert {m.source for m in moves} == behind  # only rows behind the new end move
    assert {m.target for m in moves} <= removed


@examples(40)
@given(st.data())
def test_each_query_finds_its_own_entries_after_any_joins_and_leaves(data):
    cache, slots, expected, next_query = rows_of(32, 6), GroupSlots[int](), {}, 0
    for _ in range(data.draw(st.integers(1, 8))):
        if slots.seats:
            gone = data.draw(st.sets(st.integers(0, len(slots.seats) - 1)))
            for slot in gone:
                del expected[slots.seats[slot]]
            slots.compact(gone)
            cache.free(sorted(gone))
        inputs = data.draw(st.lists(st.integers(1, 6), max_size=4))
        queries = list(range(next_query, next_query + len(inputs)))
        next_query += len(inputs)
        first = cache.allocate(inputs)
        assert slots.fill(queries) == first
        for i, (query, length) in enumerate(zip(queries, inputs, strict=True)):
            values = torch.randn(2, 2, 1, length, 4)
            cache.store[:, :, first + i, :, :length] = values
            expected[query] = values
        check_slots(cache)
        check_blocks(cache)
        assert sorted(slots.seats) == sorted(expected)
        for slot, query in enumerate(slots.seats):
            length = cache.lengths[slot]
            assert torch.equal(cache.store[:, :, slot, :, :length], expected[query])
    assert torch.isfinite(cache.store).all(), "masked scores multiply what lies here"


def test_a_cache_beyond_the_machine_is_refused_in_words():
    with pytest.raises(XgptError, match="KV cache of 1000000 requests of up to 1000000 tokens"):
        rows_of(10**6, 10**6)


def resident_bytes(store: torch.Tensor) -> int:
    """Of the store's pages, as the system counts them."""
    size = store.numel() * store.element_size()
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(
        ctypes.c_void_p(store.data_ptr()), ctypes.c_size_t(size), pages) == 0
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


def test_memory_of_a_slot_is_taken_when_a_query_writes_there():
    shape = kv_shape(SPEC, torch.float32, slots=64, capacity=4096)
    cache, slack = KvCache(shape), 2 * 2 * 2 * mmap.PAGESIZE
    cache.allocate([5, 6])
    assert resident_bytes(cache.store) == 0, "half of it no query may ever come to"
    cache.store[:, :, :2] = 3
    assert 0 < resident_bytes(cache.store) <= 2 * shape.num_bytes // shape.slots + slack
    assert not cache.store[:, :, 2:].any()
