"""compressed-tensors' `pack-quantized`: [outputs, inputs], the inputs packed into words, a row's
last one filled up. Values are stored more by half of their range, as are zero points, which are
packed along the outputs; without zero points 0 is the middle."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from xgpt.core.hf.quantised import Quantised
from xrunner.checkpoint.quantised.packed import (
    WORD_BITS,
    groups_of,
    unpack,
    whole_units,
    widened,
)
from xrunner.checkpoint.quantised.parts import SCALES, Held, Part, Rows, Shape, Window, divided, per

if TYPE_CHECKING:
    from torch import Tensor


class PackQuantized:
    """`weight_packed`, `weight_scale` and `weight_zero_point`; `weight_shape`, and `weight_g_idx`
    where inputs are in groups by a list."""

    endings = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape",
               "weight_g_idx")

    def parts(self, stored: Quantised, shape: Shape, has: Callable[[str], bool]) -> list[Part]:
        outputs, inputs = shape
        groups = divided(inputs, stored.group or inputs, "inputs")
        scales: tuple[Shape, ...] = ((outputs, groups),)
        if stored.is_per_tensor:
            scales = (), (1,), (1, 1)
        parts = [Part("weight_packed", ((outputs, per(inputs * stored.bits, WORD_BITS)),),
                      ("I32",)),
                 Part("weight_scale", scales, SCALES),
                 Part("weight_shape", ((2,),), ("I64", "I32")),
                 Part("weight_g_idx", ((inputs,),), ("I32", "I64"),
                      is_optional=not stored.is_ordered)]
        if stored.has_zeros:
            rows = per(outputs * stored.bits, WORD_BITS)
            parts.append(Part("weight_zero_point", ((rows, groups),), ("I32",)))
        return parts

    def open(self, stored: Quantised, shape: Shape, held: Held, window: Window) -> Rows:
        if (own := tuple(held.read("weight_shape").tolist())) != shape:
            raise ValueError(f"weight_shape says {list(own)}; by config.json it is {list(shape)}")
        bits, group = stored.bits, stored.group or shape[1]
        inputs, words = whole_units(window.columns, bits)
        packed = held.read("weight_packed", window.rows, words)
        scales = (held.read("weight_scale").reshape(1, 1).expand(len(window.rows), 1)
                  if stored.is_per_tensor else held.read("weight_scale", window.rows))
        zeros = _zeros(stored, held, window.rows)
        of_input = groups_of(held, "weight_g_idx", window.columns, group, scales.shape[1])
        begin = window.columns.start - inputs.start

        def rows(first: int, last: int) -> Tensor:
            values = unpack(packed[first:last], bits)[:, begin:begin + len(window.columns)]
            middle = scales.new_tensor(2 ** (bits - 1))
            return widened(values, middle if zeros is None else zeros[first:last][:, of_input],
                           scales[first:last][:, of_input])

        return rows


def _zeros(stored: Quantised, held: Held, outputs: range) -> Tensor | None:
    """[outputs, groups]; None where all are the middle of the range."""
    if not stored.has_zeros:
        return None
    around, words = whole_units(outputs, stored.bits)
    begin = outputs.start - around.start
    zeros = unpack(held.read("weight_zero_point", words).T, stored.bits)
    return zeros[:, begin:begin + len(outputs)].T
