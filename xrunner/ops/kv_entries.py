"""Copies of KV, all layers at once: onto other slots, into a block, and back.

A store is [layers, 2, slots, k, capacity, d] (keys, then values, of each layer), or a slice of
layers and heads; k KV heads, d head size. A block is [layers, 2, k, tokens, d], the requests'
tokens one after the other. All functions raise ValueError for slots and lengths beyond the
store."""

import ctypes
import mmap
import weakref
from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from xrunner.devices import on_device
from xrunner.ops.cpu import native
from xrunner.ops.cuda import cuda_kv, cuda_modules
from xrunner.rules.slots import Move

_LEAST_BYTES = 4 * 2**20  # chosen: the allocator serves and keeps smaller memory quickly


class ReusedMemory:
    """Keeps the largest memory returned: writing existing pages takes a third of new ones' time."""

    def __init__(self) -> None:
        self._free: mmap.mmap | None = None

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor on the CPU; its memory returns here after its last tensor."""
        num_bytes = prod(shape) * dtype.itemsize
        if num_bytes < _LEAST_BYTES:
            return torch.empty(tuple(shape), dtype=dtype)
        memory, self._free = self._free, None
        if memory is None or len(memory) < num_bytes:
            try:
                memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            except (OSError, ValueError, OverflowError):  # torch reports what was asked for
                return torch.empty(tuple(shape), dtype=dtype)
        holder = np.frombuffer(memory, np.uint8, num_bytes)  # every tensor of it refers to this
        weakref.finalize(holder, self._take_back, memory).atexit = False
        return torch.from_numpy(holder).view(dtype).view(tuple(shape))

    def _take_back(self, memory: mmap.mmap) -> None:
        if self._free is None or len(self._free) < len(memory):
            self._free = memory


_BLOCKS = ReusedMemory()


def compact(store: Tensor, moves: Sequence[Move], lengths: Sequence[int]) -> None:
    """Copies the first `lengths[i]` tokens of each move's source onto its target, in order."""
    sources, targets = [move.source for move in moves], [move.target for move in moves]
    _check(store, sources, lengths)
    _check(store, targets, lengths)
    if (launch := cuda_modules.launch_for(store)) is not None:
        cuda_kv.compact(launch, store, moves, lengths)
        return
    form, lib = _form_of(store), native.library()
    if form is None or lib is None:
        compact_torch(store, moves, lengths)
        return
    native.check(lib.xgpt_kv_compact(
        *form.arrays, _numbers(sources), _numbers(targets), _numbers(lengths), len(moves),
        *form.sizes, native.threads()))


def compact_torch(store: Tensor, moves: Sequence[Move], lengths: Sequence[int]) -> None:
    """As `compact`, by torch."""
    for (source, target), length in zip(moves, lengths, strict=True):
        store[:, :, target, :, :length] = store[:, :, source, :, :length]


def gather(store: Tensor, slots: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """Block of the first `lengths[i]` tokens of each of the `slots`."""
    _check(store, slots, lengths)
    if (launch := cuda_modules.launch_for(store)) is not None:
        return cuda_kv.gather(launch, store, slots, lengths)
    form, lib = _form_of(store), native.library()
    if form is None or lib is None:
        return gather_torch(store, slots, lengths)
    tokens = sum(lengths)
    block = _BLOCKS.empty(_block_shape(store, tokens), store.dtype)
    native.check(lib.xgpt_kv_gather(
        block.data_ptr(), tokens, *form.arrays, _numbers(slots), _numbers(lengths), len(slots),
        *form.sizes, native.threads()))
    return block


def gather_torch(store: Tensor, slots: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """As `gather`, by torch."""
    rows = [store[:, :, slot, :, :length] for slot, length in zip(slots, lengths, strict=True)]
    return torch.cat(rows, dim=3) if rows else store.new_empty(_block_shape(store, 0))


def scatter(store: Tensor, slots: Sequence[int], lengths: Sequence[int], block: Tensor) -> None:
    """Copies the tokens of a block, or of a slice of one, to the slots of their requests. Each slot
    may be named once."""
    _check(store, slots, lengths)
    if block.shape != _block_shape(store, sum(lengths)) or len(set(slots)) < len(slots):
        raise ValueError(f"a block {list(block.shape)} for tokens {list(lengths)} in the slots "
                         f"{list(slots)} of a store {list(store.shape)}")
    block = on_device(block, store.device)  # a block from another pool arrives in host memory
    launch = cuda_modules.launch_for(store)
    if launch is not None and block.dtype == store.dtype:
        cuda_kv.scatter(launch, store, slots, lengths, block.contiguous())
        return
    form, lib = _form_of(store), native.library()
    if form is None or lib is None or not block.is_cpu or block.dtype != store.dtype:
        scatter_torch(store, slots, lengths, block)
        return
    block = block.contiguous()
    native.check(lib.xgpt_kv_scatter(
        block.data_ptr(), block.shape[3], *form.arrays, _numbers(slots), _numbers(lengths),
        len(slots), *form.sizes, native.threads()))


def scatter_torch(store: Tensor, slots: Sequence[int], lengths: Sequence[int],
                  block: Tensor) -> None:
    """As `scatter`, by torch."""
    start = 0
    for slot, length in zip(slots, lengths, strict=True):
        store[:, :, slot, :, :length] = block[:, :, :, start:start + length]
        start += length


class _Form(NamedTuple):
    """A store as operators take it. `arrays`: addresses, their number, bytes between slots.
    `sizes`: KV heads, bytes of a token, slots, capacity."""

    arrays: tuple[Any, int, int]
    sizes: tuple[int, int, int, int]


def _form_of(store: Tensor) -> _Form | None:
    """The store's form; None if it is not in host memory, or a head's tokens are not contiguous."""
    if not store.is_cpu:
        return None
    return _form(store.data_ptr(), tuple(store.shape), store.stride(), store.element_size())


@lru_cache(maxsize=64)  # a rank's stores are few, and never move
def _form(base: int, shape: tuple[int, ...], strides: tuple[int, ...], size: int) -> _Form | None:
    layers, pair, slots, kv_heads, capacity, dim = shape
    if strides[3:] != (capacity * dim, dim, 1):
        return None
    addresses = [base + (layer * strides[0] + which * strides[1]) * size
                 for layer in range(layers) for which in range(pair)]
    return _Form(((ctypes.c_void_p * len(addresses))(*addresses), len(addresses),
                  strides[2] * size), (kv_heads, dim * size, slots, capacity))


def _numbers(values: Sequence[int]) -> Any:
    return (ctypes.c_int64 * len(values))(*values)


def _block_shape(store: Tensor, tokens: int) -> tuple[int, ...]:
    layers, pair, _, kv_heads, _, dim = store.shape
    return (layers, pair, kv_heads, tokens, dim)


def _check(store: Tensor, slots: Sequence[int], lengths: Sequence[int]) -> None:
    num_slots, capacity = store.shape[2], store.shape[4]
    if (len(slots) != len(lengths) or not all(0 <= slot < num_slots for slot in slots)
            or not all(0 <= length <= capacity for length in lengths)):
        raise ValueError(f"slots {list(slots)} of {num_slots}, lengths {list(lengths)} within "
                         f"{capacity}")
