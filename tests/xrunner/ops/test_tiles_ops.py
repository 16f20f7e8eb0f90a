"""Attention by tiles (AMX), carried out by a handler of refused instructions: what
tests/xrunner/ops/test_attention_ops.py asks of every implementation, on random shapes of those that
are left to tiles, and what is theirs alone."""

from __future__ import annotations

from typing import Any

import emulated_tiles
import pytest
import test_attention_ops as attention
import torch
from emulated_tiles import a_processor_with_tiles, are_used_since, by_avx512, done
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from implementations import Implementation, num_threads

from xrunner.ops import native, tiles
from xrunner.ops.attention import (
    Distances,
    decode_attention,
    encode_attention,
    packed_attention,
)
from xrunner.ops.contexts import BlockTable, Cache, decode_context, encode_context
from xrunner.rules.slots import Span

pytestmark = pytest.mark.skipif(
    not (emulated_tiles.are_there() or emulated_tiles.are_emulated()),
    reason="this processor lacks more than tiles")
emulated = pytest.mark.skipif(not emulated_tiles.are_emulated(),
                              reason="no product of a processor's own tiles can be made wrong")


TILED = Implementation("native-avx512_amx", a_processor_with_tiles)
some = examples(60)


def tiled(dims: list[int], groups: list[int]) -> st.SearchStrategy[attention.Shape]:
    """Shapes in bfloat16 throughout."""
    return st.builds(
        attention.Shape, st.just(torch.bfloat16), st.just(torch.bfloat16), st.integers(1, 2),
        st.sampled_from(groups), st.sampled_from(dims), st.sampled_from([None, 1.0, 0.3]),
        st.integers(1, 3), st.integers(0, 2**31))


decoded_shapes = tiled([32, 64, 96, 128, 160], [6, 7, 8, 15, 16, 17, 32, 33])
encoded_shapes = tiled(attention.DIMS, [1, 2, 3, 5, 8, 17])


def asked(test: Any, *case: Any) -> None:
    """What that test asks of every implementation, of this case; by tiles."""
    before = done()
    test.hypothesis.inner_test(TILED, *case)
    assert are_used_since(before)


@some
@given(shape=decoded_shapes, case=attention.decode_cases(), size=attention.block_sizes)
def test_decoded_tokens_of_random_shapes(shape: attention.Shape, case: Any,
                                         size: int | None) -> None:
    asked(attention.test_a_token_that_is_decoded_attends_to_its_own_query_alone,
          (shape, *case[1:]), False, size)


@some
@given(shape=encoded_shapes, case=attention.spans().filter(lambda case: case[2]),
       size=attention.block_sizes)
def test_encoded_tokens_of_random_shapes(shape: attention.Shape, case: Any,
                                         size: int | None) -> None:
    asked(attention.test_a_token_that_is_encoded_attends_to_what_came_before_it,
          (shape, *case[1:]), size)


@some
@given(shape=encoded_shapes, lengths=st.lists(st.integers(1, 70), min_size=1, max_size=4),
       has_bias=st.booleans())
def test_packed_inputs_of_random_shapes(shape: attention.Shape, lengths: list[int],
                                        has_bias: bool) -> None:
    asked(attention.test_a_token_of_a_packed_input_attends_to_all_of_that_input, shape, lengths,
          has_bias)


def inputs(tokens: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> tuple[torch.Tensor, Cache]:
    generator = torch.Generator().manual_seed(tokens)
    query = torch.randn(tokens, 6, 64, generator=generator).to(dtype)
    keys, values = torch.randn(2, 1, 2, tokens, 64, generator=generator).to(kv_dtype)
    return query, (keys, values)


def encoded(query: torch.Tensor, cache: Cache) -> torch.Tensor:
    return encode_attention(query, cache, encode_context([Span(0, 0, len(query), True)],
                                                         query.device))


@pytest.mark.parametrize("tokens", [1, 5, 150])
def test_what_is_bfloat16_is_multiplied_by_tiles_and_nothing_else_is(tokens: int) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for kv_dtype in (torch.bfloat16, torch.float32):
            query, cache = inputs(tokens, dtype, kv_dtype)
            with by_avx512():
                expected = encoded(query, cache)
            with a_processor_with_tiles():
                before = done()
                got = encoded(query, cache)
                assert are_used_since(before, dtype == kv_dtype == torch.bfloat16)
            torch.testing.assert_close(got, expected, rtol=0, atol=0.02)


def test_what_is_no_number_leaves_other_rows_alone() -> None:
    query, cache = inputs(70, torch.bfloat16, torch.bfloat16)
    with a_processor_with_tiles():
        expected = encoded(query, cache)
        query[20, 1, 3] = torch.nan
        got = encoded(query, cache)
    got[20, 64:128] = expected[20, 64:128]
    assert torch.equal(got, expected)


def test_an_encoder_s_inputs_are_multiplied_by_tiles() -> None:
    joint = torch.randn(40, 3 * 2 * 48).bfloat16()
    with by_avx512():
        expected = packed_attention(joint, 2, [33, 7])
    with a_processor_with_tiles():
        before = done()
        got = packed_attention(joint, 2, [33, 7])
        assert are_used_since(before)
    torch.testing.assert_close(got, expected, rtol=0, atol=0.02)


@pytest.mark.parametrize(("group", "dim", "threads"), [
    (6, 64, 1), (8, 128, 2), (16, 32, 3), (17, 64, 1), (33, 96, 2)])
def test_decoded_tokens_of_many_heads_are_multiplied_by_tiles(group: int, dim: int,
                                                              threads: int) -> None:
    lengths, size = [1, 15, 64, 65, 97, 700], 128
    generator = torch.Generator().manual_seed(group)
    query = torch.randn(6, 2 * group, dim, generator=generator).bfloat16()
    width = -(-max(lengths) // size)
    blocks = torch.randperm(6 * width, generator=generator).view(6, width)
    keys, values = torch.randn(2, 6 * width, 2, size, dim, generator=generator).bfloat16()
    keys[blocks[5, 3], 1, 40] *= 4  # a maximum that comes late
    for row, length in zip(blocks, lengths, strict=True):  # nobody may look behind the last entry
        for part in (keys, values):
            part[row[length // size], :, length % size:] = torch.nan
            part[row[length // size + 1:]] = torch.nan
    step = decode_context(lengths, table=BlockTable(blocks, size))
    with num_threads(threads):
        with by_avx512():
            expected = decode_attention(query, (keys, values), step)
        with a_processor_with_tiles():
            before = done()
            got = decode_attention(query, (keys, values), step)
            assert are_used_since(before)
    assert expected.isfinite().all()
    torch.testing.assert_close(got, expected, rtol=0, atol=0.02)


@pytest.mark.parametrize(("group", "dim", "kv_dtype", "has_bias"), [
    (5, 64, torch.bfloat16, False), (8, 80, torch.bfloat16, False), (8, 64, torch.float32, False),
    (8, 64, torch.bfloat16, True)])
def test_other_decoded_tokens_are_not(group: int, dim: int, kv_dtype: torch.dtype,
                                      has_bias: bool) -> None:
    query, cache = torch.randn(1, group, dim).bfloat16(), torch.randn(2, 1, 1, 9, dim).to(kv_dtype)
    bias = Distances(torch.randn(group, 9), 8) if has_bias else None
    keys, values = cache
    step = decode_context([9])
    with by_avx512():
        expected = decode_attention(query, (keys, values), step, bias=bias)
    with a_processor_with_tiles():
        before = done()
        assert torch.equal(decode_attention(query, (keys, values), step, bias=bias), expected)
        assert are_used_since(before, False)


def test_tiles_that_agree_are_trusted() -> None:
    opened = native.Native(native.library(), origin="here")
    with a_processor_with_tiles():
        before = done()
        assert native.without_wrong_tiles(opened) is opened
        assert are_used_since(before)
        assert native.describe().startswith("native operators: avx512_amx")


@emulated
def test_tiles_that_do_not_are_left_aside_in_words() -> None:
    opened = native.Native(native.library(), origin="here")
    with a_processor_with_tiles(), emulated_tiles.faulty():
        found = native.without_wrong_tiles(opened)
        assert "left aside" in found.left and "AVX-512" in found.left
        before = done()
        encoded(*inputs(20, torch.bfloat16, torch.bfloat16))
        assert are_used_since(before, False)
        assert native.describe().startswith("native operators: avx512,")


@emulated
def test_nothing_is_compared_where_there_are_no_tiles() -> None:
    opened, before = native.Native(native.library()), done()
    assert native.without_wrong_tiles(opened) is opened and done() == before


def test_oneDNN_s_products_are_taken_where_there_are_tiles() -> None:  # noqa: N802
    lib = native.library()
    assert lib is not None
    with a_processor_with_tiles():
        assert not lib.xgpt_has_pairs(), "oneDNN multiplies by tiles"


@emulated
def test_what_they_come_to_is_told_by_how_much() -> None:
    lib = native.library()
    assert lib is not None
    with a_processor_with_tiles():
        assert 0 < tiles.differ_by(lib, native.LEVELS) < tiles.TOLERANCE / 2
        with emulated_tiles.faulty():
            assert tiles.differ_by(lib, native.LEVELS) > tiles.TOLERANCE
