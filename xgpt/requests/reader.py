"""Reading the requests of a job's files, whatever their format: in their order, ids unique over all
files, what cannot be used as an error record."""

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
_FEW_IDS, _SHARE_OF_IDS = 512, 64  # sorted in at a time: so many, or one of so many that there are


class SeenIds:
    """The digests of ids (64 bits: two of ten million are alike in one case of 300,000), sorted,
    and of each the file and line; the last ones by themselves, until they are sorted in."""

    def __init__(self) -> None:
        self._digests, self._places = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._last: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._digests) + len(self._last)

    def place(self, name: str) -> tuple[int, int] | None:
        """The file and line of the id; None where there was none such."""
        digest = _digest(name)
        place = self._last.get(digest)
        if place is None:
            at = int(np.searchsorted(self._digests, digest))
            if at == len(self._digests) or self._digests[at] != digest:
                return None
            place = int(self._places[at])
        return divmod(place, _LINES)

    def add(self, name: str, file: int, line: int) -> None:
        """An id that was not there."""
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
