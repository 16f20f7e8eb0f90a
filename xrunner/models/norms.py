"""Norms of hidden rows, and of the heads of queries and keys."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from xrunner.models.shard import Shard
from xrunner.models.weights import WeightSource
from xrunner.ops.residual import Residual
from xrunner.ops.rows import layer_norm, rms_norm


class Norm(NamedTuple):
    """weight [H]; with `bias` [H] a layer norm, else an RMS norm."""

    weight: Tensor
    bias: Tensor | None
    eps: float

    def __call__(self, rows: Tensor) -> Tensor:
        """rows [T, H] -> [T, H]"""
        if self.bias is None:
            return rms_norm(rows, self.weight, self.eps)
        return layer_norm(rows, self.weight, self.bias, self.eps)

    def of(self, hidden: Residual) -> Tensor:
        """The stream's rows [T, H], with what is still to be added to them."""
        if self.bias is None:
            return hidden.rms_norm(self.weight, self.eps)
        return hidden.layer_norm(self.weight, self.bias, self.eps)


def rms_weight(weights: WeightSource, name: str, size: int, *, adds_one: bool) -> Tensor:
    """[size]; `adds_one`: of a family that stores it less one."""
    weight = weights.get(f"{name}.weight", (size,))
    return weight + 1 if adds_one else weight


class HeadNorms:
    """RMS norms of queries and keys, before they are rotated: over each head alone, or over all
    heads of queries and all of keys, whichever rank of a group holds them."""

    def __init__(self, weight: Tensor, eps: float, *, over: tuple[int, int] | None = None,
                 sums: Callable[[Tensor], Tensor] | None = None) -> None:
        """weight [h + k, d]. `over`: the elements of all ranks' queries, and keys, that a norm is
        over; None: a head's own. `sums`: of a group's ranks; None: this one has all heads."""
        self.weight, self._eps, self._over, self._sums = weight, eps, over, sums

    def __call__(self, joint: Tensor, heads: int) -> Tensor:
        """joint [T, (h + 2 k) d], changed in place: its first `heads` are queries, then keys."""
        count, dim = self.weight.shape
        part = joint.view(len(joint), -1, dim)[:, :count]
        wide = part.float()
        squares = wide.square()
        if self._over is None:
            mean = squares.mean(-1, keepdim=True)
        else:
            sums = torch.stack([side.sum((1, 2)) for side in (
                squares[:, :heads], squares[:, heads:])], dim=1)
            if self._sums is not None:
                sums = self._sums(sums)
            # by numbers of the host: a tensor of them would make it wait for a GPU
            mean = torch.cat([(sums[:, side:side + 1] / over).expand(-1, width) for side, (
                over, width) in enumerate(zip(self._over, (heads, count - heads), strict=True))],
                dim=1)[:, :, None]
        part.copy_(wide * torch.rsqrt(mean + self._eps) * self.weight)
        return joint


def all_heads(weights: WeightSource, name: str, heads: int, dim: int, shard: Shard) -> Tensor:
    """This shard's part [h, d] of a weight over all `heads`."""
    part = shard.part(0, heads * dim)
    return weights.get(f"{name}.weight", (heads * dim,), part).view(-1, dim)
