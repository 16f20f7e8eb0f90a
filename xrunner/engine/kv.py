"""The KV cache of one group of queries on one stage: allocate, free with compaction, account.

Layout [layers, 2, slots, kv_heads, capacity, head_dim], of one size for the whole run: growing it
would copy every entry in the middle of a phase. Active queries hold slots 0..n-1, so a decode step
reads plain views. On the CPU, pages never written are not resident unless asked for.

NOTE: the store starts as zeros. Attention reads a group's rows up to its longest context, and a
masked score still multiplies what lies there: uninitialised memory may hold NaN, and 0 * NaN is
NaN.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from xgpt.core.errors import XgptError
from xgpt.core.model import ModelSpec
from xgpt.core.units import format_bytes
from xrunner.rules.compaction import apply_moves, compaction_moves


class KvCache:
    """Keys and values of the queries one group has in flight: at most `slots` of them, each of at
    most `capacity` tokens. Raises XgptError where the memory for that is not there."""

    def __init__(self, spec: ModelSpec, num_layers: int, dtype: torch.dtype, *, slots: int,
                 capacity: int, is_resident: bool = False,
                 device: torch.device | str = "cpu", kv_heads: int | None = None) -> None:
        """`is_resident`: take the memory now, not page by page as queries first come to it (on a
        virtual machine that was measured to add a sixth to an encode). `kv_heads`: this rank's,
        where a tensor-parallel group divides them; None: all of the model's."""
        self.queries: list[int] = []  # by slot
        self.lengths: list[int] = []  # tokens cached, by slot
        self._slots, self._capacity = slots, capacity
        heads = spec.kv_heads if kv_heads is None else kv_heads
        shape = (num_layers, 2, slots, heads, capacity, spec.head_dim)
        self._store = _zeros(shape, dtype, torch.device(device), is_resident)

    @property
    def num_active(self) -> int:
        return len(self.queries)

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def store(self) -> Tensor:
        """[layers, 2, slots, kv_heads, capacity, head_dim]; rows 0..num_active-1 are live."""
        return self._store

    def share_layers(self, num_layers: int) -> None:
        """A cache of one layer stands for `num_layers` that read and write the same entries: for
        timing a step whose caches would not fit; what it computes is meaningless."""
        self._store = self._store.expand(num_layers, -1, -1, -1, -1, -1)

    def allocate(self, queries: Sequence[int], input_tokens: Sequence[int]) -> int:
        """Slots for new queries, contiguous; returns the first."""
        first = self.num_active
        assert first + len(queries) <= self._slots, f"{first = } {len(queries) = } {self._slots = }"
        self.queries += queries
        self.lengths += input_tokens
        return first

    def place(self, queries: Sequence[int], replaced: Sequence[int]) -> None:
        """New queries without tokens as yet: the first in the slots `replaced`, whose queries are
        gone, the others behind all."""
        for slot, query in zip(replaced, queries, strict=False):
            self.queries[slot], self.lengths[slot] = query, 0
        behind = queries[len(replaced):]
        self.allocate(behind, [0] * len(behind))

    def extend(self) -> None:
        """Every active query has one more token cached."""
        self.lengths = [length + 1 for length in self.lengths]

    def grow(self, slot: int, tokens: int = 1) -> None:
        """The query in `slot` has so many more tokens cached."""
        self.lengths[slot] += tokens

    def free(self, removed: Sequence[int]) -> int:
        """Drop the queries in slots `removed` and close the gaps. Returns the rows copied."""
        moves = compaction_moves(self.num_active, removed)
        for source, target in moves:
            length = self.lengths[source]
            self._store[:, :, target, :, :length] = self._store[:, :, source, :, :length]
        self.queries = apply_moves(self.queries, removed)
        self.lengths = apply_moves(self.lengths, removed)
        return len(moves)

    def check_integrity(self, least: int = 1) -> None:
        """Slots, lengths and storage agree; every query has `least` tokens or more. Called when
        idle, and after every step in tests."""
        assert len(self.queries) == len(self.lengths) == len(set(self.queries)), (
            f"{self.queries = } {self.lengths = }")
        assert self.num_active <= self._slots, f"{self.num_active = } {self._slots = }"
        assert all(least <= n <= self._capacity for n in self.lengths), (
            f"{self.lengths = } {self._capacity = }")


def cache_bytes(spec: ModelSpec, num_layers: int, dtype: torch.dtype, *, slots: int,
                capacity: int, kv_heads: int | None = None) -> int:
    """What a KvCache of this size occupies once every page of it has been written."""
    heads = spec.kv_heads if kv_heads is None else kv_heads
    return num_layers * 2 * heads * spec.head_dim * dtype.itemsize * slots * capacity


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device,
           is_resident: bool) -> Tensor:
    if device.type != "cpu" or 0 in shape:  # no layers: a pool that has an encoder alone
        try:
            return torch.zeros(shape, dtype=dtype, device=device)
        except torch.cuda.OutOfMemoryError:
            raise _refused(shape, dtype, f"of memory, more than {device} has left") from None
    # numpy asks the system for zero pages, torch.zeros would write (and so occupy) every one
    num_bytes = math.prod(shape) * dtype.itemsize
    try:
        memory = np.zeros(num_bytes, dtype=np.uint8)
    except MemoryError:
        raise _refused(shape, dtype, "of address space, which this machine refuses") from None
    if is_resident:
        memory[::mmap.PAGESIZE] = 0
    return torch.from_numpy(memory).view(dtype).view(shape)


def _refused(shape: tuple[int, ...], dtype: torch.dtype, why: str) -> XgptError:
    num_bytes = math.prod(shape) * dtype.itemsize
    return XgptError(
        f"the KV cache of {shape[2]} queries of up to {shape[4]} tokens takes "
        f"{format_bytes(num_bytes)} {why}: shorten the longest requests (or their max_tokens), or "
        "give a smaller schedule")
