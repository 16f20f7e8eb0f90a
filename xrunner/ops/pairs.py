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

PANEL = 48  # of csrc/ops/cpu/pairs.cpp
_AT_ONCE = 16  # panels: what of a weight lies there a third time while it is laid out


def is_pairs_served() -> bool:
    """Whether this processor has such dot products at that rate, and native operators serve."""
    lib = library()
    return lib is not None and bool(lib.xgpt_has_pairs())


class PairsWeight:
    """A weight in panels [out / 48, in / 2, 48, 2]; of a gated one those of the gate, then those
    of what it gates."""

    def __init__(self, weight: Tensor, *, is_gated: bool = False) -> None:
        """weight [out, in] bfloat16, gate first; neither size is 0. `is_gated`: of the product,
        silu(its first half) times its second is wanted."""
        halves, inputs = weight.chunk(1 + is_gated), weight.shape[1]
        self._out, self._is_gated = len(halves[0]), is_gated
        pairs, panels = (inputs + 1) // 2, -(-self._out // PANEL)
        self.panels = weight.new_empty(len(halves) * panels, pairs, PANEL, 2)
        for half, own in zip(halves, torch.split(self.panels, panels), strict=True):
            pieces = torch.split(own, _AT_ONCE), torch.split(half, _AT_ONCE * PANEL)
            for some, rows in zip(*pieces, strict=True):
                whole = F.pad(rows, (0, inputs % 2, 0, -len(rows) % PANEL))
                some.copy_(whole.reshape(-1, PANEL, pairs, 2).transpose(1, 2))

    @property
    def tensors(self) -> list[Tensor]:
        """What it holds."""
        return [self.panels]

    def __call__(self, x: Tensor, bias: Tensor | None = None, *, relu: bool = False) -> Tensor:
        """x [T, in] -> x W^T + bias, [T, out] bfloat16; bias [out] bfloat16. Of a gated weight,
        which has no bias: silu(gate) * up [T, out / 2], one panel's gated while it is in a core's
        cache."""
        lib = library()
        assert lib is not None, "its products are native alone"
        x = x.to(torch.bfloat16).contiguous()
        out = x.new_empty(len(x), self._out)
        if self._is_gated:
            assert bias is None and not relu, f"{bias = } {relu = }"
            check(lib.xgpt_pairs_gated(out.data_ptr(), self.panels.data_ptr(), x.data_ptr(),
                                       *x.shape, self._out, threads()))
            return out
        check(lib.xgpt_pairs_product(
            out.data_ptr(), self.panels.data_ptr(), x.data_ptr(),
            None if bias is None else bias.data_ptr(), relu, *x.shape, self._out, threads()))
        return out
