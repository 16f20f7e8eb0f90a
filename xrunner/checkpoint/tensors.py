"""Checks by headers alone whether a model's files are whole and have the tensors it takes
(xrunner.checkpoint.layout). Free of torch, except for PyTorch's own files. Ranks would find out
too, but after the model's layers were timed."""

import json
import pickle
import re
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

from xgpt.core.errors import InputError, Mistake
from xgpt.core.hf.quantised import quantised_of
from xgpt.core.hf.values import load_json
from xgpt.core.model import ModelSpec
from xrunner.checkpoint.gguf_file import FREQUENCIES, NAME, GgufFile
from xrunner.checkpoint.layout import Shape, embedding_names, is_optional, wanted_tensors
from xrunner.checkpoint.quantised.formats import UNUSED, misfits, parts_of
from xrunner.checkpoint.quantised.parts import PLAIN_TYPES, Stored

# checkpoints nest the decoder at different depths; tried in this order
_PREFIXES = ("", "model.", "transformer.")
# stored by some and not used: tables of positions and masks, and leftovers of T5's first converter
_NOT_WEIGHTS = (".inv_freq", ".attn.bias", ".attn.masked_bias", ".position_ids", ".version",
                "EncDecAttention.relative_attention_bias.weight")
MAX_SHOWN = 6  # chosen: a wrong size in config.json affects every layer
_NO_PICKLES = (".safetensors", ".gguf")
_LENGTH_BYTES, _MOST_HEADER_BYTES, _CHUNK_BYTES = 8, 100_000_000, 2**20
_LFS = b"version https://git-lfs"
# safetensors' names of torch's dtypes
_TYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
          "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "int64": "I64", "int32": "I32",
          "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL"}
NO_WEIGHTS = "no model.safetensors, pytorch_model.bin or index of either"


def serving_file(directory: Path) -> Path | None:
    """The file with a model's weights, or the index (.json) of several."""
    names = (*(f"{stem}{more}" for stem in ("model.safetensors", "pytorch_model.bin")
               for more in (".index.json", "")), NAME)
    return next((path for name in names if (path := directory / name).is_file()), None)


def locate(name: str, files: Mapping[str, object]) -> str | None:
    """The name under which a checkpoint stores `name`; None if it does not."""
    for prefix in _PREFIXES:
        for candidate in (prefix + name, name.removeprefix(prefix or "\0")):
            if candidate in files:
                return candidate
    return None


def check_weights(directory: Path, spec: ModelSpec, *, may_unpickle: bool = False) -> list[str]:
    """Names of tensors that are present and not used. Raises InputError with every file and tensor
    that is missing or wrong. `may_unpickle`: the user trusts PyTorch's own files, which are
    pickles."""
    files, mistakes = _files(directory)
    if not may_unpickle:
        mistakes += [_mistake(path, None, "a pickle, which can run code where it is read: convert "
                              "it to safetensors (its model's page often has one) or, if you trust "
                              "who made it, say `run: {pickles: true}`; even then tensors alone "
                              "are read") for path in files if path.suffix not in _NO_PICKLES]
    tensors: dict[str, Stored] = {}
    places: dict[str, Path] = {}
    for path, names in files.items():
        if path.suffix not in _NO_PICKLES and not may_unpickle:
            continue
        try:
            held = header(path)
        except ValueError as cause:
            mistakes.append(_mistake(path, None, str(cause)))
            continue
        tensors.update(held if names is None else {n: held[n] for n in names if n in held})
        places.update(dict.fromkeys(held, path))
        mistakes += [_mistake(path, name, "no such tensor there, but the index says so")
                     for name in names or () if name not in held]
    spare: list[str] = []
    if not mistakes:
        mistakes = list(_misfits(directory, spec, tensors, places, spare))
    if len(mistakes) > MAX_SHOWN:
        rest = len(mistakes) - MAX_SHOWN
        mistakes = [*mistakes[:MAX_SHOWN],
                    _mistake(directory, None, f"{rest} more like these are not shown")]
    if mistakes:
        raise InputError(mistakes)
    return spare


def header(path: Path) -> dict[str, Stored]:
    """Tensors of a safetensors, GGUF or PyTorch file by name. Raises ValueError if the file is
    none, or shorter or longer than its header says."""
    if path.suffix == ".gguf":
        held = GgufFile(path)
        return {name: held.stored(name) for name in held.places}
    size = path.stat().st_size
    with path.open("rb") as file:
        begin = file.read(max(_LENGTH_BYTES, len(_LFS)))
        if begin.startswith(_LFS):
            raise ValueError("a pointer of Git LFS, not the file itself: fetch it (git lfs pull)")
        if path.suffix != ".safetensors":
            return {name: stored_of(tensor) for name, tensor in pickled(path).items()}
        length = int.from_bytes(begin[:_LENGTH_BYTES], "little")
        if size < _LENGTH_BYTES + length and length <= _MOST_HEADER_BYTES:
            raise ValueError(f"cut off: it has {size} bytes, its header alone is longer")
        file.seek(_LENGTH_BYTES)
        try:
            if length > _MOST_HEADER_BYTES:
                raise ValueError
            table = json.loads(file.read(length))
            table.pop("__metadata__", None)
            tensors = {name: Stored(tuple(entry["shape"]), str(entry["dtype"]))
                       for name, entry in table.items()}
            end = max((entry["data_offsets"][1] for entry in table.values()), default=0)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise ValueError("no safetensors file: its header cannot be read") from None
    if size != (expected := _LENGTH_BYTES + length + end):
        what = "cut off" if size < expected else "longer than it should be"
        raise ValueError(f"{what}: it has {size} bytes, its header speaks of {expected}")
    return tensors


def pickled(path: Path) -> dict[str, Any]:
    """Tensors of a torch.save file by name, memory-mapped; other contents are left out. torch reads
    them without running anything that the pickle names. Raises ValueError."""
    import torch

    try:
        held = torch.load(path, mmap=True, weights_only=True)
    except pickle.UnpicklingError as cause:
        named = re.search(r"GLOBAL (\S+)", str(cause))  # the rest of its message says how to run it
        raise ValueError(f"it names {named[1]}, which is no part of a tensor" if named else
                         "cannot be read: no file of torch.save") from None
    except (RuntimeError, EOFError, OSError):
        raise ValueError("cannot be read: cut off, or no file of torch.save (those of PyTorch "
                         "before 1.6 are none any more)") from None
    if not isinstance(held, dict):
        raise ValueError("holds no tensors by their names")
    return {str(name): tensor for name, tensor in held.items() if isinstance(tensor, torch.Tensor)}


def stored_of(tensor: Any) -> Stored:
    """Entry of a torch tensor, as a header would have it."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Stored(tuple(tensor.shape), _TYPES.get(dtype, dtype))


def _files(directory: Path) -> tuple[dict[Path, list[str] | None], list[Mistake]]:
    """(weight files with the tensors that an index lists for each, None without index; mistakes in
    it)."""
    path = serving_file(directory)
    if path is None:
        return {}, [_mistake(directory, None, f"{NO_WEIGHTS}: a run needs the weights")]
    return _listed(path) if path.suffix == ".json" else ({path: None}, [])


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
        if Path(file).name != file:
            mistakes.append(_mistake(listing, "weight_map", "the name of a file of this folder",
                                     file))
        elif (listing.parent / file).is_file():
            files[listing.parent / file] = names
        else:
            mistakes.append(_mistake(listing, "weight_map", "this file is missing from the folder; "
                                     f"it holds {len(names)} tensors", file))
    return files, mistakes


def _misfits(directory: Path, spec: ModelSpec, tensors: Mapping[str, Stored],
             places: Mapping[str, Path], spare: list[str]) -> Iterator[Mistake]:
    """Mistakes in the tensors; appends valid but unused ones to `spare`."""
    config = directory / "config.json"
    quantised = quantised_of(load_json(config), config)
    unused = _NOT_WEIGHTS + (UNUSED if quantised is not None else ())
    taken = {FREQUENCIES} if quantised is not None and quantised.format == "gguf" else set()
    usual, *_ = names = embedding_names(spec)
    first, *others = [held for name in names if (held := locate(name, tensors))] or [usual]
    for other in others:
        taken.add(other)
        if not _are_same(tensors, places, first, other):
            yield _mistake(directory, other, f"the same numbers as {first}: config.json ties the "
                                             "two (tie_word_embeddings)")

    def find(name: str) -> Stored | None:
        return None if (stored := locate(name, tensors)) is None else tensors[stored]

    for name, wanted in wanted_tensors(spec):
        if name == usual:
            name = first
        try:
            parts = None if quantised is None else parts_of(quantised, name, wanted, find)
        except ValueError as cause:
            yield _mistake(directory, name, f"it cannot be stored as {quantised}, as config.json "
                                            f"says: of shape {list(wanted)}, {cause}")
            taken |= {own for own in tensors if own.startswith(name.removesuffix("weight"))}
            continue
        taken |= {locate(own, tensors) or own for own in parts or (name,)}
        if parts is not None and quantised is not None:
            for own, allowed, value in misfits(parts, quantised, find):
                yield _mistake(directory, own, allowed, value)
        elif find(name) is not None or not is_optional(spec, name):
            yield from _plain_misfit(directory, name, wanted, find(name))
    for name in sorted(tensors.keys() - taken):
        # AutoGPTQ gave every layer a bias, zero where the model has none
        is_nought = quantised is not None and quantised.format == "gptq" and name.endswith(
            ".bias") and not any(map(any, _chunks(places[name], name)))
        if name.endswith(unused) or is_nought:
            spare.append(name)
        else:
            yield _mistake(directory, name, f"no layer of the {spec.family} family takes it: its "
                           "answers would be wrong without it (scales of quantised weights, or a "
                           "variant that is not executed)")


def _are_same(tensors: Mapping[str, Stored], places: Mapping[str, Path], one: str,
              other: str) -> bool:
    return tensors[one] == tensors[other] and all(a == b for a, b in (
        zip_longest(_chunks(places[one], one), _chunks(places[other], other))))


def _chunks(path: Path, name: str) -> Iterator[bytes]:
    """Bytes of a tensor of a safetensors or PyTorch file."""
    if path.suffix != ".safetensors":
        import torch

        held = pickled(path)[name].contiguous().flatten().view(torch.uint8).numpy()
        for first in range(0, len(held), _CHUNK_BYTES):
            yield held[first:first + _CHUNK_BYTES].tobytes()
        return
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        first, last = json.loads(file.read(length))[name]["data_offsets"]
        file.seek(_LENGTH_BYTES + length + first)
        for start in range(first, last, _CHUNK_BYTES):
            yield file.read(min(_CHUNK_BYTES, last - start))


def _plain_misfit(directory: Path, name: str, wanted: Shape,
                  stored: Stored | None) -> Iterator[Mistake]:
    if stored is None:
        yield _mistake(directory, name, "the weights hold no such tensor; by config.json "
                                        f"there is one of shape {list(wanted)}")
    elif stored.shape != wanted:
        yield _mistake(directory, name, f"by config.json its shape is {list(wanted)}",
                       list(stored.shape))
    elif not stored.is_plain:
        yield _mistake(directory, name, "weights of fewer bits need scales, and config.json states "
                       f"none of it: one of {', '.join(PLAIN_TYPES)}", stored.type)


def _mistake(path: Path, key: str | None, allowed: str, value: object = None) -> Mistake:
    return Mistake(file=str(path), line=None, key=key or "weights", value=value, allowed=allowed)
