"""Tensors in 4 bits: FlexGen's quantiser (arXiv:2303.06865, section 5). Groups of 64 elements along
one dimension share a scale and a minimum of 16 bits: 4.5 bits an element. A value is near code *
scale + minimum, at most (maximum - minimum) / 30 off.

The scale is bfloat16, cut off: rounded up it would err more; cut off, it leaves at most an eighth
of a step beyond the last code. The minimum is bfloat16 or (the scale's sign is set) float16,
whichever is nearer: exact for tensors of both types. A float32 minimum is rounded; its group must
differ by 2 % (8 % beyond float16's range) to keep the bound. Equal values that either type has are
exact. A group with an infinity or a NaN is unpacked as NaN."""

import ctypes
from collections.abc import Iterator, Sequence
from itertools import product
from math import prod

import torch
from torch import Tensor

from xrunner.ops.cpu import native

GROUP = 64  # elements, as FlexGen has them
_HALF = GROUP // 2
_FLOAT16, _NAN = -0x8000, 0x7FC0  # bits of a scale: its minimum is float16; it is NaN
_AT_ONCE, _AT_ONCE_GPU = 2**18, 2**24  # chosen: elements that torch has as float32 at a time
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NAMES = ", ".join(map(str, _DTYPES))


def packed_bytes(shape: Sequence[int], dim: int = -1) -> int:
    """Bytes of a tensor of `shape` when packed: 4.5 bits an element if 64 divides shape[dim]."""
    outer, size, inner = _sizes(shape, dim)
    return outer * -(-size // GROUP) * inner * (_HALF + 4)


def pack(tensor: Tensor, dim: int = -1, *, bits: int = 4) -> Tensor:
    """`tensor` as [packed_bytes] uint8: codes, scales, minima; groups along `dim`, the last one
    padded. Fewer `bits`, for comparison, save no byte. Raises ValueError for other types."""
    if tensor.dtype not in _DTYPES or not 1 <= bits <= 4:
        raise ValueError(f"{tensor.dtype} in {bits} bits: 1 to 4 bits can be packed of {_NAMES}")
    values = tensor.reshape(_sizes(tensor.shape, dim))
    packed = values.new_empty(packed_bytes(tensor.shape, dim), dtype=torch.uint8)
    if (lib := _library_for(values, values.shape[2] == 1)) is not None:
        native.check(lib.xgpt_pack_four_bits(
            native.dtype_code(values), packed.data_ptr(), values.data_ptr(), *values.shape[:2],
            2**bits - 1, native.threads()))
    else:
        pack_torch(values, packed, 2**bits - 1)
    return packed


def unpack(packed: Tensor, out: Tensor, dim: int = -1) -> Tensor:
    """Fills `out` (contiguous; of the shape packed, and any of three types) from `packed` and
    returns it; takes little memory besides. Raises ValueError for other sizes or types."""
    size = packed_bytes(out.shape, dim)
    is_whole = packed.dtype == torch.uint8 and packed.shape == (size,) and packed.is_contiguous()
    if not is_whole or packed.data_ptr() % 2 or out.dtype not in _DTYPES or not out.is_contiguous():
        raise ValueError(f"{list(packed.shape)} {packed.dtype} into {list(out.shape)} {out.dtype}: "
                         f"{size} bytes at an even address are unpacked along dimension {dim} into "
                         f"a contiguous tensor of {_NAMES}")
    values = out.view(_sizes(out.shape, dim))
    is_served = values.shape[2] == 1 or values.shape[2] % 16 == 0  # whole registers side by side
    if (lib := _library_for(values, is_served)) is not None:
        native.check(lib.xgpt_unpack_four_bits(
            native.dtype_code(values), out.data_ptr(), packed.data_ptr(), *values.shape,
            native.threads()))
    else:
        unpack_torch(packed, values)
    return out


def pack_torch(values: Tensor, packed: Tensor, top: int) -> None:
    """As `pack`, by torch, of values [outer, size, inner]; `top`: the largest code."""
    for outer, rows, codes, scales, minima in _pieces(values, packed):
        at = torch.arange(rows.start, rows.stop, device=values.device)
        x = values[outer].index_select(1, at.clamp_(max=values.shape[1] - 1)).float()
        x = x.view(*codes.shape[:2], GROUP, -1)
        low, high = (end + 0.0 for end in torch.aminmax(x, dim=2, keepdim=True))  # no -0
        spread, wide, narrow = high - low, low.bfloat16(), low.half()
        is_finite = spread.isfinite() & wide.isfinite()
        is_narrow = (narrow.float() - low).abs() < (wide.float() - low).abs()
        bits = ((spread / top).view(torch.int32) >> 16).to(torch.int16)
        scales.copy_(torch.where(is_narrow, bits | _FLOAT16, bits).where(is_finite, _NAN))
        bits = torch.where(is_narrow, narrow.view(torch.int16), wide.view(torch.int16))
        minima.copy_(bits.where(is_finite, 0))
        step, minimum = _decoded(scales, minima)
        x = ((x - minimum) / step.where(step != 0, 1.0)).clamp_(0, top).nan_to_num_(0)
        whole = x.round_().to(torch.uint8)
        codes.copy_(whole[:, :, :_HALF] | whole[:, :, _HALF:] << 4)


def unpack_torch(packed: Tensor, values: Tensor) -> None:
    """As `unpack`, by torch, into values [outer, size, inner]."""
    for outer, rows, codes, scales, minima in _pieces(values, packed):
        step, minimum = _decoded(scales, minima)
        x = (torch.cat([codes & 15, codes >> 4], 2) * step + minimum).flatten(1, 2)
        values[outer, rows].copy_(x[:, :values.shape[1] - rows.start])


def _decoded(scales: Tensor, minima: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima as float32."""
    wide, narrow = minima.view(torch.bfloat16).float(), minima.view(torch.float16).float()
    return (scales & ~_FLOAT16).view(torch.bfloat16).float(), wide.where(scales >= 0, narrow)


def _pieces(values: Tensor, packed: Tensor) -> Iterator[tuple[
        slice, slice, Tensor, Tensor, Tensor]]:
    """Small parts: outer and middle range; codes [.., groups, 32, inner]; bits of scales and minima
    [.., groups, 1, inner]. Byte i has element i of its group in its low half, 32 + i in the other.
    """
    outer, groups, inner = len(values), -(-values.shape[1] // GROUP), values.shape[2]
    parts = torch.split(packed, [outer * groups * inner * each for each in (_HALF, 2, 2)])
    codes, (scales, minima) = parts[0].view(outer, groups, _HALF, inner), (
        part.view(torch.int16).view(outer, groups, 1, inner) for part in parts[1:])
    few = max((_AT_ONCE if values.is_cpu else _AT_ONCE_GPU) // max(GROUP * inner, 1), 1)
    some = max(few // max(groups, 1), 1)
    for o, g in product(range(0, outer, some), range(0, groups, few)):
        at = slice(o, o + some), slice(g, min(g + few, groups))
        yield at[0], slice(g * GROUP, at[1].stop * GROUP), codes[at], scales[at], minima[at]


def _sizes(shape: Sequence[int], dim: int) -> tuple[int, int, int]:
    """A tensor's `shape` as [outer, size, inner] about its dimension `dim`."""
    return prod(shape[:dim]), shape[dim], prod(shape[dim % len(shape) + 1:])


def _library_for(values: Tensor, is_served: bool) -> ctypes.CDLL | None:
    """The native operators; None where their form, type or device is not served."""
    is_served = is_served and values.numel() > 0 and values.is_contiguous()
    return native.library() if is_served and native.serves(values) else None
