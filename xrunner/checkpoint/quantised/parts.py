"""Parts of a quantised weight in a checkpoint: tensors whose names begin alike; free of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from xgpt.core.hf.quantised import Quantised

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]
SCALES = ("F16", "BF16", "F32")
WEIGHT = ".weight"

# types of plain weights by safetensors' names; others (F8_E4M3, I8, I32, ...) need scales
PLAIN_TYPES = ("F64", "F32", "F16", "BF16")


class Stored(NamedTuple):
    """A file's entry of a tensor; `type` by safetensors' name."""

    shape: Shape
    type: str

    @property
    def is_plain(self) -> bool:
        return self.type in PLAIN_TYPES


class Part(NamedTuple):
    """One tensor of a weight: ending of its name, allowed `shapes` and `types` (safetensors'
    names)."""

    ending: str
    shapes: tuple[Shape, ...]
    types: tuple[str, ...]
    is_optional: bool = False


class Window(NamedTuple):
    """A part of a weight [outputs, inputs]: ranges of outputs (rows) and inputs (columns)."""

    rows: range
    columns: range


class StoredTensors(Protocol):
    """Reads the tensors of one weight from its file."""

    def has(self, ending: str) -> bool: ...

    def read(self, ending: str, rows: range | None = None,
             columns: range | None = None) -> Tensor:
        """The tensor, or these rows and columns of it, in memory."""
        ...


# float32 [rows, columns] of a window's rows first .. last - 1, counted from its first row
Rows = Callable[[int, int], "Tensor"]


class Format(Protocol):
    """A format of weights. Stateless: checkpoints differ in `Quantised`."""

    @property
    def endings(self) -> tuple[str, ...]:
        """Endings of its tensors' names; any of them shows that a weight has this format."""
        ...

    def parts(self, stored: Quantised, shape: Shape, has: Callable[[str], bool]) -> list[Part]:
        """Parts of a weight of shape [outputs, inputs]. Raises ValueError, in words, if no such
        weight can be stored so."""
        ...

    def open(self, stored: Quantised, shape: Shape, held: StoredTensors, window: Window) -> Rows:
        """Reads the window, and returns a function of its rows. Raises ValueError for wrong
        values."""
        ...


def num_parts(count: int, size: int) -> int:
    """Number of parts of `size` that hold `count` elements."""
    return -(-count // size)


def divide_evenly(count: int, unit: int, what: str) -> int:
    """count / unit. Raises ValueError, naming `what`, if it is no whole number."""
    if count % unit:
        raise ValueError(f"its {count} {what} are no multiple of {unit}")
    return count // unit
