"""held.jsonl: results that are done and wait for one before them in the input's order. They lie on
the disk from the moment they are done, so that a run that is stopped or killed keeps them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO

HELD_FILE = "held.jsonl"
_DEAD_CHARS = 2**20  # of lines that are in results.jsonl by now, before the file is written anew


class HeldFile:
    """A file that gets a line a result, each as it will be in results.jsonl. Lines whose turn has
    come stay until the file is tidied: whoever reads it leaves out what results.jsonl has."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[str] | None = None
        self._num_chars = 0

    def add(self, line: str) -> None:
        if self._file is None:
            self._file = self._path.open("a", encoding="utf-8")
        self._num_chars += self._file.write(line + "\n")
        self._file.flush()

    def is_untidy(self, held: Mapping[int, str]) -> bool:
        """Whether it is mostly of lines that are not `held` any more."""
        return self._num_chars > _DEAD_CHARS + 2 * sum(map(len, held.values()))

    def tidy(self, held: Mapping[int, str]) -> None:
        """Writes what is held and nothing else, or removes the file where that is nothing. To be
        called when the others are safe in results.jsonl."""
        self.close()
        if not held:
            self._path.unlink(missing_ok=True)
            self._num_chars = 0
            return
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}.tmp")
        with temporary.open("w", encoding="utf-8") as file:
            self._num_chars = sum(file.write(line + "\n") for _, line in sorted(held.items()))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self._path)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def read_held(path: Path, first_index: int) -> dict[int, str]:
    """The line of each query from `first_index` on whose result is held; what is torn is left out.
    A run may be writing there."""
    held: dict[int, str] = {}
    try:
        with path.open("rb") as file:
            for line in file:
                index = _index_of(line)
                if index is not None and index >= first_index:
                    held[index] = line.decode().removesuffix("\n")
    except FileNotFoundError:
        pass
    return held


def _index_of(line: bytes) -> int | None:
    """Which query a whole line is of; None for a torn line."""
    try:
        row = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:  # of UnicodeDecodeError too
        return None
    if not isinstance(row, dict):
        return None
    own = row.get("xgpt", row)  # of OpenAI's form
    index = own.get("index") if isinstance(own, dict) else None
    return index if isinstance(index, int) else None
