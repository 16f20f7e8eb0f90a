"""Weights of a stage in a file, written once in the layout that products compute by. Later runs
with the same key use it again, wherever their weights lie: the file has all of them."""

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xgpt.core.placement import SECTOR, sectors
from xgpt.core.system.direct_file import DirectFile
from xgpt.core.system.whole_file import read_object, sync_folder, write_atomically
from xrunner.offload.arena import Arena, raw
from xrunner.offload.mover import copy
from xrunner.ops import four_bits
from xrunner.ops.cpu.products import is_pairs_served
from xrunner.ops.linear import Product

_VERSION = 1
_BUFFER_BYTES = 2**23  # as a request of DirectFile
_SCALES = ".scales"


class Stored(NamedTuple):
    """A tensor in the file: `num_bytes` from `offset` on, padded to whole sectors. `bits`: 4 where
    it is packed (xrunner.ops.four_bits), else 16."""

    offset: int
    num_bytes: int
    shape: Sequence[int]
    dtype: str
    bits: int = 16

    @property
    def end(self) -> int:
        return self.offset + sectors(self.num_bytes)

    def view(self, memory: Tensor) -> Tensor:
        """The tensor in `memory` [bytes] uint8, which begins with its bytes as they are stored; a
        packed one stays so."""
        held = memory[:self.num_bytes]
        return held if self.bits == 4 else held.view(getattr(torch, self.dtype)).view(*self.shape)


class WeightsFile:
    """A whole file. `stored`: its tensors by name, in the file's order."""

    def __init__(self, path: Path, stored: Mapping[str, Stored]) -> None:
        self.file, self.stored = DirectFile(path), stored
        self._sectors: Tensor | None = None

    def num_bytes(self, names: Sequence[str]) -> int:
        """Bytes that `read` fills for these tensors."""
        return sum(sectors(self.stored[name].num_bytes) for name in names)

    def read(self, names: Sequence[str], into: Tensor) -> None:
        """Reads tensors, one after the other, into memory [bytes] uint8 of an Arena; neighbours in
        the file by one request. Raises XgptError."""
        done = taken = 0
        for name, following in zip_longest(names, names[1:]):
            taken += self.num_bytes([name])
            own, other = self.stored[name], self.stored.get(following or "")
            if other is None or other.offset != own.end:
                self.file.read(own.end - taken + done, raw(into[done:taken]))
                done = taken

    def views(self, names: Sequence[str], memory: Tensor) -> list[Tensor]:
        """The tensors that `read` has put into `memory`, or a copy of it on a device."""
        found, at = list[Tensor](), 0
        for name in names:
            found.append(self.stored[name].view(memory[at:]))
            at += sectors(self.stored[name].num_bytes)
        return found

    def vector(self, name: str) -> Tensor | None:
        """The scales of a product's int8 codes; None where it has none."""
        if (stored := self.stored.get(name + _SCALES)) is None:
            return None
        memory = Arena("host").tensor((sectors(stored.num_bytes),), torch.uint8, name)
        self.read([name + _SCALES], memory)
        return stored.view(memory)

    def rows(self, name: str, indices: Tensor) -> Tensor:
        """Rows [n, width] of a table at indices [n], each read once and singly. Raises
        XgptError."""
        stored = self.stored[name]
        width = stored.num_bytes // stored.shape[0]
        if self._sectors is None or len(self._sectors) < sectors(width) + SECTOR:
            self._sectors = Arena("host").tensor((sectors(width) + SECTOR,), torch.uint8, name)
        unique, places = torch.unique(indices.cpu(), return_inverse=True)
        out = torch.empty(len(unique), width, dtype=torch.uint8)
        for own, index in zip(out, unique.tolist(), strict=True):
            first = stored.offset + index * width
            skipped = first % SECTOR
            self.file.read(first - skipped, raw(self._sectors[:sectors(skipped + width)]))
            own.copy_(self._sectors[skipped:skipped + width])
        return out.view(getattr(torch, stored.dtype))[places]

    def close(self) -> None:
        """Closes the file, which stays on the disk for later runs."""
        self.file.close()


class Writer:
    """Appends tensors to a new file. `bits`: form of the products."""

    def __init__(self, file: DirectFile, bits: int) -> None:
        self.stored: dict[str, Stored] = {}
        self._file, self._bits, self._end = file, bits, 0
        self._buffer = Arena("host").tensor((_BUFFER_BYTES,), torch.uint8, "writing")
        self._scales: dict[str, Tensor] = {}

    def add(self, name: str, product: Product) -> None:
        """Appends a product's weight, which was packed as movable, and takes it from the product.
        Products that are added one after the other are read by one request."""
        held = product.movable
        if self._bits == 4:
            self._append(name, four_bits.pack(*_grouped(held)), held, 4)
        else:
            self.table(name, held)
        if product.scales is not None:
            self._scales[name + _SCALES] = product.scales
        product.place(held.to("meta"))

    def table(self, name: str, tensor: Tensor) -> None:
        """Appends a tensor as it is, in 16 bits or more: one whose rows are read singly."""
        self._append(name, tensor.contiguous().view(-1).view(torch.uint8), tensor, 16)

    def finish(self) -> None:
        """Appends what is small, and waits until all of it is on the disk."""
        for name, scales in self._scales.items():
            self.table(name, scales)
        self._file.sync()

    def _append(self, name: str, held: Tensor, form: Tensor, bits: int) -> None:
        assert name not in self.stored, f"{name = }"
        self.stored[name] = Stored(self._end, len(held), list(form.shape),
                                   str(form.dtype).removeprefix("torch."), bits)
        for part in torch.split(held, _BUFFER_BYTES):
            copy(self._buffer[:len(part)], part)
            whole = self._buffer[:sectors(len(part))]
            self._file.write(self._end, raw(whole))
            self._end += len(whole)


def unpack(packed: Tensor, into: Tensor) -> None:
    """Fills a product's place, of the shape of `Product.movable`, from its 4 bits."""
    four_bits.unpack(packed, *_grouped(into))


def _grouped(held: Tensor) -> tuple[Tensor, int]:
    """A weight and the dimension of its groups: the inputs of one output; in panels every second
    one, so that groups are unpacked where they lie."""
    return (held.flatten(2), 1) if held.ndim == 4 else (held, 1)


def weights_file(folder: Path, key: Mapping[str, Any], bits: int,
                 write: Callable[[Writer], None]) -> WeightsFile:
    """The file in `folder` of the stage that `key` describes: the model's identity, the stage, the
    dtype and the kind of device. `write` makes it where no whole one is there. A process that wants
    one that another is writing waits for it. Raises XgptError, and OSError."""
    layout = "pairs" if is_pairs_served() else "rows"
    content = json.dumps({"version": _VERSION, "bits": bits, "layout": layout, **key},
                         sort_keys=True, default=str)
    path = folder / f"weights-{hashlib.sha256(content.encode()).hexdigest()[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(path.with_suffix(".lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = read_object(index := path.with_suffix(".json"))
        if not path.is_file() or path.stat().st_size != found.get("num_bytes"):
            found = _written(path, bits, write)
            write_atomically(index, json.dumps({"key": content, **found}))  # last: all is whole
        return WeightsFile(path, {name: Stored(*one) for name, one in found["stored"].items()})
    finally:
        os.close(lock)


def _written(path: Path, bits: int, write: Callable[[Writer], None]) -> dict[str, Any]:
    part = path.with_suffix(".part")  # one name: the next process replaces what a killed one left
    file = DirectFile(part, 0)
    try:
        writer = Writer(file, bits)
        write(writer)
        writer.finish()
        os.replace(part, path)
    finally:
        file.close()
        part.unlink(missing_ok=True)
    sync_folder(path.parent)
    return {"num_bytes": path.stat().st_size, "stored": writer.stored}
