"""Which inputs a GPU leaves to torch's flash attention: by the work of a mean span."""


import cpu_cuda
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from xrunner.ops import attention
from xrunner.ops.attention import encode_attention
from xrunner.ops.contexts import encode_context
from xrunner.ops.cpu import native
from xrunner.rules.slots import Span

HEADS, KV_HEADS = 4, 2
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


@pytest.mark.parametrize(("spans", "pairs"), [
    (INPUTS, 9**2 / 2 + 5**2 / 2), (CHUNKS, sum(range(2, 11)) + sum(range(5, 10)))])
def test_long_inputs_in_half_precision_are_left_to_torch(monkeypatch, spans, pairs):
    """`pairs`: of tokens with what each attends to; a chunk counts with what it goes on from."""
    launcher = cpu_cuda.CpuLauncher(cpu_cuda.built())
    is_ours, expected = by_kernel(launcher, spans, torch.bfloat16)
    assert is_ours, "short ones are not"
    flops = 4 * HEADS * WIDTH * pairs / 2  # of one, in the mean
    for most, dtype, is_kept in ((0.8 * flops, torch.bfloat16, False),
                                 (0.8 * flops, torch.float32, True),
                                 (1.3 * flops, torch.bfloat16, True)):
        monkeypatch.setattr(attention, "_FLASH_FLOPS", most)
        is_ours, out = by_kernel(launcher, spans, dtype)
        assert is_ours == is_kept
        torch.testing.assert_close(out.float(), expected.float(), atol=0.02, rtol=0.02)


def test_what_flash_attention_is_told_of_a_chunk_is_its_mask():
    generator = torch.Generator().manual_seed(5)
    query, key, value = (torch.randn(1, 2, rows, WIDTH, generator=generator) for rows in (5, 9, 9))
    mask = attention._causal(torch.arange(9), 4, 5, attention.PLAIN, torch.float32)
    by_numbers, in_a_word = (scaled_dot_product_attention(query, key, value, attn_mask=of)
                             for of in (mask, attention.in_a_word(5, 9)))
    torch.testing.assert_close(in_a_word, by_numbers)
