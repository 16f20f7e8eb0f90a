"""Attention over the KV cache, apart from the rest of a layer (as XProfiler times it).

Shapes: T tokens of an encode batch, n active queries, h heads, k KV heads, d head size. A layer's
cache is keys and values, each [slots, k, capacity, d]; what a step adds is there before attention
reads it (`xrunner.ops.rows.place`). A query may be of another type than the cache (float32 beside
bfloat16); what comes out is of the query's. The native operators (csrc/attention.cpp) serve where
they can, each query read as far as it is long; else torch, which pads and masks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from xrunner.ops import cuda_modules
from xrunner.ops.cuda import MAX_DIM, CudaOps, DistanceBias
from xrunner.ops.native import check, dtype_code, library, serves, threads
from xrunner.ops.rows import Places
from xrunner.rules.slots import Span

Cache = tuple[Tensor, Tensor]


class Distances(NamedTuple):
    """A score's bias by the key's position less the query's: table [h, width] float32, whose column
    `center` is of distance 0."""

    table: Tensor
    center: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeContext:
    """What every layer of one decode step shares: which slots, how much of each is read. Built once
    a step, so that nothing in a layer grows with the number of queries in Python."""

    slots: Tensor  # [n] int64, rising
    positions: Tensor  # [n] int64 of the token being decoded
    lengths: Tensor  # [n] int64 entries that a query reads, that token's too: positions + 1
    longest: int
    width: int  # slots below which all of `slots` lie
    _masks: dict[torch.dtype, Tensor] = field(default_factory=dict)

    @property
    def places(self) -> Places:
        """Where the tokens being decoded go."""
        return Places(self.slots, self.positions)

    def mask(self, dtype: torch.dtype) -> Tensor:
        """[width, 1, 1, longest] added to scores by torch: 0 within a query's length, -inf
        beyond."""
        if dtype not in self._masks:
            lengths = self.lengths.new_full((self.width,), self.longest)
            lengths[self.slots] = self.lengths
            beyond = torch.arange(self.longest, device=lengths.device) >= lengths[:, None]
            mask = torch.zeros(beyond.shape, dtype=dtype, device=lengths.device)
            self._masks[dtype] = mask.masked_fill_(beyond, float("-inf"))[:, None, None, :]
        return self._masks[dtype]


def decode_context(lengths: Sequence[int], slots: Sequence[int] | None = None,
                   device: torch.device | str = "cpu") -> DecodeContext:
    """`lengths`: entries that each query reads, the token's own too; `slots`: theirs, rising; None:
    0, 1, 2, ..."""
    where = range(len(lengths)) if slots is None else slots
    held = torch.tensor(lengths, device=device)
    return DecodeContext(slots=torch.tensor(where, device=device), positions=held - 1, lengths=held,
                         longest=max(lengths), width=where[-1] + 1)


def decode_attention(query: Tensor, cache: Cache, step: DecodeContext, scale: float | None = None,
                     bias: Distances | None = None) -> Tensor:
    """One token of each of n queries against its own entries, the last of which is its own.

    query [n, h, d], rows contiguous; `scale` None: 1 / sqrt(d). Returns [n, h * d].
    """
    keys, values = cache
    n, heads, dim = query.shape
    num_slots, kv_heads, capacity, _ = keys.shape
    if (gpu := _cuda("decode_attention", query, keys)) is not None:
        return gpu.decode_attention(
            query, cache, step.slots, step.lengths, dim ** -0.5 if scale is None else scale,
            None if bias is None else DistanceBias(*bias)).flatten(1)
    if not _is_native(query, keys):
        return _masked_decode(query, cache, step, scale, bias)
    out, lib = query.new_empty(n, heads * dim), library()
    assert lib is not None
    table, width, center = _addresses(bias)
    check(lib.xgpt_decode_attention(
        dtype_code(query), dtype_code(keys), out.data_ptr(), query.data_ptr(), query.stride(0),
        keys.data_ptr(), values.data_ptr(), step.slots.data_ptr(), step.lengths.data_ptr(), n,
        heads, kv_heads, dim, num_slots, capacity, dim ** -0.5 if scale is None else scale, table,
        width, center, threads()))
    return out


def _masked_decode(query: Tensor, cache: Cache, step: DecodeContext, scale: float | None,
                   bias: Distances | None) -> Tensor:
    """By torch. What lies between the slots is read along and dropped: gathering the rows would
    copy them all."""
    n, heads, dim = query.shape
    kv_heads = cache[0].shape[1]
    grouped = query.reshape(n, kv_heads, heads // kv_heads, dim)
    is_dense = step.width == n
    if not is_dense:
        spread = grouped.new_zeros(step.width, *grouped.shape[1:])
        spread[step.slots] = grouped
        grouped = spread
    mask = step.mask(query.dtype)
    if bias is not None:
        distances = torch.arange(step.longest, device=mask.device) - step.positions[:, None]
        own = bias.table[:, (distances + bias.center).clamp(max=bias.table.shape[1] - 1)]
        added = mask.new_zeros(step.width, heads, 1, step.longest)
        added[step.slots] = own.transpose(0, 1)[:, :, None, :].to(mask.dtype)
        mask = (mask + added).view(step.width, kv_heads, -1, step.longest)
    keys, values = (part[:step.width, :, :step.longest].to(query.dtype) for part in cache)
    out = scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale)
    return (out if is_dense else out[step.slots]).reshape(n, heads * dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeContext:
    """What every layer of one encode step shares: spans of inputs, packed one after the other."""

    spans: Sequence[Span]
    columns: Tensor  # [3, spans] int64: slot, first position, tokens of each
    places: Places  # of every token

    @property
    def ends(self) -> Tensor:
        """Rows of the last token of each input whose end is among the spans."""
        last = [place for place, span in enumerate(self.spans) if span.is_last]
        return (self.columns[2].cumsum(0) - 1)[last]

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
        return EncodeContext(spans=self.spans[first:last], columns=self.columns[:, first:last],
                             places=Places(*(part[rows] for part in self.places)))


def encode_context(spans: Sequence[Span], device: torch.device | str = "cpu") -> EncodeContext:
    """A span's tokens are those from `first` on of the query in its slot."""
    slots = chain.from_iterable([span.slot] * span.tokens for span in spans)
    positions = chain.from_iterable(range(s.first, s.first + s.tokens) for s in spans)
    columns = torch.tensor([[span.slot, span.first, span.tokens] for span in spans],
                           dtype=torch.long).view(-1, 3).t().contiguous()
    return EncodeContext(spans=spans, columns=columns.to(device), places=Places(*(
        torch.tensor(list(part), device=device, dtype=torch.long) for part in (slots, positions))))


def whole_inputs(lengths: Sequence[int], first_slot: int = 0) -> list[Span]:
    """Inputs of these lengths, in slots from `first_slot` on."""
    return [Span(first_slot + i, 0, length, True) for i, length in enumerate(lengths)]


def encode_attention(query: Tensor, cache: Cache, step: EncodeContext,
                     scale: float | None = None) -> Tensor:
    """Causal: a token attends to its query's entries up to its own. query [T, h, d], rows
    contiguous; `scale` None: 1 / sqrt(d). Returns [T, h * d]."""
    keys, values = cache
    tokens, heads, dim = query.shape
    num_slots, kv_heads, capacity, _ = keys.shape
    if (gpu := _cuda("encode_attention", query, keys)) is not None:
        return gpu.encode_attention(query, cache, step.spans,
                                    dim ** -0.5 if scale is None else scale).flatten(1)
    if not _is_native(query, keys):
        return _encode_by_span(query, cache, step, scale)
    out, lib = query.new_empty(tokens, heads * dim), library()
    assert lib is not None
    slots, first, lengths = step.columns
    check(lib.xgpt_encode_attention(
        dtype_code(query), dtype_code(keys), out.data_ptr(), query.data_ptr(), query.stride(0),
        keys.data_ptr(), values.data_ptr(), slots.data_ptr(), first.data_ptr(), lengths.data_ptr(),
        len(step.spans), heads, kv_heads, dim, num_slots, capacity,
        dim ** -0.5 if scale is None else scale, threads()))
    return out


def _encode_by_span(query: Tensor, cache: Cache, step: EncodeContext,
                    scale: float | None) -> Tensor:
    outs = []
    ends = list(accumulate(span.tokens for span in step.spans))
    for (slot, first, tokens, _), end in zip(step.spans, ends, strict=True):
        at = torch.arange(first + tokens, device=query.device)
        mask = None if first == 0 else at[None, :] <= at[first:, None]
        key, value = (part[slot, :, :first + tokens].to(query.dtype) for part in cache)
        outs.append(_attend_one(query[end - tokens:end], key, value, mask, scale,
                                is_causal=first == 0))
    return torch.cat(outs) if outs else query.flatten(1)


def packed_attention(joint: Tensor, heads: int, lengths: Sequence[int], scale: float | None = None,
                     bias: Distances | None = None) -> Tensor:
    """Every token of an input attends to all of that input (an encoder); inputs are packed.

    joint [T, 3 h d]: query, key, value of each token; `scale` None: 1 / sqrt(d). Returns
    [T, h * d].
    """
    tokens = len(joint)
    dim = joint.shape[1] // (3 * heads)
    query, key, value = joint.view(tokens, 3, heads, dim).unbind(1)
    if not _is_native(query, joint):
        return _packed_by_input(query, key, value, lengths, scale, bias)
    out, lib = query.new_empty(tokens, heads * dim), library()
    assert lib is not None
    table, width, center = _addresses(bias)
    counts = torch.tensor(lengths, dtype=torch.long)
    check(lib.xgpt_packed_attention(
        dtype_code(query), out.data_ptr(), query.data_ptr(), key.data_ptr(), value.data_ptr(),
        joint.stride(0), counts.data_ptr(), len(lengths), heads, dim,
        dim ** -0.5 if scale is None else scale, table, width, center, threads()))
    return out


def _packed_by_input(query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int],
                     scale: float | None, bias: Distances | None) -> Tensor:
    outs, heads = [], query.shape[1]
    for length, end in zip(lengths, accumulate(lengths), strict=True):
        here, mask = slice(end - length, end), None
        if bias is not None:
            at = torch.arange(length, device=query.device)
            mask = bias.table[:, at[None, :] - at[:, None] + bias.center].to(query.dtype).view(
                heads, 1, length, length)
        outs.append(_attend_one(query[here], key[here].transpose(0, 1),
                                value[here].transpose(0, 1), mask, scale))
    return torch.cat(outs) if outs else query.flatten(1)


def _attend_one(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
                scale: float | None, *, is_causal: bool = False) -> Tensor:
    """Tokens [t, h, d] of one query against keys and values [k, s, d], each of which serves h / k
    heads. Returns [t, h * d]."""
    tokens, heads, dim = query.shape
    kv_heads, context = key.shape[:2]
    group = (kv_heads, heads // kv_heads, context, dim)
    attended = scaled_dot_product_attention(
        query.reshape(tokens, kv_heads, -1, dim).permute(1, 2, 0, 3),
        key.unsqueeze(1).expand(group), value.unsqueeze(1).expand(group), attn_mask=mask,
        scale=scale, is_causal=is_causal)
    return attended.permute(2, 0, 1, 3).reshape(tokens, heads * dim)


def store_packed(key: Tensor, value: Tensor, cache: Cache, places: Places) -> None:
    """Keys and values [T, k, d] of packed inputs into the cache."""
    for part, new in zip(cache, (key, value), strict=True):
        part[places.slots, :, places.positions] = new.to(part.dtype)


def _is_native(query: Tensor, keys: Tensor) -> bool:
    return serves(query) and serves(keys) and _are_plain(query, keys)


def _cuda(operator: str, query: Tensor, keys: Tensor) -> CudaOps | None:
    """The CUDA operators, where this one serves such tensors."""
    gpu = cuda_modules.ops_for(operator, query)
    return (gpu if query.shape[2] <= MAX_DIM and keys.dtype == query.dtype
            and _are_plain(query, keys) else None)


def _are_plain(query: Tensor, keys: Tensor) -> bool:
    """Whether both lie as an operator reads them: the rows of the query may be apart."""
    return (keys.is_contiguous() and query.stride(2) == 1
            and query.stride(1) == query.shape[2])


def _addresses(bias: Distances | None) -> tuple[int | None, int, int]:
    if bias is None:
        return None, 0, 0
    assert bias.table.is_contiguous() and bias.table.dtype == torch.float32, f"{bias.table.dtype}"
    return bias.table.data_ptr(), bias.table.shape[1], bias.center
