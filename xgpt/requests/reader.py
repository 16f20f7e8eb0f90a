"""Reads the requests of a job's files, whatever their format: in order, with ids unique over all
files, and with an error record for each entry that cannot be used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import IO

import numpy as np

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
    """Yields a Request for each input of a usable line, and a RequestError for each other line.

    A missing id becomes the number of the line or row, after the file's name if there are several
    files. `see`: called with a file's index and its bytes. `columns`: gets columns for the results.
    `stdin`: a copy of standard input. `divided`: called with a table's delimiter if its name
    suggests another. Raises InputError for a file that cannot be read at all."""
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
    return read_text(stream, files) if known == "text" else read_jsonl(stream, files)


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


_LINES = 2**40  # more than a file has
_FEW_IDS, _SHARE_OF_IDS = 512, 64  # chosen: new ids are merged by so many, or by such a share


class SeenIds:
    """Ids with their file and line, as sorted 64-bit digests (of ten million ids two collide in one
    case of 300,000). New ids are collected and merged many at a time."""

    def __init__(self) -> None:
        self._digests, self._places = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._last: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._digests) + len(self._last)

    def place(self, name: str) -> tuple[int, int] | None:
        """(file, line) of an id; None if it was not added."""
        digest = _digest(name)
        place = self._last.get(digest)
        if place is None:
            at = int(np.searchsorted(self._digests, digest))
            if at == len(self._digests) or self._digests[at] != digest:
                return None
            place = int(self._places[at])
        return divmod(place, _LINES)

    def add(self, name: str, file: int, line: int) -> None:
        """Adds an id that is not there yet."""
        self._last[_digest(name)] = file * _LINES + line
        if len(self._last) >= max(_FEW_IDS, len(self._digests) // _SHARE_OF_IDS):
            new = np.array(sorted(self._last.items()), np.int64)
            at = np.searchsorted(self._digests, new[:, 0])
            self._digests = np.insert(self._digests, at, new[:, 0])
            self._places = np.insert(self._places, at, new[:, 1])
            self._last.clear()


def _digest(name: str) -> int:
    digest = blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
