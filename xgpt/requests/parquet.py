"""Parquet, a batch of rows at a time. pyarrow is imported where a file of it is read or written."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

from xgpt.core.errors import MissingExtraError, wrong
from xgpt.requests.chat import BadRecord
from xgpt.requests.file_rows import Roles, Row, roles_of
from xgpt.requests.request_files import RequestFiles, unreadable
from xgpt.requests.spool_columns import ROWS_COLUMN, ColumnsWriter

EXTRA = "parquet"
_ROWS_AT_A_TIME = 1024
_TEXTS = ("string", "large_string", "string_view", "null")


class Arrow(NamedTuple):
    """The modules of pyarrow."""

    pa: Any
    pq: Any


def arrow(purpose: str) -> Arrow:
    """pyarrow, for this purpose. Raises MissingExtraError."""
    try:
        return Arrow(importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet"))
    except ImportError:
        raise MissingExtraError("pyarrow", EXTRA, purpose) from None


def read_parquet(stream: IO[bytes], files: RequestFiles, path: Path,
                 columns: ColumnsWriter | None) -> Iterator[Row]:
    """Yields a row a request; what the results take of it goes to `columns`, with its types. Raises
    InputError for a file that is not whole."""
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
    """The values of an Arrow array; in place of texts that are no UTF-8 a BadRecord says so."""
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
    """The columns that go into the results, as a batch of their own. One of nulls comes with them,
    since a batch without columns does not know its rows."""
    fields = [batch.schema.field(place).with_name(name) for name, place in roles.carried]
    return pa.RecordBatch.from_arrays(
        [*(batch.column(place) for _, place in roles.carried), pa.nulls(batch.num_rows)],
        schema=pa.schema([*fields, pa.field(ROWS_COLUMN, pa.null())]))


def _whole_ids(pa: Any, batch: Any, roles: Roles) -> bool:
    """Whether every row's id is a whole number, which it is in the results then, too."""
    places = [place for role, place in roles.used if role == "id"]
    return bool(places) and batch.column(places[0]).null_count == 0 and (
        pa.types.is_signed_integer(batch.schema.field(places[0]).type))


def _check_prompts(schema: Any, roles: Roles, path: Path) -> None:
    """Raises InputError for prompts that are no text, whatever a row says."""
    for role, place in roles.used:
        kind = getattr(schema.field(place).type, "value_type", schema.field(place).type)
        if role == "prompt" and str(kind) not in _TEXTS:
            raise wrong(path, "workload.requests.prompt", schema.names[place],
                        f"the column is of type {schema.field(place).type}, not text; columns "
                        "there: " + ", ".join(f"{field.name} ({field.type})" for field in schema))
