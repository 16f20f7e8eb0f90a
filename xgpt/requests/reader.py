"""Reading the requests of a job's files, whatever their format: in their order, ids unique over all
files, what cannot be used as an error record."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import IO

from xgpt.core.errors import shorten
from xgpt.requests.chat import BadRecord
from xgpt.requests.file_rows import Row
from xgpt.requests.formats import (
    USUAL,
    Divided,
    read_array,
    read_delimited,
    read_jsonl,
    read_parquet,
    read_text,
)
from xgpt.requests.request import Request, RequestError, id_of, is_openai, read_record
from xgpt.requests.request_files import RequestFiles, opened
from xgpt.requests.spool_columns import ColumnsWriter


def read_requests(files: RequestFiles,
                  see: Callable[[int, bytes], object] = lambda file, raw: None,
                  columns: ColumnsWriter | None = None, stdin: IO[bytes] | None = None,
                  divided: Divided = lambda path, delimiter: None,
                  ) -> Iterator[Request | RequestError]:
    """Yields the usable requests, one for each input of a line, and what is none. An id that is
    missing is the line's number, or the row's; of several files with the file's name before it.
    `see` is shown every file's bytes and which file it is, `columns` what the results take over.
    `stdin`: what came there. `divided` is told what divides the cells of a file whose name says
    something else. Raises InputError for a file that cannot be read at all."""
    seen = SeenIds()
    are_several = len(files.paths) > 1
    labels = files.labels if are_several else ("",)
    for index, path in enumerate(files.paths):
        with opened(path, files, partial(see, index), stdin) as (stream, known):
            for row in _rows(stream, known, files, path, columns, divided):
                if columns is not None and row.others is not None:
                    columns.add(row.others)
                number = row.line if row.number is None else row.number
                default = f"{labels[index]}:{number}" if are_several else str(number)
                taken = _taken(row, index, default, seen, files)
                yield taken
                if isinstance(taken, Request):
                    yield from taken.others


def _rows(stream: IO[bytes], known: str, files: RequestFiles, path: Path,
          columns: ColumnsWriter | None, divided: Divided) -> Iterator[Row]:
    if known == "parquet":
        return read_parquet(stream, files, path, columns)
    if known in USUAL:
        return read_delimited(stream, files, path, USUAL[known], divided)
    if known == "json":
        return read_array(stream, files, path)
    return read_text(stream) if known == "text" else read_jsonl(stream, files)


def _taken(row: Row, file: int, default: str, seen: SeenIds, files: RequestFiles,
           ) -> Request | RequestError:
    name: str | None = None
    try:
        if isinstance(row.record, str):
            name = row.name
            raise BadRecord(row.record, "invalid_json_line")
        name = id_of(row.record, default)
        if (first := seen.place(name)) is not None:
            raise BadRecord(f"id {shorten(name)} is already that of {files.place(*first)}",
                            "duplicate_custom_id")
        request = read_record(row.record, row.line, name, file, files.terms)
    except BadRecord as cause:
        return RequestError(line=row.line, id=name, error=str(cause), file=file, code=cause.code,
                            is_openai=None if isinstance(row.record, str) else is_openai(
                                row.record))
    seen.add(name, file, row.line)
    return request


_LEAST_SLOTS = 2**6
_FULL = 0.7  # beyond it searches grow long
_TABLES = 2**6  # that grow one by one: what is moved is there twice, and that is little at a time
_LINE_BITS = 32


class SeenIds:
    """Tables by open addressing of ids' digests (96 bits: no two ids share one) to the places of
    their lines. Lines of a file come in their order, files one after another."""

    def __init__(self) -> None:
        self._tables = [_Table() for _ in range(_TABLES)]
        # files have lines below 2**32 in sum: a place is a line, counted on through all of them
        self._begins, self._last = [0], 0

    def __len__(self) -> int:
        return sum(table.count for table in self._tables)

    def place(self, name: str) -> tuple[int, int] | None:
        """The file and line of the id; None where there was none such."""
        high, low = _digest(name)
        place = self._tables[high % _TABLES].place(high, low)
        if place is None:
            return None
        file = bisect_left(self._begins, place) - 1
        return file, place - self._begins[file]

    def add(self, name: str, file: int, line: int) -> None:
        """An id that was not there. `line`: >= 1."""
        while len(self._begins) <= file:
            self._begins.append(self._last)
        self._last = self._begins[file] + line
        assert self._last < 1 << _LINE_BITS, "more lines than can be told apart"
        high, low = _digest(name)
        self._tables[high % _TABLES].add(high, low, self._last)


class _Table:
    """Of the digests that are its own. A slot is 8, 4 and 4 bytes."""

    def __init__(self) -> None:
        self._make(_LEAST_SLOTS)

    def place(self, high: int, low: int) -> int | None:
        slot = self._slot(high, low)
        return self._places[slot] if self._low[slot] else None

    def add(self, high: int, low: int, place: int) -> None:
        if self.count >= _FULL * len(self._low):
            before = (self._high, self._low, self._places)
            self._make(2 * len(self._low))
            for one, other, held in zip(*before, strict=True):
                if other:
                    self._put(one, other, held)
        self._put(high, low, place)

    def _put(self, high: int, low: int, place: int) -> None:
        slot = self._slot(high, low)
        assert not self._low[slot], "the id was there"
        self._high[slot], self._low[slot], self._places[slot] = high, low, place
        self.count += 1

    def _slot(self, high: int, low: int) -> int:
        """That of the digest, or the free one that it would take."""
        lows, highs, mask = self._low, self._high, len(self._low) - 1
        slot = low & mask
        while lows[slot] and (lows[slot] != low or highs[slot] != high):
            slot = (slot + 1) & mask
        return slot

    def _make(self, slots: int) -> None:
        self._low = array("Q", bytes(8 * slots))
        self._high, self._places = array("I", bytes(4 * slots)), array("I", bytes(4 * slots))
        self.count = 0


def _digest(name: str) -> tuple[int, int]:
    """4 bytes, and 8 that are never 0, which stands for a free slot."""
    digest = blake2b(name.encode("utf-8", "surrogatepass"), digest_size=12).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little") or 1
