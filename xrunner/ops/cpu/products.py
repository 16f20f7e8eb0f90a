"""Matrix products of CPUs that torch does not have, each on weights laid out once.

In 8-bit integers: weights by output channel, activations by token, both
symmetric about zero, sums exact in int32 (oneDNN's products, through torch).

y[t, o] = scale[t] * scale[o] * sum_i (code[t, i] * code[o, i]): "W8A8 with dynamic per-token
activations", after LLM.int8() (arXiv:2208.07339, section 2.1) without its outliers kept apart.

In bfloat16, for processors on which dot products of pairs do twice what float32 products do (AMD's
with AVX512-BF16): oneDNN's reach that rate at many rows alone, at the 30 to 100 rows of a decode
step two thirds of it. Sums are in float32 and rounded once, as oneDNN's are.

In float32 by MKL, for Intel's: 0.75 of the time of oneDNN's packed weights for one row, 0.84 for 32
and 100, 0.88 for 190, 0.95 for 2,080 (two cores of a Xeon without AMX, SmolLM2-135M's products).
A packed weight has room for 8 to 10 MB more than MKL writes: address space, no page of which is
ever touched.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from xrunner.ops.cpu.native import check, dtype_code, library, serves, threads

_ONEDNN = torch.ops.onednn
_ZERO = 128  # of the activations' codes: processors multiply unsigned by signed bytes


def is_int8_served() -> bool:
    """Whether this processor multiplies bytes at once and exactly (VNNI); others saturate sums of
    two products at 16 bits."""
    return bool(torch.cpu._is_vnni_supported()) and (
        torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


class Int8Weight:
    """A weight as codes [out, in] of int8, laid out for oneDNN, and a scale for each output."""

    def __init__(self, weight: Tensor) -> None:
        """weight [out, in]; neither size is 0."""
        wide = weight.float()
        self.scales = (wide.abs().amax(dim=1) / 127).clamp_min_(torch.finfo(torch.float32).tiny)
        codes = (wide / self.scales[:, None]).round_().to(torch.int8)
        self.packed: Tensor = _ONEDNN.qlinear_prepack(codes, None)
        self._zeros = torch.zeros(len(codes), dtype=torch.int32)

    @property
    def tensors(self) -> list[Tensor]:
        """What it holds."""
        return [self.packed, self.scales, self._zeros]

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, in], float32 or bfloat16 -> x W^T + bias, [T, out] float32; bias [out] float32."""
        codes, scales = quantise(x)
        sums: Tensor = _ONEDNN.qlinear_pointwise(
            codes, 1.0, _ZERO, self.packed, self.scales, self._zeros, None, 1.0, 0, torch.float32,
            "none", [], "")
        return rescale(sums, scales, bias)


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, K] -> codes [T, K] uint8 and scales [T] float32: x is near (codes - 128) * scale. A row
    that holds an infinity or a NaN has the scale NaN, so that what is made of it is NaN."""
    lib = library()
    if lib is not None and serves(x) and x.is_contiguous():
        codes, scales = torch.empty_like(x, dtype=torch.uint8), x.new_empty(
            len(x), dtype=torch.float32)
        check(lib.xgpt_quantise_rows(dtype_code(x), codes.data_ptr(), scales.data_ptr(),
                                     x.data_ptr(), *x.shape, threads()))
        return codes, scales
    wide = x.float()
    scales = wide.abs().amax(dim=1) / 127
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    steps = (wide / scales[:, None]).nan_to_num(0.0)
    return (steps.round() + _ZERO).to(torch.uint8), scales


def rescale(sums: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """sums [T, N] float32, each row times its scale [T], + bias [N] float32; in place."""
    lib = library()
    if lib is not None and serves(sums) and sums.is_contiguous():
        check(lib.xgpt_rescale_rows(sums.data_ptr(), scales.data_ptr(),
                                    None if bias is None else bias.data_ptr(), *sums.shape,
                                    threads()))
        return sums
    sums.mul_(scales[:, None])
    return sums if bias is None else sums.add_(bias)


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
