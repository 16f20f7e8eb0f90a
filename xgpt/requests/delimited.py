"""CSV and TSV: a header, then a row a request. A row that does not fit becomes an error record."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import IO, TypeAlias, cast

from xgpt.core.errors import wrong
from xgpt.requests.chat import BadRecord
from xgpt.requests.file_rows import MAX_CELL_CHARS, Row, roles_of
from xgpt.requests.request_files import RequestFiles

USUAL = {"csv": ",", "tsv": "\t"}  # Excel writes semicolons where a comma is in numbers
Divided: TypeAlias = "Callable[[Path, str], object]"  # is told a file and its delimiter
_DELIMITERS = (",", ";", "\t", "|")
_UNDECODED = re.compile("[\udc80-\udcff]")


def delimiter_of(stream: IO[bytes], default: str) -> str:
    """What divides the cells of a table that begins here; nothing is consumed. It is the default
    where the header has it, else what divides header and first row into equally many cells."""
    start = cast(io.BufferedReader, stream).peek(1).decode("utf-8-sig", "replace")
    known = {one: _first_rows(start, one) for one in (default, *_DELIMITERS)}
    if known[default] and len(known[default][0]) > 1:
        return default
    cells = {one: len(rows[0]) for one, rows in known.items()
             if len({len(row) for row in rows}) == 1 and len(rows[0]) > 1}
    return max(cells, key=cells.__getitem__, default=default)


def _first_rows(text: str, delimiter: str) -> list[list[str]]:
    """The header and the first row after it, as far as they are there and can be read."""
    found = list[list[str]]()
    with suppress(csv.Error):
        rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        found.extend(islice(filter(None, rows), 2))
    return found


class _Lines:
    """The lines of a text; in the place of one that is too long an error, which costs its row."""

    def __init__(self, text: io.TextIOWrapper) -> None:
        self._text = text
        self.number = 0  # of the last one, from 1

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        line = self._text.readline(MAX_CELL_CHARS + 1)
        if not line:
            raise StopIteration
        self.number += 1
        if len(line) > MAX_CELL_CHARS and not line.endswith("\n"):
            while (part := self._text.readline(2**20)) and not part.endswith("\n"):
                pass
            raise csv.Error(f"a line is longer than {MAX_CELL_CHARS // 2**20} MiB")
        return line


def read_delimited(stream: IO[bytes], files: RequestFiles, path: Path, usual: str,
                   divided: Divided) -> Iterator[Row]:
    """Yields a row a request; blank lines are skipped. `usual`: the delimiter that the file's name
    tells of. Raises InputError for a header without the columns that are needed."""
    csv.field_size_limit(MAX_CELL_CHARS)
    delimiter = files.delimiter or delimiter_of(stream, usual)
    if files.delimiter is None and delimiter != usual:
        divided(path, delimiter)
    # bytes that are no UTF-8 are kept apart, so that they cost their row alone
    text = io.TextIOWrapper(stream, "utf-8-sig", "surrogateescape", newline="")
    lines = _Lines(text)
    # strict: a quote in the wrong place is told, not guessed at
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    try:
        header = next((row for row in reader if row), None)
    except csv.Error as cause:
        raise wrong(path, "requests", None, f"its header cannot be read: {cause}", 1) from None
    if header is None:
        return
    header = [name.strip() for name in header]
    roles = roles_of(header, files, path)
    number = 0
    while True:
        line = lines.number + 1
        try:
            values = next(reader)
        except StopIteration:
            break
        except csv.Error as cause:
            number += 1
            yield Row(line, _why(cause, line, lines.number), number=number)
            continue
        if not values:
            continue
        number += 1
        if len(values) != len(header):
            yield Row(line, f"{len(values)} cells; the header has {len(header)}: a cell that holds "
                      "the delimiter or a line's end must be in quotes", number=number)
            continue
        others = roles.others(values)
        try:
            record = roles.record(values)
            if (bad := next((name for name, value in zip(header, values, strict=True)
                             if _UNDECODED.search(value)), None)) is not None:
                raise BadRecord(f"not UTF-8 in column {bad!r}: save the file as UTF-8")
        except BadRecord as cause:
            yield Row(line, str(cause), others, number, roles.name(values))
        else:
            yield Row(line, record, others, number)
    text.detach()  # the file is closed by who opened it


def _why(cause: csv.Error, first: int, last: int) -> str:
    if "unexpected end" in str(cause):
        return (f"a quote is opened here and never closed: lines {first} to {last}, the rest of "
                "the file, are no row")
    where = f"lines {first} to {last}" if last > first else "it"
    return f"{where} cannot be read as a row: {cause}"
