"""AWQ as AutoAWQ stores it (version `gemm`): transposed, [inputs, outputs], eight outputs of 4 bits
in a word. Within a word the outputs 0, 2, 4, 6, 1, 3, 5, 7 follow each other, as AutoAWQ's kernel
takes them out; zero points are packed alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from xgpt.core.hf.quantised import Quantised
from xrunner.checkpoint.quantised.packed import unpack, whole_units, widened, words_of
from xrunner.checkpoint.quantised.parts import SCALES, Held, Part, Rows, Shape, Window, divided, per

if TYPE_CHECKING:
    from torch import Tensor

_STORED_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_PLACES = tuple(_STORED_ORDER.index(output) for output in range(len(_STORED_ORDER)))


class Awq:
    """`qweight`, `qzeros` and `scales`; one of each a group of inputs but for the first."""

    endings = ("qweight", "qzeros", "scales")

    def parts(self, stored: Quantised, shape: Shape, has: Callable[[str], bool]) -> list[Part]:
        outputs, inputs = shape
        groups = divided(inputs, stored.group or inputs, "inputs")
        words = words_of(outputs, stored.bits, "outputs")
        return [Part("qweight", ((inputs, words),), ("I32",)),
                Part("qzeros", ((groups, words),), ("I32",)),
                Part("scales", ((groups, outputs),), SCALES)]

    def open(self, stored: Quantised, shape: Shape, held: Held, window: Window) -> Rows:
        group = stored.group or shape[1]
        around, words = whole_units(window.rows, stored.bits)
        groups = range(window.columns.start // group, per(window.columns.stop, group))
        packed = held.read("qweight", window.columns, words)
        scales = held.read("scales", groups, window.rows)
        zeros = _ordered(unpack(held.read("qzeros", groups, words), stored.bits))
        zeros = zeros[:, window.rows.start - around.start:]
        of_input = packed.new_tensor([column // group - groups.start for column in window.columns])

        def rows(first: int, last: int) -> Tensor:
            wanted = range(window.rows.start + first, window.rows.start + last)
            values, own = whole_units(wanted, stored.bits)
            taken = packed[:, own.start - words.start:own.stop - words.start]
            begin = wanted.start - values.start
            unpacked = _ordered(unpack(taken, stored.bits))[:, begin:begin + len(wanted)]
            return widened(unpacked, zeros[:, first:last][of_input],
                           scales[:, first:last][of_input]).T

        return rows


def _ordered(values: Tensor) -> Tensor:
    """[n, outputs] as they lie in words -> in their own order."""
    eights = values.reshape(len(values), values.shape[1] // len(_PLACES), len(_PLACES))
    return eights[..., list(_PLACES)].flatten(-2)
