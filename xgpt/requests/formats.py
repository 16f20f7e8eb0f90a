"""Readers of request files, one for each format: JSON lines, text (a prompt per line), a JSON array
(read as a whole), CSV and TSV (a header, then a request per row), and Parquet (in batches, by
pyarrow). Blank lines are skipped."""

from __future__ import annotations

import csv
import importlib
import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias, cast

from xgpt.core.errors import MissingExtraError, wrong
from xgpt.requests.chat import BadRecord
from xgpt.requests.file_rows import (
    MAX_CELL_CHARS,
    NO_OTHERS,
    RepeatedKeyError,
    Roles,
    Row,
    of_object,
    parsed,
    parsed_items,
    roles_of,
    text_record,
)
from xgpt.requests.request_files import RequestFiles, unreadable
from xgpt.requests.spool_columns import ROWS_COLUMN, ColumnsWriter

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
MAX_LINE_BYTES = 2**24  # chosen: longer lines are another file by mistake, or an attack
MAX_ARRAY_BYTES = 2**27  # chosen: of a JSON array, which is in memory as a whole
_TOO_LONG = f"longer than {MAX_LINE_BYTES // 2**20} MiB, the most that a line may have"
_SKIPPED_BYTES = 2**20


def read_jsonl(stream: IO[bytes], files: RequestFiles) -> Iterator[Row]:
    """Yields a Row for each line of JSON."""
    return _rows(_lines(stream), lambda line: of_object(_object(line), files))


def read_text(stream: IO[bytes], files: RequestFiles) -> Iterator[Row]:
    """Yields a Row for each line of text: its prompt."""
    return _rows(_lines(stream), lambda line: (
        text_record(_decoded(line).removesuffix("\r"), files), NO_OTHERS))


def _rows(entries: Iterable[tuple[int, Any]],
          taken: Callable[[Any], tuple[Mapping[str, Any], Mapping[str, Any]]]) -> Iterator[Row]:
    """Yields a Row for each numbered entry, with the keys `taken` from it, or why none can be."""
    for number, entry in entries:
        try:
            yield Row(number, *taken(entry))
        except BadRecord as cause:
            yield Row(number, str(cause))


def read_array(stream: IO[bytes], files: RequestFiles, path: Path) -> Iterator[Row]:
    """Yields a Row for each item of a JSON array: an object, or a text (a prompt). Raises
    InputError for a file that is not whole."""
    try:
        raw = stream.read(MAX_ARRAY_BYTES + 1)
        if len(raw) > MAX_ARRAY_BYTES:
            raise unreadable(path, f"a JSON array of more than {MAX_ARRAY_BYTES // 2**20} MiB: "
                             "write so many requests as one object a line, whose format is jsonl")
        items = parsed_items(raw.removeprefix(BYTE_ORDER_MARK).decode("utf-8"))
    except UnicodeDecodeError as cause:
        raise unreadable(path, f"not UTF-8: {cause.reason} at byte {cause.start}") from None
    except BadRecord as cause:
        raise unreadable(path, str(cause)) from None
    except ValueError as cause:
        raise unreadable(path, f"no whole JSON array: {cause}. Is it cut off? Of a file of one "
                         "object a line the format is jsonl") from None
    if not isinstance(items, list):
        raise unreadable(path, "its JSON is no array: [{\"prompt\": ...}, ...] is wanted, or one "
                         "object a line, whose format is jsonl")

    def taken(item: Any) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        if isinstance(item, str):
            return text_record(item, files), NO_OTHERS
        if isinstance(item, dict):
            return of_object(item, files)
        raise item if isinstance(item, RepeatedKeyError) else BadRecord(
            "neither a JSON object nor a text")

    yield from _rows(enumerate(items, start=1), taken)


def _lines(stream: IO[bytes]) -> Iterator[tuple[int, bytes | None]]:
    """Yields (number from 1, line) of lines that are not blank; None for a line that is too long,
    which is never in memory as a whole."""
    number = 0
    while raw := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(raw) > MAX_LINE_BYTES and not raw.endswith(b"\n"):
            while (part := stream.readline(_SKIPPED_BYTES)) and not part.endswith(b"\n"):
                pass
            yield number, None
            continue
        line = raw.removesuffix(b"\n").removeprefix(BYTE_ORDER_MARK if number == 1 else b"")
        if line.strip():
            yield number, line


def _decoded(line: bytes | None) -> str:
    if line is None:
        raise BadRecord(_TOO_LONG)
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as cause:
        raise BadRecord(f"not UTF-8: {cause.reason} at byte {cause.start}") from None


def _object(line: bytes | None) -> dict[str, Any]:
    try:
        record = parsed(_decoded(line))
    except ValueError as cause:  # JSONDecodeError, or a number of more than 4,300 digits
        raise BadRecord(f"not JSON: {cause}") from None
    if not isinstance(record, dict):
        raise BadRecord("not a JSON object")
    return record


USUAL = {"csv": ",", "tsv": "\t"}  # Excel writes semicolons where numbers have commas
Divided: TypeAlias = "Callable[[Path, str], object]"  # called with a file and its delimiter
_DELIMITERS = (",", ";", "\t", "|")
_UNDECODED = re.compile("[\udc80-\udcff]")


def delimiter_of(stream: IO[bytes], default: str) -> str:
    """The delimiter of the table that begins here; consumes nothing. It is `default` if the header
    has it, else the one that divides header and first row into equally many cells."""
    start = cast(io.BufferedReader, stream).peek(1).decode("utf-8-sig", "replace")
    known = {one: _first_rows(start, one) for one in (default, *_DELIMITERS)}
    if known[default] and len(known[default][0]) > 1:
        return default
    cells = {one: len(rows[0]) for one, rows in known.items()
             if len({len(row) for row in rows}) == 1 and len(rows[0]) > 1}
    return max(cells, key=cells.__getitem__, default=default)


def _first_rows(text: str, delimiter: str) -> list[list[str]]:
    """The header and the first row after it, as far as they can be read."""
    found = list[list[str]]()
    with suppress(csv.Error):
        rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        found.extend(islice(filter(None, rows), 2))
    return found


class _Lines:
    """Lines of a text; a line that is too long raises csv.Error, which costs its row alone."""

    def __init__(self, text: io.TextIOWrapper) -> None:
        self._text = text
        self.number = 0  # of the last line, from 1

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
    """Yields a Row for each row of a table. `usual`: delimiter by the file's name; `divided` is
    called if it is another. Raises InputError for a header that lacks a required column."""
    csv.field_size_limit(MAX_CELL_CHARS)
    delimiter = files.delimiter or delimiter_of(stream, usual)
    if files.delimiter is None and delimiter != usual:
        divided(path, delimiter)
    # bytes that are no UTF-8 are escaped, so that they cost their row alone
    text = io.TextIOWrapper(stream, "utf-8-sig", "surrogateescape", newline="")
    lines = _Lines(text)
    # strict: a misplaced quote is an error, not guessed at
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
    text.detach()  # the caller closes the file


def _why(cause: csv.Error, first: int, last: int) -> str:
    if "unexpected end" in str(cause):
        return (f"a quote is opened here and never closed: lines {first} to {last}, the rest of "
                "the file, are no row")
    where = f"lines {first} to {last}" if last > first else "it"
    return f"{where} cannot be read as a row: {cause}"


EXTRA = "parquet"
_ROWS_AT_A_TIME = 1024
_TEXTS = ("string", "large_string", "string_view", "null")


class Arrow(NamedTuple):
    """The modules of pyarrow."""

    pa: Any
    pq: Any


def arrow(purpose: str) -> Arrow:
    """The modules of pyarrow. Raises MissingExtraError, which names the purpose."""
    try:
        return Arrow(importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet"))
    except ImportError:
        raise MissingExtraError("pyarrow", EXTRA, purpose) from None


def read_parquet(stream: IO[bytes], files: RequestFiles, path: Path,
                 columns: ColumnsWriter | None) -> Iterator[Row]:
    """Yields a Row for each row of a Parquet file, and adds columns for the results to `columns`,
    with their types. Raises InputError for a file that is not whole."""
    pa, pq = arrow(f"reading {path.name}")
    number, roles = 0, None
    for batch in _batches(pa, pq, stream, path):
        if roles is None:
            roles = roles_of(batch.schema.names, files, path)
            _check_prompts(batch.schema, roles, path)
        if columns is not None:
            columns.add_batch(_carried(pa, batch, roles), _whole_ids(pa, batch, roles))
        used = {place: values_of(batch.column(place)) for _, place in roles.used}
        for row in range(batch.num_rows):
            number += 1
            yield _row(number, roles, {place: used[place][row] for place in used})


def _batches(pa: Any, pq: Any, stream: IO[bytes], path: Path) -> Iterator[Any]:
    count = 0
    try:
        for batch in pq.ParquetFile(stream).iter_batches(_ROWS_AT_A_TIME):
            yield batch
            count += batch.num_rows
    except (pa.ArrowException, OSError) as cause:
        where = f" after row {count}" if count else ""
        why = str(cause).rstrip(".")
        raise unreadable(path, f"no whole Parquet file{where}: {why}. Is it cut off? Copy it "
                         "again") from None


def values_of(column: Any) -> list[Any]:
    """The values of an Arrow array; a text that is no UTF-8 becomes a BadRecord."""
    try:
        values: list[Any] = column.to_pylist()
        return values
    except UnicodeDecodeError:
        return [_value(one) for one in column]


def _value(scalar: Any) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        return BadRecord("not UTF-8")


def _row(number: int, roles: Roles, values: Mapping[int, Any]) -> Row:
    try:
        return Row(number, roles.record(values), None, number)
    except BadRecord as cause:
        return Row(number, str(cause), None, number, roles.name(values))


def _carried(pa: Any, batch: Any, roles: Roles) -> Any:
    """A record batch of the columns that go into the results, and a column of nulls: a batch
    without columns would lose its number of rows."""
    fields = [batch.schema.field(place).with_name(name) for name, place in roles.carried]
    return pa.RecordBatch.from_arrays(
        [*(batch.column(place) for _, place in roles.carried), pa.nulls(batch.num_rows)],
        schema=pa.schema([*fields, pa.field(ROWS_COLUMN, pa.null())]))


def _whole_ids(pa: Any, batch: Any, roles: Roles) -> bool:
    """Whether every row's id is a whole number; it stays one in the results."""
    places = [place for role, place in roles.used if role == "id"]
    return bool(places) and batch.column(places[0]).null_count == 0 and (
        pa.types.is_signed_integer(batch.schema.field(places[0]).type))


def _check_prompts(schema: Any, roles: Roles, path: Path) -> None:
    """Raises InputError if the type of the prompts' column is no text."""
    for role, place in roles.used:
        kind = getattr(schema.field(place).type, "value_type", schema.field(place).type)
        if role == "prompt" and str(kind) not in _TEXTS:
            raise wrong(path, "workload.requests.prompt", schema.names[place],
                        f"the column is of type {schema.field(place).type}, not text; columns "
                        "there: " + ", ".join(f"{field.name} ({field.type})" for field in schema))
