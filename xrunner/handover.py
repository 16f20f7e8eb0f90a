"""KV entries of whole queries as one block of memory, to travel from one rank's cache to another's.

A block is [layers, 2, kv_heads, tokens, head_dim], the queries' tokens one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from xrunner.kv import KvCache


def pack(cache: KvCache, slots: Sequence[int]) -> Tensor:
    """The entries of the queries in `slots`, copied out of `cache`."""
    return torch.cat([cache.store[:, :, slot, :, :cache.lengths[slot]] for slot in slots], dim=3)


def unpack(cache: KvCache, queries: Sequence[int], lengths: Sequence[int], block: Tensor) -> None:
    """Puts queries with these lengths, and their entries, into new slots of `cache`."""
    assert block.shape[3] == sum(lengths), f"{block.shape = } {sum(lengths) = }"
    first, start = cache.allocate(queries, lengths), 0
    for slot, length in enumerate(lengths, start=first):
        cache.store[:, :, slot, :, :length] = block[:, :, :, start:start + length]
        start += length
