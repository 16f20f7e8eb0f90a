"""MKL's products on a weight packed once are right for every number of rows, and fall back."""

from itertools import product

import pytest
import torch
from examples import some
from torch.nn import functional as F

from xrunner.ops.cpu.products import MklWeight, is_mkl_served
from xrunner.ops.linear import ACTIVATIONS, Product, is_packable

needs_mkl = pytest.mark.skipif(not is_mkl_served(), reason="no MKL, or not Intel's processor")
SHAPES = [(1, 1), (7, 5), (97, 33), (576, 1536), (3073, 577), (960, 576)]
THREADS = [(1, 1), (1, 2), (2, 1), (2, 2)]  # packing, computing
ROWS = (0, 1, 2, 3, 16, 63, 64, 65, 200, 255, 256, 257, 2080)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


# the bias in turns: with each number of threads and each shape, and without
@needs_mkl
@pytest.mark.parametrize(("out", "into", "packing", "computing", "has_bias"), some(
    [(*shape, *threads, has_bias)
     for shape, threads, has_bias in product(SHAPES, THREADS, (False, True))],
    lambda case: (SHAPES.index(case[:2]) + THREADS.index(case[2:4]) + case[4]) % 2 == 0))
def test_a_weight_packed_once_multiplies_any_number_of_rows(threads, out, into, packing, computing,
                                                            has_bias):
    generator = torch.Generator().manual_seed(out + into)
    weight = torch.randn(out, into, generator=generator) / into ** 0.5
    bias = torch.randn(out, generator=generator) if has_bias else None
    x = torch.randn(max(ROWS), into, generator=generator)
    exact = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    torch.set_num_threads(packing)
    packed = MklWeight(weight)
    torch.set_num_threads(computing)
    with torch.inference_mode():
        for rows in ROWS:
            ours = packed(x[:rows], bias)
            assert ours.shape == (rows, out) and ours.dtype == torch.float32
            torch.testing.assert_close(ours.double(), exact[:rows], rtol=1e-4, atol=1e-5)
        apart = torch.empty(9, 2 * into)[:, ::2].copy_(x[:9])  # neither here nor there contiguous
        torch.testing.assert_close(packed(apart, bias).double(), exact[:9], rtol=1e-4, atol=1e-5)


@needs_mkl
def test_a_weight_that_is_no_whole_piece_of_memory_is_packed_as_it_reads():
    weight = torch.randn(33, 97).T
    x = torch.randn(5, 33)
    torch.testing.assert_close(MklWeight(weight)(x), x @ weight.T, rtol=1e-4, atol=1e-4)


@needs_mkl
def test_float32_weights_are_mkl_s_unless_an_activation_follows():
    for activation, is_mkl in (("none", True), ("gelu", False), ("relu", False)):
        product = Product(torch.randn(8, 8), activation=activation)
        product.pack(torch.float32)
        assert isinstance(product._other, MklWeight) == is_mkl and product.weight is None


TYPES = [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16),
         (torch.bfloat16, torch.float32)]  # of activations, of held weights


def made(dtype: torch.dtype, out: int, into: int, *, has_bias: bool) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(out * into)
    weight = torch.randn(out, into, generator=generator) / into ** 0.5
    bias = torch.randn(out, generator=generator) if has_bias else None
    return weight.to(dtype), None if bias is None else bias.to(dtype)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("dtype", "held"), TYPES)
@pytest.mark.parametrize(("rows", "out", "into"), [(1, 8, 5), (33, 96, 64), (200, 48, 129)])
def test_a_packed_product_is_the_plain_one(dtype, held, activation, has_bias, rows, out, into):
    weight, bias = made(dtype, out, into, has_bias=has_bias)
    x = torch.randn(rows, into, generator=torch.Generator().manual_seed(rows)).to(dtype)
    product = Product(weight, bias, activation=activation)
    exact = ACTIVATIONS[activation](F.linear(
        x.double(), weight.double(), None if bias is None else bias.double()))
    near = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    for is_packed in (False, True):
        if is_packed:
            product.pack(held)
            assert (product.weight is None) == is_packable(held)
        with torch.inference_mode():
            ours = product(x)
        assert ours.dtype == (held if is_packed else dtype) and product.shape == (out, into)
        torch.testing.assert_close(ours.double(), exact, **near)


def test_what_cannot_be_packed_stays_as_it_came():
    weight, _ = made(torch.float16, 8, 8, has_bias=False)
    product = Product(weight)
    product.pack(torch.float16)
    assert product.weight is weight and product.tensors == [weight]
    empty = Product(torch.empty(0, 8))  # a rank without a share of the vocabulary
    empty.pack(torch.float32)
    assert empty(torch.ones(3, 8)).shape == (3, 0)
