"""Products of bfloat16 pairs by our own operator: those of float32 sums rounded once."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from implementations import num_threads

from xrunner.ops.cpu.native import library
from xrunner.ops.cpu.products import PairsWeight, is_pairs_served
from xrunner.ops.linear import Product
from xrunner.ops.rows import silu_mul

pytestmark = pytest.mark.skipif(
    not is_pairs_served(), reason="this processor's dot products of pairs are not the quickest")

many = settings(deadline=None, max_examples=60)


@many
@given(tokens=st.integers(0, 40), inputs=st.one_of(st.integers(1, 300), st.just(1024)),
       outputs=st.integers(1, 200), seed=st.integers(0, 999), threads=st.integers(1, 3),
       has_bias=st.booleans(), relu=st.booleans())
def test_sums_are_rounded_once(tokens, inputs, outputs, seed, threads, has_bias, relu):
    generator = torch.Generator().manual_seed(seed)
    x, weight = (torch.randn(n, inputs, generator=generator).bfloat16() for n in (tokens, outputs))
    bias = torch.randn(outputs, generator=generator).bfloat16() if has_bias else None
    with num_threads(threads):
        got = PairsWeight(weight)(x, bias, relu=relu)
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    exact = exact.clamp_min(0) if relu else exact
    assert got.shape == (tokens, outputs) and got.dtype == torch.bfloat16
    sums = 1e-6 * (x.double().abs() @ weight.double().abs().T)
    assert ((got.double() - exact).abs() <= exact.abs() * 2.0**-8 + sums).all()


@many
@given(tokens=st.integers(0, 40), inputs=st.integers(1, 200), inner=st.integers(1, 150),
       seed=st.integers(0, 999), threads=st.integers(1, 3))
def test_a_gate_is_closed_within_the_product_as_after_it(tokens, inputs, inner, seed, threads):
    generator = torch.Generator().manual_seed(seed)
    x, weight = (torch.randn(n, inputs, generator=generator).bfloat16()
                 for n in (tokens, 2 * inner))
    with num_threads(threads):
        got = PairsWeight(weight, is_gated=True)(x)
        assert torch.equal(got, silu_mul(PairsWeight(weight)(x)))
    assert got.shape == (tokens, inner)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("activation", ["none", "relu", "gelu", "silu_mul"])
def test_a_layer_s_product_is_by_pairs(activation, has_bias):
    torch.manual_seed(0)
    weight, bias, x = torch.randn(140, 33), torch.randn(140), torch.randn(9, 33).bfloat16()
    product = Product(weight.bfloat16(), bias.bfloat16() if has_bias else None,
                      activation=activation)
    expected = product(x)
    product.pack(torch.bfloat16)
    assert [t.ndim for t in product.tensors] == [4, 1][:1 + has_bias], "panels and bias"
    assert expected.shape == (9, 70 if activation == "silu_mul" else 140)
    torch.testing.assert_close(product(x), expected, rtol=2.0**-6, atol=2.0**-6)


@pytest.mark.parametrize("threads", [2, 5])
def test_shares_that_are_cut_anywhere_leave_out_no_tile(threads):
    torch.manual_seed(0)
    held, x = PairsWeight(torch.randn(1000, 31).bfloat16()), torch.randn(307, 31).bfloat16()
    with num_threads(1):
        expected = held(x)
    lib = library()
    for _ in range(20):
        got = torch.full_like(expected, torch.nan)  # what is left out stays so
        lib.xgpt_pairs_product(got.data_ptr(), held.movable.data_ptr(), x.data_ptr(), None, 0,
                               *x.shape, expected.shape[1], threads)
        assert torch.equal(got, expected)


@pytest.mark.parametrize(("outputs", "inputs", "rows"), [(130, 577, 37), (70, 8000, 100)])
def test_a_row_does_not_depend_on_the_others(outputs, inputs, rows):
    """Of the second 64 rows stay in a cache."""
    torch.manual_seed(0)
    held = PairsWeight(torch.randn(outputs, inputs).bfloat16())
    x = torch.randn(rows, inputs).bfloat16()
    together = held(x)
    assert torch.equal(together, torch.cat([held(row[None]) for row in x]))
    assert torch.equal(together[5:30], held(x[5:30]))


@pytest.mark.parametrize("strange", [float("inf"), float("nan")])
def test_what_is_not_finite_stays_in_its_row(strange):
    x = torch.ones(3, 41).bfloat16()
    x[1, 40] = strange
    for relu in (False, True):
        got = PairsWeight(torch.ones(50, 41).bfloat16())(x, relu=relu)
        assert got[::2].eq(41).all() and got[1].equal(torch.full_like(got[1], strange)) or (
            got[1].isnan().all() and strange != strange)
