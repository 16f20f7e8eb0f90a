"""The KV cache of one group of requests on one stage: its memory, and who has which block.

The memory has layout [layers, 2, blocks, kv_heads, block size, head_dim] and one size for the whole
run, since growing it would copy all of it. Keys and values lie in one of two ways:

- in rows: a block holds the longest request, and slot i has block i. When requests end, others
  are moved into their rows, so a decode step reads plain views;
- in blocks (vLLM, SOSP '23): a request takes a block when its tokens begin one, and returns all of
  them when it ends. A table says which blocks a slot has (xrunner.ops.contexts). Nothing is moved.
  Requests may share the blocks of a prefix, which are free when nobody holds them.

The rule decides how many requests there may be. With blocks it admits no more than a budget of
tokens, of each group or of all together (xrunner.rules.steps.KvBudget).

NOTE: the memory starts as zeros. Attention reads rows up to the group's longest context, and a
masked score still multiplies what lies there: 0 * NaN is NaN."""

import math
import mmap
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from xgpt.core.cluster import KV_BLOCK_TOKENS
from xgpt.core.errors import XgptError
from xgpt.core.model import ModelSpec
from xgpt.core.units import format_bytes
from xrunner.devices import on_device
from xrunner.ops.contexts import BlockTable, layers_of
from xrunner.ops.kv_entries import compact
from xrunner.rules.slots import Move, apply_moves, compaction_moves
from xrunner.rules.steps import Start

# Tokens of a block. On a GPU as in vLLM; on a CPU the keys whose scores attention holds at a time
# (csrc/ops/cpu/decode_isa.h). Measured on one AVX-512 core, 32 requests of 200 tokens, bfloat16:
# blocks of 128 are as quick as rows, of 64 take 5 % longer, of 16 take 1.7 times as long.
BLOCK_TOKENS = {"cuda": KV_BLOCK_TOKENS["gpu"], "cpu": KV_BLOCK_TOKENS["cpu"]}


class KvShape(NamedTuple):
    """Shape of a cache's memory. `slots`: its blocks. `capacity`: tokens of each. In rows these are
    the most requests and the tokens of the longest one."""

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
        """Bytes it occupies once all of it has been written."""
        return math.prod(self.dimensions) * self.dtype.itemsize


def kv_shape(spec: ModelSpec, dtype: torch.dtype, *, slots: int, capacity: int,
             num_layers: int | None = None, kv_heads: int | None = None) -> KvShape:
    """KV shape of a model. `num_layers`, `kv_heads`: those of this rank (None: all of the
    model's)."""
    return KvShape(spec.num_layers if num_layers is None else num_layers, slots,
                   spec.kv_heads if kv_heads is None else kv_heads, capacity, spec.head_dim, dtype)


class Room(NamedTuple):
    """Requests that blocks must hold. `slots`: requests of each of the `groups` that share the
    blocks. `capacity`: tokens of the longest. `tokens`: budget in all, each request's counted in
    whole multiples of `unit`. `prefixes`: most shared prefixes that are there beside them."""

    slots: int
    capacity: int
    tokens: int
    unit: int
    groups: int = 1
    prefixes: int = 0

    def num_blocks(self, size: int) -> int:
        """Number of blocks of `size` tokens that hold whatever is admitted. A request leaves up to
        `size` - `unit` uncounted tokens of its last block empty. Behind a prefix its first block
        holds tokens of the prefix as well. So it is with another prefix."""
        assert size % self.unit == 0, f"{size = } {self.unit = }"
        slots = self.slots * self.groups
        more = slots * (size - self.unit)
        if self.prefixes:
            more += slots * size + 2 * self.prefixes * (size - 1)
        least = -(-(self.tokens + more) // size)
        return min(least, (slots + self.prefixes) * self.width(size))

    def width(self, size: int) -> int:
        """Number of blocks of the longest request."""
        return -(-self.capacity // size)


class EntryRows(NamedTuple):
    """Blocks of a cache, and the number of tokens of each, counted from its beginning."""

    rows: Sequence[int]
    lengths: Sequence[int]


class BlockPool:
    """Memory of blocks 0 .. count - 1, shared by the caches of one or more groups. A block is free
    once all its holders have given it back. The block freed last is taken first, then the lowest.
    `lines`: blocks of each living prefix, by node. Raises XgptError if there is too little
    memory."""

    def __init__(self, shape: KvShape, device: torch.device | str = "cpu") -> None:
        self.shape, self.count, self.most_taken = shape, shape.slots, 0
        self.store = _store_of(shape, torch.device(device))
        self.free = list(range(self.count - 1, -1, -1))
        self.lines: dict[int, list[int]] = {}
        self._holders = [0] * self.count  # lines of tables and prefixes, by block

    @property
    def num_taken(self) -> int:
        return self.count - len(self.free)

    def take(self, count: int) -> list[int]:
        assert count <= len(self.free), (
            f"{count} of {self.shape} are not free: more was admitted than planned")
        blocks = [self.free.pop() for _ in range(count)]
        self.share(blocks)
        self.most_taken = max(self.most_taken, self.num_taken)
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Counts one more holder of each block."""
        for block in blocks:
            self._holders[block] += 1

    def give_back(self, blocks: Sequence[int]) -> None:
        """Counts one holder of each block less; frees those that nobody holds."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            if not self._holders[block]:
                self.free.append(block)

    def keep(self, node: int, blocks: Sequence[int]) -> None:
        """Holds the blocks of a prefix until it is released."""
        assert node not in self.lines, f"{node = } lives already"
        self.share(blocks)
        self.lines[node] = [*blocks]

    def release(self, nodes: Sequence[int]) -> None:
        """Gives back the blocks of prefixes."""
        for node in nodes:
            self.give_back(self.lines.pop(node))

    def check_integrity(self, held: Sequence[Sequence[int]]) -> None:
        """Asserts that each block is counted as often as `held` (the lines of all tables) and the
        prefixes name it, and is free if they do not."""
        counts = Counter(chain(*held, *self.lines.values()))
        assert self._holders == [counts[block] for block in range(self.count)], f"{held = }"
        assert sorted([*counts, *self.free]) == list(range(self.count)), f"{self.free = }"


class KvCache:
    """Keys and values of one group's requests."""

    def __init__(self, shape: KvShape, device: torch.device | str = "cpu", *,
                 room: Room | None = None, pool: BlockPool | None = None) -> None:
        """`room`: what the blocks must hold (None: rows). `pool`: shared blocks (None: its own)."""
        self.pool = pool or BlockPool(shape, device)
        self.lengths: list[int] = []  # tokens cached, by slot
        self.held: list[list[int]] = []  # blocks of each slot
        self._size, self._slots, self._groups = shape.capacity, shape.slots, 1
        # [layers, 2, blocks, kv_heads, block size, head_dim]
        self.store, self.layers = self.pool.store, layers_of(self.pool.store)
        self._table: Tensor | None = None  # [slots, blocks of the longest request], on the device
        self._changed: dict[tuple[int, int], int] = {}  # entries of the table not yet on the device
        self._copies: dict[Move, int] = {}  # tokens to be copied from block to block
        if room is not None:
            self._slots, self._groups = room.slots, room.groups
            self._table = torch.zeros(room.slots, max(room.width(self._size), 1),
                                      dtype=torch.int64, device=self.store.device)

    @property
    def num_bytes(self) -> int:
        """Bytes set aside; an even share of memory that groups share."""
        return self.pool.shape.num_bytes // self._groups

    @property
    def peak_bytes(self) -> int:
        """Most bytes of it that requests had at a time."""
        pool = self.pool
        return pool.most_taken * pool.shape.num_bytes // max(pool.count, 1) // self._groups

    def rows_of(self, slots: Sequence[int]) -> EntryRows:
        """Blocks and token counts of the requests in these slots, one after the other."""
        size, blocks, lengths = self._size, list[int](), list[int]()
        for slot in slots:
            length = self.lengths[slot]
            blocks += self.held[slot][:-(-length // size)]
            lengths += [min(size, length - first) for first in range(0, length, size)]
        return EntryRows(blocks, lengths)

    def room_for(self, lengths: Sequence[int],
                 slots: Sequence[int] | None = None) -> BlockTable | None:
        """Allocates blocks for so many tokens of each slot (None: slots 0, 1, 2, ...). Fills those
        of which a part is shared. Returns the table of all slots' blocks; None in rows, which have
        room for any request."""
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
        if self._copies:
            compact(self.store, [*self._copies], [*self._copies.values()])
            self._copies.clear()
        return BlockTable(self._table, size)

    def allocate(self, tokens: Sequence[int]) -> int:
        """Appends slots for requests of so many tokens each; returns the first."""
        first = len(self.lengths)
        assert first + len(tokens) <= self._slots, f"{first = } {len(tokens) = } {self._slots = }"
        self.lengths += tokens
        self.held += [[] for _ in tokens]
        for slot, count in enumerate(tokens, start=first):
            self._reach(slot, count if self._table is not None else self._size)
        return first

    def adopt(self, tokens: Sequence[int]) -> None:
        """Replaces all requests by ones of so many tokens each."""
        self.free(range(len(self.lengths)))
        self.allocate(tokens)

    def seat(self, count: int, replaced: Sequence[int]) -> None:
        """Adds `count` requests without tokens: the first in slots `replaced`, the others
        appended."""
        for slot in replaced:
            if self._table is not None:
                self._leave(slot)
            self.lengths[slot] = 0
        self.allocate([0] * (count - len(replaced)))

    def share(self, slot: int, start: Start) -> None:
        """Lets the slot's request, without tokens so far, begin with those that it shares. It holds
        the prefix's whole blocks as well; `room_for` copies a part of one. Allocates blocks of the
        prefixes that the request writes, and keeps them."""
        size = self._size
        whole, part = divmod(start.first, size)
        line = self.pool.lines[start.node] if start.first else []
        self.held[slot] = line[:whole]
        self.pool.share(self.held[slot])
        self._reach(slot, start.first)
        if part:
            self._copies[Move(line[whole], self.held[slot][whole])] = part
        self.lengths[slot] = start.first
        for node, end in start.writes:
            self._reach(slot, end)
            self.pool.keep(node, self.held[slot][:-(-end // size)])
        self._write(slot)

    def grow(self, slot: int, tokens: int = 1) -> None:
        """Counts `tokens` more cached tokens of the slot's request."""
        self.lengths[slot] += tokens

    def give_up(self, slot: int) -> None:
        """Frees the blocks of a finished request; the slot itself is removed by `free`."""
        assert self._table is not None, f"{slot = }: rows are free with their slots"
        self._leave(slot)
        self.lengths[slot] = 0

    def free(self, removed: Sequence[int]) -> int:
        """Removes slots and closes the gaps; returns the number of rows copied (0 with blocks)."""
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
        self.held[slot] += self.pool.take(max(-(-length // self._size) - first, 0))
        self._write(slot, first)

    def _leave(self, slot: int) -> None:
        self.pool.give_back(self.held[slot])
        self.held[slot] = []

    def _write(self, slot: int, first: int = 0) -> None:
        """Marks the slot's line of the table as changed from its block `first` on."""
        if self._table is not None:
            for place, block in enumerate(self.held[slot][first:], start=first):
                self._changed[slot, place] = block


def block_tokens(device: torch.device | str) -> int:
    """Number of tokens in a KV block on the device."""
    return BLOCK_TOKENS["cuda" if torch.device(device).type == "cuda" else "cpu"]


def _store_of(shape: KvShape, device: torch.device) -> Tensor:
    """Zeroed memory of that shape; on a CPU its pages are occupied only when written.

    Raises XgptError if the device has too little memory.

    NOTE: pages are not populated beforehand: MADV_POPULATE_WRITE takes as long as writing them.
    Huge pages are not used. Measured: decode attention of 190 requests takes 38 ms with them
    instead of 50 (SmolLM2-135M, bfloat16, two cores). But allocating 1.6 GB takes 3 to 5 s instead
    of 0.4 on a virtual machine that returns free memory to its host."""
    dimensions, dtype = shape.dimensions, shape.dtype
    if device.type != "cpu" or 0 in dimensions:  # no layers: a pool that only has an encoder
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
        f"the KV cache of {shape.slots} requests of up to {shape.capacity} tokens takes "
        f"{format_bytes(shape.num_bytes)} {why}: shorten the longest requests (or their "
        "max_tokens), or give a smaller schedule")
