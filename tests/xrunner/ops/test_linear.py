"""Products on packed weights are torch's, in every type and with every activation."""

import pytest
import torch
from torch.nn import functional as F

from xrunner.ops.linear import ACTIVATIONS, Product, is_packable

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
