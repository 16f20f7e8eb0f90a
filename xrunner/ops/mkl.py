"""Float32 products by MKL on weights that it has laid out once, for Intel's processors.

Beside oneDNN's packed weights (two cores of an Intel Xeon without AMX, the products of
SmolLM2-135M): 0.75 of the time for one row, 0.84 for 32 and 100, 0.88 for 190, 0.95 for 2,080.

NOTE: a packed weight has room for more than MKL writes, 8 to 10 MB each: address space, of which
no page is ever touched. What is resident is no larger than the weights.
"""

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

_MKL = torch.ops.mkl
# MKL blocks for a product of so many rows, and any other number is right, too (tried below). 256
# was the quickest, or within 1 % of that, from 1 to 2,080 rows and 576 to 8,192 outputs; packed
# for 64, 190 rows took up to a quarter longer; packed for 2,048, all did up to twice as long.
_ROWS = 256


class MklWeight:
    """A weight in MKL's layout. NOTE: MKL's data may not be copied to another address."""

    def __init__(self, weight: Tensor) -> None:
        """weight [out, in] float32; neither size is 0."""
        self.packed: Tensor = _MKL._mkl_reorder_linear_weight(weight.contiguous(), _ROWS)
        # torch asks a weight for its shape, and multiplies by it where it was packed for another
        # number of rows than it is told: what came of that would be NaN
        self._form = torch.tensor([torch.nan]).expand(weight.shape)

    @property
    def tensors(self) -> list[Tensor]:
        """What it holds."""
        return [self.packed]

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, in] -> x W^T + bias, [T, out] float32; bias [out] float32."""
        # so many rows as there are: torch would not take the packed weight for others
        result: Tensor = _MKL._mkl_linear(x.to(torch.float32), self.packed, self._form, bias,
                                          len(x))
        return result


@cache
def is_mkl_served() -> bool:
    """Whether torch has MKL, this is a processor that it is made for, and a weight packed for one
    number of rows multiplies others: torch's own check is passed by, so that is tried."""
    cpuinfo = Path("/proc/cpuinfo")
    if not (torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
            and hasattr(_MKL, "_mkl_linear") and cpuinfo.is_file()
            and "GenuineIntel" in cpuinfo.read_text(encoding="utf-8")):
        return False
    weight, x = torch.linspace(-1, 1, 33 * 65).view(65, 33).sin(), torch.linspace(-1, 1, 300 * 33)
    packed, x = MklWeight(weight), x.view(300, 33).cos()
    return all(torch.allclose(packed(x[:rows]), x[:rows] @ weight.T, rtol=1e-4, atol=1e-4)
               for rows in (1, 2, _ROWS - 1, _ROWS, 300))
