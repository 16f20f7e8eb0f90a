"""Integers of a few bits, packed into words of 32: value i is at bit i * bits of its row, the
lowest bits of a word first. Where the bits do not divide 32 (3 of them), a value may lie in two
words.

GPTQ's 3 bits are stored so too: AutoGPTQ's three words for 32 values, with the values 10 and 21
in two of them, are the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xrunner.checkpoint.quantised.parts import Held, divided, per

if TYPE_CHECKING:
    from torch import Tensor

WORD_BITS = 32


def words_of(count: int, bits: int, what: str) -> int:
    """Words that hold so many values. Raises ValueError where they would not fill them."""
    unit = WORD_BITS // bits if WORD_BITS % bits == 0 else WORD_BITS
    return divided(count, unit, what) * unit * bits // WORD_BITS


def whole_units(wanted: range, bits: int) -> tuple[range, range]:
    """(values, words): the shortest range of values around `wanted` that begins and ends with a
    word, and its words."""
    unit = WORD_BITS // bits if WORD_BITS % bits == 0 else WORD_BITS
    first, last = wanted.start // unit, per(wanted.stop, unit)
    width = unit * bits // WORD_BITS
    return range(first * unit, last * unit), range(first * width, last * width)


def unpack(words: Tensor, bits: int) -> Tensor:
    """words [..., n] int32 -> their values [..., n * 32 / bits], each 0 .. 2 ** bits - 1, uint8."""
    import torch

    mask = 2 ** bits - 1
    if 8 % bits == 0:
        # a copy: one column of a transposed tensor is contiguous, and yet not for a view
        octets = words.new_empty(words.shape).copy_(words).view(torch.uint8)
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=words.device)
        values: Tensor = ((octets.unsqueeze(-1) >> shifts) & mask).flatten(-2)
        return values
    count = words.shape[-1] * WORD_BITS // bits
    begin = torch.arange(count, device=words.device) * bits
    wide = torch.nn.functional.pad(words.to(torch.int64) & 0xFFFFFFFF, (0, 1))
    pair = wide[..., begin // WORD_BITS] | wide[..., begin // WORD_BITS + 1] << WORD_BITS
    spanning: Tensor = (pair >> begin % WORD_BITS) & mask
    return spanning.to(torch.uint8)


def widened(values: Tensor, zeros: Tensor, scales: Tensor) -> Tensor:
    """(values - zeros) * scales as float32, where integers and products are exact."""
    return (values.float() - zeros.float()) * scales.float()


def groups_of(held: Held, ending: str, inputs: range, group: int, count: int) -> Tensor:
    """Of each input its group, of `count`: by the list of that name, or, without one, in order.
    Raises ValueError where the list names another."""
    import torch

    if not held.has(ending):
        return torch.tensor([place // group for place in inputs], dtype=torch.int64)
    groups = held.read(ending, inputs).to(torch.int64)
    if len(groups) and not 0 <= int(groups.min()) <= int(groups.max()) < count:
        raise ValueError(f"{ending} names the group {int(groups.max())} of {count}")
    return groups
