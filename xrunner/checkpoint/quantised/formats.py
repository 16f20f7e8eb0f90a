"""The ways to store weights of fewer bits that are read: a row each. A row's config is read by
xgpt.core.hf_quantised, whose `Quantised.format` names it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from xgpt.core.hf_quantised import Quantised
from xrunner.checkpoint.quantised.packed import Awq, Gptq, PackQuantized
from xrunner.checkpoint.quantised.parts import (
    SCALES,
    WEIGHT,
    Format,
    Held,
    Part,
    Rows,
    Shape,
    Stored,
    Window,
    divided,
    per,
)

if TYPE_CHECKING:
    from torch import Tensor


class Scaled:
    """One number of 8 bits an element beside scales of rectangles of them: fp8 (as DeepSeek-V3 and
    Qwen3-FP8 publish it, or with one scale a weight), `float-quantized` and `int-quantized`.

    `weight` with `weight_scale` (`weight_scale_inv`: the same under DeepSeek's name), and with
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


# those that the package widens, but for the plain ones
TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "TQ1_0",
         "TQ2_0", "MXFP4", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M",
         "IQ4_NL", "IQ4_XS")


class Gguf:
    """One tensor, which the package `gguf` widens as it is read (xrunner.checkpoint.gguf_file)."""

    endings = ("weight",)

    def parts(self, stored: Quantised, shape: Shape, has: Callable[[str], bool]) -> list[Part]:
        return [Part("weight", (shape,), TYPES)]

    def open(self, stored: Quantised, shape: Shape, held: Held, window: Window) -> Rows:
        def rows(first: int, last: int) -> Tensor:
            own = range(window.rows.start + first, window.rows.start + last)
            return held.read("weight", own, window.columns)

        return rows


FORMATS: Mapping[str, Format] = {
    "awq": Awq(), "gptq": Gptq(), "pack-quantized": PackQuantized(), "scaled": Scaled(),
    "gguf": Gguf()}
# Of activations and caches, where a method quantises them, too: ours are not, and nothing takes
# these.
UNUSED = (".input_scale", ".output_scale", ".k_scale", ".v_scale", ".input_zero_point",
          ".activation_scale")


def parts_of(quantised: Quantised, name: str, shape: Shape,
             find: Callable[[str], Stored | None]) -> dict[str, Part] | None:
    """The tensors in which the weight `name` is stored, by their names; None where it is stored
    plainly, or not at all. `find`: what a tensor's file says of it. Raises ValueError where no such
    shape can be stored so."""
    if len(shape) != 2 or not name.endswith(WEIGHT):
        return None
    form, module = FORMATS[quantised.format], name.removesuffix(WEIGHT)
    own = find(name)
    if own is not None and own.is_plain or not any(
            find(f"{module}.{ending}") for ending in form.endings):
        return None
    return {f"{module}.{part.ending}": part for part in form.parts(
        quantised, shape, lambda ending: find(f"{module}.{ending}") is not None)}


def misfits(parts: Mapping[str, Part], quantised: Quantised,
            find: Callable[[str], Stored | None]) -> Iterator[tuple[str, str, object]]:
    """(tensor, what it should be, what it is instead or None) of each that is missing or wrong."""
    for name, part in parts.items():
        found, shapes = find(name), " or ".join(str(list(shape)) for shape in part.shapes)
        if found is None:
            if not part.is_optional:
                yield name, (f"the weights hold no such tensor; {quantised.method} stores one of "
                             f"shape {shapes} beside the weight's others"), None
        elif found.shape not in part.shapes:
            yield name, f"stored as {quantised}, as config.json says, its shape is {shapes}", (
                list(found.shape))
        elif found.type not in part.types:
            yield name, (f"stored as {quantised}, as config.json says, it is of "
                         f"{' or '.join(part.types)}"), found.type
