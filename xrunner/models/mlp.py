"""What a layer does to each row after attention: two products, gated or not, or experts'."""

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from xgpt.core.model import Experts
from xrunner.ops.linear import Product

# ModelSpec.activation -> of a gate
GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu, "gelu": F.gelu, "gelu_new": partial(F.gelu, approximate="tanh"),
    "relu": F.relu}


class Mlp(Protocol):
    """rows [T, H] -> this shard's partial sums [T, H]."""

    @property
    def products(self) -> tuple[Product, ...]: ...

    def __call__(self, rows: Tensor) -> Tensor: ...


class PlainMlp:
    """`up` [f, H], which ends with its activation, and `down` [H, f], of f columns of this
    shard."""

    def __init__(self, up: Product, down: Product) -> None:
        self.up, self.down = up, down

    @property
    def products(self) -> tuple[Product, ...]:
        return self.up, self.down

    def __call__(self, rows: Tensor) -> Tensor:
        return self.down(self.up(rows))


class GatedMlp:
    """`gate_up` [2 f, H], gate first, and `down` [H, f]: down(activation(gate) * up)."""

    def __init__(self, gate_up: Tensor, down: Product, activation: str) -> None:
        self.gate_up = Product(gate_up, activation="silu_mul" if activation == "silu" else "none")
        self.down, self._activation = down, activation

    @property
    def products(self) -> tuple[Product, ...]:
        return self.gate_up, self.down

    def __call__(self, rows: Tensor) -> Tensor:
        joint = self.gate_up(rows)
        if self._activation == "silu":  # the product's own
            return self.down(joint)
        gate, up = joint.chunk(2, dim=-1)
        return self.down(GATES[self._activation](gate) * up)


class Mixture:
    """A router [E, H], whole on every rank, and E gated MLPs, of each this shard's columns."""

    def __init__(self, router: Tensor, mlps: list[GatedMlp], experts: Experts) -> None:
        self.router, self.mlps, self._experts = router, mlps, experts

    @property
    def products(self) -> tuple[Product, ...]:
        return tuple(product for mlp in self.mlps for product in mlp.products)

    def __call__(self, rows: Tensor) -> Tensor:
        """Each row through its experts, weighted; an expert takes all of its rows at once."""
        shares = F.linear(rows, self.router.to(rows.dtype)).softmax(-1, dtype=torch.float)
        weights, chosen = shares.topk(self._experts.per_token, dim=-1)
        if self._experts.is_normed:
            weights = weights / weights.sum(-1, keepdim=True)
        # who goes to which: rows by expert, those of one after the other, in their own order
        experts, order = chosen.flatten().sort(stable=True)
        counts = experts.bincount(minlength=self._experts.count).tolist()
        out, first = torch.zeros_like(rows), 0
        for mlp, count in zip(self.mlps, counts, strict=True):
            if count:
                places = order[first:first + count]
                own = places // self._experts.per_token
                share = weights.view(-1)[places].to(rows.dtype)
                out.index_add_(0, own, mlp(rows[own]) * share[:, None])
                first += count
        return out
