"""What the host does for the kernels of a layer, where no GPU is: how many functions of Python it
calls, and what it hands to the driver."""

import sys
from types import FrameType

import cpu_cuda
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from xrunner.ops import attention
from xrunner.ops.attention import encode_attention
from xrunner.ops.contexts import encode_context
from xrunner.ops.cpu import native
from xrunner.ops.cuda.kernels import CudaOps
from xrunner.ops.cuda.launch import Launch
from xrunner.rules.slots import Span

QUERIES, HEADS, KV_HEADS, DIM = 6, 4, 2, 64
SIZE = HEADS * DIM


def layer(ops: CudaOps, *, encodes: bool) -> None:
    """What a layer of Llama asks of the kernels."""
    dtype = torch.bfloat16
    cache = tuple(torch.zeros(QUERIES, KV_HEADS, 32, DIM, dtype=dtype) for _ in range(2))
    joint = torch.zeros(QUERIES, (HEADS + 2 * KV_HEADS) * DIM, dtype=dtype)
    query = joint[:, :SIZE].view(QUERIES, HEADS, DIM)
    hidden, weight = torch.zeros(QUERIES, SIZE, dtype=dtype), torch.ones(SIZE, dtype=dtype)
    slots = torch.arange(QUERIES)
    angles = torch.zeros(QUERIES, DIM // 2)
    span = encode_context([Span(0, 0, QUERIES, True)])
    span.groups(65535)  # once a step
    calls.clear()
    sys.setprofile(count)
    try:
        ops.add_rms_norm(hidden, hidden, weight, 1e-5)
        ops.place(joint, (angles, angles), cache, slots, slots)
        if encodes:
            ops.encode_attention(query, cache, span, 0.125)
        else:
            ops.decode_attention(query, cache, slots[:, None], slots + 1, 0.125)
        ops.add_rms_norm(hidden, hidden, weight, 1e-5)
        ops.silu_mul(hidden)
    finally:
        sys.setprofile(None)


calls: list[str] = []


def count(frame: FrameType, event: str, _: object) -> None:
    if event == "call" and "/xrunner/" in frame.f_code.co_filename:
        calls.append(frame.f_code.co_name)


@pytest.mark.parametrize("encodes", [False, True])
def test_a_layer_calls_few_functions_of_ours_before_its_launches(*, encodes):
    launched: list[Launch] = []
    layer(CudaOps(launched.append, 132), encodes=encodes)
    kernels = [launch.source for launch in launched]
    assert kernels[0] == kernels[1] == kernels[-1] == "rows" and len(launched) >= 5
    assert len(calls) <= 45, sorted(calls)


WIDTH = 8  # of a head, where attention is left to torch or not
INPUTS = [Span(0, 0, 9, True), Span(2, 0, 5, True)]
CHUNKS = [Span(0, 1, 9, True), Span(2, 4, 5, True)]


def by_kernel(launcher: cpu_cuda.CpuLauncher, spans: list[Span],
              dtype: torch.dtype) -> tuple[bool, torch.Tensor]:
    """Whether our kernel was launched, and what came of it."""
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(sum(span.tokens for span in spans), HEADS, WIDTH,
                        generator=generator).to(dtype)
    cache = torch.randn(2, 3, KV_HEADS, 12, WIDTH, generator=generator).to(dtype)
    launcher.launched.clear()
    with cpu_cuda.using(launcher), native.left_aside():
        out = encode_attention(query, (cache[0], cache[1]), encode_context(spans))
    return bool(launcher.launched), out


def test_long_inputs_in_half_precision_are_left_to_torch(monkeypatch):
    launcher = cpu_cuda.CpuLauncher(cpu_cuda.built())
    is_ours, expected = by_kernel(launcher, INPUTS, torch.bfloat16)
    assert is_ours, "short ones are not"
    flops = 2 * HEADS * WIDTH * (9**2 + 5**2) // 2  # of one, in the mean
    monkeypatch.setattr(attention, "_FLASH_FLOPS", flops)
    is_ours, out = by_kernel(launcher, INPUTS, torch.bfloat16)
    assert not is_ours
    torch.testing.assert_close(out.float(), expected.float(), atol=0.02, rtol=0.02)
    assert by_kernel(launcher, INPUTS, torch.float32)[0]
    monkeypatch.setattr(attention, "_FLASH_FLOPS", flops + 1)
    assert by_kernel(launcher, INPUTS, torch.bfloat16)[0]


def test_a_chunk_counts_with_what_it_attends_to(monkeypatch):
    launcher = cpu_cuda.CpuLauncher(cpu_cuda.built())
    is_ours, expected = by_kernel(launcher, CHUNKS, torch.bfloat16)
    assert is_ours
    pairs = sum(range(2, 11)) + sum(range(5, 10))  # of tokens with what each attends to
    flops = 4 * HEADS * WIDTH * pairs // 2
    for most, is_kept in ((flops // 2, False), (2 * flops, True)):
        monkeypatch.setattr(attention, "_FLASH_FLOPS", most)
        is_ours, out = by_kernel(launcher, CHUNKS, torch.bfloat16)
        assert is_ours == is_kept
        torch.testing.assert_close(out.float(), expected.float(), atol=0.02, rtol=0.02)


def test_what_flash_attention_is_told_of_a_chunk_is_its_mask():
    generator = torch.Generator().manual_seed(5)
    query, key, value = (torch.randn(1, 2, rows, WIDTH, generator=generator) for rows in (5, 9, 9))
    mask = attention._causal(torch.arange(9), 4, 5, attention.PLAIN, torch.float32)
    by_numbers, in_a_word = (scaled_dot_product_attention(query, key, value, attn_mask=of)
                             for of in (mask, attention.in_a_word(5, 9)))
    torch.testing.assert_close(in_a_word, by_numbers)
