"""Data of a step that all layers share: its tokens, and which KV each reads.

Built once per step, so that no layer's Python work grows with the number of requests. A layer's
cache is keys and values, each [blocks, k, size, d]. A slot's KV lies in blocks of `size` tokens
that a table names. Without a table it lies in one row: a slot is then a block that holds the
longest request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import NamedTuple

import torch
from torch import Tensor

from xrunner.devices import on_device
from xrunner.rules.slots import Span

Cache = tuple[Tensor, Tensor]
# all layers: [layers, 2, blocks, k, size, d], or keys and values of each, taken apart beforehand
Layers = Tensor | Sequence[Cache]


def layers_of(store: Tensor) -> list[Cache]:
    """Keys and values of each layer, from store [layers, 2, blocks, k, size, d]."""
    return [(keys, values) for keys, values in store]


class DistanceBias(NamedTuple):
    """Bias of scaled scores by distance: key position - token position, 0 at column `center`.
    `values`: [h, width] float32. Distances beyond the last column get its value."""

    values: Tensor
    center: int


class Places(NamedTuple):
    """Where a step's tokens go in the cache: token t to slots[t], positions[t], each [T] int64.
    With a block table these are a block and a position within it."""

    slots: Tensor
    positions: Tensor


class BlockTable(NamedTuple):
    """Blocks of each slot, [slots, most] int64, those in use first. Token p of a slot is number p %
    size of its block p // size."""

    blocks: Tensor
    size: int

    def places(self, slots: Tensor, positions: Tensor) -> Places:
        """Where the tokens at these positions of these slots go: their blocks, and positions within
        these."""
        return Places(self.blocks[slots, positions // self.size], positions % self.size)


def rows_of(cache: Cache, blocks: Tensor, count: int) -> list[Tensor]:
    """Copies of the first `count` keys and values in rows of `blocks` [n, most]: each [n, k, count,
    d]. For torch's attention, which reads rows. Values beyond a request's length are arbitrary."""
    size = cache[0].shape[2]
    if count <= size:
        return [part[:, :, :count][blocks[:, 0].clamp(min=0)] for part in cache]
    own = blocks[:, :-(-count // size)].clamp(min=0)
    return [part[own].transpose(1, 2).flatten(2, 3)[:, :, :count] for part in cache]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeContext:
    """Context of a decode step: one token of each of n requests."""

    slots: Tensor  # [n] int64, rising
    blocks: Tensor  # [n, most] int64 blocks of each; without a table the slots
    positions: Tensor  # [n] int64 of the token being decoded
    places: Places  # where those tokens go
    lengths: Tensor  # [n] int64 tokens that each reads, its own included: positions + 1
    longest: int
    width: int  # 1 + the last of `slots`
    in_blocks: bool = False  # whether a table names the blocks


def decode_context(lengths: Sequence[int], slots: Sequence[int] | None = None,
                   device: torch.device | str = "cpu",
                   table: BlockTable | None = None) -> DecodeContext:
    """Context of a decode step. `lengths`: tokens that each request reads, its own included.
    `slots`: rising (None: 0, 1, 2, ...). `table`: of the blocks (None: rows)."""
    where = range(len(lengths)) if slots is None else slots
    held, own = on_device([[*lengths], [*where]], torch.device(device))
    positions = held - 1
    if table is None:
        blocks, places = own[:, None], Places(own, positions)
    else:
        blocks = table.blocks[:len(held)] if slots is None else table.blocks[own]
        places = table.places(own, positions)
    return DecodeContext(slots=own, blocks=blocks, positions=positions, places=places, lengths=held,
                         longest=max(lengths), width=where[-1] + 1, in_blocks=table is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeContext:
    """Context of an encode (prefill) `step`: spans of inputs, packed one after the other."""

    spans: Sequence[Span]
    first: Tensor  # [spans] int64 position of each span's first token
    tokens: Tensor  # [spans] int64
    starts: Tensor  # [spans] int64 rows before each
    longest: int  # most tokens that one token reads
    longest_span: int  # tokens
    blocks: Tensor  # [spans, most] int64 blocks of each span's slot; without a table the slots
    positions: Tensor  # [T] int64 of every token
    places: Places  # of every token
    in_blocks: bool  # whether a table names the blocks
    tails: Sequence[int] = ()  # rows asked for at each span's end; (): one each

    @property
    def ends(self) -> Tensor:
        """Rows that predict what is asked for, of inputs whose end is among the spans. The last row
        of each, or as many as `tails` says."""
        tails = self.tails or [1] * len(self.spans)
        behind = accumulate(span.tokens for span in self.spans)
        return on_device([row for span, end, tail in zip(self.spans, behind, tails, strict=True)
                          if span.is_last for row in range(end - tail, end)], self.positions.device)

    def pieces(self, most: int) -> Iterator[tuple[slice, EncodeContext]]:
        """Yields (rows, context) of pieces of whole spans, of at most `most` tokens and evenly
        large. A longer span is a piece of its own."""
        total = sum(span.tokens for span in self.spans)
        share = total / -(-total // most)  # all pieces equally large, or the last would be small
        first = begin = end = 0
        for i, span in enumerate(self.spans):
            if end > begin and (end + span.tokens - begin > most or end - begin >= share):
                yield slice(begin, end), self.part(slice(first, i), slice(begin, end))
                first, begin = i, end
            end += span.tokens
        yield slice(begin, end), self.part(slice(first, len(self.spans)), slice(begin, end))

    def part(self, some: slice, rows: slice) -> EncodeContext:
        """Context of some of the spans, whose tokens are these rows."""
        return EncodeContext(
            spans=self.spans[some], first=self.first[some], tokens=self.tokens[some],
            starts=self.starts[some] - rows.start, **_longest(self.spans[some]),
            blocks=self.blocks[some], positions=self.positions[rows],
            places=Places(*(part[rows] for part in self.places)), in_blocks=self.in_blocks,
            tails=self.tails[some])


def _longest(spans: Sequence[Span]) -> dict[str, int]:
    return {"longest": max((span.first + span.tokens for span in spans), default=0),
            "longest_span": max((span.tokens for span in spans), default=0)}


def encode_context(spans: Sequence[Span], device: torch.device | str = "cpu",
                   table: BlockTable | None = None, tails: Sequence[int] = ()) -> EncodeContext:
    """Context of an encode step. `table`: of the blocks (None: rows); `tails`: see
    EncodeContext."""
    slots = chain.from_iterable([span.slot] * span.tokens for span in spans)
    positions = chain.from_iterable(range(s.first, s.first + s.tokens) for s in spans)
    before = accumulate((span.tokens for span in spans), initial=0)
    on, ends = torch.device(device), list(before)[:len(spans)]
    slot_of, *columns = on_device([[s.slot for s in spans], [s.first for s in spans],
                                   [s.tokens for s in spans], ends], on)
    own, at = on_device([[*slots], [*positions]], on)
    return EncodeContext(
        spans=spans, first=columns[0], tokens=columns[1], starts=columns[2], **_longest(spans),
        positions=at, in_blocks=table is not None, tails=tails,
        blocks=slot_of[:, None] if table is None else table.blocks[slot_of],
        places=Places(own, at) if table is None else table.places(own, at))


def whole_inputs(lengths: Sequence[int], first_slot: int = 0) -> list[Span]:
    """Spans of whole inputs of these lengths, in slots from `first_slot` on."""
    return [Span(first_slot + i, 0, length, True) for i, length in enumerate(lengths)]
