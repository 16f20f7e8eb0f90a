"""Matrix products in 8-bit integers: weights by output channel, activations by token, both
symmetric about zero, sums exact in int32 (oneDNN's products, through torch).

y[t, o] = scale[t] * scale[o] * sum_i (code[t, i] * code[o, i]): "W8A8 with dynamic per-token
activations", after LLM.int8() (arXiv:2208.07339, section 2.1) without its outliers kept apart.
"""

import torch
from torch import Tensor

from xrunner.ops.native import check, dtype_code, library, serves, threads

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
