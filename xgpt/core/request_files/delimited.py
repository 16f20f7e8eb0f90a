"""CSV and TSV: a header, then a row a request. A row that does not fit becomes an error record."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from xgpt.core.errors import wrong
from xgpt.core.request_files.files import RequestFiles
from xgpt.core.request_files.rows import Row, roles_of
from xgpt.core.workload import BadRecord

# Of one cell. A quote that is never closed takes up the rest of the file.
MAX_CELL_CHARS = 2**24
_UNDECODED = re.compile("[\udc80-\udcff]")


def read_delimited(stream: IO[bytes], files: RequestFiles, path: Path, delimiter: str,
                   ) -> Iterator[Row]:
    """Yields a row a request; blank lines are skipped. Raises InputError for a header without the
    columns that are needed."""
    csv.field_size_limit(MAX_CELL_CHARS)
    # bytes that are no UTF-8 are kept apart, so that they cost their row alone
    text = io.TextIOWrapper(stream, "utf-8-sig", "surrogateescape", newline="")
    # strict: a quote in the wrong place is told, not guessed at
    reader = csv.reader(text, delimiter=files.delimiter or delimiter, strict=True)
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
        line = reader.line_num + 1
        try:
            values = next(reader)
        except StopIteration:
            break
        except csv.Error as cause:
            number += 1
            yield Row(line, _why(cause, line, reader.line_num), number=number)
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
