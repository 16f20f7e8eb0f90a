"""A Hugging Face checkpoint directory, read one tensor at a time.

A rank opens every file it needs but maps and copies only its own stage's tensors, and of those
only its own rows or columns, so that no rank ever holds the whole model; `bytes_read` counts what
was taken."""

import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from xgpt.core.errors import XgptError
from xgpt.core.model import ModelSpec
from xgpt.core.model_file import load_json, wrong_file
from xrunner.checkpoint.source import shape_to_make
from xrunner.checkpoint.tensors import NO_WEIGHTS, locate, serving_file
from xrunner.models.weights import RandomWeights, TensorPart

_READ_TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_DAMAGED = (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, OSError)


class CheckpointReader:
    """WeightSource over safetensors (single or sharded) or PyTorch's own files."""

    def __init__(self, directory: Path, dtype: torch.dtype) -> None:
        self.directory, self.dtype, self.bytes_read = directory, dtype, 0
        self._files = _index(directory)
        self._open: dict[Path, Any] = {}

    def has(self, name: str) -> bool:
        return self._locate(name) is not None

    def get(self, name: str, shape: tuple[int, ...], part: TensorPart | None = None) -> Tensor:
        place = self._locate(name)
        if place is None:
            raise XgptError(f"{self.directory}: no tensor {name!r} among {len(self._files)}")
        tensor = self._map(*place, shape, part)
        self.bytes_read += tensor.numel() * tensor.element_size()
        taken = tensor.to(self.dtype, copy=True, memory_format=torch.contiguous_format)
        # one pass over what was just written: cheaper than the copy
        if taken.numel() and not all(bound.isfinite() for bound in torch.aminmax(taken)):
            raise XgptError(f"{self.directory}: {name!r} holds values that are not finite as "
                            f"{str(self.dtype).removeprefix('torch.')}: answers would be wrong")
        return taken

    def close(self) -> None:
        self._open.clear()

    def _locate(self, name: str) -> tuple[Path, str] | None:
        stored = locate(name, self._files)
        return None if stored is None else (self._files[stored], stored)

    def _map(self, path: Path, name: str, shape: tuple[int, ...],
             part: TensorPart | None) -> Tensor:
        """A view of the file's tensor, or of part of it: of pages that are never touched only those
        are read that the system reads ahead (up to some MiB a piece)."""
        if path not in self._open:
            self._open[path] = _opened(path)
        handle = self._open[path]
        is_torch = isinstance(handle, dict)
        held = handle[name] if is_torch else handle.get_slice(name)
        own_shape = list(held.shape) if is_torch else held.get_shape()
        if own_shape != list(shape):
            raise XgptError(f"{self.directory}: {name!r} has shape {own_shape}, "
                            f"config.json says {list(shape)}")
        if is_torch and held.dtype not in _READ_TYPES:  # the others' headers were read before
            raise XgptError(f"{self.directory}: {name!r} is of {held.dtype}: weights of fewer bits "
                            "need scales, which are not read")
        if part is None:
            whole: Tensor = held if is_torch else handle.get_tensor(name)
            return whole
        if is_torch:
            return part.of(held)
        wanted = slice(part.start, part.stop)
        sliced: Tensor = held[wanted] if part.dim == 0 else held[:, wanted]
        return sliced


class MadeWeights:
    """WeightSource of a folder that only states a shape; `bytes_read` counts what was made."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype) -> None:
        # a product with normed rows is then of their size: finite in half precision, however deep
        self._weights = RandomWeights(dtype, scale=spec.hidden_size ** -0.5)
        self.dtype, self.bytes_read = dtype, 0

    def has(self, name: str) -> bool:
        return self._weights.has(name)

    def get(self, name: str, shape: tuple[int, ...], part: TensorPart | None = None) -> Tensor:
        tensor = self._weights.get(name, shape, part)
        self.bytes_read += tensor.numel() * tensor.element_size()
        return tensor

    def close(self) -> None:
        """Nothing is open."""


def open_weights(directory: Path, dtype: torch.dtype) -> CheckpointReader | MadeWeights:
    """The weights of a model's folder, whatever they are."""
    spec = shape_to_make(directory)
    return CheckpointReader(directory, dtype) if spec is None else MadeWeights(spec, dtype)


def _opened(path: Path) -> Any:
    """A handle on a file's tensors: safetensors', or a mapping. Raises InputError."""
    try:
        if path.suffix == ".safetensors":
            return safe_open(path, framework="pt")
        return torch.load(path, mmap=True, weights_only=True)
    except _DAMAGED as cause:
        raise wrong_file(path, f"cannot be read: {cause}") from None


def _index(directory: Path) -> dict[str, Path]:
    """Tensor name -> file that holds it. Raises XgptError for a directory without weights."""
    path = serving_file(directory)
    if path is None:
        raise XgptError(f"{directory}: {NO_WEIGHTS}")
    if path.suffix != ".json":
        return dict.fromkeys(_opened(path).keys(), path)
    table = load_json(path).get("weight_map", {})
    return {name: directory / file for name, file in table.items()}
