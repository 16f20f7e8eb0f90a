"""GGUF's types (Q4_K, Q8_0, ...), which the file states tensor by tensor; the package `gguf` widens
them (xrunner.checkpoint.gguf_file)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from xgpt.core.hf.quantised import Quantised
from xrunner.checkpoint.quantised.parts import Held, Part, Rows, Shape, Window

if TYPE_CHECKING:
    from torch import Tensor

# those that the package widens, but for the plain ones
TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "TQ1_0",
         "TQ2_0", "MXFP4", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M",
         "IQ4_NL", "IQ4_XS")


class Gguf:
    """One tensor, which is widened as it is read."""

    endings = ("weight",)

    def parts(self, stored: Quantised, shape: Shape, has: Callable[[str], bool]) -> list[Part]:
        return [Part("weight", (shape,), TYPES)]

    def open(self, stored: Quantised, shape: Shape, held: Held, window: Window) -> Rows:
        def rows(first: int, last: int) -> Tensor:
            own = range(window.rows.start + first, window.rows.start + last)
            return held.read("weight", own, window.columns)

        return rows
