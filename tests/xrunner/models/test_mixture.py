"""A mixture of experts gives each row what its experts give it, weighted, whoever they are: where
one expert has all rows or none, where every row has every expert, and of no rows."""

import pytest

torch = pytest.importorskip("torch", reason="the runner needs the extra `run`")

from xgpt.core.model import Experts  # noqa: E402
from xrunner.models.decoder import GatedMlp, Mixture  # noqa: E402
from xrunner.ops.linear import Product  # noqa: E402

HIDDEN, INNER, ROWS = 16, 24, 7


def weights_of(count: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(router [E, H], gate_up [E, 2 f, H], down [E, H, f])"""
    chance = torch.Generator().manual_seed(3)
    return tuple(torch.randn(shape, generator=chance).div(4).to(dtype) for shape in (
        (count, HIDDEN), (count, 2 * INNER, HIDDEN), (count, HIDDEN, INNER)))


def mixture_of(weights: tuple[torch.Tensor, ...], experts: Experts, *, packed: bool) -> Mixture:
    router, gate_up, down = weights
    mlps = [GatedMlp(own.clone(), Product(out.clone()), "silu")
            for own, out in zip(gate_up, down, strict=True)]
    mixture = Mixture(router, mlps, experts)
    for product in mixture.products if packed else ():
        product.pack(router.dtype)
    return mixture


def by_row(rows: torch.Tensor, weights: tuple[torch.Tensor, ...],
           experts: Experts) -> torch.Tensor:
    """In float64, one row and expert at a time."""
    router, gate_up, down = (own.double() for own in weights)
    out = torch.zeros(rows.shape, dtype=torch.double)
    for place, row in enumerate(rows.double()):
        shares = (router @ row).softmax(-1)
        chosen = shares.topk(experts.per_token).indices
        whole = shares[chosen].sum() if experts.is_normed else 1.0
        for expert in chosen:
            gate, up = (gate_up[expert] @ row).chunk(2)
            silu = torch.nn.functional.silu(gate)
            out[place] += shares[expert] / whole * (down[expert] @ (silu * up))
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_normed", [True, False])
@pytest.mark.parametrize(("count", "per_token"), [(1, 1), (4, 1), (4, 2), (4, 4), (9, 3)])
def test_every_row_gets_what_its_experts_give(count, per_token, is_normed, dtype):
    experts = Experts(count=count, per_token=per_token, inner=INNER, is_normed=is_normed)
    weights = weights_of(count, dtype)
    rows = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(5)).to(dtype)
    close = {"atol": 1e-5, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 0.03, "rtol": 0.03}
    for own in (rows, rows[:1], rows[:0], rows[:1].expand(ROWS, -1)):  # the last: all to the same
        for packed in (False, True):
            found = mixture_of(weights, experts, packed=packed)(own)
            assert found.shape == own.shape and found.dtype == dtype
            torch.testing.assert_close(found.double(), by_row(own, weights, experts), **close)
