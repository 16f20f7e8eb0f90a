"""Formats of quantised weights, a row each; `Quantised.format` (xgpt.core.hf.quantised) names one.

Integers of a few bits are packed into words of 32 bits: value i is at bit i * bits of its row, the
lowest bits of a word first. With 3 bits a value may lie in two words. AutoGPTQ's three words for 32
values, of which values 10 and 21 lie in two, are the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from xgpt.core.hf.quantised import Quantised
from xrunner.checkpoint.quantised.parts import (
    SCALES,
    WEIGHT,
    Format,
    Part,
    Rows,
    Shape,
    Stored,
    StoredTensors,
    Window,
    divide_evenly,
    num_parts,
)

if TYPE_CHECKING:
    from torch import Tensor


WORD_BITS = 32


def words_of(count: int, bits: int, what: str) -> int:
    """Number of words that hold `count` values. Raises ValueError if these do not fill them."""
    unit = WORD_BITS // bits if WORD_BITS % bits == 0 else WORD_BITS
    return divide_evenly(count, unit, what) * unit * bits // WORD_BITS


def whole_units(wanted: range, bits: int) -> tuple[range, range]:
    """(values, words): the shortest range around `wanted` that starts and ends with a word."""
    unit = WORD_BITS // bits if WORD_BITS % bits == 0 else WORD_BITS
    first, last = wanted.start // unit, num_parts(wanted.stop, unit)
    width = unit * bits // WORD_BITS
    return range(first * unit, last * unit), range(first * width, last * width)


def unpack(words: Tensor, bits: int) -> Tensor:
    """Values [..., n * 32 / bits] uint8, each 0 .. 2 ** bits - 1, of words [..., n] int32."""
    import torch

    mask = 2 ** bits - 1
    if 8 % bits == 0:
        # a copy, since a column of a transposed tensor is contiguous but not to a view
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
    """(values - zeros) * scales in float32, where integers and products are exact."""
    return (values.float() - zeros.float()) * scales.float()


def groups_of(held: StoredTensors, ending: str, inputs: range, group: int, count: int) -> Tensor:
    """Group of each input, of `count`: by the tensor `ending` or, without it, in order. Raises
    ValueError if the tensor names another group."""
    import torch

    if not held.has(ending):
        return torch.tensor([place // group for place in inputs], dtype=torch.int64)
    groups = held.read(ending, inputs).to(torch.int64)
    if len(groups) and not 0 <= int(groups.min()) <= int(groups.max()) < count:
        raise ValueError(f"{ending} names the group {int(groups.max())} of {count}")
    return groups


class Gptq:
    """The format of AutoGPTQ and GPTQModel: [inputs, outputs], inputs packed into words.

    `g_idx` names each input's group; it is not in order if inputs were quantised in the order of
    their activations (`desc_act`). Zero points are packed along the outputs. In `gptq` they are
    stored less one, 0 as the largest number, so that one is added without carry; in `gptq_v2` as
    they are.

    Tensors: `qweight`, `qzeros`, `scales` and `g_idx`, which may be absent if inputs are in
    order."""

    endings = ("qweight", "qzeros", "scales", "g_idx")

    def parts(self, stored: Quantised, shape: Shape, has: Callable[[str], bool]) -> list[Part]:
        outputs, inputs = shape
        groups = num_parts(inputs, stored.group or inputs)
        return [Part("qweight", ((words_of(inputs, stored.bits, "inputs"), outputs),), ("I32",)),
                Part("qzeros", ((groups, words_of(outputs, stored.bits, "outputs")),), ("I32",)),
                Part("scales", ((groups, outputs),), SCALES),
                Part("g_idx", ((inputs,),), ("I32", "I64"), is_optional=not stored.is_ordered)]

    def open(self, stored: Quantised, shape: Shape, held: StoredTensors, window: Window) -> Rows:
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


_STORED_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_PLACES = tuple(_STORED_ORDER.index(output) for output in range(len(_STORED_ORDER)))


class Awq:
    """AutoAWQ's format (version `gemm`): [inputs, outputs], eight 4-bit outputs a word, in the
    order 0, 2, 4, 6, 1, 3, 5, 7; zero points likewise. Tensors: `qweight`, and `qzeros` and
    `scales` with a row per group of inputs."""

    endings = ("qweight", "qzeros", "scales")

    def parts(self, stored: Quantised, shape: Shape, has: Callable[[str], bool]) -> list[Part]:
        outputs, inputs = shape
        groups = divide_evenly(inputs, stored.group or inputs, "inputs")
        words = words_of(outputs, stored.bits, "outputs")
        return [Part("qweight", ((inputs, words),), ("I32",)),
                Part("qzeros", ((groups, words),), ("I32",)),
                Part("scales", ((groups, outputs),), SCALES)]

    def open(self, stored: Quantised, shape: Shape, held: StoredTensors, window: Window) -> Rows:
        group = stored.group or shape[1]
        around, words = whole_units(window.rows, stored.bits)
        groups = range(window.columns.start // group, num_parts(window.columns.stop, group))
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
    """Values [n, outputs] in their own order, from their order within words."""
    eights = values.reshape(len(values), values.shape[1] // len(_PLACES), len(_PLACES))
    return eights[..., list(_PLACES)].flatten(-2)


class PackQuantized:
    """compressed-tensors' `pack-quantized`: [outputs, inputs], inputs packed, a row's last word
    padded.

    Values and zero points are stored plus half of their range; zero points are packed along the
    outputs, and the middle without them.

    Tensors: `weight_packed`, `weight_scale`, `weight_zero_point`, `weight_shape`, and
    `weight_g_idx` if inputs are grouped by a list."""

    endings = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape",
               "weight_g_idx")

    def parts(self, stored: Quantised, shape: Shape, has: Callable[[str], bool]) -> list[Part]:
        outputs, inputs = shape
        groups = divide_evenly(inputs, stored.group or inputs, "inputs")
        scales: tuple[Shape, ...] = ((outputs, groups),)
        if stored.is_per_tensor:
            scales = (), (1,), (1, 1)
        parts = [Part("weight_packed", ((outputs, num_parts(inputs * stored.bits, WORD_BITS)),),
                      ("I32",)),
                 Part("weight_scale", scales, SCALES),
                 Part("weight_shape", ((2,),), ("I64", "I32")),
                 Part("weight_g_idx", ((inputs,),), ("I32", "I64"),
                      is_optional=not stored.is_ordered)]
        if stored.has_zeros:
            rows = num_parts(outputs * stored.bits, WORD_BITS)
            parts.append(Part("weight_zero_point", ((rows, groups),), ("I32",)))
        return parts

    def open(self, stored: Quantised, shape: Shape, held: StoredTensors, window: Window) -> Rows:
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


def _zeros(stored: Quantised, held: StoredTensors, outputs: range) -> Tensor | None:
    """Zero points [outputs, groups]; None if all are the middle of the range."""
    if not stored.has_zeros:
        return None
    around, words = whole_units(outputs, stored.bits)
    begin = outputs.start - around.start
    zeros = unpack(held.read("weight_zero_point", words).T, stored.bits)
    return zeros[:, begin:begin + len(outputs)].T


class Scaled:
    """Formats of 8-bit elements with scales of rectangles of them.

    fp8 (of DeepSeek-V3 and Qwen3-FP8, or with one scale per weight), `float-quantized` and
    `int-quantized`. Tensors: `weight`, `weight_scale` (DeepSeek's name: `weight_scale_inv`), and
    `weight_zero_point` if there are zero points."""

    endings = ("weight_scale", "weight_scale_inv", "weight_zero_point", "weight")

    def parts(self, stored: Quantised, shape: Shape, has: Callable[[str], bool]) -> list[Part]:
        shapes = scale_shapes(stored, shape)
        parts = [Part("weight", (shape,), ("I8",) if stored.kind == "int" else ("F8_E4M3",)),
                 Part(_scale(stored, has), shapes, SCALES)]
        if stored.has_zeros:
            parts.append(Part("weight_zero_point", shapes, ("I8",)))
        return parts

    def open(self, stored: Quantised, shape: Shape, held: StoredTensors, window: Window) -> Rows:
        values = held.read("weight", window.rows, window.columns)
        scales = SpreadScales(held.read(_scale(stored, held.has)), stored, shape, window)
        zeros = None if not stored.has_zeros else SpreadScales(
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
    """Numbers of outputs and inputs that share a scale."""
    outputs, inputs = shape
    if stored.is_per_tensor:
        return outputs, inputs
    return stored.block or (1, stored.group or inputs)


def scale_shapes(stored: Quantised, shape: Shape) -> tuple[Shape, ...]:
    """Allowed shapes of the scales of a weight; a dimension of size 1 may be left out. Raises
    ValueError if groups do not divide its inputs."""
    if stored.group is not None:
        divide_evenly(shape[1], stored.group, "inputs")
    rows, columns = (num_parts(count, size) for count, size in zip(
        shape, rectangle(stored, shape), strict=True))
    if stored.is_per_tensor:
        return (), (1,), (1, 1)
    whole = (rows, columns)
    return (whole, (rows,)) if stored.group is None and stored.block is None else (whole,)


class SpreadScales:
    """Scales or zero points, each repeated for all elements of a window that share it."""

    def __init__(self, held: Tensor, stored: Quantised, shape: Shape, window: Window) -> None:
        high, wide = rectangle(stored, shape)
        self._grid = held.float().reshape(num_parts(shape[0], high), num_parts(shape[1], wide))
        self._rows = [row // high for row in window.rows]
        self._columns = [column // wide for column in window.columns]

    def __call__(self, first: int, last: int) -> Tensor:
        """Values for the window's rows first .. last - 1, float32 [rows, columns]."""
        return self._grid[self._rows[first:last]][:, self._columns]


# types that the package widens, without plain ones
TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "TQ1_0",
         "TQ2_0", "MXFP4", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M",
         "IQ4_NL", "IQ4_XS")


class Gguf:
    """GGUF: one tensor, which the package `gguf` widens (xrunner.checkpoint.gguf_file)."""

    endings = ("weight",)

    def parts(self, stored: Quantised, shape: Shape, has: Callable[[str], bool]) -> list[Part]:
        return [Part("weight", (shape,), TYPES)]

    def open(self, stored: Quantised, shape: Shape, held: StoredTensors, window: Window) -> Rows:
        def rows(first: int, last: int) -> Tensor:
            own = range(window.rows.start + first, window.rows.start + last)
            return held.read("weight", own, window.columns)

        return rows


FORMATS: Mapping[str, Format] = {
    "awq": Awq(), "gptq": Gptq(), "pack-quantized": PackQuantized(), "scaled": Scaled(),
    "gguf": Gguf()}
# tensors of quantised activations and caches, which this runner does not quantise
UNUSED = (".input_scale", ".output_scale", ".k_scale", ".v_scale", ".input_zero_point",
          ".activation_scale")


def parts_of(quantised: Quantised, name: str, shape: Shape,
             find: Callable[[str], Stored | None]) -> dict[str, Part] | None:
    """Tensors in which the weight `name` is stored, by name; None if it is plain or missing.
    `find`: a tensor's entry in its file. Raises ValueError if no weight of this shape can be stored
    so."""
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
    """Yields (tensor, what is required, what was found or None) of missing or wrong tensors."""
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
