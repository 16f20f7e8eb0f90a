"""Attention over the KV cache, apart from the rest of a layer (as XProfiler times it).

Shapes: T tokens of an encode batch, n active queries, h heads, k KV heads, g = h / k, d head size.
Grouped heads are kept as a [k, g] pair, so that keys and values are never repeated in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from xrunner.rules.slots import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeContext:
    """What every layer of one decode step shares: where to write, and what to read.

    Built once a step, so that nothing in a layer grows with the number of queries in Python.
    Where queries between these rest, all slots below `width` are read, and the mask has rows for
    all of them; None: n slots.
    """

    rows: Tensor  # [n] slot of each query: 0..n-1 where none rests
    positions: Tensor  # [n] index of the token being decoded
    # added to the scores, [n, 1, 1, max_context] or, with a bias by head, [n, k, g, max_context]:
    # 0 (the bias) where present, -inf beyond a query's context
    mask: Tensor
    max_context: int
    width: int | None = None


def decode_context(contexts: Tensor, dtype: torch.dtype) -> DecodeContext:
    """`contexts` [n]: tokens already cached for each query, the one being decoded excluded."""
    longest = int(contexts.max()) + 1
    return DecodeContext(rows=torch.arange(len(contexts), device=contexts.device),
                         positions=contexts, mask=_mask(contexts + 1, longest, dtype),
                         max_context=longest)


def _mask(lengths: Tensor, longest: int, dtype: torch.dtype) -> Tensor:
    """[n, 1, 1, longest], added to scores: 0 within each of the `lengths` [n], -inf beyond it."""
    beyond = torch.arange(longest, device=lengths.device)[None, :] >= lengths[:, None]
    mask = torch.zeros(beyond.shape, dtype=dtype, device=lengths.device)
    return mask.masked_fill_(beyond, float("-inf"))[:, None, None, :]


def decode_context_of(slots: Sequence[int], contexts: Sequence[int], dtype: torch.dtype,
                      device: torch.device) -> DecodeContext:
    """The same of the queries in `slots` alone, in rising order; contexts by slot, of all. What
    lies between them is read along, and dropped: gathering the rows would copy them all."""
    width = slots[-1] + 1
    rows = torch.tensor(slots, device=device)
    whole = decode_context(torch.tensor(contexts[:width], device=device), dtype)
    if width == len(slots):
        return whole
    positions = whole.positions[rows]
    longest = int(positions.max()) + 1
    return replace(whole, rows=rows, positions=positions, max_context=longest, width=width,
                   mask=whole.mask[..., :longest])


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossContext:
    """What every layer of one decode step shares of the encoded inputs it looks at."""

    mask: Tensor  # [n, 1, 1, longest] additive: 0 within a query's input, -inf beyond it
    longest: int


def cross_context(lengths: Tensor, dtype: torch.dtype) -> CrossContext:
    """`lengths` [n]: encoded input tokens of each query, in order of their slots."""
    longest = int(lengths.max())
    return CrossContext(mask=_mask(lengths, longest, dtype), longest=longest)


def attend_decode(query: Tensor, key: Tensor, value: Tensor, cache_key: Tensor,
                  cache_value: Tensor, step: DecodeContext, scale: float | None = None) -> Tensor:
    """One new token of each of n queries against its own cache.

    query [n, h, d]; key, value [n, k, d]; cache_* [slots, k, capacity, d], written in place.
    `scale` None: 1 / sqrt(d). Returns [n, h * d].
    """
    n, heads, dim = query.shape
    kv_heads = key.shape[1]
    cache_key[step.rows, :, step.positions] = key
    cache_value[step.rows, :, step.positions] = value
    grouped = query.view(n, kv_heads, heads // kv_heads, dim)
    width = n if step.width is None else step.width
    if width > n:
        spread = grouped.new_zeros(width, *grouped.shape[1:])
        spread[step.rows] = grouped
        grouped = spread
    out = scaled_dot_product_attention(
        grouped, cache_key[:width, :, :step.max_context], cache_value[:width, :, :step.max_context],
        attn_mask=step.mask, scale=scale,
    )
    if width > n:
        out = out[step.rows]
    return out.reshape(n, heads * dim)


def attend_encode(query: Tensor, key: Tensor, value: Tensor, cache_key: Tensor,
                  cache_value: Tensor, first_slot: int, lengths: Sequence[int]) -> Tensor:
    """Causal attention of whole inputs, packed one after the other (no padding is computed).

    query [T, h, d]; key, value [T, k, d]; query i of `lengths` goes to slot first_slot + i of
    cache_* [slots, k, capacity, d]. Returns [T, h * d].
    """
    out = torch.empty_like(query)
    start = 0
    for i, length in enumerate(lengths):
        end = start + length
        k, v = key[start:end].transpose(0, 1), value[start:end].transpose(0, 1)  # [k, L, d]
        cache_key[first_slot + i, :, :length] = k
        cache_value[first_slot + i, :, :length] = v
        out[start:end] = _attend_packed(query[start:end], k, v, is_causal=True)
        start = end
    assert start == len(query), f"{start = } {len(query) = }"
    return out.flatten(1)


def attend_spans(query: Tensor, key: Tensor, value: Tensor, cache_key: Tensor,
                 cache_value: Tensor, spans: Sequence[Span]) -> Tensor:
    """Causal attention of whole inputs or spans of them, packed; a span attends to the entries its
    query has so far, too. Shapes as of attend_encode. Returns [T, h * d]."""
    outs, start = [], 0
    for slot, first, tokens, _ in spans:
        here = slice(start, start + tokens)
        start += tokens
        if first == 0:
            outs.append(attend_encode(query[here], key[here], value[here], cache_key, cache_value,
                                      slot, [tokens]))
        else:
            outs.append(_attend_on(query[here], key[here], value[here], cache_key[slot],
                                   cache_value[slot], first))
    assert start == len(query), f"{start = } {len(query) = }"
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def _attend_on(query: Tensor, key: Tensor, value: Tensor, row_key: Tensor, row_value: Tensor,
               first: int) -> Tensor:
    """Tokens from `first` on of one query; row_* [k, capacity, d] of its slot."""
    end = first + len(query)
    row_key[:, first:end] = key.transpose(0, 1)
    row_value[:, first:end] = value.transpose(0, 1)
    at = torch.arange(end, device=query.device)
    return _attend_packed(query, row_key[:, :end], row_value[:, :end],
                          attn_mask=at[None, :] <= at[first:, None]).flatten(1)


def _attend_packed(query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Tensor:
    """Tokens [t, h, d] of one query against its keys and values [k, s, d], each of which serves
    g heads. `how`: what else torch's attention takes. Returns [t, h, d]."""
    tokens, heads, dim = query.shape
    kv_heads, context = key.shape[:2]
    group = (kv_heads, heads // kv_heads, context, dim)
    attended = scaled_dot_product_attention(
        query.view(tokens, kv_heads, -1, dim).permute(1, 2, 0, 3),
        key.unsqueeze(1).expand(group), value.unsqueeze(1).expand(group), **how)
    return attended.permute(2, 0, 1, 3).reshape(tokens, heads, dim)


def attend_bidirectional(query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int],
                         bias: Tensor | None = None, scale: float | None = None) -> Tensor:
    """Every token of an input attends to all of that input (an encoder); inputs are packed.

    query [T, h, d]; key, value [T, k, d]; `bias` [h, L, L] with L the longest of `lengths`: its
    corner serves a shorter input, as it depends on distances alone. `scale` None: 1 / sqrt(d).
    Returns [T, h * d].
    """
    out = torch.empty_like(query)
    start, kv_heads = 0, key.shape[1]
    for length in lengths:
        end = start + length
        mask = None if bias is None else bias[:, :length, :length].view(
            kv_heads, -1, length, length)
        out[start:end] = _attend_packed(
            query[start:end], key[start:end].transpose(0, 1), value[start:end].transpose(0, 1),
            attn_mask=mask, scale=scale)
        start = end
    assert start == len(query), f"{start = } {len(query) = }"
    return out.flatten(1)


def store_packed(key: Tensor, value: Tensor, cache_key: Tensor, cache_value: Tensor,
                 slots: Tensor, positions: Tensor) -> None:
    """Keys and values of packed inputs into their cache rows: token t to slots[t], positions[t].

    key, value [T, k, d]; cache_* [slots, k, capacity, d], written in place.
    """
    cache_key[slots, :, positions] = key
    cache_value[slots, :, positions] = value


def attend_cross(query: Tensor, cache_key: Tensor, cache_value: Tensor, step: CrossContext,
                 scale: float | None = None) -> Tensor:
    """One token of each of n queries against the input that was encoded for it.

    query [n, h, d]; cache_* [slots, k, capacity, d]; `scale` None: 1 / sqrt(d). Returns [n, h * d].
    """
    n, heads, dim = query.shape
    kv_heads = cache_key.shape[1]
    out = scaled_dot_product_attention(
        query.view(n, kv_heads, heads // kv_heads, dim), cache_key[:n, :, :step.longest],
        cache_value[:n, :, :step.longest], attn_mask=step.mask, scale=scale,
    )
    return out.reshape(n, heads * dim)
