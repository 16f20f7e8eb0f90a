"""The KV cache of one group whose requests' entries lie on tiers (xgpt.core.placement).

Slots have a tier for the whole run: the first of the most slots lie on the device, the last on
disk. A step is cut into pieces, device batches on one tier. A layer computes a piece over a cache
that is lent to it, in place or in one of two buffers. While it computes in one, the entries of the
next piece come into the other (FlexGen, arXiv:2303.06865, algorithm 1)."""

import os
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from xgpt.core.placement import DEVICE, DISK, HOST, queries_by_tier
from xrunner.devices import CPU
from xrunner.engine.kv import KvCache, KvShape
from xrunner.offload import kv_parts
from xrunner.offload.kv_parts import KvPart, Tiers, Tokens
from xrunner.offload.mover import Ticket
from xrunner.ops import contexts
from xrunner.rules.slots import Span, compaction_moves


class Piece(NamedTuple):
    """Rows of one device batch in one step, whose entries lie on one tier.

    `rows`: of the step's input. `slots`: of the group. `device`: where its cache is lent. One of
    `decoded` and `encoded` is set, with tensors on `device`. Its places and blocks are the lent
    cache's, the same for every layer. `tokens`: cached before and after the step. `is_staged`:
    whether entries are copied to the device."""

    rows: slice
    slots: range
    tier: int
    device: torch.device
    decoded: contexts.DecodeContext | None
    encoded: contexts.EncodeContext | None
    tokens: Tokens
    is_staged: bool


class _Buffer:
    """Memory of a piece at a time, on the host, where a file is read, and on the device. `last`:
    the copy that ends its use so far."""

    def __init__(self, host: Tensor, device: Tensor) -> None:
        self.host, self.device, self.is_lent = host, device, False
        self.last: Ticket | None = None


class _Lent(NamedTuple):
    """Entries of a piece, brought for one layer. `lower`: rows on the piece's tier, or read from
    it. `rows`: those attended over. `before`: copies that end first."""

    lower: Tensor
    rows: Tensor
    buffer: _Buffer | None
    before: list[Ticket]


class PlacedCache(KvCache):
    """Keys and values of one group's requests, by tier: in rows, without prefixes. What KvCache
    itself has holds no layers: it counts slots and tokens."""

    def __init__(self, shape: KvShape, tiers: Tiers, name: str) -> None:
        """`name`: of the file, if any. Raises XgptError if a tier has too little left."""
        super().__init__(shape._replace(num_layers=0))
        self._tiers, self._num_layers = tiers, shape.num_layers
        self._ranges = queries_by_tier(shape.slots, tiers.placement.kv)
        self.buffers: list[_Buffer] = []  # two, which all groups share
        self._earlier: list[Ticket] = []  # copies of earlier steps that may be under way
        self._lent: dict[tuple[int, int], _Lent] = {}  # by layer and first slot
        by_blocks = tiers.placement.kv_bits == 4 or (
            tiers.is_gpu and not tiers.placement.host_attention)
        self.parts = [kv_parts.KvPart(
            kv_parts.row_form(shape, in_blocks=tier == DISK or (tier == HOST and by_blocks)),
            shape.num_layers, len(own), tiers, tier, name) for tier, own in enumerate(self._ranges)]

    @property
    def num_bytes(self) -> int:
        """Bytes set aside on all tiers."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def peak_bytes(self) -> int:
        """Most bytes of it that requests had at a time, if all had the mean."""
        return self.num_bytes * self.pool.most_taken // max(self.pool.count, 1)

    def free(self, removed: Sequence[int]) -> int:
        """Removes slots and closes the gaps, from tier to tier too; returns the number of rows
        moved."""
        self._earlier = [own.last for own in self.buffers if own.last is not None]
        for ticket in self._earlier if removed else ():
            self._tiers.mover.wait(ticket)
        for source, target in compaction_moves(len(self.lengths), removed):
            self._move(source, target, self.lengths[source])
        return super().free(removed)

    def pieces(self, spans: Sequence[Span] = (), tails: Sequence[int] = ()) -> list[Piece]:
        """Pieces of a step that encodes whole inputs, in consecutive slots; without any, of one
        that decodes a token of every request. `grow` counts the tokens after them. `tails`: see
        EncodeContext."""
        self._earlier = [own.last for own in self.buffers if own.last is not None]
        placement, made, start = self._tiers.placement, list[Piece](), 0
        counts = [1] * len(self.lengths)
        if spans:
            start, counts = spans[0].slot, [span.tokens for span in spans]
        assert all((span.slot, span.first, span.is_last) == (slot, 0, True)
                   for slot, span in enumerate(spans, start)), f"{spans = }"
        ends, most = [*accumulate(counts, initial=0)], placement.device_batch
        for tier, own in enumerate(self._ranges):
            is_below = tier != DEVICE and not spans and placement.host_attention
            device, stop = CPU if is_below else self._tiers.device, start + len(counts)
            is_staged = self.parts[tier].is_packed or (not is_below and (
                tier == HOST or (tier == DISK and self._tiers.is_gpu)))
            for first in range(max(own.start, start), min(own.stop, stop), most):
                slots = range(first, min(first + most, own.stop, stop))
                low, high = first - start, slots.stop - start
                tokens = [(self.lengths[slot], self.lengths[slot] + count)
                          for slot, count in zip(slots, counts[low:high], strict=True)]
                table = self.parts[tier].near.table(len(slots), device)
                decoded = encoded = None
                if spans:
                    encoded = contexts.encode_context(
                        [span._replace(slot=place) for place, span in enumerate(spans[low:high])],
                        device, table, tails[low:high])
                else:
                    decoded = contexts.decode_context([end for _, end in tokens], None, device,
                                                      table)
                made.append(Piece(slice(ends[low], ends[high]), slots, tier, device, decoded,
                                  encoded, tokens, is_staged))
        return made

    def ahead(self, layer: int, piece: Piece) -> None:
        """Begins to bring the piece's entries of a layer. No more than two pieces are between this
        and `put`. Raises the error of an earlier copy."""
        part, row, count = *self._at(piece), len(piece.slots)
        known, submit = [(0, first) for first, _ in piece.tokens], self._tiers.mover.submit
        has_entries, buffer = any(first for _, first in known), None
        before = [] if piece.tier == DEVICE else [*self._earlier]
        if piece.is_staged or part.file is not None:
            idle = [own for own in self.buffers if not own.is_lent]
            assert idle, f"{piece.slots = }: a third piece at a time"
            buffer = min(idle, key=lambda own: own.last is not None and not own.last.done.is_set())
            buffer.is_lent = True
            before += [] if buffer.last is None else [buffer.last]
        if part.file is None:
            lower = rows = part.rows[layer, row:row + count]
        else:
            assert buffer is not None
            lower = rows = part.form.view(buffer.host, count)
            if has_entries:
                before = [submit("read", part.whole_bytes(known),
                                 partial(part.load, layer, row, known, lower), before)]
        if piece.is_staged:
            assert buffer is not None
            rows = part.near.view(buffer.device, count)
            if has_entries:
                before = [submit("up", sum(first for _, first in known) * part.form.token_bytes,
                                 partial(part.up, layer, row, known, lower, rows), before)]
        self._lent[layer, piece.slots.start] = _Lent(lower, rows, buffer, before)

    def lend(self, layer: int, piece: Piece) -> contexts.Cache:
        """Keys and values [blocks, k, size, d] on the piece's device, once they are there. The
        layer writes the step's own to the piece's places, and attends. Raises a copy's error."""
        key = layer, piece.slots.start
        if key not in self._lent:
            self.ahead(layer, piece)
        for ticket in self._lent[key].before:
            self._tiers.mover.wait(ticket)
        return kv_parts.cache_of(self._lent[key].rows)

    def put(self, layer: int, piece: Piece) -> None:
        """Stores what the layer wrote, and ends the loan. Raises the error of an earlier copy."""
        part, row = self._at(piece)
        lent, submit = self._lent.pop((layer, piece.slots.start)), self._tiers.mover.submit
        if lent.buffer is None:
            return
        after = list[Ticket]()
        if piece.is_staged:
            count = sum(end - first for first, end in piece.tokens)
            after = [submit("down", count * part.form.token_bytes, partial(
                part.down, layer, row, piece.tokens, lent.lower, lent.rows))]
        if part.file is not None:
            after = [submit("write", part.whole_bytes(piece.tokens),
                            partial(part.store, layer, row, piece.tokens, lent.lower), after)]
        lent.buffer.last, lent.buffer.is_lent = after[0], False

    def close(self) -> None:
        """Gives back the memory and the file; no copies may be under way."""
        for tier, part in enumerate(self.parts):
            part.close(self._tiers, tier)
        for buffer in self.buffers:
            if not buffer.is_lent:  # no other group has given it back
                buffer.is_lent = True
                self._tiers.free(DEVICE, buffer.device)
                if buffer.host is not buffer.device:
                    self._tiers.free(HOST, buffer.host)

    def _at(self, piece: Piece) -> tuple[KvPart, int]:
        """The part and the row of the piece's first slot."""
        return self.parts[piece.tier], piece.slots.start - self._ranges[piece.tier].start

    def _move(self, source: int, target: int, length: int) -> None:
        """Moves a request's entries to another slot, while nothing else is under way."""
        of = [next(tier for tier, own in enumerate(self._ranges) if slot in own)
              for slot in (source, target)]
        one, other = (Piece(slice(0), range(slot, slot + 1), tier, CPU, None, None, tokens,
                            self.parts[tier].is_packed)
                      for slot, tier, tokens in ((source, of[0], [(length, length)]),
                                                 (target, of[1], [(0, length)])))
        part, row, (_, place) = *self._at(one), self._at(other)
        if of[0] == of[1] and part.file is not None:  # no byte moves
            part.row_of[row], part.row_of[place] = part.row_of[place], part.row_of[row]
            return
        for layer in range(self._num_layers if length else 0):
            self.lend(layer, one)
            self.lend(layer, other)
            kv_parts.recut(self._lent[layer, source].rows[0], self._lent[layer, target].rows[0],
                           length)
            self.put(layer, one)
            self.put(layer, other)


def placed_caches(count: int, shape: KvShape, tiers: Tiers) -> list[PlacedCache]:
    """Caches of `count` groups. `shape`: of a group's most slots, in rows. Raises XgptError if a
    tier has too little left, or the folder of the files refuses."""
    caches = [PlacedCache(shape, tiers, f"kv-{os.getpid()}-{group}") for group in range(count)]
    rows = [min(part.count, tiers.placement.device_batch) for part in caches[0].parts]
    near = max(part.near.row_bytes * most for part, most in zip(
        caches[0].parts[HOST:], rows[HOST:], strict=True))
    in_file, what = caches[0].parts[DISK].form.row_bytes * rows[DISK], "a buffer of keys and values"
    for _ in range(2):
        host = device = tiers.tensor(DEVICE, (near,), torch.uint8, what)
        if tiers.is_gpu or tiers.placement.kv_bits == 4:
            host = tiers.tensor(HOST, (in_file,), torch.uint8, what)
        buffer = _Buffer(host, device)
        for cache in caches:
            cache.buffers.append(buffer)
    return caches
