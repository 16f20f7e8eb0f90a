"""Reads a Hugging Face checkpoint folder, one tensor at a time. A rank opens every file it needs
but copies only its stage's tensors, and of those only its rows or columns. So no rank ever holds
the whole model. Quantised weights are widened on the way, some rows at a time."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from xgpt.core.errors import XgptError
from xgpt.core.hf.quantised import Quantised, quantised_of
from xgpt.core.hf.values import load_json, wrong_file
from xrunner.checkpoint.gguf_file import GgufFile
from xrunner.checkpoint.quantised.formats import FORMATS, misfits, parts_of
from xrunner.checkpoint.quantised.parts import WEIGHT, Part, Stored, Window
from xrunner.checkpoint.source import shape_to_make
from xrunner.checkpoint.tensors import NO_WEIGHTS, locate, pickled, serving_file, stored_of
from xrunner.models.weights import RandomWeights, TensorPart


class TensorFiles:
    """safetensors (single or sharded), or PyTorch's own files. `bytes_read`: bytes of tensors
    read."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.bytes_read = directory, 0
        self.places = _index(directory)
        self._open: dict[Path, Any] = {}

    def __len__(self) -> int:
        return len(self.places)

    def find(self, name: str) -> Stored | None:
        """The file's entry of the tensor; None if there is none. Raises InputError if the index
        names a file that lacks it."""
        if (place := locate(name, self.places)) is None:
            return None
        handle = self._handle(self.places[place])
        try:
            held = handle[place] if isinstance(handle, dict) else handle.get_slice(place)
        except (KeyError, SafetensorError):
            raise wrong_file(self.places[place], f"no tensor {place!r} there, but the index says "
                             "so") from None
        if isinstance(handle, dict):
            return stored_of(held)
        return Stored(tuple(held.get_shape()), held.get_dtype())

    def read(self, name: str, rows: range | None = None, columns: range | None = None) -> Tensor:
        """A view of the file's tensor, or of these rows and columns (None: all). Only touched pages
        are read from disk, besides the system's read-ahead of some MiB."""
        place = locate(name, self.places)
        assert place is not None, f"{name = }"
        handle = self._handle(self.places[place])
        if rows is None and columns is None:
            tensor: Tensor = handle[place] if isinstance(handle, dict) else handle.get_tensor(place)
        else:
            held = handle[place] if isinstance(handle, dict) else handle.get_slice(place)
            tensor = held[_slice(rows)] if columns is None else held[_slice(rows), _slice(columns)]
        self.bytes_read += tensor.numel() * tensor.element_size()
        return tensor

    def close(self) -> None:
        self._open.clear()

    def _handle(self, path: Path) -> Any:
        if path not in self._open:
            self._open[path] = _opened(path)
        return self._open[path]


class GgufTensors:
    """Tensors of a GGUF file, widened as they are read. `bytes_read`: bytes of the file read."""

    def __init__(self, path: Path) -> None:
        self._file, self.bytes_read = GgufFile(path), 0

    def __len__(self) -> int:
        return len(self._file.places)

    def find(self, name: str) -> Stored | None:
        return self._file.stored(name) if name in self._file.places else None

    def read(self, name: str, rows: range | None = None, columns: range | None = None) -> Tensor:
        taken, num_bytes = self._file.rows(name, rows, columns)
        self.bytes_read += num_bytes
        # pages of a file are read-only: plain tensors are copied for torch
        return torch.from_numpy(taken if taken.flags.writeable else taken.copy())

    def close(self) -> None:
        """Does nothing: the file's pages are released with it."""


def open_files(directory: Path) -> TensorFiles | GgufTensors:
    """The files with a folder's weights. Raises XgptError if there are none."""
    path = serving_file(directory)
    return GgufTensors(path) if path is not None and path.suffix == ".gguf" else (
        TensorFiles(directory))


def _slice(wanted: range | None) -> slice:
    return slice(None) if wanted is None else slice(wanted.start, wanted.stop)


def _opened(path: Path) -> Any:
    """Handle on a file's tensors: safetensors', or a mapping. Raises InputError."""
    try:
        return safe_open(path, framework="pt") if path.suffix == ".safetensors" else pickled(path)
    except (SafetensorError, OSError) as cause:
        raise wrong_file(path, f"cannot be read: {cause}") from None
    except ValueError as cause:
        raise wrong_file(path, str(cause)) from None


def _index(directory: Path) -> dict[str, Path]:
    """File of each tensor, by name. Raises XgptError for a folder without weights."""
    path = serving_file(directory)
    if path is None:
        raise XgptError(f"{directory}: {NO_WEIGHTS}")
    if path.suffix != ".json":
        return dict.fromkeys(_opened(path).keys(), path)
    table = load_json(path).get("weight_map", {})
    return {name: directory / file for name, file in table.items()}


_WIDENED_ELEMENTS = 2**22  # chosen: widened at a time, in float32
_WHOLE_ROWS = 32  # a multiple of the rows that any format's words hold


class CheckpointReader:
    """WeightSource over a folder's files."""

    def __init__(self, directory: Path, dtype: torch.dtype) -> None:
        self.directory, self.dtype = directory, dtype
        self._files, self._quantised = open_files(directory), _stored_as(directory)

    @property
    def bytes_read(self) -> int:
        """Bytes read so far, as stored."""
        return self._files.bytes_read

    def has(self, name: str) -> bool:
        if self._files.find(name) is not None:
            return True
        endings = FORMATS[self._quantised.format].endings if self._quantised is not None else ()
        module = name.removesuffix(WEIGHT)
        return any(self._files.find(f"{module}.{ending}") for ending in endings)

    def get(self, name: str, shape: tuple[int, ...], part: TensorPart | None = None) -> Tensor:
        widened = self._widened(name, shape, part)
        if widened is None:
            taken = self._map(name, shape, part).to(self.dtype, copy=True,
                                                    memory_format=torch.contiguous_format)
        else:
            taken = widened
        # one pass over what was just written: cheaper than the copy
        if taken.numel() and not all(bound.isfinite() for bound in torch.aminmax(taken)):
            raise XgptError(f"{self.directory}: {name!r} holds values that are not finite as "
                            f"{str(self.dtype).removeprefix('torch.')}: answers would be wrong")
        return taken

    def close(self) -> None:
        self._files.close()

    def _map(self, name: str, shape: tuple[int, ...], part: TensorPart | None) -> Tensor:
        """A view of the file's plain tensor, or of part of it."""
        stored = self._files.find(name)
        if stored is None:
            raise XgptError(f"{self.directory}: no tensor {name!r} among {len(self._files)}")
        if stored.shape != tuple(shape):
            raise XgptError(f"{self.directory}: {name!r} has shape {list(stored.shape)}, "
                            f"config.json says {list(shape)}")
        if not stored.is_plain:
            raise XgptError(f"{self.directory}: {name!r} is of {stored.type}: weights of fewer "
                            "bits need scales, and config.json states none of it")
        if part is None:
            return self._files.read(name)
        wanted = range(part.start, part.stop)
        return self._files.read(name, **{"rows" if part.dim == 0 else "columns": wanted})

    def _widened(self, name: str, shape: tuple[int, ...],
                 part: TensorPart | None) -> Tensor | None:
        """A quantised weight in the run's dtype; None if it is stored plainly."""
        quantised, files = self._quantised, self._files
        if quantised is None:
            return None
        try:
            if (parts := parts_of(quantised, name, shape, files.find)) is None:
                return None
            for own, allowed, value in misfits(parts, quantised, files.find):
                raise ValueError(f"{own}: {allowed}" + (f"; it is {value}" if value else ""))
            rows, columns = range(shape[0]), range(shape[1])
            if part is not None:
                wanted = range(part.start, part.stop)
                rows, columns = (wanted, columns) if part.dim == 0 else (rows, wanted)
            held = _Held(files, name.removesuffix(WEIGHT), parts)
            of_rows = FORMATS[quantised.format].open(quantised, shape, held, Window(rows, columns))
        except ValueError as cause:
            raise XgptError(f"{self.directory}: {name!r} is not stored as {quantised}: "
                            f"{cause}") from None
        taken = torch.empty(len(rows), len(columns), dtype=self.dtype)
        step = max(_WIDENED_ELEMENTS // max(len(columns), 1) // _WHOLE_ROWS, 1) * _WHOLE_ROWS
        for first in range(0, len(rows), step):
            last = min(first + step, len(rows))
            taken[first:last] = of_rows(first, last)
        return taken


class _Held(NamedTuple):
    """Reads the tensors of one weight; `parts`: those it may have."""

    files: TensorFiles | GgufTensors
    module: str
    parts: Mapping[str, Part]

    def has(self, ending: str) -> bool:
        name = f"{self.module}.{ending}"
        return name in self.parts and self.files.find(name) is not None

    def read(self, ending: str, rows: range | None = None,
             columns: range | None = None) -> Tensor:
        return self.files.read(f"{self.module}.{ending}", rows, columns)


def open_weights(directory: Path, dtype: torch.dtype) -> CheckpointReader | RandomWeights:
    """The weights of a model's folder: a checkpoint's, or random ones."""
    spec = shape_to_make(directory)
    if spec is None:
        return CheckpointReader(directory, dtype)
    # keeps a product with normed rows at their size: finite in half precision, however deep
    return RandomWeights(dtype, scale=spec.hidden_size ** -0.5)


def _stored_as(directory: Path) -> Quantised | None:
    path = directory / "config.json"
    return quantised_of(load_json(path), path) if path.is_file() else None
