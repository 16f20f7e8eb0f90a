"""Where a group's keys and values lie: in one tier's memory, or in a file.

A request has a row of blocks [blocks, 2, k, size, d], the keys and values of each block one after
the other, so that what it has used is contiguous. Blocks are those of a file, or one for a request:
attention reads long stretches faster. In 4 bits a block is packed once it is full."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xgpt.core.placement import DEVICE, DISK, HOST, Placement, kv_block_tokens, sectors
from xgpt.core.system.direct_file import DirectFile
from xrunner.devices import CPU
from xrunner.engine.kv import KvShape
from xrunner.offload.arena import Arena, raw
from xrunner.offload.mover import Mover, copy
from xrunner.ops import four_bits
from xrunner.ops.contexts import BlockTable, Cache

# chosen: reads of a file at a time. 256 of 147 KB take 43 ms in place of 60; of 2 MB no less
_READS = 4
Tokens = Sequence[tuple[int, int]]  # of each request: the first, and one behind the last


class Tiers(NamedTuple):
    """A rank's tiers. `arenas`: by tier; the device's for the host of a CPU rank that has no such
    tier. `folder`: of files."""

    placement: Placement
    device: torch.device
    arenas: tuple[Arena, Arena, Arena]
    mover: Mover
    folder: Path

    @property
    def is_gpu(self) -> bool:
        """Whether the device's memory is not its host's."""
        return self.device.type != "cpu"

    def tensor(self, tier: int, shape: Sequence[int], dtype: torch.dtype, what: str) -> Tensor:
        """Zeros on the device or its host. Raises XgptError if the tier has too little left."""
        if 0 in shape:
            return torch.zeros(tuple(shape), dtype=dtype)
        device = self.device if tier == DEVICE else CPU
        made = self.arenas[tier].tensor(shape, dtype, what, device=device,
                                        pin=self.is_gpu and tier == HOST)
        return made if made.is_cpu else made.zero_()

    def free(self, tier: int, tensor: Tensor) -> None:
        """Gives back what `tensor` returned."""
        if tensor.numel():
            self.arenas[tier].free(tensor)


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

    def packed(self) -> "RowForm":
        """The form of the same blocks in 4 bits, each to the end of a sector."""
        num_bytes = sectors(four_bits.packed_bytes(self.block))
        return RowForm(self.blocks, 1, self.size, num_bytes // (2 * self.size), torch.uint8)

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


class KvPart:
    """Rows of one tier, in memory or in a file. `form`: as they lie there; `near`: where attention
    reads them. `rows`: [layers, count, blocks, 2, k, size, d] of `form`, in memory, zero at first,
    since a masked score still multiplies what lies there. `row_of`: by slot.

    Of a file only whole blocks are read and written, and only whole blocks are packed. A request's
    last block stays on the host until it is full. The file has no name, so that it goes however the
    process ends."""

    def __init__(self, near: RowForm, layers: int, count: int, tiers: Tiers, tier: int,
                 name: str) -> None:
        """Raises XgptError if a tier has too little left, or the folder refuses."""
        self.is_packed = tier != DEVICE and tiers.placement.kv_bits == 4
        self.near, self.form = near, near.packed() if self.is_packed else near
        self.count, self.num_bytes = count, layers * count * self.form.row_bytes
        self.row_of, self.file, in_memory = [*range(count)], None, layers
        what = f"the KV cache of {count} requests"
        if tier == DISK and count:
            tiers.arenas[DISK].take(sectors(self.num_bytes), what)
            self.file, in_memory = DirectFile(tiers.folder / name, self.num_bytes,
                                              is_scratch=True), 0
            self._readers = ThreadPoolExecutor(_READS)
        self.rows = tiers.tensor(tier, (in_memory, count, self.form.blocks, *self.form.block),
                                 self.form.dtype, what)
        tails = layers if self.is_packed or self.file is not None else 0
        self._tails = tiers.tensor(HOST, (tails, count, *near.block), near.dtype,
                                   f"the last blocks of {what}")

    def close(self, tiers: Tiers, tier: int) -> None:
        """Gives back the memory and the file."""
        tiers.free(tier, self.rows)
        tiers.free(HOST, self._tails)
        if self.file is not None:
            self._readers.shutdown()
            self.file.close()
            tiers.arenas[DISK].give_back(sectors(self.num_bytes))

    def whole_bytes(self, tokens: Tokens) -> int:
        """Bytes of the blocks that become whole with these tokens."""
        form = self.form
        return form.size * form.token_bytes * sum(
            end // form.size - first // form.size for first, end in tokens)

    def load(self, layer: int, row: int, tokens: Tokens, into: Tensor) -> None:
        """Reads the requests' tokens, all that each has, into rows of `form`. `row`: of the first
        request."""
        assert self.file is not None, f"{self.form = }"
        wanted = [(self._offset(layer, place), raw(own[:end // self.form.size]))
                  for own, place, (_, end) in zip(into, self.row_of[row:], tokens, strict=False)
                  if end >= self.form.size]
        for _ in self._readers.map(self.file.read, *zip(*wanted, strict=True)) if wanted else ():
            pass  # an error is raised here
        if not self.is_packed:
            self._add_tails(layer, row, tokens, into)

    def store(self, layer: int, row: int, tokens: Tokens, source: Tensor) -> None:
        """Writes the requests' new tokens from rows of `form` with all that each has."""
        assert self.file is not None, f"{self.form = }"
        for own, place, (first, end) in zip(source, self.row_of[row:], tokens, strict=False):
            low, high = first // self.form.size, end // self.form.size
            if high > low:
                self.file.write(self._offset(layer, place, low), raw(own[low:high]))
        if not self.is_packed:
            self._keep_tails(layer, row, tokens, source)

    def up(self, layer: int, row: int, tokens: Tokens, lower: Tensor, rows: Tensor) -> None:
        """Copies the requests' tokens, all that each has, from rows of `form` to rows of `near`."""
        if not self.is_packed:
            copy_entries(rows, lower, tokens)
            return
        num_bytes = four_bits.packed_bytes(self.near.block)
        for own, into, (_, end) in zip(lower, rows, tokens, strict=True):
            for packed, block in zip(own[:end // self.form.size], into, strict=False):
                four_bits.unpack(packed.view(-1)[:num_bytes].to(block.device), block)
        self._add_tails(layer, row, tokens, rows)

    def down(self, layer: int, row: int, tokens: Tokens, lower: Tensor, rows: Tensor) -> None:
        """Copies the requests' new tokens from rows of `near` to rows of `form`."""
        if not self.is_packed:
            copy_entries(lower, rows, tokens)
            return
        num_bytes = four_bits.packed_bytes(self.near.block)
        for into, own, (first, end) in zip(lower, rows, tokens, strict=True):
            for block in range(first // self.form.size, end // self.form.size):
                into[block].view(-1)[:num_bytes] = four_bits.pack(own[block]).to(into.device)
        self._keep_tails(layer, row, tokens, rows)

    def _add_tails(self, layer: int, row: int, tokens: Tokens, into: Tensor) -> None:
        for own, place, (_, end) in zip(into, self.row_of[row:], tokens, strict=False):
            if end % self.near.size:
                copy(own[end // self.near.size], self._tails[layer, place])

    def _keep_tails(self, layer: int, row: int, tokens: Tokens, source: Tensor) -> None:
        size = self.near.size
        for own, place, (first, end) in zip(source, self.row_of[row:], tokens, strict=False):
            if end % size:
                new = slice(max(first - end // size * size, 0), end % size)
                copy(self._tails[layer, place, :, :, new], own[end // size, :, :, new])

    def _offset(self, layer: int, row: int, block: int = 0) -> int:
        form = self.form
        return ((layer * self.count + row) * form.blocks + block) * form.size * form.token_bytes
