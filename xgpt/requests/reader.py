"""Reading the requests of a job's files, whatever their format: in their order, ids unique over all
files, what cannot be used as an error record."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO

from xgpt.core.errors import shorten
from xgpt.requests.chat import BadRecord
from xgpt.requests.delimited import USUAL, Divided, read_delimited
from xgpt.requests.file_rows import Row
from xgpt.requests.lines import read_array, read_jsonl, read_text
from xgpt.requests.parquet import read_parquet
from xgpt.requests.request import Request, RequestError, id_of, is_openai, read_record
from xgpt.requests.request_files import RequestFiles
from xgpt.requests.seen_ids import SeenIds
from xgpt.requests.source import opened
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
