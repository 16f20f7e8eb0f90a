"""8-bit products: codes and scales by the formula, sums exact, in every implementation."""

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from implementations import DTYPES, IMPLEMENTATIONS, TOLERANCE, num_threads, rows

from xrunner.ops.cpu.products import Int8Weight, is_int8_served, quantise, rescale

# no CUDA source has these: int8 is refused on a GPU
HERE = [each for each in IMPLEMENTATIONS if not each.name.startswith("cuda")]
every_implementation = pytest.mark.parametrize("implementation", HERE, ids=str)
many = examples(50)


@every_implementation
@many
@given(case=rows, factor=st.sampled_from([0.0, 1e-6, 1.0, 1e6]))
def test_codes_are_the_nearest(implementation, case, factor):
    x = (case.normal(case.tokens, case.size, dtype=torch.float32) * factor).to(case.dtype)
    with implementation.using(), num_threads(case.threads):
        codes, scales = quantise(x)
    assert (codes.dtype, scales.dtype) == (torch.uint8, torch.float32)
    assert torch.equal(scales, x.float().abs().amax(1) / 127)
    off = ((codes.double() - 128) * scales.double()[:, None] - x.double()).abs()
    assert (off <= scales.double()[:, None] * 0.5001).all(), "half a step at most"
    assert ((codes >= 1) & (codes <= 255)).all(), "-127 to 127: symmetric"


@every_implementation
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strange", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_stays_so(implementation, dtype, strange):
    x = torch.ones(3, 40, dtype=dtype)
    x[1, 33] = strange
    with implementation.using():
        _, scales = quantise(x)
    assert scales.isnan().tolist() == [False, True, False]


@every_implementation
@many
@given(case=rows, has_bias=st.booleans())
def test_rescaled_sums(implementation, case, has_bias):
    wide = torch.float32
    sums = case.normal(case.tokens, case.size, dtype=wide) * 100
    scales = case.normal(case.tokens, dtype=wide).abs()
    bias = case.normal(case.size, dtype=wide) if has_bias else None
    expected = sums.double() * scales.double()[:, None] + (0 if bias is None else bias.double())
    with implementation.using(), num_threads(case.threads):
        got = rescale(sums.clone(), scales, bias)
    largest = expected.abs().max().item() if expected.numel() else 0.0
    near = TOLERANCE[torch.float32] * max(largest, 1.0)
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=near)


@pytest.mark.skipif(not is_int8_served(), reason="this processor has no VNNI")
@every_implementation
@many
@given(case=rows, out=st.sampled_from([1, 5, 48, 200]))
def test_a_product_is_that_of_its_codes(implementation, case, out):
    """Sums of products of codes are whole numbers: float64 has them exactly."""
    x, weight = case.normal(case.tokens, case.size), case.normal(out, case.size, 1)[..., 0]
    held = Int8Weight(weight)
    codes = (weight / held.scales[:, None]).round()
    assert (codes.abs() <= 127).all()
    with implementation.using(), num_threads(case.threads):
        taken, scales = quantise(x)
        got = held(x)
    sums = (taken.double() - 128) @ codes.double().T
    expected = sums * scales.double()[:, None] * held.scales.double()
    torch.testing.assert_close(got.double(), expected, rtol=2e-6, atol=1e-30)
