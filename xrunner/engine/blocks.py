"""The KV cache of one group of queries on one stage, in blocks: memory for the tokens that are
there, whatever the longest query (vLLM, SOSP '23).

Layout [layers, 2, blocks, kv_heads, block size, head_dim], of one size for the whole run. A query
takes a block when its tokens begin one, and gives all of its blocks back when it goes; which blocks
a slot has is said by a table that attention reads (xrunner.ops.contexts). So nothing is copied when
slots are made contiguous: lines of the table move.

How many queries there may be is the rule's part (xrunner.rules.paged): it admits no more than the
group's budget of tokens holds, and the pool is made for that. Blocks are taken again in the order
in which they were left, the latest first: on the CPU those never taken are never resident."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from xrunner.engine.kv import KvShape, zeros
from xrunner.ops.contexts import BlockTable
from xrunner.rules.slots import apply_moves, compaction_moves

# Tokens of a block. On a GPU what vLLM takes; on a CPU the keys whose scores attention holds at a
# time (csrc/decode_isa.h): in blocks of 128 it was as quick as in rows, of 64 a twentieth slower,
# of 16 it took 1.7 times as long (one core with AVX-512, 32 queries of 200 tokens, bfloat16).
BLOCK_TOKENS = {"cuda": 16, "cpu": 128}


def block_tokens(device: torch.device | str) -> int:
    return BLOCK_TOKENS["cuda" if torch.device(device).type == "cuda" else "cpu"]


class BlockPool:
    """Which of blocks 0 .. count - 1 are free."""

    def __init__(self, count: int) -> None:
        self.count, self.most_taken = count, 0
        self._free = list(range(count - 1, -1, -1))

    @property
    def num_taken(self) -> int:
        return self.count - len(self._free)

    def take(self) -> int:
        assert self._free, f"none of {self.count} blocks is free: more was admitted than planned"
        block = self._free.pop()
        self.most_taken = max(self.most_taken, self.num_taken)
        return block

    def give_back(self, blocks: Sequence[int]) -> None:
        self._free += reversed(blocks)

    def check_integrity(self, held: Sequence[int]) -> None:
        """`held`, by anybody, and those that are free are all there are, none of them twice."""
        assert sorted([*self._free, *held]) == list(range(self.count)), f"{held = } {self._free = }"


class Room(NamedTuple):
    """What a pool is made for: `slots` queries of up to `capacity` tokens, in all `tokens` where
    each query's are counted in whole multiples of `unit`."""

    slots: int
    capacity: int
    tokens: int
    unit: int

    def num_blocks(self, size: int) -> int:
        """Blocks of that size that hold whatever is admitted: a query leaves up to `size` - `unit`
        tokens of its last block empty that nobody counts."""
        assert size % self.unit == 0, f"{size = } {self.unit = }"
        least = -(-(self.tokens + self.slots * (size - self.unit)) // size)
        return min(least, self.slots * self.width(size))

    def width(self, size: int) -> int:
        """Blocks of the longest query."""
        return -(-self.capacity // size)


class BlockCache:
    """Keys and values of the queries that one group has in flight. As xrunner.engine.kv.KvCache.
    Raises XgptError where the memory for that is not there."""

    def __init__(self, shape: KvShape, room: Room, device: torch.device | str = "cpu", *,
                 is_resident: bool = False) -> None:
        """`shape`: its slots are the blocks, its capacity is their size."""
        self.lengths: list[int] = []  # tokens cached, by slot
        self.pool = BlockPool(shape.slots)
        self._shape, self._room = shape, room
        self._held: list[list[int]] = []  # blocks of each slot
        self._store = zeros(shape, torch.device(device), is_resident)
        self._table = torch.zeros(room.slots, max(room.width(shape.capacity), 1),
                                  dtype=torch.int64, device=device)
        self._changed: dict[tuple[int, int], int] = {}  # of the table, not on the device as yet

    @property
    def store(self) -> Tensor:
        """[layers, 2, blocks, kv_heads, block size, head_dim]."""
        return self._store

    @property
    def num_bytes(self) -> int:
        """What is set aside for it."""
        return self._shape.num_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that queries had at a time."""
        return self.pool.most_taken * self._shape.num_bytes // max(self.pool.count, 1)

    def allocate(self, tokens: Sequence[int]) -> int:
        """Slots for new queries of so many tokens each, contiguous; returns the first."""
        first = len(self.lengths)
        assert first + len(tokens) <= self._room.slots, f"{first = } {len(tokens) = } {self._room}"
        self.lengths += tokens
        self._held += [[] for _ in tokens]
        for slot, count in enumerate(tokens, start=first):
            self._reach(slot, count)
        return first

    def place(self, count: int, replaced: Sequence[int]) -> None:
        """New queries without tokens as yet: the first in the slots `replaced`, whose queries are
        gone, the others behind all."""
        for slot in replaced:
            self._leave(slot)
            self.lengths[slot] = 0
        self.allocate([0] * (count - len(replaced)))

    def room_for(self, lengths: Sequence[int], slots: Sequence[int] | None = None) -> BlockTable:
        """Gives these slots (None: 0, 1, 2, ...) the blocks for so many tokens each; where the
        blocks of every slot are."""
        size = self._shape.capacity
        for slot, length in enumerate(lengths) if slots is None else zip(slots, lengths,
                                                                         strict=True):
            if length > len(self._held[slot]) * size:
                self._reach(slot, length)
        if self._changed:
            changed = torch.tensor([(*place, block) for place, block in self._changed.items()])
            where = changed.t().to(self._table.device)
            self._table[where[0], where[1]] = where[2]
            self._changed.clear()
        return BlockTable(self._table, size)

    def extend(self) -> None:
        """Every active query has one more token cached."""
        self.lengths = [length + 1 for length in self.lengths]

    def grow(self, slot: int, tokens: int = 1) -> None:
        """The query in `slot` has so many more tokens cached."""
        self.lengths[slot] += tokens

    def free(self, removed: Sequence[int]) -> int:
        """Drop the queries in slots `removed` and close the gaps. Returns the rows copied: none."""
        for slot in removed:
            self._leave(slot)
        moves = compaction_moves(len(self.lengths), removed)
        apply_moves(self.lengths, moves, len(removed))
        apply_moves(self._held, moves, len(removed))
        for _, target in moves:
            self._write(target, 0)
        return 0

    def check_integrity(self, least: int = 1) -> None:
        """Lengths, blocks and table agree; every query has `least` tokens or more. Called after
        every step in tests."""
        size = self._shape.capacity
        assert len(self.lengths) == len(self._held) <= self._room.slots, f"{self.lengths = }"
        assert all(least <= n <= len(held) * size for n, held in zip(
            self.lengths, self._held, strict=True)), f"{self.lengths = } {self._held = }"
        self.pool.check_integrity([block for held in self._held for block in held])
        table, _ = self.room_for([])
        assert all(table[slot, :len(held)].tolist() == held
                   for slot, held in enumerate(self._held)), f"{table = } {self._held = }"

    def _reach(self, slot: int, length: int) -> None:
        held = self._held[slot]
        first = len(held)
        held += [self.pool.take() for _ in range(self._room_blocks(length) - first)]
        self._write(slot, first)

    def _room_blocks(self, length: int) -> int:
        return -(-length // self._shape.capacity)

    def _leave(self, slot: int) -> None:
        self.pool.give_back(self._held[slot])
        self._held[slot] = []

    def _write(self, slot: int, first: int) -> None:
        """The slot's line of the table, from its block `first` on."""
        for place, block in enumerate(self._held[slot][first:], start=first):
            self._changed[slot, place] = block
