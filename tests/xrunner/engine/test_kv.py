"""The KV cache: slots, compaction against a plain model of it, growth, zeros."""

import ctypes
import mmap

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from integrity import check_blocks, check_slots

from xgpt.core.errors import XgptError
from xgpt.core.model import ModelSpec
from xrunner.engine.kv import KvCache, kv_shape
from xrunner.rules.slots import GroupSlots, apply_moves, compaction_moves

SPEC = ModelSpec(name="toy", family="llama", num_layers=2, hidden_size=8, num_heads=2,
                 num_kv_heads=1, vocab_size=11, intermediate_size=8)


def cache_of(slots: int, capacity: int) -> KvCache:
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
    cache, slots, expected, next_query = cache_of(32, 6), GroupSlots[int](), {}, 0
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
        assert slots.place(queries) == first
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
    with pytest.raises(XgptError, match="KV cache of 1000000 queries of up to 1000000 tokens"):
        cache_of(10**6, 10**6)


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
