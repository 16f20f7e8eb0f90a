"""Products in float16: near the exact ones, nearer than bfloat16's, whatever the sizes of rows."""

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from implementations import num_threads

from xrunner.ops.float16 import Float16Weight, is_float16_served, power_of_two

pytestmark = pytest.mark.skipif(
    not is_float16_served(), reason="this processor has no AVX512-FP16, or nothing is native")

many = examples(60)
sizes = st.tuples(st.integers(0, 40), st.integers(1, 300), st.integers(1, 200))


def off(got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The largest error of each row, as a share of |x| |W|: what rounding can depend on."""
    exact = x.double() @ weight.double().T
    scale = (x.double().norm(dim=1)[:, None] * weight.double().norm(dim=1)).clamp_min(1e-300)
    return ((got.double() - exact).abs() / scale).amax(dim=1)


@many
@given(sizes=sizes, seed=st.integers(0, 999), threads=st.integers(1, 3),
       row_power=st.integers(-60, 60), out_power=st.integers(-30, 30), has_bias=st.booleans())
def test_near_the_exact_product(sizes: tuple[int, int, int], seed: int, threads: int,
                                row_power: int, out_power: int, has_bias: bool) -> None:
    tokens, inputs, outputs = sizes
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, inputs, generator=generator)
    x[::2] *= 2.0**row_power
    weight = torch.randn(outputs, inputs, generator=generator)
    weight[1::2] *= 2.0**out_power
    held = Float16Weight(weight)
    with num_threads(threads):
        got = held(x)
        bias = torch.randn(outputs, generator=generator) if has_bias else None
        with_bias = held(x, bias)
    assert got.shape == (tokens, outputs) and got.dtype == torch.float32
    assert not tokens or off(got, x, weight).max() < 2.0**-9, "bfloat16 rounds an input by so much"
    assert torch.equal(with_bias, got if bias is None else got + bias)


def test_nearer_than_bfloat16() -> None:
    torch.manual_seed(0)
    weight = (torch.randn(192, 1536) / 40).bfloat16()
    x = torch.randn(64, 1536)
    exact = x.double() @ weight.double().T
    error = (Float16Weight(weight)(x).double() - exact).pow(2).mean().sqrt()
    of_bfloat16 = ((x.bfloat16() @ weight.T).double() - exact).pow(2).mean().sqrt()
    assert error < 0.5 * of_bfloat16


def test_a_bfloat16_weight_is_held_as_it_is() -> None:
    torch.manual_seed(0)
    weight = torch.randn(100, 33).bfloat16() * torch.logspace(-9, 9, 100)[:, None].bfloat16()
    held = Float16Weight(weight)
    rows = held.panels.mT.reshape(-1, 33)[:100].float() * held.scales[:, None]
    assert torch.equal(rows, weight.float())
    assert torch.equal(held(torch.eye(33)), weight.float().T), "a product of one is exact, too"


def test_a_row_does_not_depend_on_the_others() -> None:
    torch.manual_seed(0)
    held, x = Float16Weight(torch.randn(130, 576)), torch.randn(37, 576)
    together = held(x)
    assert torch.equal(together, torch.cat([held(row[None]) for row in x]))
    assert torch.equal(together[5:30], held(x[5:30]))


def test_more_rows_than_are_narrowed_at_a_time() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(70, 8000), torch.randn(100, 8000)  # 24 rows at a time
    assert off(Float16Weight(weight)(x), x, weight).max() < 2.0**-11


@pytest.mark.parametrize("largest", [1e-3, 1.0, 6e4, 3e38])
def test_the_largest_sums_do_not_overflow(largest: float) -> None:
    x = torch.full((2, 640), largest)
    weight = torch.full((65, 640), 3.9)
    got = Float16Weight(weight)(x * torch.tensor([[1.0], [1e-6]]))
    exact = x.double() @ weight.double().T * torch.tensor([[1.0], [1e-6]]).double()
    if largest < 1e38:
        torch.testing.assert_close(got.double(), exact, rtol=4e-3, atol=0)  # 2^-8: bfloat16's
    else:
        assert not got[0].isfinite().any() and got[1].isfinite().all(), "as in float32"


@pytest.mark.parametrize("strange", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_makes_its_row_nan(strange: float) -> None:
    x = torch.ones(3, 40)
    x[1, 33] = strange
    got = Float16Weight(torch.ones(5, 40))(x)
    assert got.isnan().all(dim=1).tolist() == [False, True, False]
    assert got[::2].eq(40).all()


def test_zeros() -> None:
    assert Float16Weight(torch.zeros(3, 5))(torch.ones(2, 5)).eq(0).all()
    assert Float16Weight(torch.ones(3, 5))(torch.zeros(2, 5)).eq(0).all()


def test_scales_are_powers_of_two() -> None:
    largest = torch.tensor([0.0, 1e-30, 0.7, 1.0, 2.0, 3.9, 4.0, 1e30])
    scales = power_of_two(largest)
    assert (torch.frexp(scales).mantissa == 0.5).all()
    assert ((largest / scales)[2:] >= 2).all() and ((largest / scales)[2:] < 4).all()


def test_wrong_sizes_are_refused() -> None:
    from xrunner.ops.native import library

    lib, x = library(), torch.ones(4)
    assert lib is not None
    for sizes in ((-1, 1, 1, 1), (1, 0, 1, 1), (1, 1, 0, 1), (1, 1, 1, 0)):
        code = lib.xgpt_float16_product(*[x.data_ptr()] * 4, None, *sizes)
        assert lib.xgpt_words(code).startswith(b"a size")
