"""A layer's matrix products: torch's, oneDNN's, MKL's and our own, on weights laid out once for the
processor.

A weight is a view of the checkpoint until `pack` copies it into a library's own blocked layout,
which spares that from doing it at every call (benchmarks/floor.py measures all; oneDNN's bfloat16
on an Intel Xeon without AMX: 1.05 to 2.4 times as quick at 1 to 128 rows).
A bfloat16 weight may be kept as float32, which some processors multiply twice as fast. Activations
are float32 then, so that nothing is widened before a product or rounded after it.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from xrunner.ops import invariant
from xrunner.ops.cpu.products import (
    Int8Weight,
    MklWeight,
    PairsWeight,
    is_mkl_served,
    is_pairs_served,
)
from xrunner.ops.rows import silu_mul

_PACKED = torch.ops.mkldnn
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x, "relu": F.relu, "gelu": partial(F.gelu, approximate="tanh"),
    "gelu_erf": F.gelu, "silu_mul": silu_mul}  # [T, 2 f], gate first, -> [T, f]: halves of the rest
# -> oneDNN's name, and its algorithm
_ONEDNN = {"relu": ("relu", ""), "gelu": ("gelu", "tanh"),
           "gelu_erf": ("gelu", "none")}
_EXACT = ("none", "relu", "silu_mul")  # of a row, whatever rows are beside it


class Product:
    """y = x W^T + b, then `activation`: one of ACTIVATIONS. Of `silu_mul` y is [T, out / 2]."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *,
                 activation: str = "none") -> None:
        """weight [out, in], bias [out]."""
        assert activation in ACTIVATIONS, f"{activation = }"
        assert activation != "silu_mul" or len(weight) % 2 == 0, f"{weight.shape = }"
        self.weight: Tensor | None = weight
        self.bias, self._activation = bias, activation
        self.shape = tuple(weight.shape)
        self._packed: Tensor | None = None
        self._tile: int | None = None  # rows of a product, where batches must not matter
        self._other: Int8Weight | MklWeight | PairsWeight | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """What it holds: weight, then bias if it has one."""
        held = [] if self._other is None else self._other.tensors
        return held + [t for t in (self.weight, self._packed, self.bias) if t is not None]

    def pack(self, dtype: torch.dtype) -> None:
        """Copies the weight, as `dtype`, into MKL's or oneDNN's layout where one serves, and lets
        go of the checkpoint's; elsewhere it is held as `dtype` in torch's."""
        weight = self.weight
        if weight is None:
            return
        self._lay_out(weight, dtype)
        if invariant.is_asked() and 0 not in weight.shape and not self._is_row_by_row:
            self._tile = invariant.tile_of(self._product, self.shape[1], activations_of(dtype))

    @property
    def _is_gated(self) -> bool:
        """Whether it is one with what gates it: a bias is beyond that."""
        return self._activation == "silu_mul" and self.bias is None

    @property
    def _is_row_by_row(self) -> bool:
        """Whether the sums of a row are those of our own products, in one order whatever is
        computed beside it (tested), and what follows them is exact."""
        return isinstance(self._other, PairsWeight) and self._activation in _EXACT

    def _lay_out(self, weight: Tensor, dtype: torch.dtype) -> None:
        is_int8, dtype = dtype == torch.int8, activations_of(dtype)
        if is_int8 and 0 not in weight.shape:
            self._other, self.weight = Int8Weight(weight), None
            self.bias = None if self.bias is None else self.bias.to(dtype)
            return
        self.weight = weight.to(dtype)
        self.bias = None if self.bias is None else self.bias.to(dtype)
        if weight.is_cpu and dtype == torch.bfloat16 and 0 not in weight.shape and (
                is_pairs_served()):
            self._other = PairsWeight(self.weight, is_gated=self._is_gated)
            self.weight = None
            return
        if not weight.is_cpu or not is_packable(dtype) or 0 in weight.shape:
            return
        # MKL has no activations; oneDNN does them in the product's pass
        is_mkl = self._activation not in _ONEDNN and not invariant.is_asked()
        if dtype == torch.float32 and is_mkl and is_mkl_served():
            self._other = MklWeight(self.weight)
        else:
            self._packed = _PACKED._reorder_linear_weight(self.weight.contiguous(), None)
        self.weight = None

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, out], or what the activation makes of it, of the dtype that
        `activations_of` gives the held weight's."""
        return self._product(x) if self._tile is None else invariant.in_tiles(
            self._product, x, self._tile)

    def _product(self, x: Tensor) -> Tensor:
        if isinstance(self._other, PairsWeight) and (self._activation == "relu" or self._is_gated):
            return self._other(x, self.bias, relu=not self._is_gated)
        if self._other is not None:
            return ACTIVATIONS[self._activation](self._other(x, self.bias))
        if self._packed is None:
            assert self.weight is not None
            out = F.linear(x.to(self.weight.dtype), self.weight, self.bias)
            return ACTIVATIONS[self._activation](out)
        name, algorithm = _ONEDNN.get(self._activation, ("none", ""))
        result: Tensor = _PACKED._linear_pointwise(
            x.to(self._packed.dtype), self._packed, self.bias, name, [], algorithm)
        return result if self._activation in _ONEDNN else ACTIVATIONS[self._activation](result)


def activations_of(weight_dtype: torch.dtype) -> torch.dtype:
    """The type of what a product takes and gives where weights are held as `weight_dtype`."""
    return torch.float32 if weight_dtype == torch.int8 else weight_dtype


def is_packable(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies by packed weights of `dtype` on this processor."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.float32:
        return True
    return dtype == torch.bfloat16 and bool(_PACKED._is_mkldnn_bf16_supported())
