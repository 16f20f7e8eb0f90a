"""Where a group's keys and values lie: in one tier's memory, or in a file.

A request has a row of blocks [blocks, 2, k, size, d], the keys and values of each block one after
the other, so that what it has used is contiguous. Blocks are those of a file, or one for a request:
attention reads long stretches faster."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xgpt.core.placement import DEVICE, HOST, Placement, kv_block_tokens
from xgpt.core.system.direct_file import DirectFile
from xrunner.devices import CPU
from xrunner.engine.kv import KvShape
from xrunner.offload.arena import Arena, raw
from xrunner.offload.mover import Mover, Ticket, copy
from xrunner.ops.contexts import BlockTable, Cache

Tokens = Sequence[tuple[int, int]]  # of each request: the first, and one behind the last


class Tiers(NamedTuple):
    """A rank's tiers. `arenas`: by tier; the device's for the host of a CPU rank
    that has no such tier. `folder`: of files."""

    placement: Placement
    device: torch.device
    arenas: tuple[Arena, Arena, Arena]
    mover: Mover
    folder: Path

    @property
    def is_far(self) -> bool:
        """Whether the device's memory is not its host's."""
        return self.device.type != "cpu"

    def flat(self, tier: int, num_bytes: int) -> Tensor:
        """A buffer of uint8 on the device or its host. Raises XgptError."""
        if not num_bytes:
            return torch.empty(0, dtype=torch.uint8)
        device = self.device if tier == DEVICE else CPU
        return self.arenas[tier].tensor((num_bytes,), torch.uint8, "a buffer of keys and values",
                                        device=device, pin=self.is_far and tier == HOST)


class Buffer:
    """Memory of a piece at a time. `landing`: on the host, where a file is read. `staging`: on the
    device; both are the same memory on a CPU. `last`: the copy that ends its use so far."""

    def __init__(self, landing: Tensor, staging: Tensor) -> None:
        self.landing, self.staging, self.is_lent = landing, staging, False
        self.last: Ticket | None = None


class RowForm(NamedTuple):
    """A request's row: blocks of `size` tokens."""

    blocks: int
    kv_heads: int
    size: int
    head_dim: int
    dtype: torch.dtype

    @property
    def block(self) -> tuple[int, ...]:
        return 2, self.kv_heads, self.size, self.head_dim

    @property
    def token_bytes(self) -> int:
        return 2 * self.kv_heads * self.head_dim * int(self.dtype.itemsize)

    @property
    def row_bytes(self) -> int:
        return self.blocks * self.size * self.token_bytes

    def view(self, flat: Tensor, rows: int) -> Tensor:
        """The beginning of flat memory (uint8) as rows [rows, blocks, 2, k, size, d]."""
        return flat[:rows * self.row_bytes].view(self.dtype).view(rows, self.blocks, *self.block)

    def table(self, rows: int, device: torch.device) -> BlockTable:
        """The blocks of each row in what `cache_of` returns."""
        blocks = 2 * torch.arange(rows * self.blocks, device=device).view(rows, self.blocks)
        return BlockTable(blocks, self.size)


def row_form(shape: KvShape, *, in_blocks: bool) -> RowForm:
    """A row of a request of `shape.capacity` tokens. in_blocks: such as fill whole sectors."""
    size = kv_block_tokens(shape.kv_heads, shape.head_dim, int(shape.dtype.itemsize)
                           ) if in_blocks else shape.capacity
    return RowForm(-(-shape.capacity // size), shape.kv_heads, size, shape.head_dim, shape.dtype)


def cache_of(rows: Tensor) -> Cache:
    """Rows as attention reads them: block i has number 2 i among the keys and among the values."""
    whole = rows.view(-1, *rows.shape[3:])
    return whole[:-1], whole[1:]


def copy_entries(into: Tensor, source: Tensor, tokens: Tokens) -> None:
    """Copies these tokens from rows to rows of the same form; whole blocks where a request has
    tokens of several, or between a GPU and its host, which copy these in one go."""
    size, rows = into.shape[4], [*range(len(tokens))]
    if all(end - first == 1 for first, end in tokens):
        blocks, places = zip(*(divmod(first, size) for first, _ in tokens), strict=True)
        where = rows, blocks, slice(None), slice(None), places
        if into.is_cpu and source.is_cpu:
            array(into)[where] = array(source)[where]
        else:
            into[where] = source[where].to(into.device)
        return
    for row, (first, end) in enumerate(tokens):
        low, high = first // size, -(-end // size)
        part = slice(first - low * size, end - low * size)
        if high - low > 1 or into.device != source.device:
            copy(into[row, low:high], source[row, low:high])
        else:
            copy(into[row, low:high, :, :, part], source[row, low:high, :, :, part])


def array(tensor: Tensor) -> Any:
    """The tensor's bits as a numpy array of integers, which is copied without threads."""
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.itemsize]).numpy()


def recut(row: Tensor, into: Tensor, length: int) -> None:
    """Copies the first tokens of a row [blocks, 2, k, size, d] into one with blocks of any size."""
    tokens, size = row.permute(1, 2, 0, 3, 4).flatten(2, 3), into.shape[3]
    for block, first in enumerate(range(0, length, size)):
        end = min(first + size, length)
        into[block, :, :, :end - first] = tokens[:, :, first:end]


class MemoryPart:
    """Rows in the memory of a device or its host: `rows` [layers, count, blocks, 2, k, size, d],
    zero at first, since a masked score still multiplies what lies there."""

    def __init__(self, form: RowForm, layers: int, rows: int, arena: Arena, *,
                 device: torch.device | str = "cpu", pin: bool = False) -> None:
        """Raises XgptError if the arena has too little left."""
        self.form, self.count, self.num_bytes = form, rows, layers * rows * form.row_bytes
        self.rows = arena.tensor((layers, rows, form.blocks, *form.block), form.dtype,
                                 f"the KV cache of {rows} requests", device=device, pin=pin)
        if not self.rows.is_cpu:
            self.rows.zero_()


class DiskPart:
    """Rows in a file, by (layer, row). Only whole blocks are read and written; a request's last
    block stays in memory until it is full. The file has no name, so that it goes however the
    process ends. `row_of`: row of the file and of the tails, by slot."""

    def __init__(self, form: RowForm, layers: int, rows: int, path: Path, *, disk: Arena,
                 memory: Arena) -> None:
        """memory: of the tails. Raises XgptError if an arena or the disk has too little left."""
        self.form, self.count, self.num_bytes = form, rows, layers * rows * form.row_bytes
        self.row_of = [*range(rows)]
        what = f"the KV cache of {rows} requests"
        disk.take(self.num_bytes, what)
        self.file = DirectFile(path, self.num_bytes, is_scratch=True)
        self._tails = memory.tensor((layers, rows, *form.block), form.dtype,
                                    f"the last blocks of {what}")  # by layer and row

    def whole_bytes(self, tokens: Tokens) -> int:
        """Bytes of the blocks that become whole with these tokens."""
        size = self.form.size
        return sum(end // size - first // size for first, end in tokens) * (
            size * self.form.token_bytes)

    def load(self, layer: int, row: int, tokens: Tokens, into: Tensor) -> None:
        """Fills rows [n, blocks, 2, k, size, d] with the requests' tokens. These are all that each
        has, from the first on. `row`: of the first request."""
        size, tails, rows = self.form.size, array(self._tails[layer]), array(into)
        for own, place, (_, count) in zip(into, self.row_of[row:], tokens, strict=False):
            if count >= size:
                self.file.read(self._offset(layer, place), raw(own[:count // size]))
        begun = [i for i, (_, count) in enumerate(tokens) if count % size]
        rows[begun, [tokens[i][1] // size for i in begun]] = tails[
            [self.row_of[row + i] for i in begun]]

    def store(self, layer: int, row: int, tokens: Tokens, source: Tensor) -> None:
        """Stores the requests' new tokens, from rows with all that each has."""
        size, tails, rows = self.form.size, array(self._tails[layer]), array(source)
        for i, (first, end) in enumerate(tokens):
            low, high, place = first // size, end // size, self.row_of[row + i]
            if high > low:
                self.file.write(self._offset(layer, place, low), raw(source[i, low:high]))
            new = slice(max(first - high * size, 0), end - high * size)
            if new.stop:
                tails[place, :, :, new] = rows[i, high, :, :, new]

    def _offset(self, layer: int, row: int, block: int = 0) -> int:
        form = self.form
        return ((layer * self.count + row) * form.blocks + block) * (
            form.size * form.token_bytes)
