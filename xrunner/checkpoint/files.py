"""The tensors of a checkpoint's files by their names, as they are stored: mapped, and read slice by
slice."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from xgpt.core.errors import XgptError
from xgpt.core.hf.values import load_json, wrong_file
from xrunner.checkpoint.gguf_file import GgufFile
from xrunner.checkpoint.quantised.parts import Stored
from xrunner.checkpoint.tensors import NO_WEIGHTS, locate, pickled, serving_file, stored_of


class TensorFiles:
    """safetensors (single or sharded), or PyTorch's own files. `bytes_read`: of what was taken."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.bytes_read = directory, 0
        self.places = _index(directory)
        self._open: dict[Path, Any] = {}

    def __len__(self) -> int:
        return len(self.places)

    def find(self, name: str) -> Stored | None:
        """What the file says of the tensor; None where there is none. Raises InputError for one
        that the index says is in a file that lacks it."""
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
        """A view of the file's tensor, or of those rows and columns of it (None: of all): of pages
        that are never touched only those are read that the system reads ahead (some MiB)."""
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
    """The same of a GGUF file, whose tensors are widened as they are read."""

    def __init__(self, path: Path) -> None:
        self._file, self.bytes_read = GgufFile(path), 0

    def __len__(self) -> int:
        return len(self._file.places)

    def find(self, name: str) -> Stored | None:
        return self._file.stored(name) if name in self._file.places else None

    def read(self, name: str, rows: range | None = None, columns: range | None = None) -> Tensor:
        taken, num_bytes = self._file.rows(name, rows, columns)
        self.bytes_read += num_bytes
        # a file's own pages may not be written to: torch is told so by a copy of what is plain
        return torch.from_numpy(taken if taken.flags.writeable else taken.copy())

    def close(self) -> None:
        """Its pages are let go with it."""


def open_files(directory: Path) -> TensorFiles | GgufTensors:
    """The files that hold a folder's weights. Raises XgptError where there are none."""
    path = serving_file(directory)
    return GgufTensors(path) if path is not None and path.suffix == ".gguf" else (
        TensorFiles(directory))


def _slice(wanted: range | None) -> slice:
    return slice(None) if wanted is None else slice(wanted.start, wanted.stop)


def _opened(path: Path) -> Any:
    """A handle on a file's tensors: safetensors', or a mapping. Raises InputError."""
    try:
        return safe_open(path, framework="pt") if path.suffix == ".safetensors" else pickled(path)
    except (SafetensorError, OSError) as cause:
        raise wrong_file(path, f"cannot be read: {cause}") from None
    except ValueError as cause:
        raise wrong_file(path, str(cause)) from None


def _index(directory: Path) -> dict[str, Path]:
    """Tensor name -> file that holds it. Raises XgptError for a directory without weights."""
    path = serving_file(directory)
    if path is None:
        raise XgptError(f"{directory}: {NO_WEIGHTS}")
    if path.suffix != ".json":
        return dict.fromkeys(_opened(path).keys(), path)
    table = load_json(path).get("weight_map", {})
    return {name: directory / file for name, file in table.items()}
