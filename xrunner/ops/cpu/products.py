"""Matrix products on CPUs that torch lacks, each on weights packed once.

In 8-bit integers: weights by output channel, activations by token, both symmetric about zero, sums
exact in int32 (oneDNN, through torch): y[t, o] = scale[t] * scale[o] * sum_i (code[t, i] * code[o,
i]). This is "W8A8 with dynamic per-token activations", after LLM.int8() (arXiv:2208.07339, section
2.1) without separate outliers.

In bfloat16, for processors whose dot products of pairs are twice as fast as float32 (AMD's with
AVX512-BF16). oneDNN's reach that rate only with many rows; at 30 to 100 rows, a decode step's, two
thirds of it. Sums are in float32 and rounded once, as oneDNN's.

In float32 by MKL, for Intel's. Measured against oneDNN's packed weights: 0.75 of the time for one
row, 0.84 for 32 and 100, 0.88 for 190, 0.95 for 2,080 (two cores of a Xeon without AMX,
SmolLM2-135M). A packed weight reserves 8 to 10 MB of address space that are never touched."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from xrunner.ops.cpu.native import check, dtype_code, library, serves, threads

_ONEDNN = torch.ops.onednn
_ZERO = 128  # zero point of the activations' codes: processors multiply unsigned by signed bytes


def is_int8_served() -> bool:
    """Whether this processor multiplies bytes exactly (VNNI); others saturate sums at 16 bits."""
    return bool(torch.cpu._is_vnni_supported()) and (
        torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


class Int8Weight:
    """A weight as int8 codes [out, in], packed for oneDNN, with a scale for each output."""

    def __init__(self, weight: Tensor) -> None:
        """`weight`: [out, in]; neither size is 0."""
        codes, self.scales = _codes(weight)
        self.packed: Tensor = _ONEDNN.qlinear_prepack(codes, None)
        self._zeros = torch.zeros(len(codes), dtype=torch.int32)

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors that it holds."""
        return [self.packed, self.scales, self._zeros]

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x W^T + bias, [T, out] float32, of x [T, in] float32 or bfloat16; bias [out] float32."""
        codes, scales = quantise(x)
        sums: Tensor = _ONEDNN.qlinear_pointwise(
            codes, 1.0, _ZERO, self.packed, self.scales, self._zeros, None, 1.0, 0, torch.float32,
            "none", [], "")
        return rescale(sums, scales, bias)


class Int8Rows:
    """A weight as int8 codes [out, in] in rows that may lie anywhere; results are Int8Weight's."""

    def __init__(self, weight: Tensor) -> None:
        """`weight`: [out, in]; neither size is 0."""
        self.movable, self.scales = _codes(weight)

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors that it holds."""
        return [self.movable, self.scales]

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x W^T + bias, as of Int8Weight."""
        codes, scales = quantise(x)
        signed = (codes ^ _ZERO).view(torch.int8)  # codes - 128
        sums = torch._int_mm(signed, self.movable.t())
        return rescale(sums * self.scales, scales, bias)


def _codes(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [out, in] int8 and scales [out] float32 of a weight."""
    wide = weight.float()
    scales = (wide.abs().amax(dim=1) / 127).clamp_min_(torch.finfo(torch.float32).tiny)
    return (wide / scales[:, None]).round_().to(torch.int8), scales


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [T, K] uint8 and scales [T] float32 with x [T, K] near (codes - 128) * scale. A row
    with an infinity or NaN gets the scale NaN, so that its results are NaN."""
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
    """Multiplies each row of sums [T, N] float32 by its scale [T] and adds bias [N], in place."""
    lib = library()
    if lib is not None and serves(sums) and sums.is_contiguous():
        check(lib.xgpt_rescale_rows(sums.data_ptr(), scales.data_ptr(),
                                    None if bias is None else bias.data_ptr(), *sums.shape,
                                    threads()))
        return sums
    sums.mul_(scales[:, None])
    return sums if bias is None else sums.add_(bias)


PANEL = 48  # as in csrc/ops/cpu/pairs.cpp
_AT_ONCE = 16  # chosen: panels packed at a time, for which memory is needed twice


def is_pairs_served() -> bool:
    """Whether this processor has fast dot products of bfloat16 pairs, and native operators are
    used."""
    lib = library()
    return lib is not None and bool(lib.xgpt_has_pairs())


class PairsWeight:
    """A weight in panels [out / 48, in / 2, 48, 2]; a gated one's gate panels come first."""

    def __init__(self, weight: Tensor, *, is_gated: bool = False) -> None:
        """`weight`: [out, in] bfloat16, gate first; neither size is 0. `is_gated`: compute
        silu(first half) * second half of the product."""
        halves, inputs = weight.chunk(1 + is_gated), weight.shape[1]
        self._out, self._is_gated = len(halves[0]), is_gated
        pairs, panels = (inputs + 1) // 2, -(-self._out // PANEL)
        self.movable = weight.new_empty(len(halves) * panels, pairs, PANEL, 2)
        for half, own in zip(halves, torch.split(self.movable, panels), strict=True):
            pieces = torch.split(own, _AT_ONCE), torch.split(half, _AT_ONCE * PANEL)
            for some, rows in zip(*pieces, strict=True):
                whole = F.pad(rows, (0, inputs % 2, 0, -len(rows) % PANEL))
                some.copy_(whole.reshape(-1, PANEL, pairs, 2).transpose(1, 2))

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors that it holds."""
        return [self.movable]

    def __call__(self, x: Tensor, bias: Tensor | None = None, *, relu: bool = False) -> Tensor:
        """x W^T + bias, [T, out] bfloat16, of x [T, in]; bias [out] bfloat16. A gated weight, which
        has no bias, gives silu(gate) * up [T, out / 2], a panel at a time in a core's cache."""
        lib = library()
        assert lib is not None, "its products are native alone"
        x = x.to(torch.bfloat16).contiguous()
        out = x.new_empty(len(x), self._out)
        if self._is_gated:
            assert bias is None and not relu, f"{bias = } {relu = }"
            check(lib.xgpt_pairs_gated(out.data_ptr(), self.movable.data_ptr(), x.data_ptr(),
                                       *x.shape, self._out, threads()))
            return out
        check(lib.xgpt_pairs_product(
            out.data_ptr(), self.movable.data_ptr(), x.data_ptr(),
            None if bias is None else bias.data_ptr(), relu, *x.shape, self._out, threads()))
        return out


_MKL = torch.ops.mkl
# Rows that MKL packs for; other numbers of rows are right too (tried below). Measured: 256 is the
# fastest, or within 1 % of it, from 1 to 2,080 rows and 576 to 8,192 outputs. Packed for 64, 190
# rows take up to a quarter longer; packed for 2,048, all take up to twice as long.
_ROWS = 256


class MklWeight:
    """A weight in MKL's layout. NOTE: MKL's data may not be copied to another address."""

    def __init__(self, weight: Tensor) -> None:
        """`weight`: [out, in] float32; neither size is 0."""
        self.packed: Tensor = _MKL._mkl_reorder_linear_weight(weight.contiguous(), _ROWS)
        # torch reads its shape, and multiplies by it if the number of rows is not the one packed
        # for: the result would be NaN
        self._form = torch.tensor([torch.nan]).expand(weight.shape)

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors that it holds."""
        return [self.packed]

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x W^T + bias, [T, out] float32, of x [T, in]; bias [out] float32."""
        # the actual number of rows: torch would not use the packed weight for others
        result: Tensor = _MKL._mkl_linear(x.to(torch.float32), self.packed, self._form, bias,
                                          len(x))
        return result


@cache
def is_mkl_served() -> bool:
    """Whether torch has MKL, the processor is Intel's, and packed weights multiply any number of
    rows. The last is tried, since torch's own check is bypassed."""
    cpuinfo = Path("/proc/cpuinfo")
    if not (torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
            and hasattr(_MKL, "_mkl_linear") and cpuinfo.is_file()
            and "GenuineIntel" in cpuinfo.read_text(encoding="utf-8")):
        return False
    weight, x = torch.linspace(-1, 1, 33 * 65).view(65, 33).sin(), torch.linspace(-1, 1, 300 * 33)
    packed, x = MklWeight(weight), x.view(300, 33).cos()
    return all(torch.allclose(packed(x[:rows]), x[:rows] @ weight.T, rtol=1e-4, atol=1e-4)
               for rows in (1, 2, _ROWS - 1, _ROWS, 300))
