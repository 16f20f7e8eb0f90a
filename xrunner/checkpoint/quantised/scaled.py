"""Weights stored one number an element, of 8 bits, beside scales of rectangles of them: fp8 (as
DeepSeek-V3 and Qwen3-FP8 publish it, or with one scale a weight), and compressed-tensors'
`float-quantized` and `int-quantized`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from xgpt.core.hf.quantised import Quantised
from xrunner.checkpoint.quantised.parts import SCALES, Held, Part, Rows, Shape, Window, divided, per

if TYPE_CHECKING:
    from torch import Tensor


class Scaled:
    """`weight` with `weight_scale` (`weight_scale_inv`: the same under DeepSeek's name), and with
    `weight_zero_point` where it has one."""

    endings = ("weight_scale", "weight_scale_inv", "weight_zero_point", "weight")

    def parts(self, stored: Quantised, shape: Shape, has: Callable[[str], bool]) -> list[Part]:
        shapes = scale_shapes(stored, shape)
        parts = [Part("weight", (shape,), ("I8",) if stored.kind == "int" else ("F8_E4M3",)),
                 Part(_scale(stored, has), shapes, SCALES)]
        if stored.has_zeros:
            parts.append(Part("weight_zero_point", shapes, ("I8",)))
        return parts

    def open(self, stored: Quantised, shape: Shape, held: Held, window: Window) -> Rows:
        values = held.read("weight", window.rows, window.columns)
        scales = Spread(held.read(_scale(stored, held.has)), stored, shape, window)
        zeros = None if not stored.has_zeros else Spread(
            held.read("weight_zero_point"), stored, shape, window)

        def rows(first: int, last: int) -> Tensor:
            taken = values[first:last].float()
            if zeros is not None:
                taken -= zeros(first, last)
            return taken * scales(first, last)

        return rows


def _scale(stored: Quantised, has: Callable[[str], bool]) -> str:
    is_deepseeks = has("weight_scale_inv") or stored.method == "fp8" and not has("weight_scale")
    return "weight_scale_inv" if is_deepseeks else "weight_scale"


def rectangle(stored: Quantised, shape: Shape) -> tuple[int, int]:
    """Outputs and inputs that share a scale."""
    outputs, inputs = shape
    if stored.is_per_tensor:
        return outputs, inputs
    return stored.block or (1, stored.group or inputs)


def scale_shapes(stored: Quantised, shape: Shape) -> tuple[Shape, ...]:
    """Of the scales of a weight of this shape; of one dimension less where that is 1. Raises
    ValueError where groups do not divide its inputs."""
    if stored.group is not None:
        divided(shape[1], stored.group, "inputs")
    rows, columns = (per(count, size) for count, size in zip(
        shape, rectangle(stored, shape), strict=True))
    if stored.is_per_tensor:
        return (), (1,), (1, 1)
    whole = (rows, columns)
    return (whole, (rows,)) if stored.group is None and stored.block is None else (whole,)


class Spread:
    """Scales or zero points, each on all the elements of a window that share it."""

    def __init__(self, held: Tensor, stored: Quantised, shape: Shape, window: Window) -> None:
        high, wide = rectangle(stored, shape)
        self._grid = held.float().reshape(per(shape[0], high), per(shape[1], wide))
        self._rows = [row // high for row in window.rows]
        self._columns = [column // wide for column in window.columns]

    def __call__(self, first: int, last: int) -> Tensor:
        """Of the window's rows first .. last - 1, float32 [rows, columns]."""
        return self._grid[self._rows[first:last]][:, self._columns]
