"""Shared prefixes: which beginnings the prompts of a job have in common, as a forest. The KV cache
of a prefix is computed once for all requests that begin with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from xgpt.core.lengths import BoolArray, IntArray


@dataclass(frozen=True, kw_only=True, eq=False)
class Prefixes:
    """A forest of prefixes. A node's tokens follow those of its parent.

    `parents`: [nodes] node, or -1; a parent comes before its children. `ends`: [nodes] tokens from
    the prompt's begin to the node's end. `nodes`: [requests] the longest prefix of each request,
    -1 for none. `block_tokens`: tokens of a KV block. `is_whole`: only whole blocks are shared."""

    parents: IntArray
    ends: IntArray
    nodes: IntArray
    block_tokens: int = 128
    is_whole: bool = False

    def __getitem__(self, rows: IntArray | slice) -> Prefixes:
        """Returns the same forest for the requests `rows`, in this order."""
        return replace(self, nodes=self.nodes[rows])

    @cached_property
    def own_tokens(self) -> IntArray:
        """Tokens of each node that its parent lacks, [nodes]."""
        before = np.where(self.parents >= 0, self.ends[self.parents], 0)
        own: IntArray = self.ends - before
        return own

    @cached_property
    def lives(self) -> tuple[IntArray, IntArray]:
        """Places of the first and of the last request of each prefix, each [nodes]; (requests, -1)
        without any."""
        count, rows = len(self.nodes), np.flatnonzero(self.nodes >= 0)
        begins, stops = np.full(len(self.ends), count), np.full(len(self.ends), -1)
        np.minimum.at(begins, self.nodes[rows], rows)
        np.maximum.at(stops, self.nodes[rows], rows)
        first, last = begins.tolist(), stops.tolist()
        above = self.parents.tolist()
        for node in range(len(above) - 1, -1, -1):  # a parent comes before its children
            if (parent := above[node]) >= 0:
                first[parent] = min(first[parent], first[node])
                last[parent] = max(last[parent], last[node])
        return np.array(first, np.int64), np.array(last, np.int64)

    @property
    def used(self) -> BoolArray:
        """Whether a request begins with the prefix, [nodes]."""
        return np.asarray(self.lives[1] >= 0)

    @cached_property
    def shared(self) -> IntArray:
        """Tokens of each request that a prefix holds, [requests]."""
        own: IntArray = np.where(self.nodes >= 0, self.ends[self.nodes], 0) if (
            len(self.ends)) else np.zeros_like(self.nodes)
        return own

    def most_within(self, tokens: int) -> int:
        """The most prefixes that are in a cache of so many tokens at a time."""
        return int(np.searchsorted(np.cumsum(np.sort(self.own_tokens)), tokens, "right"))

    def chain(self, node: int) -> Sequence[int]:
        """The node and all above it, from the root on; () for -1."""
        found = list[int]()
        while node >= 0:
            found.append(node)
            node = int(self.parents[node])
        return found[::-1]


def in_blocks(prefixes: Prefixes, block_tokens: int, *, is_whole: bool = False) -> Prefixes | None:
    """The forest in KV blocks of `block_tokens`. `is_whole`: only whole blocks are shared, and the
    rest of a node's last block belongs to those below it; None where no block is whole."""
    if not is_whole:
        return replace(prefixes, block_tokens=block_tokens)
    ends = prefixes.ends // block_tokens * block_tokens
    kept, to = list[tuple[int, int]](), [-1]  # `to`: by old node + 1
    for parent, end in zip(prefixes.parents.tolist(), ends.tolist(), strict=True):
        above = to[parent + 1]
        if end > (kept[above][1] if above >= 0 else 0):
            to.append(len(kept))
            kept.append((above, end))
        else:
            to.append(above)
    if not kept:
        return None
    parents, ends = np.array(kept, np.int64).T
    return Prefixes(parents=parents, ends=ends, nodes=np.array(to)[prefixes.nodes + 1],
                    block_tokens=block_tokens, is_whole=True)


def dealt_prefixes(ends: IntArray, inputs: IntArray, seed: int) -> Prefixes:
    """Prefixes of `ends` tokens each, [groups], to which requests are dealt at random. `inputs`:
    tokens of each request, [requests]; one that is no longer than its prefix has none."""
    nodes = np.random.default_rng((seed, 2)).integers(len(ends), size=len(inputs))
    return Prefixes(parents=np.full(len(ends), -1), ends=ends,
                    nodes=np.where(inputs > ends[nodes], nodes, -1))
