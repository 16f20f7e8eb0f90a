"""Matrix products in bfloat16 by our own operator, for processors on which dot products of pairs do
twice what float32 products do (AMD's with AVX512-BF16): oneDNN's reach that rate at many rows
alone, at the 30 to 100 rows of a decode step two thirds of it.

Sums are in float32 and rounded once, as oneDNN's are.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from xrunner.ops.native import check, library, threads

PANEL = 48  # of csrc/pairs.cpp
_AT_ONCE = 16  # panels: what of a weight lies there a third time while it is laid out


def is_pairs_served() -> bool:
    """Whether this processor has such dot products at that rate, and native operators serve."""
    lib = library()
    return lib is not None and bool(lib.xgpt_has_pairs())


class PairsWeight:
    """A weight in panels [out / 48, in / 2, 48, 2]."""

    def __init__(self, weight: Tensor) -> None:
        """weight [out, in] bfloat16; neither size is 0."""
        self._out, inputs = weight.shape
        pairs = (inputs + 1) // 2
        self.panels = weight.new_empty(-(-self._out // PANEL), pairs, PANEL, 2)
        pieces = torch.split(self.panels, _AT_ONCE), torch.split(weight, _AT_ONCE * PANEL)
        for some, rows in zip(*pieces, strict=True):
            whole = F.pad(rows, (0, inputs % 2, 0, -len(rows) % PANEL))
            some.copy_(whole.reshape(-1, PANEL, pairs, 2).transpose(1, 2))

    @property
    def tensors(self) -> list[Tensor]:
        """What it holds."""
        return [self.panels]

    def __call__(self, x: Tensor, bias: Tensor | None = None, *, relu: bool = False) -> Tensor:
        """x [T, in] -> x W^T + bias, [T, out] bfloat16; bias [out] bfloat16."""
        lib = library()
        assert lib is not None, "its products are native alone"
        x = x.to(torch.bfloat16).contiguous()
        out = x.new_empty(len(x), self._out)
        check(lib.xgpt_pairs_product(
            out.data_ptr(), self.panels.data_ptr(), x.data_ptr(),
            None if bias is None else bias.data_ptr(), relu, *x.shape, self._out, threads()))
        return out
