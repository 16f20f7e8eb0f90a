"""A layer's matrix products: torch's, oneDNN's, MKL's and our own, on weights packed once.

A weight is a view of the checkpoint until `pack` copies it into a library's blocked layout, which
saves that from doing it at every call. Measured (benchmarks/floor.py), oneDNN's bfloat16 on a Xeon
without AMX: 1.05 to 2.4 times as fast at 1 to 128 rows. A bfloat16 weight may be held as float32,
which some processors multiply twice as fast. Activations are then float32, so that nothing is
converted around a product."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from xgpt.core.errors import XgptError
from xrunner.ops import invariant
from xrunner.ops.cpu.products import (
    Int8Rows,
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
    "gelu_erf": F.gelu, "silu_mul": silu_mul}  # [T, 2 f], gate first, to [T, f]
# activation -> oneDNN's name and algorithm
_ONEDNN = {"relu": ("relu", ""), "gelu": ("gelu", "tanh"),
           "gelu_erf": ("gelu", "none")}
_MOVABLE = PairsWeight, Int8Rows
_EXACT = ("none", "relu", "silu_mul")  # of a row, whatever rows are beside it


class Product:
    """activation(x W^T + b), with one of ACTIVATIONS; [T, out / 2] with `silu_mul`."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *,
                 activation: str = "none") -> None:
        """`weight`: [out, in], `bias`: [out]."""
        assert activation in ACTIVATIONS, f"{activation = }"
        assert activation != "silu_mul" or len(weight) % 2 == 0, f"{weight.shape = }"
        self.weight: Tensor | None = weight
        self.bias, self._activation = bias, activation
        self.shape = tuple(weight.shape)
        self._packed: Tensor | None = None
        self._tile: int | None = None  # rows of a product for batch invariance
        self._other: Int8Rows | Int8Weight | MklWeight | PairsWeight | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors that it holds: the weight, then the bias if it has one."""
        held = [] if self._other is None else self._other.tensors
        return held + [t for t in (self.weight, self._packed, self.bias) if t is not None]

    def pack(self, dtype: torch.dtype) -> None:
        """Copies the weight as `dtype` into MKL's, oneDNN's or our layout, and frees the
        checkpoint's. Where none is supported, the weight is held as `dtype` in torch's layout."""
        weight = self.weight
        if weight is None:
            return
        self._pack_as(weight, dtype)
        if invariant.is_deterministic() and 0 not in weight.shape and not self._is_row_by_row:
            self._tile = invariant.tile_of(self._product, self.shape[1], activations_of(dtype))

    def pack_movable(self, dtype: torch.dtype, device_type: str) -> None:
        """Packs for computing on `device_type` in a layout that may lie anywhere: `movable` is its
        tensor, and `place` exchanges it. A weight on "meta" gets the layout alone. Raises XgptError
        if `run.deterministic` needs another layout."""
        assert self.weight is not None, "packed twice"
        self._pack_as(self.weight, dtype, movable_on=device_type)
        if invariant.is_deterministic() and not self._is_row_by_row:
            raise XgptError("run.deterministic: weights that do not stay on the device are not "
                            f"multiplied row by row as {str(dtype).removeprefix('torch.')} on this "
                            "processor; run without it, or with run.offload: off")

    @property
    def movable(self) -> Tensor:
        """The weight as `pack_movable` laid it out: panels, rows, or int8 codes."""
        held = self._other.movable if isinstance(self._other, _MOVABLE) else self.weight
        assert held is not None, "packed to stay"
        return held

    @property
    def scales(self) -> Tensor | None:
        """Scales [out] float32 of int8 codes; None for other weights."""
        return self._other.scales if isinstance(self._other, Int8Rows) else None

    def place(self, weight: Tensor, scales: Tensor | None = None) -> None:
        """Computes by `weight` from now on: `movable` at another place, "meta" for none. `scales`:
        those of int8 codes, where they were not known."""
        own = self.movable
        assert (weight.shape, weight.dtype) == (own.shape, own.dtype), f"{weight.shape = }"
        if not isinstance(self._other, _MOVABLE):
            self.weight = weight
            return
        self._other.movable = weight
        if isinstance(self._other, Int8Rows) and scales is not None:
            self._other.scales = scales

    @property
    def _is_gated(self) -> bool:
        """Whether one product with a gate is used, which has no bias."""
        return self._activation == "silu_mul" and self.bias is None

    @property
    def _is_row_by_row(self) -> bool:
        """Whether rows are summed in one order whatever is beside them, and the activation is
        exact."""
        return isinstance(self._other, _MOVABLE) and self._activation in _EXACT

    def _pack_as(self, weight: Tensor, dtype: torch.dtype, movable_on: str | None = None) -> None:
        is_int8, dtype = dtype == torch.int8, activations_of(dtype)
        if is_int8 and 0 not in weight.shape:
            self._other = Int8Weight(weight) if movable_on is None else Int8Rows(weight)
            self.weight = None
            self.bias = None if self.bias is None else self.bias.to(dtype)
            return
        self.weight = weight.to(dtype)
        self.bias = None if self.bias is None else self.bias.to(dtype)
        is_cpu = weight.is_cpu if movable_on is None else movable_on == "cpu"
        if is_cpu and dtype == torch.bfloat16 and 0 not in weight.shape and is_pairs_served():
            self._other = PairsWeight(self.weight, is_gated=self._is_gated)
            self.weight = None
            return
        if movable_on is not None:
            self.weight = self.weight.contiguous()
            return
        if not weight.is_cpu or not is_packable(dtype) or 0 in weight.shape:
            return
        # MKL has no activations; oneDNN applies them within the product
        is_mkl = self._activation not in _ONEDNN and not invariant.is_deterministic()
        if dtype == torch.float32 and is_mkl and is_mkl_served():
            self._other = MklWeight(self.weight)
        else:
            self._packed = _PACKED._reorder_linear_weight(self.weight.contiguous(), None)
        self.weight = None

    def __call__(self, x: Tensor) -> Tensor:
        """Output [T, out] of x [T, in], activation applied, of dtype `activations_of` the
        weight's."""
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
    """Dtype of a product's input and output for weights held as `weight_dtype`."""
    return torch.float32 if weight_dtype == torch.int8 else weight_dtype


def is_packable(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies by packed weights of `dtype` on this processor."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.float32:
        return True
    return dtype == torch.bfloat16 and bool(_PACKED._is_mkldnn_bf16_supported())
