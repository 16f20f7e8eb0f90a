"""What a weight of fewer bits is made of in a checkpoint's files: tensors beside each other, whose
names begin alike. Free of torch but for annotations."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from xgpt.core.hf.quantised import Quantised

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]
SCALES = ("F16", "BF16", "F32")
WEIGHT = ".weight"

# safetensors' names of the types of plain weights; any other (F8_E4M3, I8, I32, ...) holds numbers
# that are no weights without their scales
PLAIN_TYPES = ("F64", "F32", "F16", "BF16")


class Stored(NamedTuple):
    """What a file says of a tensor; `type` by safetensors' names."""

    shape: Shape
    type: str

    @property
    def is_plain(self) -> bool:
        return self.type in PLAIN_TYPES


class Part(NamedTuple):
    """One of the tensors: how its name ends, its `shapes` (any of them), and its `types` by
    safetensors' names. `is_optional`: may be absent."""

    ending: str
    shapes: tuple[Shape, ...]
    types: tuple[str, ...]
    is_optional: bool = False


class Window(NamedTuple):
    """Outputs first .. last - 1 (rows) and inputs (columns) of a weight [outputs, inputs]."""

    rows: range
    columns: range


class Held(Protocol):
    """The tensors of one weight, in its file."""

    def has(self, ending: str) -> bool: ...

    def read(self, ending: str, rows: range | None = None,
             columns: range | None = None) -> Tensor:
        """The tensor, or those rows and columns of it, in memory."""
        ...


# Rows first .. last - 1 of a window as float32 [rows, columns]; counted from its first row.
Rows = Callable[[int, int], "Tensor"]


class Format(Protocol):
    """A way to store weights. Stateless: what differs between checkpoints is in `Quantised`."""

    @property
    def endings(self) -> tuple[str, ...]:
        """Of its tensors' names, any of which tells that a weight is stored so."""
        ...

    def parts(self, stored: Quantised, shape: Shape, has: Callable[[str], bool]) -> list[Part]:
        """Of a weight of this shape, which is [outputs, inputs]. Raises ValueError, in words, where
        no weight of this shape can be stored so."""
        ...

    def open(self, stored: Quantised, shape: Shape, held: Held, window: Window) -> Rows:
        """Reads what the window takes. Raises ValueError where the values cannot be right."""
        ...


def per(count: int, size: int) -> int:
    """Parts of `size` that hold `count`."""
    return -(-count // size)


def divided(count: int, unit: int, what: str) -> int:
    if count % unit:
        raise ValueError(f"its {count} {what} are no multiple of {unit}")
    return count // unit
