"""Entries copied between slots and blocks: every implementation does what torch's indexing does."""

from itertools import pairwise

import pytest
import torch
from examples import examples, some
from hypothesis import given
from hypothesis import strategies as st
from implementations import IMPLEMENTATIONS
from torch import Tensor

from xrunner.ops import kv_entries as kv
from xrunner.ops.cpu import native
from xrunner.rules.slots import Move

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
many = examples(60)


def store_of(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """[layers, 2, slots, kv_heads, capacity, head_dim], no two entries alike, but of bytes."""
    layers, slots, kv_heads, capacity, dim = shape
    count = 2 * layers * slots * kv_heads * capacity * dim
    numbers = torch.randint(256, (count,)) if dtype == torch.uint8 else torch.randperm(count)
    return numbers.to(dtype).view(layers, 2, slots, kv_heads, capacity, dim)


@st.composite
def stores(draw: st.DrawFn) -> Tensor:
    """Whole stores, and parts of them by layers and heads."""
    shape = (draw(st.integers(0, 3)), draw(st.integers(1, 7)), draw(st.integers(1, 3)),
             draw(st.integers(1, 12)), draw(st.sampled_from([1, 2, 5, 8])))
    store = store_of(shape, draw(st.sampled_from(DTYPES)))
    layer, head = draw(st.integers(0, shape[0])), draw(st.integers(0, shape[2] - 1))
    return draw(st.sampled_from([store, store[layer:], store[:, :, :, head:]]))


@st.composite
def queries(draw: st.DrawFn) -> tuple[Tensor, list[int], list[int]]:
    """A store, some of its slots, and their lengths."""
    store = draw(stores())
    slots = draw(st.lists(st.integers(0, store.shape[2] - 1), unique=True))
    return store, slots, [draw(st.integers(0, store.shape[4])) for _ in slots]


@st.composite
def chains(draw: st.DrawFn) -> tuple[Tensor, list[Move], list[int]]:
    """Moves in any order over the same slots: what one leaves, the next may take."""
    store = draw(stores())
    slot = st.integers(0, store.shape[2] - 1)
    moves = draw(st.lists(st.builds(Move, slot, slot), max_size=6))
    return store, moves, [draw(st.integers(0, store.shape[4])) for _ in moves]


@every_implementation
@many
@given(case=chains())
def test_moves_happen_one_after_the_other(implementation, case):
    store, moves, lengths = case
    expected = store.clone()
    for move, length in zip(moves, lengths, strict=True):
        expected[:, :, move.target, :, :length] = expected[:, :, move.source, :, :length].clone()
    own = (store.clone() if store.is_contiguous() else store).to(implementation.device)
    with implementation.using():
        kv.compact(own, moves, lengths)
    assert torch.equal(own.cpu(), expected)


@every_implementation
@many
@given(case=queries())
def test_a_block_has_the_tokens_of_its_queries_one_after_the_other(implementation, case):
    store, slots, lengths = case
    with implementation.using():
        block = kv.gather(store.to(implementation.device), slots, lengths).cpu()
    starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    assert block.shape[3] == starts[-1] and block.dtype == store.dtype
    for slot, (start, end) in zip(slots, pairwise(starts), strict=True):
        assert torch.equal(block[:, :, :, start:end], store[:, :, slot, :, :end - start])


@every_implementation
@many
@given(case=queries(), before=st.integers(0, 3), behind=st.integers(0, 3))
def test_a_stretch_of_a_block_fills_its_slots_and_nothing_else(
        implementation, case, before, behind):
    store, slots, lengths = case
    layers, pair, _, kv_heads, _, dim = store.shape
    tokens = sum(lengths)
    whole = torch.randn(layers, pair, kv_heads, before + tokens + behind, dim).to(store.dtype)
    block = whole[:, :, :, before:before + tokens]
    expected = store.clone()
    kv.scatter_torch(expected, slots, lengths, block)
    own = store.to(implementation.device)
    with implementation.using():
        kv.scatter(own, slots, lengths, block)
    assert torch.equal(own.cpu(), expected)


@every_implementation
@pytest.mark.parametrize(("shape", "dtype"), some(
    [((2, 6, 1, 4096, 64), torch.float32), ((1, 3, 2, 5000, 65), torch.float32),
     ((12, 20, 3, 64, 64), torch.float32), ((1, 4, 1, 1024, 4121), torch.uint8)],
    lambda case: case[0] == (1, 3, 2, 5000, 65) or case[1] == torch.uint8))
def test_copies_that_threads_share_are_whole(implementation, shape, dtype):
    """More than one thread's chunk, along the tokens or along layers and heads; the last is more
    than caches hold, and its entries of 4,121 bytes begin anywhere in a line."""
    store, capacity = store_of(shape, dtype), shape[3]
    moves = [Move(2, 1), Move(1, 0), Move(0, 2)]
    lengths = [capacity, capacity - 7, capacity // 2]
    expected, own = store.clone(), store.to(implementation.device)
    kv.compact_torch(expected, moves, lengths)
    with implementation.using():
        kv.compact(own, moves, lengths)
        store = own.cpu()
        assert torch.equal(store, expected)
        block = kv.gather(own, [2, 0], lengths[:2])
        assert torch.equal(block.cpu(), kv.gather_torch(store, [2, 0], lengths[:2]))
        emptied = torch.zeros_like(own)
        kv.scatter(emptied, [1, 2], lengths[:2], block)
    emptied = emptied.cpu()
    assert torch.equal(emptied[:, :, 1, :, :capacity], store[:, :, 2])
    assert torch.equal(emptied[:, :, 2, :, :capacity - 7], store[:, :, 0, :, :capacity - 7])
    assert not emptied[:, :, 0].any() and not emptied[:, :, 2, :, capacity - 7:].any()


@every_implementation
def test_a_block_that_is_laid_out_otherwise_is_taken(implementation):
    store = store_of((2, 3, 2, 4, 8), torch.float32)
    block = torch.randn(8, 3, 2, 2, 2).permute(4, 3, 2, 1, 0)  # [2, 2, 2, 3, 8]
    own = store.to(implementation.device)
    with implementation.using():
        kv.scatter(own, [2, 0], [1, 2], block)
        kv.scatter(own, [1], [3], block.double())
    store = own.cpu()
    assert torch.equal(store[:, :, 2, :, :1], block[:, :, :, :1])
    assert torch.equal(store[:, :, 0, :, :2], block[:, :, :, 1:])
    assert torch.equal(store[:, :, 1, :, :3], block)


@every_implementation
@pytest.mark.parametrize(("slots", "lengths"), [
    ([3], [1]), ([-1], [1]), ([0], [5]), ([0], [-1]), ([0, 1], [1])])
def test_what_lies_beyond_the_store_is_refused(implementation, slots, lengths):
    store = store_of((2, 3, 2, 4, 8), torch.float32)
    before = store.clone()
    block = torch.zeros(2, 2, 2, max(sum(lengths), 0), 8)
    with implementation.using():
        for call in (lambda: kv.gather(store, slots, lengths),
                     lambda: kv.scatter(store, slots, lengths, block),
                     lambda: kv.compact(store, [Move(s, 0) for s in slots], lengths),
                     lambda: kv.compact(store, [Move(0, s) for s in slots], lengths)):
            with pytest.raises(ValueError, match="slots"):
                call()
    assert torch.equal(store, before)


@every_implementation
def test_a_block_of_another_shape_and_a_slot_named_twice_are_refused(implementation):
    store = store_of((2, 3, 2, 4, 8), torch.float32)
    with implementation.using(), pytest.raises(ValueError, match="a block"):
        kv.scatter(store, [0], [3], torch.zeros(2, 2, 2, 4, 8))
    with implementation.using(), pytest.raises(ValueError, match="a block"):
        kv.scatter(store, [1, 1], [2, 2], torch.zeros(2, 2, 2, 4, 8))


def test_a_large_block_has_the_memory_of_the_last_unless_that_is_in_use():
    store = torch.arange(2 * 4 * 1024 * 600.).view(1, 2, 4, 1, 1024, 600)
    first = kv.gather(store, [0, 1], [1024, 1024])
    kept, address = first[:, :, :, 5:], first.data_ptr()
    del first
    other = kv.gather(store, [2, 3], [1024, 1024])
    assert other.data_ptr() != address
    assert torch.equal(kept[0, :, 0], torch.cat([store[0, :, 0, 0], store[0, :, 1, 0]], 1)[:, 5:])
    del kept
    again = kv.gather(store, [3], [1024])
    if native.library() is not None:
        assert again.data_ptr() == address
    assert torch.equal(again[0, :, 0], store[0, :, 3, 0])
    assert torch.equal(other[0, :, 0, 1024:], store[0, :, 3, 0])
