"""Whether a checkpoint's files are whole and hold what config.json says, from their headers alone.

A run finds out too, but on every rank, and after the model's layers have been timed. Of PyTorch's
own files only their presence is checked: they have no header that can be read without torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from xgpt.core.errors import InputError, Mistake
from xgpt.core.model import ModelSpec
from xgpt.core.model_file import load_json
from xrunner.checkpoint.tensors import HEAD, Shape, locate, wanted_tensors

MAX_SHOWN = 6  # a wrong size in config.json concerns every layer
_LENGTH_BYTES, _MOST_HEADER_BYTES = 8, 100_000_000
_LFS = b"version https://git-lfs"


def check_weights(directory: Path, spec: ModelSpec) -> None:
    """Raises InputError with every file and tensor that is missing or wrong."""
    files, mistakes = _files(directory)
    shapes: dict[str, Shape] = {}
    for path, names in files.items():
        if path.suffix != ".safetensors":
            continue
        try:
            held = header(path)
        except ValueError as cause:
            mistakes.append(_mistake(path, None, str(cause)))
            continue
        shapes.update(held if names is None else {n: held[n] for n in names if n in held})
        mistakes += [_mistake(path, name, "no such tensor there, but the index says so")
                     for name in names or () if name not in held]
    if not mistakes and all(path.suffix == ".safetensors" for path in files):
        mistakes = list(_misfits(directory, spec, shapes))
    if len(mistakes) > MAX_SHOWN:
        rest = len(mistakes) - MAX_SHOWN
        mistakes = [*mistakes[:MAX_SHOWN],
                    _mistake(directory, None, f"{rest} more like these are not shown")]
    if mistakes:
        raise InputError(mistakes)


def header(path: Path) -> dict[str, Shape]:
    """Tensor name -> shape in a safetensors file. Raises ValueError where the file is none, or
    shorter or longer than its header says."""
    size = path.stat().st_size
    with path.open("rb") as file:
        begin = file.read(max(_LENGTH_BYTES, len(_LFS)))
        if begin.startswith(_LFS):
            raise ValueError("a pointer of Git LFS, not the file itself: fetch it (git lfs pull)")
        length = int.from_bytes(begin[:_LENGTH_BYTES], "little")
        if size < _LENGTH_BYTES + length and length <= _MOST_HEADER_BYTES:
            raise ValueError(f"cut off: it has {size} bytes, its header alone is longer")
        file.seek(_LENGTH_BYTES)
        try:
            if length > _MOST_HEADER_BYTES:
                raise ValueError
            table = json.loads(file.read(length))
            table.pop("__metadata__", None)
            shapes = {name: tuple(entry["shape"]) for name, entry in table.items()}
            end = max((entry["data_offsets"][1] for entry in table.values()), default=0)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise ValueError("no safetensors file: its header cannot be read") from None
    if size != (expected := _LENGTH_BYTES + length + end):
        what = "cut off" if size < expected else "longer than it should be"
        raise ValueError(f"{what}: it has {size} bytes, its header speaks of {expected}")
    return shapes


def _files(directory: Path) -> tuple[dict[Path, list[str] | None], list[Mistake]]:
    """The files that serve, as CheckpointReader chooses them, with the tensors that an index says
    are there (None without an index); and what is wrong with that index."""
    for stem, suffix in (("model", ".safetensors"), ("pytorch_model", ".bin")):
        listing, single = (directory / f"{stem}{suffix}{more}" for more in (".index.json", ""))
        if listing.is_file():
            return _listed(listing)
        if single.is_file():
            return {single: None}, []
    return {}, [_mistake(directory, None, "no model.safetensors, pytorch_model.bin or index of "
                                          "either: a run needs the weights")]


def _listed(listing: Path) -> tuple[dict[Path, list[str] | None], list[Mistake]]:
    table = load_json(listing).get("weight_map")
    if not isinstance(table, dict) or not table or not all(
            isinstance(file, str) for file in table.values()):
        return {}, [_mistake(listing, "weight_map", "missing, or no mapping of tensors to files")]
    held: dict[str, list[str]] = {}
    for name, file in table.items():
        held.setdefault(file, []).append(name)
    files: dict[Path, list[str] | None] = {}
    mistakes = []
    for file, names in held.items():
        if (listing.parent / file).is_file():
            files[listing.parent / file] = names
        else:
            mistakes.append(Mistake(
                file=str(listing), line=None, key="weight_map", value=file,
                allowed=f"this file is missing from the folder; it holds {len(names)} tensors"))
    return files, mistakes


def _misfits(directory: Path, spec: ModelSpec, shapes: Mapping[str, Shape]) -> Iterator[Mistake]:
    for name, wanted in wanted_tensors(spec):
        stored = locate(name, shapes)
        if stored is None and name != HEAD:
            yield _mistake(directory, name, "the weights hold no such tensor; by config.json "
                                            f"there is one of shape {list(wanted)}")
        elif stored is not None and shapes[stored] != wanted:
            yield Mistake(file=str(directory), line=None, key=name, value=list(shapes[stored]),
                          allowed=f"by config.json its shape is {list(wanted)}")


def _mistake(path: Path, key: str | None, allowed: str) -> Mistake:
    return Mistake(file=str(path), line=None, key=key or "weights", value=None, allowed=allowed)
