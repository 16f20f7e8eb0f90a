"""GPTQ as AutoGPTQ and GPTQModel store it: transposed, [inputs, outputs], the inputs packed into
words. `g_idx` names each input's group, which is not its place where inputs were quantised in the
order of their activations (`desc_act`).

Zero points are packed along the outputs. The format `gptq` stores them less by one, and 0 as the
largest number, so that one is added without a carry; `gptq_v2` as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from xgpt.core.hf.quantised import Quantised
from xrunner.checkpoint.quantised.packed import (
    groups_of,
    unpack,
    whole_units,
    widened,
    words_of,
)
from xrunner.checkpoint.quantised.parts import SCALES, Held, Part, Rows, Shape, Window, per

if TYPE_CHECKING:
    from torch import Tensor


class Gptq:
    """`qweight`, `qzeros`, `scales` and `g_idx`, which may be absent where inputs are in order."""

    endings = ("qweight", "qzeros", "scales", "g_idx")

    def parts(self, stored: Quantised, shape: Shape, has: Callable[[str], bool]) -> list[Part]:
        outputs, inputs = shape
        groups = per(inputs, stored.group or inputs)
        return [Part("qweight", ((words_of(inputs, stored.bits, "inputs"), outputs),), ("I32",)),
                Part("qzeros", ((groups, words_of(outputs, stored.bits, "outputs")),), ("I32",)),
                Part("scales", ((groups, outputs),), SCALES),
                Part("g_idx", ((inputs,),), ("I32", "I64"), is_optional=not stored.is_ordered)]

    def open(self, stored: Quantised, shape: Shape, held: Held, window: Window) -> Rows:
        bits, group = stored.bits, stored.group or shape[1]
        inputs, words = whole_units(window.columns, bits)
        outputs, zero_words = whole_units(window.rows, bits)
        packed = held.read("qweight", words, window.rows)
        zeros = unpack(held.read("qzeros", None, zero_words), bits)
        zeros = (zeros + stored.zero_offset) & (2 ** bits - 1)
        zeros = zeros[:, window.rows.start - outputs.start:]
        scales = held.read("scales", None, window.rows)
        of_input = groups_of(held, "g_idx", window.columns, group, len(scales))

        def rows(first: int, last: int) -> Tensor:
            values = unpack(packed[:, first:last].T, bits)
            begin = window.columns.start - inputs.start
            return widened(values[:, begin:begin + len(window.columns)],
                           zeros[:, first:last].T[:, of_input],
                           scales[:, first:last].T[:, of_input])

        return rows
