"""Whether attention by tiles (Intel's AMX) may be trusted on this processor: it is compared, once a
process, with the same by AVX-512's float32 products. No processor with tiles has been at hand to
whoever wrote it; where the two differ by more than rounding, AVX-512 serves, and that is said.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

TILES, BELOW = "avx512_amx", "avx512"
# Of the largest of the values averaged: weights, and what comes out, are rounded to 8 bits.
TOLERANCE = 2.0**-6
# Tokens of spans, heads, KV heads, head size: tiles that are full, cut, and of one row.
_CASES = (((48, 17), 4, 2, 64), ((1, 70), 3, 1, 80), ((130, 33), 12, 2, 128),
          ((33,), 20, 1, 64))  # heads of more than one tile


def differ_by(lib: ctypes.CDLL, levels: Sequence[str]) -> float:
    """The largest difference between the two, of the largest value; infinite where one of them
    gives what is no number. `levels`: the library's, in its order; it is left at that of tiles."""
    found = 0.0
    for number, case in enumerate(_CASES):
        arguments = _arguments(number, *case)
        outs = []
        for level in (BELOW, TILES):
            code = lib.xgpt_use_level(levels.index(level))
            assert code == 0, f"{level = } {code = }"
            outs.append(torch.cat([_encoded(lib, *arguments), _decoded(lib, *arguments)]))
        by = (outs[0] - outs[1]).abs().max() / arguments[2].abs().max().float()
        found = max(found, float(by.nan_to_num(torch.inf)))
    return found


def _arguments(seed: int, tokens: tuple[int, ...], heads: int, kv_heads: int,
               dim: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """query [T, h, d], keys and values [spans, k, longest, d], the spans' tokens [spans]."""
    generator = torch.Generator().manual_seed(seed)
    cache = len(tokens), kv_heads, max(tokens), dim
    query, keys, values = (torch.randn(shape, generator=generator).to(torch.bfloat16)
                           for shape in ((sum(tokens), heads, dim), cache, cache))
    return query, keys, values, torch.tensor(tokens)


def _decoded(lib: ctypes.CDLL, query: Tensor, keys: Tensor, values: Tensor,
             tokens: Tensor) -> Tensor:
    """Of the first token of each span as the last one of its query. Float32, [spans, h, d]."""
    spans, kv_heads, longest, dim = keys.shape
    query, blocks = query[:spans].contiguous(), torch.arange(spans)
    out = torch.full_like(query, torch.nan)
    code = lib.xgpt_decode_attention(
        1, 1, out.data_ptr(), query.data_ptr(), query.stride(0), keys.data_ptr(),
        values.data_ptr(), blocks.data_ptr(), 1, tokens.data_ptr(), spans, query.shape[1],
        kv_heads, dim, spans, longest, dim**-0.5, None, 0, 0, 1)
    assert code == 0, f"{code = }"
    return out.float()


def _encoded(lib: ctypes.CDLL, query: Tensor, keys: Tensor, values: Tensor,
             tokens: Tensor) -> Tensor:
    """Float32, [T, h, d]."""
    out = torch.full_like(query, torch.nan)
    spans, kv_heads, longest, dim = keys.shape
    first, blocks = torch.zeros_like(tokens), torch.arange(spans)
    code = lib.xgpt_encode_attention(
        1, 1, out.data_ptr(), query.data_ptr(), query.stride(0), keys.data_ptr(),
        values.data_ptr(), blocks.data_ptr(), 1, first.data_ptr(), tokens.data_ptr(), spans,
        query.shape[1], kv_heads, dim, spans, longest, dim**-0.5, 1)
    assert code == 0, f"{code = }"
    return out.float()
