"""Tensors packed in 4 bits an element, and unpacked again.

The quantiser is FlexGen's (arXiv:2303.06865, section 5). Groups of 64 elements along one dimension
share a scale and a minimum in 16 bits, so an element takes 4.5 bits. A value is near code * scale +
minimum, with codes 0 to 15. Two choices keep every error within a half step, (maximum - minimum) /
30 of its group.

The scale is bfloat16, which has float32's range. It is cut off, not rounded: a longer step would
err more. A shorter one leaves at most an eighth of a step beyond the last code. The minimum is
bfloat16 or float16, whichever is nearer, so that tensors of both types keep theirs exactly. The
scale's sign is set for float16. A float32 minimum is rounded; the bound then needs a group whose
values differ by 2 % (8 % beyond float16's range).

Equal values are exact if bfloat16 or float16 has them. A group with an infinity or a NaN is
unpacked as NaN: its scale is NaN."""

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

GROUP = 64  # elements, as FlexGen has them
_HALF = GROUP // 2
_FLOAT16, _NAN = -0x8000, 0x7FC0  # bits of a scale: its minimum is float16; it is NaN
_PIECE = 2**18  # chosen: elements that torch converts at a time, so that its float32 stays small
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def packed_bytes(shape: Sequence[int], dim: int = -1) -> int:
    """Bytes of a tensor of `shape` when packed: 4.5 bits an element if 64 divides shape[dim]."""
    form = _form(shape, dim)
    return form.outer * form.groups * form.inner * (_HALF + 4)


def pack(tensor: Tensor, dim: int = -1, *, bits: int = 4) -> Tensor:
    """`tensor` as [packed_bytes] uint8: codes, scales, minima. Groups lie along `dim`, the last one
    padded. With fewer `bits`, of as many bytes, codes have 2^bits values, for comparison. Raises
    ValueError for a tensor that is not float32, bfloat16 or float16."""
    form = _form(tensor.shape, dim)
    _check(tensor)
    if not 1 <= bits <= 4:
        raise ValueError(f"{bits} bits cannot be packed, only 1 to 4")
    packed = tensor.new_empty(packed_bytes(tensor.shape, dim), dtype=torch.uint8)
    pack_torch(tensor.reshape(form[:3]), packed, form, bits)
    return packed


def unpack(packed: Tensor, out: Tensor, dim: int = -1) -> Tensor:
    """Fills `out` (contiguous; of the shape packed, and any of three types) from `packed` and
    returns it. Takes no memory of `out`'s order. Raises ValueError if sizes do not match."""
    form, size = _form(out.shape, dim), packed_bytes(out.shape, dim)
    _check(out)
    if packed.dtype != torch.uint8 or packed.shape != (size,) or not packed.is_contiguous():
        raise ValueError(f"a tensor {list(out.shape)} is packed in {size} bytes along dimension "
                         f"{dim}, not in {list(packed.shape)} {packed.dtype}")
    if not out.is_contiguous():
        raise ValueError(f"a tensor {list(out.shape)} to unpack into must be contiguous")
    unpack_torch(packed, out.view(form[:3]), form)
    return out


class _Form(NamedTuple):
    """A tensor as [outer, size, inner], with `groups` groups along the middle."""

    outer: int
    size: int
    inner: int
    groups: int

    def parts(self, packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Codes [outer, groups, 32, inner] uint8 (element i of a group is in the low half of byte
        i, element 32 + i in the high half); bits of scales and minima [outer, groups, 1, inner]."""
        count = self.outer * self.groups * self.inner
        shape = (self.outer, self.groups, 1, self.inner)
        codes, scales, minima = torch.split(packed, [_HALF * count, 2 * count, 2 * count])
        return (codes.view(self.outer, self.groups, _HALF, self.inner),
                scales.view(torch.int16).view(shape), minima.view(torch.int16).view(shape))

    def pieces(self) -> Iterator[tuple[slice, slice]]:
        """Ranges of the outer dimension and of groups that make up the tensor, each small."""
        outer = max(_PIECE // max(self.groups * GROUP * self.inner, 1), 1)
        groups = max(_PIECE // max(GROUP * self.inner, 1), 1)
        for o in range(0, self.outer, outer):
            for g in range(0, self.groups, groups):
                yield slice(o, o + outer), slice(g, min(g + groups, self.groups))


def _form(shape: Sequence[int], dim: int) -> _Form:
    if not -len(shape) <= dim < len(shape):
        raise ValueError(f"a tensor {list(shape)} has no dimension {dim}")
    at = dim % len(shape)
    return _Form(prod(shape[:at]), shape[at], prod(shape[at + 1:]), -(-shape[at] // GROUP))


def _check(tensor: Tensor) -> None:
    if tensor.dtype not in _DTYPES:
        raise ValueError(f"a tensor of {tensor.dtype} cannot be packed, only of "
                         f"{', '.join(map(str, _DTYPES))}")


def pack_torch(values: Tensor, packed: Tensor, form: _Form, bits: int) -> None:
    """As `pack`, by torch, of values [outer, size, inner]."""
    codes, scales, minima = form.parts(packed)
    for outer, groups in form.pieces():
        rows = torch.arange(groups.start * GROUP, groups.stop * GROUP, device=values.device)
        x = values[outer].index_select(1, rows.clamp_(max=form.size - 1)).float()
        x = x.view(len(x), groups.stop - groups.start, GROUP, form.inner)
        low = x.amin(2, keepdim=True) + 0.0  # a zero without a sign
        spread, wide, narrow = x.amax(2, keepdim=True) - low, low.bfloat16(), low.half()
        is_finite = spread.isfinite() & wide.isfinite()
        is_narrow = is_finite & ((narrow.float() - low).abs() < (wide.float() - low).abs())
        scale = ((spread / (2**bits - 1)).view(torch.int32) >> 16).to(torch.int16)
        scales[outer, groups] = torch.where(
            is_finite, torch.where(is_narrow, scale | _FLOAT16, scale), _NAN)
        minima[outer, groups] = torch.where(is_finite, torch.where(
            is_narrow, narrow.view(torch.int16), wide.view(torch.int16)), 0)
        step, minimum = _decoded(scales[outer, groups], minima[outer, groups])
        x = ((x - minimum) / torch.where(step == 0, 1.0, step)).clamp_(0, 2**bits - 1)
        whole = x.nan_to_num_(0).round_().to(torch.uint8)
        codes[outer, groups] = whole[:, :, :_HALF] | whole[:, :, _HALF:] << 4


def unpack_torch(packed: Tensor, out: Tensor, form: _Form) -> None:
    """As `unpack`, by torch, into out [outer, size, inner]."""
    codes, scales, minima = form.parts(packed)
    for outer, groups in form.pieces():
        both, target = codes[outer, groups], out[outer, groups.start * GROUP:groups.stop * GROUP]
        step, minimum = _decoded(scales[outer, groups], minima[outer, groups])
        x = torch.cat([both & 15, both >> 4], 2) * step + minimum
        target.copy_(x.flatten(1, 2)[:, :target.shape[1]])


def _decoded(scales: Tensor, minima: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima as float32."""
    minimum = torch.where(scales < 0, minima.view(torch.float16).float(),
                          minima.view(torch.bfloat16).float())
    return (scales & ~_FLOAT16).view(torch.bfloat16).float(), minimum
