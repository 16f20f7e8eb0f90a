"""Matrix products in float16, for Intel's processors that have AVX512-FP16 and no AMX, which
multiply twice as many of these as of float32: no library that torch brings uses that.

Rows of the weight and of the activations are divided by powers of two, so that a bfloat16 weight
is itself but for elements 100,000 times smaller than its row's largest; 32 products at a time are
summed in float16, so are six such sums, which cannot overflow, and these in float32. What comes
out is nearer to the exact product than one of bfloat16 is, which rounds inputs and outputs to 8
bits (tested).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from xrunner.ops.native import check, library, threads

PANEL = 64  # of csrc/product.cpp
_BLOCK = 4096  # outputs that are laid out at a time


def is_float16_served() -> bool:
    """Whether this processor, and the native operators here, have such products."""
    lib = library()
    return lib is not None and bool(lib.xgpt_has_float16())


class Float16Weight:
    """A weight as float16 in panels [out / 64, in, 64], and a scale for each output."""

    def __init__(self, weight: Tensor) -> None:
        """weight [out, in] of any float type; neither size is 0."""
        self._out, self._in = weight.shape
        panels = -(-self._out // PANEL)
        self.panels = torch.zeros(panels, self._in, PANEL, dtype=torch.float16)
        self.scales = torch.empty(self._out)
        for first in range(0, self._out, _BLOCK):
            wide = weight[first:first + _BLOCK].float()
            scales = power_of_two(wide.abs().amax(dim=1))
            self.scales[first:first + _BLOCK] = scales
            narrow = F.pad((wide / scales[:, None]).half(), (0, 0, 0, -len(wide) % PANEL))
            at = first // PANEL
            self.panels[at:at + len(narrow) // PANEL] = narrow.view(-1, PANEL, self._in).mT

    @property
    def tensors(self) -> list[Tensor]:
        """What it holds."""
        return [self.panels, self.scales]

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, in] -> x W^T + bias, [T, out] float32; bias [out] float32."""
        lib = library()
        assert lib is not None, "its products are native alone"
        x = x.to(torch.float32).contiguous()
        out = x.new_empty(len(x), self._out)
        check(lib.xgpt_float16_product(
            out.data_ptr(), self.panels.data_ptr(), self.scales.data_ptr(), x.data_ptr(),
            None if bias is None else bias.data_ptr(), len(x), self._in, self._out, threads()))
        return out


def power_of_two(largest: Tensor) -> Tensor:
    """By which each of `largest` >= 0 lies between 2 and 4; of a tiny one it stays below that."""
    exponents = torch.frexp(largest.clamp_min(2.0**-94)).exponent
    return torch.ldexp(torch.ones_like(largest), exponents - 2)
