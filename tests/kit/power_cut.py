"""Power cuts of one folder: what its processes did to it is recorded once (power_cut.c), and for
every moment in between it is told what the disk may hold then.

A disk has for certain what was synced: a file's content by fsync of the file, its name by fsync of
the folder. What was done since may be there or not, in any order, in part, and new bytes may read
as zeros."""

import fcntl
import os
import random
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).with_name("power_cut.c")
ROOT = 0  # the folder's own number here


class Operation(NamedTuple):
    """What a process did. `path`, `target`: below the folder; None: elsewhere, or none."""

    kind: str
    inode: int
    offset: int
    data: bytes
    path: str | None
    target: str | None


def compiled(folder: Path) -> Path:
    """The library for LD_PRELOAD."""
    library = folder / "power_cut.so"
    subprocess.run(["cc", "-O1", "-w", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"],
                   check=True, capture_output=True)
    return library


def environment(library: Path, folder: Path, log: Path) -> dict[str, str]:
    """Of processes whose operations in the folder are to be recorded."""
    return {"LD_PRELOAD": str(library), "POWER_CUT_FOLDER": str(folder), "POWER_CUT_LOG": str(log)}


def read_log(log: Path) -> Iterator[Operation]:
    """Those so far: processes may be at work."""
    with log.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # no record is half there
        while line := file.readline():
            kind, *numbers = line.decode().split()
            inode, offset, *lengths = map(int, numbers)
            path, target, data = map(file.read, lengths)
            yield Operation(kind, inode, offset, data, os.fsdecode(path) or None,
                            os.fsdecode(target) or None)


Change = tuple[int, str, int | None]  # of a folder's name: to a file, or to none


@dataclass
class Disk:
    """A folder's files as processes see them, and what is on the disk for certain. Files and
    folders are named by numbers of their own."""

    names: dict[int, dict[str, int]] = field(default_factory=lambda: {ROOT: {}})
    content: dict[int, bytes] = field(default_factory=dict)
    kept_names: dict[int, dict[str, int]] = field(default_factory=lambda: {ROOT: {}})
    kept_content: dict[int, bytes] = field(default_factory=dict)
    pending: list[tuple[Change, ...]] = field(default_factory=list)  # changes of names, in order
    _count: int = 0
    _of_inode: dict[int, int] = field(default_factory=dict)  # the system uses a number again

    def apply(self, operation: Operation) -> None:
        kind, inode, offset, data, path, target = operation
        if kind in ("open", "truncated") and path is not None:
            place, name = self._place(path)
            if name not in self.names[place]:
                self._rename((place, name, self._new(inode)))
            file = self.names[place][name]
            self._of_inode[inode] = file
            if kind == "truncated":
                self.content[file] = b""
        elif kind == "mkdir" and path is not None and path != ".":
            place, name = self._place(path)
            folder = self._new(inode)
            self.names[folder], self.kept_names[folder] = {}, {}
            self._rename((place, name, folder))
        elif kind == "write":
            file = self._file(inode)
            old = self.content.get(file, b"").ljust(offset, b"\0")
            self.content[file] = old[:offset] + data + old[offset + len(data):]
        elif kind == "resize":
            self.content[self._file(inode)] = self.content.get(
                self._file(inode), b"")[:offset].ljust(offset, b"\0")
        elif kind == "sync":
            self.content[self._file(inode)] = self.kept_content[self._file(inode)] = data
        elif kind == "syncdir" and path is not None:
            self._sync_names(self._folder(path))
        else:
            self._move(kind, path, target)

    def _move(self, kind: str, path: str | None, target: str | None) -> None:
        changes: list[Change] = []
        number = None
        if path is not None:
            place, name = self._place(path)
            number = self.names[place].get(name)
            if kind != "link":
                changes.append((place, name, None))
        if target is not None and number is not None:
            changes.append((*self._place(target), number))
        self._rename(*changes)

    def _rename(self, *changes: Change) -> None:
        _change(self.names, changes)
        self.pending.append(changes)

    def _sync_names(self, folder: int) -> None:
        due = [changes for changes in self.pending if any(place == folder for place, *_ in changes)]
        self.pending = [changes for changes in self.pending if changes not in due]
        for changes in due:
            _change(self.kept_names, changes)

    def _new(self, inode: int) -> int:
        self._count += 1
        self._of_inode[inode] = self._count
        self.content[self._count] = b""
        return self._count

    def _file(self, inode: int) -> int:
        return self._of_inode[inode] if inode in self._of_inode else self._new(inode)

    def _folder(self, path: str) -> int:
        number = ROOT
        for part in () if path == "." else path.split("/"):
            number = self.names[number][part]
        return number

    def _place(self, path: str) -> tuple[int, str]:
        folder, _, name = path.rpartition("/")
        return self._folder(folder or "."), name

    def after_a_cut(self, target: Path, seed: int | None) -> None:
        """Writes into `target` what may be found. `seed` None: nothing but what was synced; else a
        choice of what else is there."""
        names = {folder: dict(inside) for folder, inside in self.kept_names.items()}
        chance = random.Random(seed)
        for changes in self.pending if seed is not None else ():
            if chance.random() < 0.5:
                _change(names, changes)
        self._write(target, ROOT, names, None if seed is None else chance)

    def _write(self, target: Path, folder: int, names: dict[int, dict[str, int]],
               chance: random.Random | None) -> None:
        target.mkdir(parents=True, exist_ok=True)
        for name, number in names[folder].items():
            if number in self.names:
                self._write(target / name, number, names, chance)
            else:
                (target / name).write_bytes(self._found(number, chance))

    def _found(self, number: int, chance: random.Random | None) -> bytes:
        kept, now = self.kept_content.get(number, b""), self.content.get(number, b"")
        if chance is None or kept == now:
            return kept
        which = chance.randrange(4)
        cut = chance.randint(min(len(kept), len(now)), len(now))
        return (kept, now, now[:cut], now[:cut] + bytes(len(now) - cut))[which]


def _change(names: dict[int, dict[str, int]], changes: Sequence[Change]) -> None:
    for place, name, number in changes:
        inside = names.setdefault(place, {})
        if number is None:
            inside.pop(name, None)
        else:
            inside[name] = number
