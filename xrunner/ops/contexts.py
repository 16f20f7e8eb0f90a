"""What every layer of one step shares: whose tokens they are, how much of the KV cache each reads,
and where it lies. Built once a step, so that nothing in a layer grows with the number of queries in
Python.

A layer's cache is keys and values, each [blocks, k, size, d]. A slot's entries lie in blocks of
`size` tokens, which a table names; or, without a table, in one row: then a slot is a block, as
large as the longest query.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
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
    in_blocks: bool  # a table names them
    _masks: dict[torch.dtype, Tensor] = field(default_factory=dict)

    def mask(self, dtype: torch.dtype) -> Tensor:
        """[width, 1, 1, longest] added to scores by torch: 0 within a query's length, -inf beyond;
        of entries that lie in blocks [n, 1, 1, longest]."""
        if dtype not in self._masks:
            lengths = self.lengths
            if not self.in_blocks:
                lengths = self.lengths.new_full((self.width,), self.longest)
                lengths[self.slots] = self.lengths
            beyond = torch.arange(self.longest, device=lengths.device) >= lengths[:, None]
            mask = torch.zeros(beyond.shape, dtype=dtype, device=lengths.device)
            self._masks[dtype] = mask.masked_fill_(beyond, float("-inf"))[:, None, None, :]
        return self._masks[dtype]


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


class SpanGroup(NamedTuple):
    """Spans that one launch takes: what it reads of them, views of the context's columns."""

    num_spans: int
    longest_span: int  # tokens
    blocks: Tensor  # [num_spans, most] int64
    first: Tensor  # [num_spans] int64, as the next two
    tokens: Tensor
    starts: Tensor


class SpanGroups(NamedTuple):
    """All of a step's spans in groups. `tokens` of all of them; `longest`: entries that a token
    reads at most; `are_sound`: each has tokens, and begins at none before the first."""

    groups: tuple[SpanGroup, ...]
    tokens: int
    longest: int
    are_sound: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeContext:
    """Of spans of inputs, packed one after the other."""

    spans: Sequence[Span]
    columns: Tensor  # [4, spans] int64: slot, first position, tokens of each; rows before it
    blocks: Tensor  # [spans, most] int64 of each span's slot; without a table the slots
    positions: Tensor  # [T] int64 of every token
    places: Places  # of every token
    in_blocks: bool  # a table names them
    tails: Sequence[int] = ()  # of each span, rows at its end that are asked for; (): one of each
    _groups: dict[int, SpanGroups] = field(default_factory=dict)

    def groups(self, most: int) -> SpanGroups:
        """The spans in groups of at most `most`: found once for all layers."""
        if most not in self._groups:
            self._groups[most] = SpanGroups(
                tuple(self._group(slice(at, at + most)) for at in range(0, len(self.spans), most)),
                sum(span.tokens for span in self.spans), self.longest,
                all(span.tokens >= 1 and span.first >= 0 for span in self.spans))
        return self._groups[most]

    def _group(self, here: slice) -> SpanGroup:
        spans = self.spans[here]
        _, first, tokens, starts = self.columns[:, here]
        return SpanGroup(len(spans), max(span.tokens for span in spans), self.blocks[here], first,
                         tokens, starts)

    @property
    def longest(self) -> int:
        """Entries that one token reads at most."""
        return max((span.first + span.tokens for span in self.spans), default=0)

    @property
    def ends(self) -> Tensor:
        """Rows that predict what is asked for: the last token of each input whose end is among the
        spans, or as many of its last ones as `tails` says."""
        tails = self.tails or [1] * len(self.spans)
        behind = accumulate(span.tokens for span in self.spans)
        return on_device([row for span, end, tail in zip(self.spans, behind, tails, strict=True)
                          if span.is_last for row in range(end - tail, end)], self.columns.device)

    def pieces(self, most: int) -> Iterator[tuple[slice, EncodeContext]]:
        """The same in pieces of whole spans of at most `most` tokens, of evenly many; a span that
        is longer is a piece of its own. Each comes with its rows."""
        total = sum(span.tokens for span in self.spans)
        share = total / -(-total // most)  # all pieces as large, or the last would be a small one
        first = begin = end = 0
        for i, span in enumerate(self.spans):
            if end > begin and (end + span.tokens - begin > most or end - begin >= share):
                yield slice(begin, end), self._part(first, i, slice(begin, end))
                first, begin = i, end
            end += span.tokens
        yield slice(begin, end), self._part(first, len(self.spans), slice(begin, end))

    def _part(self, first: int, last: int, rows: slice) -> EncodeContext:
        columns = self.columns[:, first:last].clone()
        columns[3] -= rows.start
        return EncodeContext(
            spans=self.spans[first:last], columns=columns,
            blocks=self.blocks[first:last], positions=self.positions[rows],
            places=Places(*(part[rows] for part in self.places)), in_blocks=self.in_blocks,
            tails=self.tails[first:last])


def encode_context(spans: Sequence[Span], device: torch.device | str = "cpu",
                   table: BlockTable | None = None, tails: Sequence[int] = ()) -> EncodeContext:
    """A span's tokens are those from `first` on of the query in its slot; `table`: where their
    entries lie in blocks; `tails`: see EncodeContext."""
    slots = chain.from_iterable([span.slot] * span.tokens for span in spans)
    positions = chain.from_iterable(range(s.first, s.first + s.tokens) for s in spans)
    before = accumulate((span.tokens for span in spans), initial=0)
    on, ends = torch.device(device), list(before)[:len(spans)]
    columns = on_device([[s.slot for s in spans], [s.first for s in spans],
                         [s.tokens for s in spans], ends], on)
    own, at = on_device([[*slots], [*positions]], on)
    return EncodeContext(
        spans=spans, columns=columns, positions=at, in_blocks=table is not None, tails=tails,
        blocks=columns[0][:, None] if table is None else table.blocks[columns[0]],
        places=Places(own, at) if table is None else table.places(own, at))


def whole_inputs(lengths: Sequence[int], first_slot: int = 0) -> list[Span]:
    """Inputs of these lengths, in slots from `first_slot` on."""
    return [Span(first_slot + i, 0, length, True) for i, length in enumerate(lengths)]
