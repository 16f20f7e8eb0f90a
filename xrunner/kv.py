"""The KV cache of one group of queries on one stage: allocate, free with compaction, account.

Layout [layers, 2, slots, kv_heads, capacity, head_dim]. Active queries hold slots 0..n-1, so a
decode step reads plain views. On the CPU, pages never written are never resident.

NOTE: the store starts as zeros. Attention reads a group's rows up to its longest context, and a
masked score still multiplies what lies there: uninitialised memory may hold NaN, and 0 * NaN is
NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from xgpt.model import ModelSpec
from xrunner.rules.compaction import apply_moves, compaction_moves

_GROWTH = 1.5  # each reallocation copies, so grow by a factor rather than to the exact need


class KvCache:
    """Keys and values of the queries one group has in flight."""

    def __init__(self, spec: ModelSpec, num_layers: int, dtype: torch.dtype,
                 device: torch.device | str = "cpu") -> None:
        self.queries: list[int] = []  # by slot
        self.lengths: list[int] = []  # tokens cached, by slot
        self._shape = (num_layers, 2, spec.kv_heads, spec.head_dim)
        self._store = torch.empty(0, dtype=dtype, device=device)
        self._slots = self._capacity = 0

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

    def allocate(self, queries: Sequence[int], input_tokens: Sequence[int],
                 reserve_tokens: Sequence[int]) -> int:
        """Slots for new queries, contiguous; returns the first. `reserve_tokens` is the most each
        may ever hold, so that decoding never has to grow the cache."""
        first = self.num_active
        self._ensure(first + len(queries), max(reserve_tokens, default=0))
        self.queries += queries
        self.lengths += input_tokens
        return first

    def extend(self) -> None:
        """Every active query has one more token cached."""
        self.lengths = [length + 1 for length in self.lengths]

    def free(self, removed: Sequence[int]) -> int:
        """Drop the queries in slots `removed` and close the gaps. Returns the rows copied."""
        moves = compaction_moves(self.num_active, removed)
        for source, target in moves:
            length = self.lengths[source]
            self._store[:, :, target, :, :length] = self._store[:, :, source, :, :length]
        self.queries = apply_moves(self.queries, removed)
        self.lengths = apply_moves(self.lengths, removed)
        return len(moves)

    def check_integrity(self) -> None:
        """Slots, lengths and storage agree. Called when idle, and after every step in tests."""
        assert len(self.queries) == len(self.lengths) == len(set(self.queries)), (
            f"{self.queries = } {self.lengths = }")
        assert self.num_active <= self._slots, f"{self.num_active = } {self._slots = }"
        assert all(0 < n <= self._capacity for n in self.lengths), (
            f"{self.lengths = } {self._capacity = }")

    def _ensure(self, slots: int, capacity: int) -> None:
        if slots <= self._slots and capacity <= self._capacity:
            return
        new_slots = self._slots if slots <= self._slots else max(slots, int(_GROWTH * self._slots))
        new_capacity = max(capacity, self._capacity)
        layers, pair, kv_heads, dim = self._shape
        shape = (layers, pair, new_slots, kv_heads, new_capacity, dim)
        grown = _zeros(shape, self._store.dtype, self._store.device)
        if self.num_active:
            n, longest = self.num_active, max(self.lengths)
            grown[:, :, :n, :, :longest] = self._store[:, :, :n, :, :longest]
        self._store, self._slots, self._capacity = grown, new_slots, new_capacity


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy asks the system for zero pages, torch.zeros would write (and so occupy) every one
    memory = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(memory).view(dtype).view(shape)
