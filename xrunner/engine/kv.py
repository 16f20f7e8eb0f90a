"""The KV cache of one group of queries on one stage: blocks of memory, and which query has which.

Layout [layers, 2, blocks, kv_heads, block size, head_dim], of one size for the whole run: growing
it would copy every entry in the middle of a phase. Entries lie in one of two ways:

- in rows: a block is as large as the longest query, and slot i has block i. When queries end,
  the entries of others are moved into their rows, so a decode step reads plain views;
- in blocks (vLLM, SOSP '23): a query takes a block when its tokens begin one, and gives all of its
  blocks back when it goes. Which blocks a slot has is said by a table that attention reads
  (xrunner.ops.contexts), and no entry is ever moved.

How many queries there may be is the rule's part: in blocks it admits no more than a budget of
tokens holds (xrunner.rules.steps.KvBudget), of each group or of all groups together.

NOTE: the store starts as zeros. Attention reads a group's rows up to its longest context, and a
masked score still multiplies what lies there: uninitialised memory may hold NaN, and 0 * NaN is
NaN."""

import math
import mmap
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from xgpt.core.errors import XgptError
from xgpt.core.model import ModelSpec
from xgpt.core.units import format_bytes
from xrunner.devices import on_device
from xrunner.ops.contexts import BlockTable, layers_of
from xrunner.ops.kv_entries import compact
from xrunner.rules.slots import apply_moves, compaction_moves

# Tokens of a block. On a GPU what vLLM takes; on a CPU the keys whose scores attention holds at a
# time (csrc/ops/cpu/decode_isa.h): in blocks of 128 it was as quick as in rows, of 64 a twentieth
# slower, of 16 it took 1.7 times as long (one core with AVX-512, 32 queries of 200 tokens,
# bfloat16).
BLOCK_TOKENS = {"cuda": 16, "cpu": 128}


class KvShape(NamedTuple):
    """The size of a store. `slots`: its blocks; `capacity`: tokens of each. In rows these are the
    most queries and the tokens of the longest."""

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


class Room(NamedTuple):
    """What blocks are made for: `slots` queries of up to `capacity` tokens in each of the `groups`
    that share them, in all `tokens` where each query's are counted in whole multiples of `unit`."""

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


class EntryRows(NamedTuple):
    """Blocks of a store, and how many entries of each are asked for, from its beginning."""

    rows: Sequence[int]
    lengths: Sequence[int]


class BlockPool:
    """The memory of blocks 0 .. count - 1, of which the caches of one or more groups take, and
    which of them are free. The lowest is taken first, and again the one that was given back last.
    Raises XgptError where the memory for that is not there."""

    def __init__(self, shape: KvShape, device: torch.device | str = "cpu") -> None:
        self.shape, self.count, self.most_taken = shape, shape.slots, 0
        self.store = _store_of(shape, torch.device(device))
        self.free = list(range(self.count - 1, -1, -1))

    @property
    def num_taken(self) -> int:
        return self.count - len(self.free)

    def take(self, count: int) -> list[int]:
        assert count <= len(self.free), (
            f"{count} of {self.shape} are not free: more was admitted than planned")
        blocks = [self.free.pop() for _ in range(count)]
        self.most_taken = max(self.most_taken, self.num_taken)
        return blocks

    def give_back(self, blocks: Sequence[int]) -> None:
        self.free += reversed(blocks)


class KvCache:
    """Keys and values of the queries that one group has in flight."""

    def __init__(self, shape: KvShape, device: torch.device | str = "cpu", *,
                 room: Room | None = None, pool: BlockPool | None = None) -> None:
        """`room`: what its blocks are made for; None: entries lie in rows. `pool`: blocks of that
        shape, where others take of them too; None: its own, on `device`."""
        self.pool = pool or BlockPool(shape, device)
        self.lengths: list[int] = []  # tokens cached, by slot
        self.held: list[list[int]] = []  # blocks of each slot
        self._size, self._slots, self._groups = shape.capacity, shape.slots, 1
        # [layers, 2, blocks, kv_heads, block size, head_dim]
        self.store, self.layers = self.pool.store, layers_of(self.pool.store)
        self._table: Tensor | None = None  # [slots, blocks of the longest query], on the device
        self._changed: dict[tuple[int, int], int] = {}  # what of it is not there as yet
        if room is not None:
            self._slots, self._groups = room.slots, room.groups
            self._table = torch.zeros(room.slots, max(room.width(self._size), 1),
                                      dtype=torch.int64, device=self.store.device)

    @property
    def num_bytes(self) -> int:
        """What is set aside for it: of memory that groups share, an even share."""
        return self.pool.shape.num_bytes // self._groups

    @property
    def peak_bytes(self) -> int:
        """Of that, the blocks that queries had at a time, at most."""
        pool = self.pool
        return pool.most_taken * pool.shape.num_bytes // max(pool.count, 1) // self._groups

    def rows_of(self, slots: Sequence[int]) -> EntryRows:
        """Where the entries of these slots' queries lie, one query after the other."""
        size, blocks, lengths = self._size, list[int](), list[int]()
        for slot in slots:
            length = self.lengths[slot]
            blocks += self.held[slot][:-(-length // size)]
            lengths += [min(size, length - first) for first in range(0, length, size)]
        return EntryRows(blocks, lengths)

    def room_for(self, lengths: Sequence[int],
                 slots: Sequence[int] | None = None) -> BlockTable | None:
        """Gives these slots (None: 0, 1, 2, ...) the blocks for so many tokens each. Returns where
        the blocks of every slot are; None in rows, which have room for any query."""
        if self._table is None:
            return None
        size = self._size
        for slot, length in enumerate(lengths) if slots is None else zip(slots, lengths,
                                                                         strict=True):
            if length > len(self.held[slot]) * size:
                self._reach(slot, length)
        if self._changed:
            at, places = zip(*self._changed, strict=True)
            where = on_device([[*at], [*places], [*self._changed.values()]], self._table.device)
            self._table[where[0], where[1]] = where[2]
            self._changed.clear()
        return BlockTable(self._table, size)

    def allocate(self, tokens: Sequence[int]) -> int:
        """Slots for new queries of so many tokens each, contiguous; returns the first."""
        first = len(self.lengths)
        assert first + len(tokens) <= self._slots, f"{first = } {len(tokens) = } {self._slots = }"
        self.lengths += tokens
        self.held += [[] for _ in tokens]
        for slot, count in enumerate(tokens, start=first):
            self._reach(slot, count if self._table is not None else self._size)
        return first

    def adopt(self, tokens: Sequence[int]) -> None:
        """Queries of so many tokens each, and no others, have the slots from now on."""
        self.free(range(len(self.lengths)))
        self.allocate(tokens)

    def place(self, count: int, replaced: Sequence[int]) -> None:
        """New queries without tokens as yet: the first in the slots `replaced`, whose queries are
        gone, the others behind all."""
        for slot in replaced:
            if self._table is not None:
                self._leave(slot)
            self.lengths[slot] = 0
        self.allocate([0] * (count - len(replaced)))

    def grow(self, slot: int, tokens: int = 1) -> None:
        """The query in `slot` has so many more tokens cached."""
        self.lengths[slot] += tokens

    def give_up(self, slot: int) -> None:
        """The slot's query is done: its blocks are free from now on, the slot is with `free`."""
        assert self._table is not None, f"{slot = }: rows are free with their slots"
        self._leave(slot)
        self.lengths[slot] = 0

    def free(self, removed: Sequence[int]) -> int:
        """Drop the queries in slots `removed` and close the gaps. Returns the rows copied: none in
        blocks, where lines of the table move."""
        there = len(self.lengths)
        moves = compaction_moves(there, removed)
        renamed, left = moves, removed
        if self._table is None:
            compact(self.store, moves, [self.lengths[move.source] for move in moves])
            renamed, left = [], range(there - 1, there - len(removed) - 1, -1)
        for slot in left:
            self._leave(slot)
        apply_moves(self.lengths, moves, len(removed))
        apply_moves(self.held, renamed, len(removed))
        for _, target in renamed:
            self._write(target)
        return len(moves) - len(renamed)

    def _reach(self, slot: int, length: int) -> None:
        first = len(self.held[slot])
        self.held[slot] += self.pool.take(-(-length // self._size) - first)
        self._write(slot, first)

    def _leave(self, slot: int) -> None:
        self.pool.give_back(self.held[slot])
        self.held[slot] = []

    def _write(self, slot: int, first: int = 0) -> None:
        """The slot's line of the table, from its block `first` on."""
        if self._table is not None:
            for place, block in enumerate(self.held[slot][first:], start=first):
                self._changed[slot, place] = block


def block_tokens(device: torch.device | str) -> int:
    return BLOCK_TOKENS["cuda" if torch.device(device).type == "cuda" else "cpu"]


def _store_of(shape: KvShape, device: torch.device) -> Tensor:
    """A store of that shape: on the CPU pages of zeros, none of them occupied before it is written
    (torch.zeros would write every one). Raises XgptError where the device has no memory for it.

    NOTE: pages are not asked for beforehand: asking (MADV_POPULATE_WRITE) takes as long as writing
    to each. Nor in huge pages. Decode attention of 190 queries takes 38 ms with them instead of 50
    (SmolLM2-135M, bfloat16, two cores), but 1.6 GB of them took 3 to 5 s to get, not 0.4, on a
    virtual machine that hands free ones back to its host: about what a minute's steps regain."""
    dimensions, dtype = shape.dimensions, shape.dtype
    if device.type != "cpu" or 0 in dimensions:  # no layers: a pool that has an encoder alone
        try:
            return torch.zeros(dimensions, dtype=dtype, device=device)
        except torch.cuda.OutOfMemoryError:
            raise _refused(shape, f"of memory, more than {device} has left") from None
    try:
        memory = mmap.mmap(-1, shape.num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError):
        raise _refused(shape, "of address space, which this machine refuses") from None
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(dimensions)


def _refused(shape: KvShape, why: str) -> XgptError:
    return XgptError(
        f"the KV cache of {shape.slots} queries of up to {shape.capacity} tokens takes "
        f"{format_bytes(shape.num_bytes)} {why}: shorten the longest requests (or their "
        "max_tokens), or give a smaller schedule")
