"""What every layer of one step shares: whose tokens they are, how much of the KV cache each reads,
and where it lies. Built once a step, so that nothing in a layer grows with the number of queries in
Python.

A layer's cache is keys and values, each [blocks, k, size, d]. A slot's entries lie in blocks of
`size` tokens, which a table names; or, without a table, in one row: then a slot is a block, as
large as the longest query.
"""

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
# All layers': [layers, 2, blocks, k, size, d], or each one's keys and values, which saves a step
# from taking them apart.
Layers = Tensor | Sequence[Cache]


def layers_of(store: Tensor) -> list[Cache]:
    """store [layers, 2, blocks, k, size, d], taken apart."""
    return [(keys, values) for keys, values in store]


class DistanceBias(NamedTuple):
    """Added to a scaled score by the position of its key less its token's, which is 0 at `center`:
    `values` [h, width] float32. What is farther away than it reaches has its farthest's."""

    values: Tensor
    center: int


class Places(NamedTuple):
    """Where a step's tokens go in the cache: token t to slots[t], positions[t], each [T] int64; of
    entries that lie in blocks, a slot is a block, and a position that within it."""

    slots: Tensor
    positions: Tensor


class BlockTable(NamedTuple):
    """The blocks of each slot: `blocks` [slots, most] int64, those in use first; entry p of a slot
    is number p % size of its block p // size."""

    blocks: Tensor
    size: int

    def places(self, slots: Tensor, positions: Tensor) -> Places:
        """Where the entries at these positions of these slots lie."""
        return Places(self.blocks[slots, positions // self.size], positions % self.size)


def rows_of(cache: Cache, blocks: Tensor, count: int) -> list[Tensor]:
    """A copy of the first `count` keys and values of rows of `blocks` [n, most]: each [n, k, count,
    d]. For torch's attention, which reads rows; what lies beyond a query's length is anything."""
    size = cache[0].shape[2]
    if count <= size:
        return [part[:, :, :count][blocks[:, 0].clamp(min=0)] for part in cache]
    own = blocks[:, :-(-count // size)].clamp(min=0)
    return [part[own].transpose(1, 2).flatten(2, 3)[:, :, :count] for part in cache]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeContext:
    """Of one token of each of n queries: which slots, how much of each is read."""

    slots: Tensor  # [n] int64, rising
    blocks: Tensor  # [n, most] int64 that they have; without a table the slots
    positions: Tensor  # [n] int64 of the token being decoded
    places: Places  # where those tokens go
    lengths: Tensor  # [n] int64 entries that a query reads, that token's too: positions + 1
    longest: int
    width: int  # slots below which all of `slots` lie
    in_blocks: bool = False  # a table names them


def decode_context(lengths: Sequence[int], slots: Sequence[int] | None = None,
                   device: torch.device | str = "cpu",
                   table: BlockTable | None = None) -> DecodeContext:
    """`lengths`: entries that each query reads, the token's own too; `slots`: theirs, rising; None:
    0, 1, 2, ...; `table`: where their entries lie in blocks."""
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
    """Of spans of inputs, packed one after the other."""

    spans: Sequence[Span]
    first: Tensor  # [spans] int64 position of the first token of each
    tokens: Tensor  # [spans] int64
    starts: Tensor  # [spans] int64 rows before each
    longest: int  # entries that one token reads at most
    longest_span: int  # tokens
    blocks: Tensor  # [spans, most] int64 of each span's slot; without a table the slots
    positions: Tensor  # [T] int64 of every token
    places: Places  # of every token
    in_blocks: bool  # a table names them
    tails: Sequence[int] = ()  # of each span, rows at its end that are asked for; (): one of each

    @property
    def ends(self) -> Tensor:
        """Rows that predict what is asked for: the last token of each input whose end is among the
        spans, or as many of its last ones as `tails` says."""
        tails = self.tails or [1] * len(self.spans)
        behind = accumulate(span.tokens for span in self.spans)
        return on_device([row for span, end, tail in zip(self.spans, behind, tails, strict=True)
                          if span.is_last for row in range(end - tail, end)], self.positions.device)

    def pieces(self, most: int) -> Iterator[tuple[slice, EncodeContext]]:
        """The same in pieces of whole spans of at most `most` tokens, of evenly many; a span that
        is longer is a piece of its own. Each comes with its rows."""
        total = sum(span.tokens for span in self.spans)
        share = total / -(-total // most)  # all pieces as large, or the last would be a small one
        first = begin = end = 0
        for i, span in enumerate(self.spans):
            if end > begin and (end + span.tokens - begin > most or end - begin >= share):
                yield slice(begin, end), self.part(slice(first, i), slice(begin, end))
                first, begin = i, end
            end += span.tokens
        yield slice(begin, end), self.part(slice(first, len(self.spans)), slice(begin, end))

    def part(self, some: slice, rows: slice) -> EncodeContext:
        """Some of the spans, whose tokens these rows are."""
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
    """A span's tokens are those from `first` on of the query in its slot; `table`: where their
    entries lie in blocks; `tails`: see EncodeContext."""
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
    """Inputs of these lengths, in slots from `first_slot` on."""
    return [Span(first_slot + i, 0, length, True) for i, length in enumerate(lengths)]
