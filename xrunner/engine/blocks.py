"""The KV cache of one group of queries on one stage, in blocks: memory for the tokens that are
there, whatever the longest query (vLLM, SOSP '23).

Layout [layers, 2, blocks, kv_heads, block size, head_dim], of one size for the whole run. A query
takes a block when its tokens begin one, and gives all of its blocks back when it goes; which blocks
a slot has is said by a table that attention reads (xrunner.ops.contexts). So nothing is copied when
slots are made contiguous: lines of the table move.

How many queries there may be is the rule's part: it admits no more than a budget of tokens holds
(xrunner.rules.steps.KvBudget), of each group or of all groups together, and the pool is made for
that. Blocks are taken again in the order in which they were left, the latest first: on the CPU
those never taken are never resident."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from xrunner.devices import on_device
from xrunner.engine.kv import EntryRows, KvShape, store_of
from xrunner.ops.contexts import BlockTable, layers_of
from xrunner.rules.slots import apply_moves, compaction_moves

# Tokens of a block. On a GPU what vLLM takes; on a CPU the keys whose scores attention holds at a
# time (csrc/ops/cpu/decode_isa.h): in blocks of 128 it was as quick as in rows, of 64 a twentieth
# slower, of 16 it took 1.7 times as long (one core with AVX-512, 32 queries of 200 tokens,
# bfloat16).
BLOCK_TOKENS = {"cuda": 16, "cpu": 128}


def block_tokens(device: torch.device | str) -> int:
    return BLOCK_TOKENS["cuda" if torch.device(device).type == "cuda" else "cpu"]


class BlockPool:
    """Which of blocks 0 .. count - 1 are free."""

    def __init__(self, count: int) -> None:
        self.count, self.most_taken = count, 0
        self._free = list(range(count - 1, -1, -1))
        self._holders: list[list[list[int]]] = []

    def lend_to(self, held: list[list[int]]) -> None:
        """`held` lists the blocks of a cache's slots, now and whenever integrity is checked."""
        self._holders.append(held)

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

    def check_integrity(self) -> None:
        """Those that caches hold and those that are free are all there are, none of them twice."""
        held = [block for holder in self._holders for blocks in holder for block in blocks]
        assert sorted([*self._free, *held]) == list(range(self.count)), f"{held = } {self._free = }"


class Room(NamedTuple):
    """What a pool is made for: `slots` queries of up to `capacity` tokens in each of the `groups`
    that share it, in all `tokens` where each query's are counted in whole multiples of `unit`."""

    slots: int
    capacity: int
    tokens: int
    unit: int
    groups: int = 1

    def num_blocks(self, size: int) -> int:
        """Blocks of that size that hold whatever is admitted: a query leaves up to `size` - `unit`
        tokens of its last block empty that nobody counts."""
        assert size % self.unit == 0, f"{size = } {self.unit = }"
        slots = self.slots * self.groups
        least = -(-(self.tokens + slots * (size - self.unit)) // size)
        return min(least, slots * self.width(size))

    def width(self, size: int) -> int:
        """Blocks of the longest query."""
        return -(-self.capacity // size)


class Blocks:
    """The memory that the groups of a room share, and which of it is free. Raises XgptError where
    the memory for that is not there."""

    def __init__(self, shape: KvShape, room: Room, device: torch.device | str = "cpu", *,
                 is_resident: bool = False) -> None:
        """`shape`: its slots are the blocks, its capacity is their size."""
        self.shape, self.room, self.device = shape, room, torch.device(device)
        self.pool = BlockPool(shape.slots)
        self.store, self.pages = store_of(shape, self.device, is_resident=is_resident)
        self.layers = layers_of(self.store)

    def caches(self) -> list["BlockCache"]:
        """One for each group."""
        return [BlockCache(self) for _ in range(self.room.groups)]


class _Lines:
    """The table that says which blocks each slot has: its lines as they are on the device, and what
    has changed since they were last asked for."""

    def __init__(self, slots: int, width: int, device: torch.device) -> None:
        self._table = torch.zeros(slots, max(width, 1), dtype=torch.int64, device=device)
        self._changed: dict[tuple[int, int], int] = {}

    def write(self, slot: int, held: Sequence[int], first: int = 0) -> None:
        """The slot's line, from its block `first` on."""
        for place, block in enumerate(held[first:], start=first):
            self._changed[slot, place] = block

    def on_device(self) -> Tensor:
        """[slots, blocks of the longest query]."""
        if self._changed:
            slots, places = zip(*self._changed, strict=True)
            where = on_device([[*slots], [*places], [*self._changed.values()]], self._table.device)
            self._table[where[0], where[1]] = where[2]
            self._changed.clear()
        return self._table


class BlockCache:
    """Keys and values of the queries that one group has in flight. As xrunner.engine.kv.KvCache."""

    def __init__(self, blocks: Blocks) -> None:
        self.lengths: list[int] = []  # tokens cached, by slot
        self.pool, self._pages = blocks.pool, blocks.pages
        self._shape, self._room = blocks.shape, blocks.room
        # [layers, 2, blocks, kv_heads, block size, head_dim], of all groups that share it
        self.store, self.layers = blocks.store, blocks.layers
        self._held: list[list[int]] = []  # blocks of each slot
        self.pool.lend_to(self._held)
        self._lines = _Lines(self._room.slots, self._room.width(self._shape.capacity),
                             blocks.device)

    @property
    def num_bytes(self) -> int:
        """The group's even share of what is set aside."""
        return self._shape.num_bytes // self._room.groups

    @property
    def peak_bytes(self) -> int:
        """The group's even share of the most that queries had at a time."""
        return self.pool.most_taken * self._shape.num_bytes // max(self.pool.count, 1) // (
            self._room.groups)

    def rows_of(self, slots: Sequence[int]) -> EntryRows:
        """The blocks of these slots' queries, one query after the other."""
        size, blocks, lengths = self._shape.capacity, list[int](), list[int]()
        for slot in slots:
            length = self.lengths[slot]
            blocks += self._held[slot][:-(-length // size)]
            lengths += [min(size, length - first) for first in range(0, length, size)]
        return EntryRows(blocks, lengths)

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
        return BlockTable(self._lines.on_device(), size)

    def extend(self) -> None:
        """Every active query has one more token cached."""
        self.lengths = [length + 1 for length in self.lengths]

    def grow(self, slot: int, tokens: int = 1) -> None:
        """The query in `slot` has so many more tokens cached."""
        self.lengths[slot] += tokens

    def give_up(self, slot: int) -> None:
        """The slot's query is done: its blocks are free from now on, the slot is with `free`."""
        self._leave(slot)
        self.lengths[slot] = 0

    def free(self, removed: Sequence[int]) -> int:
        """Drop the queries in slots `removed` and close the gaps. Returns the rows copied: none."""
        for slot in removed:
            self._leave(slot)
        moves = compaction_moves(len(self.lengths), removed)
        apply_moves(self.lengths, moves, len(removed))
        apply_moves(self._held, moves, len(removed))
        for _, target in moves:
            self._lines.write(target, self._held[target])
        return 0

    def check_integrity(self, least: int = 1) -> None:
        """Lengths, blocks and table agree; every query has `least` tokens or more, or has given up
        what it had. Called after every step in tests."""
        size = self._shape.capacity
        assert len(self.lengths) == len(self._held) <= self._room.slots, f"{self.lengths = }"
        assert all(least <= n <= len(held) * size or not (n or held) for n, held in zip(
            self.lengths, self._held, strict=True)), f"{self.lengths = } {self._held = }"
        self.pool.check_integrity()
        table, _ = self.room_for([])
        assert all(table[slot, :len(held)].tolist() == held
                   for slot, held in enumerate(self._held)), f"{table = } {self._held = }"

    def _reach(self, slot: int, length: int) -> None:
        held = self._held[slot]
        first = len(held)
        held += [self.pool.take() for _ in range(-(-length // self._shape.capacity) - first)]
        self._pages.reach(max(held[first:], default=-1) + 1)
        self._lines.write(slot, held, first)

    def _leave(self, slot: int) -> None:
        self.pool.give_back(self._held[slot])
        self._held[slot] = []
