"""Attention to the last entries alone, and with capped scores, equals the plain formula: rows and
blocks, encoded in one piece or in several, and decoded."""

import math

import pytest
import torch

from xrunner.ops.attention import Scoring, decode_attention, encode_attention
from xrunner.ops.contexts import BlockTable, decode_context, encode_context
from xrunner.ops.cpu.native import left_aside
from xrunner.rules.slots import Span

HEADS, KV, DIM, CAPACITY = 4, 2, 8, 32
LENGTHS = [19, 3, 24]
SCORINGS = [Scoring(window=1), Scoring(window=5), Scoring(cap=0.7), Scoring(0.4, 6, 1.5),
            Scoring(window=24)]


def formula(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, at: int,
            scoring: Scoring) -> torch.Tensor:
    """query [h, d] of the token at `at`, keys and values [k, s, d]"""
    first = 0 if scoring.window is None else max(0, at + 1 - scoring.window)
    scale = 1 / math.sqrt(DIM) if scoring.scale is None else scoring.scale
    out = []
    for head in range(HEADS):
        own = head // (HEADS // KV)
        scores = keys[own, first:at + 1] @ query[head] * scale
        if scoring.cap is not None:
            scores = scoring.cap * torch.tanh(scores / scoring.cap)
        out.append(scores.softmax(0) @ values[own, first:at + 1])
    return torch.cat(out)


@pytest.fixture(params=["native", "torch"])
def _implementation(request):
    if request.param == "native":
        yield
    else:
        with left_aside():
            yield


def laid_out(in_blocks: bool) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor,
                                       torch.Tensor, BlockTable | None]:
    """(cache, keys and values by slot [slots, k, capacity, d], table)"""
    torch.manual_seed(3)
    keys, values = torch.randn(2, len(LENGTHS), KV, CAPACITY, DIM) * 2
    if not in_blocks:
        return (keys, values), keys, values, None
    size = 16
    table = BlockTable(torch.randperm(len(LENGTHS) * CAPACITY // size).view(len(LENGTHS), -1), size)
    cache = tuple(torch.empty(table.blocks.numel(), KV, size, DIM) for _ in range(2))
    for part, rows in zip(cache, (keys, values), strict=True):
        for slot, blocks in enumerate(table.blocks.tolist()):
            for place, block in enumerate(blocks):
                part[block] = rows[slot, :, place * size:(place + 1) * size]
    return (cache[0], cache[1]), keys, values, table


@pytest.mark.usefixtures("_implementation")
@pytest.mark.parametrize("in_blocks", [False, True])
@pytest.mark.parametrize("scoring", SCORINGS, ids=str)
def test_attention_equals_the_formula(scoring, in_blocks):
    cache, keys, values, table = laid_out(in_blocks)
    query = torch.randn(len(LENGTHS), HEADS, DIM)
    got = decode_attention(query, cache, decode_context(LENGTHS, None, "cpu", table), scoring)
    expected = torch.stack([formula(query[i], keys[i], values[i], length - 1, scoring)
                            for i, length in enumerate(LENGTHS)])
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    spans = [Span(0, 0, 19, True), Span(1, 0, 3, True), Span(2, 10, 14, True)]
    query = torch.randn(36, HEADS, DIM)
    got = encode_attention(query, cache, encode_context(spans, "cpu", table), scoring)
    places = [(span.slot, span.first + i) for span in spans for i in range(span.tokens)]
    expected = torch.stack([formula(query[i], keys[slot], values[slot], at, scoring)
                            for i, (slot, at) in enumerate(places)])
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
