"""The KV cache of one group of queries on one stage: the memory, and how much of it is in use.

Layout [layers, 2, slots, kv_heads, capacity, head_dim], of one size for the whole run: growing it
would copy every entry in the middle of a phase. Active queries hold slots 0..n-1, so a decode step
reads plain views. On the CPU, pages never written are not resident unless asked for.

NOTE: the store starts as zeros. Attention reads a group's rows up to its longest context, and a
masked score still multiplies what lies there: uninitialised memory may hold NaN, and 0 * NaN is
NaN."""

import math
import mmap
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from xgpt.core.errors import XgptError
from xgpt.core.model import ModelSpec
from xgpt.core.units import format_bytes
from xrunner.ops.contexts import BlockTable, layers_of
from xrunner.ops.kv_entries import compact
from xrunner.rules.slots import apply_moves, compaction_moves

_MADV_POPULATE_WRITE = 23  # of Linux; Python's mmap has no name for it


class KvShape(NamedTuple):
    """The size of a cache. `slots`: queries that it holds at most; `capacity`: tokens of each."""

    num_layers: int
    slots: int
    kv_heads: int
    capacity: int
    head_dim: int
    dtype: torch.dtype

    @property
    def dimensions(self) -> tuple[int, ...]:
        return (self.num_layers, 2, self.slots, self.kv_heads, self.capacity, self.head_dim)

    @property
    def num_bytes(self) -> int:
        """What it occupies once every page of it has been written."""
        return math.prod(self.dimensions) * self.dtype.itemsize


def kv_shape(spec: ModelSpec, dtype: torch.dtype, *, slots: int, capacity: int,
             num_layers: int | None = None, kv_heads: int | None = None) -> KvShape:
    """`num_layers`, `kv_heads`: those that this rank holds; None: all of the model's."""
    return KvShape(spec.num_layers if num_layers is None else num_layers, slots,
                   spec.kv_heads if kv_heads is None else kv_heads, capacity, spec.head_dim, dtype)


class EntryRows(NamedTuple):
    """Rows of a store (slots of one in rows, blocks of one in blocks), and how many entries of each
    are asked for, from its beginning."""

    rows: Sequence[int]
    lengths: Sequence[int]


class KvCache:
    """Keys and values of the queries that one group has in flight. Raises XgptError where the
    memory for that is not there."""

    def __init__(self, shape: KvShape, device: torch.device | str = "cpu", *,
                 is_resident: bool = False) -> None:
        """`is_resident`: a slot's memory is taken as one when a query first sits in it (Pages)."""
        self.lengths: list[int] = []  # tokens cached, by slot
        self._shape, self._most = shape, 0
        # [layers, 2, slots, kv_heads, capacity, head_dim]; rows 0..len(lengths)-1 are live
        self.store, self._pages = store_of(shape, torch.device(device), is_resident=is_resident)
        self.layers = layers_of(self.store)

    @property
    def num_bytes(self) -> int:
        """What is set aside for it."""
        return self._shape.num_bytes

    @property
    def peak_bytes(self) -> int:
        """Of the rows that queries had at a time, at most."""
        return self._most * self._shape.num_bytes // max(self._shape.slots, 1)

    def rows_of(self, slots: Sequence[int]) -> EntryRows:
        """Where the entries of these slots' queries lie, one query after the other."""
        return EntryRows(slots, [self.lengths[slot] for slot in slots])

    def room_for(self, lengths: Sequence[int],
                 slots: Sequence[int] | None = None) -> BlockTable | None:
        """None: a slot has room for any query."""
        return None

    def share_layers(self, num_layers: int) -> None:
        """A cache of one layer stands for `num_layers` that read and write the same entries: for
        timing a step whose caches would not fit; what it computes is meaningless."""
        self.store = self.store.expand(num_layers, -1, -1, -1, -1, -1)
        self.layers = layers_of(self.store)

    def allocate(self, tokens: Sequence[int]) -> int:
        """Slots for new queries of so many tokens each, contiguous; returns the first."""
        first = len(self.lengths)
        assert first + len(tokens) <= self._shape.slots, (
            f"{first = } {len(tokens) = } {self._shape}")
        self.lengths += tokens
        self._most = max(self._most, len(self.lengths))
        self._pages.reach(len(self.lengths))
        return first

    def place(self, count: int, replaced: Sequence[int]) -> None:
        """New queries without tokens as yet: the first in the slots `replaced`, whose queries are
        gone, the others behind all."""
        for slot in replaced:
            self.lengths[slot] = 0
        self.allocate([0] * (count - len(replaced)))

    def extend(self) -> None:
        """Every active query has one more token cached."""
        self.lengths = [length + 1 for length in self.lengths]

    def grow(self, slot: int, tokens: int = 1) -> None:
        """The query in `slot` has so many more tokens cached."""
        self.lengths[slot] += tokens

    def free(self, removed: Sequence[int]) -> int:
        """Drop the queries in slots `removed` and close the gaps. Returns the rows copied."""
        moves = compaction_moves(len(self.lengths), removed)
        compact(self.store, moves, [self.lengths[move.source] for move in moves])
        apply_moves(self.lengths, moves, len(removed))
        return len(moves)

    def check_integrity(self, least: int = 1) -> None:
        """Lengths and storage agree; every query has `least` tokens or more. Called after every
        step in tests."""
        assert len(self.lengths) <= self._shape.slots, f"{self.lengths = } {self._shape}"
        assert all(least <= n <= self._shape.capacity for n in self.lengths), (
            f"{self.lengths = } {self._shape}")


class Pages:
    """Memory of a store's rows (slots, or blocks), which is taken as they come into use: each as
    one, not page by page as its entries are computed, which on a virtual machine was measured to
    add a sixth to an encode. What no query comes to is not taken: all of 200 slots took half a
    second of SmolLM2-135M's start, and 107 were in use at a time."""

    def __init__(self, shape: KvShape, memory: mmap.mmap | None) -> None:
        """`memory`: None where it is not to be taken, or lies on another device."""
        self._memory, self._taken = memory, 0
        self._parts = 2 * shape.num_layers  # in each of which the rows lie one behind the other
        self._part_bytes = shape.num_bytes // max(self._parts, 1)
        self._row_bytes = self._part_bytes // max(shape.slots, 1)

    def reach(self, count: int) -> None:
        """The first `count` rows are in use, or have been."""
        if self._memory is None or count <= self._taken:
            return
        for part in range(self._parts):
            _occupy(self._memory, part * self._part_bytes + self._taken * self._row_bytes,
                    (count - self._taken) * self._row_bytes)
        self._taken = count


def store_of(shape: KvShape, device: torch.device, *, is_resident: bool) -> tuple[Tensor, Pages]:
    """A store of that shape, and the memory of its rows: on the CPU pages of zeros, none of them
    occupied as yet (torch.zeros would write every one). Raises XgptError where the device has no
    memory for it."""
    dimensions, dtype = shape.dimensions, shape.dtype
    if device.type != "cpu" or 0 in dimensions:  # no layers: a pool that has an encoder alone
        try:
            return torch.zeros(dimensions, dtype=dtype, device=device), Pages(shape, None)
        except torch.cuda.OutOfMemoryError:
            raise _refused(shape, f"of memory, more than {device} has left") from None
    try:
        memory = mmap.mmap(-1, shape.num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError):
        raise _refused(shape, "of address space, which this machine refuses") from None
    store = torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(dimensions)
    return store, Pages(shape, memory if is_resident else None)


def _occupy(memory: mmap.mmap, first: int, num_bytes: int) -> None:
    """Takes the pages of these bytes now, whatever they hold: by one request where Linux knows it
    (5.14; measured: 0.6 s for 2 GiB), else by writing to each.

    NOTE: not in huge pages. Decode attention of 190 queries takes 38 ms with them instead of 50
    (SmolLM2-135M, bfloat16, two cores), but 1.6 GB of them took 3 to 5 s to get, not 0.4, on a
    virtual machine that hands free ones back to its host: about what a minute's steps regain."""
    begin = first - first % mmap.PAGESIZE
    try:
        memory.madvise(_MADV_POPULATE_WRITE, begin, first + num_bytes - begin)
    except OSError:  # what lies in a page that was taken before stays
        np.frombuffer(memory, dtype=np.uint8)[begin:first + num_bytes:mmap.PAGESIZE] |= 0


def _refused(shape: KvShape, why: str) -> XgptError:
    return XgptError(
        f"the KV cache of {shape.slots} queries of up to {shape.capacity} tokens takes "
        f"{format_bytes(shape.num_bytes)} {why}: shorten the longest requests (or their "
        "max_tokens), or give a smaller schedule")
