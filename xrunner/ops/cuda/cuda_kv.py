"""Copies of KV on a GPU, all layers in one launch; see xrunner.ops.kv_entries.

A store is [layers, 2, slots, k, capacity, d] (keys, then values, of each layer), or a slice of
layers and heads; a block is [layers, 2, k, tokens, d]. Elements are of any type of 2 n bytes, and a
head's tokens contiguous. xrunner.ops.kv_entries has checked slots, lengths and blocks."""

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from xrunner.ops.cuda.launch import KV_COMPACT, KV_PACK, Launch, Launcher, Struct, filled, numbers
from xrunner.rules.slots import Move

_THREADS = 256  # chosen
_BYTES_OF_BLOCK = 16 * _THREADS * 4  # chosen: least bytes that a block of threads copies
_MAX_GRID = 65535


def compact(launch: Launcher, store: Tensor, moves: Sequence[Move],
            lengths: Sequence[int]) -> None:
    """Copies the first `lengths[i]` tokens of each move's source onto its target, in order. Moves
    that meet the same slot go into separate launches."""
    for wave in _waves(moves):
        taken = [i for i in wave if lengths[i] and moves[i].source != moves[i].target]
        if not taken:
            continue
        table = numbers(store.device, [moves[i].source for i in taken],
                        [moves[i].target for i in taken], [lengths[i] for i in taken])
        rows, kept = _rows(store)
        arguments = filled(KV_COMPACT, **rows, sources=table[0], targets=table[1],
                                        lengths=table[2], moves=len(taken))
        _launch_rows(launch, "kv_compact", store, [lengths[i] for i in taken], arguments)
        del kept


def gather(launch: Launcher, store: Tensor, slots: Sequence[int],
           lengths: Sequence[int]) -> Tensor:
    """Block of the first `lengths[i]` tokens of each of the `slots`."""
    layers, pair, _, kv_heads, _, dim = store.shape
    block = torch.empty((layers, pair, kv_heads, sum(lengths), dim), dtype=store.dtype,
                        device=store.device)
    _pack(launch, "kv_gather", store, (slots, lengths), block)
    return block


def scatter(launch: Launcher, store: Tensor, slots: Sequence[int], lengths: Sequence[int],
            block: Tensor) -> None:
    """Copies a block's tokens to the slots of their requests."""
    _pack(launch, "kv_scatter", store, (slots, lengths), block)


def _pack(launch: Launcher, kernel: str, store: Tensor,
          queries: tuple[Sequence[int], Sequence[int]], block: Tensor) -> None:
    slots, lengths = queries
    starts = list(accumulate(lengths, initial=0))[:-1]
    for at in range(0, len(slots), _MAX_GRID):
        part = slice(at, at + _MAX_GRID)
        table = numbers(store.device, list(slots[part]), list(lengths[part]), starts[part])
        rows, kept = _rows(store)
        arguments = filled(KV_PACK, **rows, slots=table[0], lengths=table[1],
                                     starts=table[2], block=block,
                                     queries=len(slots[part]), tokens=sum(lengths))
        _launch_rows(launch, kernel, store, list(lengths[part]), arguments)
        del kept


def _waves(moves: Sequence[Move]) -> Iterator[list[int]]:
    """Yields indices of moves that can be made at once. A wave ends before a move that reads or
    writes what an earlier one wrote, or writes what it reads."""
    wave: list[int] = []
    read: set[int] = set()
    written: set[int] = set()
    for i, (source, target) in enumerate(moves):
        if source in written or target in written or target in read or len(wave) == _MAX_GRID:
            yield wave
            wave, read, written = [], set(), set()
        wave.append(i)
        read.add(source)
        written.add(target)
    if wave:
        yield wave


def _rows(store: Tensor) -> tuple[dict[str, Tensor | int | float | None], Tensor]:
    """Addresses of the store's rows, and the tensor that must live until the launch is made."""
    layers, pair, _, kv_heads, _, dim = store.shape
    size = store.element_size()
    assert store.stride()[-2:] == (dim, 1), f"{store.stride() = }"
    addresses = numbers(store.device, [
        store.data_ptr() + size * (layer * store.stride(0) + half * store.stride(1))
        for layer in range(layers) for half in range(pair)])[0]
    return {"arrays": addresses, "num_arrays": layers * pair, "heads": kv_heads,
            "head_bytes": store.stride(3) * size, "slot_bytes": store.stride(2) * size,
            "token_bytes": dim * size}, addresses


def _launch_rows(launch: Launcher, kernel: str, store: Tensor, lengths: Sequence[int],
                 arguments: Struct) -> None:
    """Launches a row of blocks for every head of every array, and every request or move."""
    layers, pair, _, kv_heads, _, dim = store.shape
    longest = max(lengths, default=0) * dim * store.element_size()
    if layers * pair * kv_heads and longest:
        parts = min(-(-longest // _BYTES_OF_BLOCK), 64)
        launch(Launch("kv", kernel, (layers * pair * kv_heads, len(lengths), parts), _THREADS, 0,
                      arguments))
