"""Attention over the KV cache, apart from the rest of a layer, as XProfiler times it.

Shapes: T tokens of an encode (prefill) batch, n decoding requests, h heads, k KV heads, d head
size. A layer's cache is keys and values, each [blocks, k, size, d] (xrunner.ops.contexts). A step's
own KV is there before attention reads it (`xrunner.ops.rows.rotate_and_store`). The query may have
another type than the cache (float32 beside bfloat16), and the output has the query's.

Native operators (csrc/ops/cpu/decode_attention.cpp, encode_attention.cpp) read each request as far
as it is long. Elsewhere torch pads and masks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from xrunner.ops import invariant
from xrunner.ops.contexts import Cache, DecodeContext, DistanceBias, EncodeContext, Places, rows_of
from xrunner.ops.cpu.native import check, dtype_code, library, serves, threads
from xrunner.ops.cuda import cuda_modules
from xrunner.ops.cuda.kernels import MAX_DIM, CudaOps


class Scoring(NamedTuple):
    """How attention scores are computed: query times key, times `scale` (None: 1 / sqrt(d)). `cap`:
    a score s becomes cap * tanh(s / cap). `window`: only the last keys count, the token's own among
    them (None: all)."""

    scale: float | None = None
    window: int | None = None
    cap: float | None = None


PLAIN = Scoring()
_NO_WEIGHT = -1e30
# Flops of a mean span above which torch's flash attention is used. Measured on an H200: it is 1.4
# times as fast at 2 ** 29 (256 tokens of 4,096 elements); ours, all spans in one launch, is 1.4
# times as fast at 2 ** 27.3 (128 of 5,120).
_FLASH_FLOPS = 2**29


def decode_attention(query: Tensor, cache: Cache, step: DecodeContext,
                     scoring: Scoring = PLAIN, bias: DistanceBias | None = None) -> Tensor:
    """Attention of one token of each of n requests to its KV, its own included: [n, h * d].
    `query`: [n, h, d], rows contiguous."""
    keys, values = cache
    n, heads, dim = query.shape
    num_blocks, kv_heads, size, _ = keys.shape
    scale = dim ** -0.5 if scoring.scale is None else scoring.scale
    if scoring.window is not None and scoring.window < step.longest:
        assert bias is None, "no family has both"
        bias = _window_bias(heads, scoring.window, step.longest, query.device)
    if scoring.cap is not None:
        return _by_rows(query, cache, step, scoring._replace(scale=scale), bias)
    if (gpu := _cuda(query, keys)) is not None:
        return gpu.decode_attention(
            query, cache, step.blocks, step.lengths, scale,
            bias).flatten(1)
    if not _is_native(query, keys):
        return _by_rows(query, cache, step, Scoring(scale), bias)
    out, lib = query.new_empty(n, heads * dim), library()
    assert lib is not None
    table, width, center = _addresses(bias)
    # threads divide all requests' KV evenly, cutting within requests; one thread cuts none
    num_threads = 1 if invariant.is_deterministic() else threads()
    check(lib.xgpt_decode_attention(
        dtype_code(query), dtype_code(keys), out.data_ptr(), query.data_ptr(), query.stride(0),
        keys.data_ptr(), values.data_ptr(), step.blocks.data_ptr(), step.blocks.shape[1],
        step.lengths.data_ptr(), n, heads, kv_heads, dim, num_blocks, size, scale,
        table, width, center, num_threads))
    return out


def _window_bias(heads: int, window: int, longest: int, device: torch.device) -> DistanceBias:
    """Bias that gives keys outside the window no weight beside the token's own. It is finite: the
    kernels would subtract an infinity from itself if it were the largest score so far."""
    table = torch.zeros(heads, longest, device=device)
    table[:, :longest - window] = _NO_WEIGHT
    return DistanceBias(table, longest - 1)


def _by_rows(query: Tensor, cache: Cache, step: DecodeContext, scoring: Scoring,
             bias: DistanceBias | None) -> Tensor:
    """Decode attention by torch, over cache rows in place or over a copy of them. Rows are used in
    place if requests have the first slots. Values beyond a request are zeroed in the copy: they may
    be NaN, which a masked score still multiplies."""
    n, heads, dim = query.shape
    kv_heads = cache[0].shape[1]
    at = torch.arange(step.longest, device=query.device)
    mask = torch.zeros(n, 1, 1, step.longest, dtype=query.dtype, device=query.device).masked_fill_(
        (at >= step.lengths[:, None])[:, None, None, :], float("-inf"))
    if step.in_blocks or step.width > n or scoring.cap is not None:
        beyond = mask.view(n, 1, step.longest, 1) != 0
        rows = [part.masked_fill(beyond, 0)
                for part in rows_of(cache, step.blocks, step.longest)]
    else:
        rows = [part[:n, :, :step.longest] for part in cache]
    keys, values = (part.to(query.dtype) for part in rows)
    if bias is not None:
        distances = at - step.positions[:, None]
        own = bias.values[:, (distances + bias.center).clamp(max=bias.values.shape[1] - 1)]
        added = own.transpose(0, 1)[:, :, None, :].to(mask.dtype)
        mask = (mask + added).view(n, kv_heads, -1, step.longest)
    out = _attended(query.reshape(n, kv_heads, heads // kv_heads, dim), keys, values, mask, scoring)
    return out.reshape(n, heads * dim)


def _attended(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None,
              scoring: Scoring) -> Tensor:
    """Attention output [..., m, d] of query [..., m, d] over keys and values [..., s, d]. `mask`:
    added to the scores [..., m, s]."""
    if scoring.cap is None:
        return scaled_dot_product_attention(query, keys, values, attn_mask=mask,
                                            scale=scoring.scale)
    scale = query.shape[-1] ** -0.5 if scoring.scale is None else scoring.scale
    scores = query @ keys.transpose(-1, -2) * scale
    scores = scoring.cap * torch.tanh(scores / scoring.cap)
    scores = scores if mask is None else scores + mask
    return scores.softmax(-1, dtype=torch.float32).to(query.dtype) @ values


def encode_attention(query: Tensor, cache: Cache, step: EncodeContext,
                     scoring: Scoring = PLAIN) -> Tensor:
    """Causal attention of each token to its request's KV up to its own: [T, h * d]. `query`: [T, h,
    d], rows contiguous."""
    keys, values = cache
    tokens, heads, dim = query.shape
    num_blocks, kv_heads, size, _ = keys.shape
    scale = dim ** -0.5 if scoring.scale is None else scoring.scale
    if scoring.cap is not None or (scoring.window is not None
                                   and scoring.window < step.longest):
        return _encode_by_span(query, cache, step, scoring._replace(scale=scale))
    if (gpu := _cuda(query, keys)) is not None:
        if _suits_flash(query, step):
            return _encode_by_span(query, cache, step, Scoring(scale))
        return gpu.encode_attention(query, cache, step, scale).flatten(1)
    if not _is_native(query, keys):
        return _encode_by_span(query, cache, step, Scoring(scale))
    out, lib = query.new_empty(tokens, heads * dim), library()
    assert lib is not None
    check(lib.xgpt_encode_attention(
        dtype_code(query), dtype_code(keys), out.data_ptr(), query.data_ptr(), query.stride(0),
        keys.data_ptr(), values.data_ptr(), step.blocks.data_ptr(), step.blocks.shape[1],
        step.first.data_ptr(), step.tokens.data_ptr(), len(step.spans), heads, kv_heads, dim,
        num_blocks, size, scale, threads()))
    return out


def _suits_flash(query: Tensor, step: EncodeContext) -> bool:
    """Whether torch's flash attention, a call per span, is faster on a GPU. It is in half
    precision, if a mean span (an input or a chunk) has enough work for its tensor cores
    (_FLASH_FLOPS)."""
    _, heads, dim = query.shape
    pairs = sum(span.tokens * (2 * span.first + span.tokens) for span in step.spans)  # twice
    return (query.dtype != torch.float32
            and 2 * heads * dim * pairs >= _FLASH_FLOPS * len(step.spans))


def _encode_by_span(query: Tensor, cache: Cache, step: EncodeContext, scoring: Scoring) -> Tensor:
    outs = []
    ends = list(accumulate(span.tokens for span in step.spans))
    for i, ((slot, first, tokens, _), end) in enumerate(zip(step.spans, ends, strict=True)):
        at = torch.arange(first + tokens, device=query.device)
        mask = _causal(at, first, tokens, scoring, query.dtype)
        rows = ([part[0] for part in rows_of(cache, step.blocks[i:i + 1], first + tokens)]
                if step.in_blocks else [part[slot, :, :first + tokens] for part in cache])
        key, value = (part.to(query.dtype) for part in rows)
        outs.append(_attend_one(query[end - tokens:end], key, value, mask, scoring,
                                is_causal=mask is None))
    return torch.cat(outs) if outs else query.flatten(1)


def _causal(at: Tensor, first: int, tokens: int, scoring: Scoring,
            dtype: torch.dtype) -> Tensor | None:
    """Mask added to the scores [t, s] of the tokens from `first` on; None if `is_causal` suffices.
    On GPUs a chunk's mask is symbolic, which flash attention supports too."""
    window = scoring.window or first + tokens
    if window >= first + tokens and scoring.cap is None:
        if first == 0:
            return None
        if at.is_cuda:
            return symbolic_mask(tokens, first + tokens)
    seen = (at[None, :] <= at[first:, None]) & (at[None, :] > at[first:, None] - window)
    return torch.zeros(seen.shape, dtype=dtype, device=at.device).masked_fill_(
        ~seen, float("-inf"))


def symbolic_mask(tokens: int, entries: int) -> Tensor:
    """Symbolic mask of a chunk's tokens, the last of so many keys, without its numbers."""
    # imports torch's compiler, for a second: cuda_modules imports it when a rank starts on a GPU
    from torch.nn.attention.bias import causal_lower_right

    return causal_lower_right(tokens, entries)


def packed_attention(joint: Tensor, heads: int, lengths: Sequence[int], scale: float | None = None,
                     bias: DistanceBias | None = None) -> Tensor:
    """Attention of every token to all of its input (an encoder's); inputs are packed: [T, h * d].
    `joint`: [T, 3 h d], query, key and value of each token. `scale`: None for 1 / sqrt(d)."""
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
                     scale: float | None, bias: DistanceBias | None) -> Tensor:
    outs, heads = [], query.shape[1]
    for length, end in zip(lengths, accumulate(lengths), strict=True):
        here, mask = slice(end - length, end), None
        if bias is not None:
            at = torch.arange(length, device=query.device)
            mask = bias.values[:, at[None, :] - at[:, None] + bias.center].to(query.dtype).view(
                heads, 1, length, length)
        outs.append(_attend_one(query[here], key[here].transpose(0, 1),
                                value[here].transpose(0, 1), mask, Scoring(scale)))
    return torch.cat(outs) if outs else query.flatten(1)


def _attend_one(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
                scoring: Scoring, *, is_causal: bool = False) -> Tensor:
    """Attention [t, h * d] of one request's tokens [t, h, d] over keys and values [k, s, d]. Each
    KV head serves h / k heads."""
    tokens, heads, dim = query.shape
    kv_heads, context = key.shape[:2]
    group = (kv_heads, heads // kv_heads, context, dim)
    rows = query.reshape(tokens, kv_heads, -1, dim).permute(1, 2, 0, 3)
    keys, values = key.unsqueeze(1).expand(group), value.unsqueeze(1).expand(group)
    attended = (scaled_dot_product_attention(rows, keys, values, scale=scoring.scale,
                                             is_causal=True) if is_causal else
                _attended(rows, keys, values, mask, scoring))
    return attended.permute(2, 0, 1, 3).reshape(tokens, heads * dim)


def store_packed(key: Tensor, value: Tensor, cache: Cache, places: Places) -> None:
    """Writes keys and values [T, k, d] of packed inputs into the cache."""
    for part, new in zip(cache, (key, value), strict=True):
        part[places.slots, :, places.positions] = new.to(part.dtype)


def _is_native(query: Tensor, keys: Tensor) -> bool:
    return serves(query) and serves(keys) and _are_plain(query, keys)


def _cuda(query: Tensor, keys: Tensor) -> CudaOps | None:
    """The CUDA operators, if they support such tensors."""
    gpu = cuda_modules.ops_for(query)
    if gpu is None or query.shape[2] > MAX_DIM or keys.dtype != query.dtype:
        return None
    return gpu if _are_plain(query, keys) else None


def _are_plain(query: Tensor, keys: Tensor) -> bool:
    """Whether both have the layout that operators read; the query's rows may be apart."""
    return (keys.is_contiguous() and query.stride(2) == 1
            and query.stride(1) == query.shape[2])


def _addresses(bias: DistanceBias | None) -> tuple[int | None, int, int]:
    if bias is None:
        return None, 0, 0
    values = bias.values
    assert values.is_contiguous() and values.dtype == torch.float32, f"{values.dtype = }"
    return values.data_ptr(), values.shape[1], bias.center
