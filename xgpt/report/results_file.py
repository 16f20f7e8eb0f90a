"""Writes a run's results as one table: CSV, TSV, JSON lines or Parquet, by the file's name. It has
a row for every row of the input that was answered or refused, in the input's order. It is made from
results.jsonl, errors.jsonl and the spool, and can be made again at any time."""

from __future__ import annotations

import base64
import csv
import gzip
import heapq
import io
import json
import os
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date, datetime, time
from functools import partial
from itertools import chain, groupby, islice
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from xgpt.core.errors import XgptError
from xgpt.core.system.whole_file import json_text, target_of, temporary_of
from xgpt.report.output import flat_error, flat_result
from xgpt.requests.chat import BadRecord
from xgpt.requests.choices import parts
from xgpt.requests.file_rows import without_surrogates
from xgpt.requests.formats import arrow, values_of
from xgpt.requests.request_files import COMPRESSED, format_of
from xgpt.requests.spool import Spool
from xgpt.requests.spool_columns import BOOLEAN, INTEGER, NUMBER, TEXT, Columns

_WIDTH = 80
_FORMULAS = ("=", "+", "-", "@", "\t", "\r", "\n", *"\uff1d\uff0b\uff0d\uff20")  # OWASP's list
_NUMBER = re.compile(r"[-+]?\d+(\.\d*)?([eE][-+]?\d+)?", re.ASCII)
COUNTS = ("input_tokens", "output_tokens")
TIMES = ("latency_s", "encode_start_s", "ttft_s", "tpot_s")
ANSWER = ("answer", "finish_reason", *COUNTS, "error", *TIMES)
_ROWS_AT_A_TIME = 1024


def write_results(output: Path, path: Path, quote_formulas: bool = False) -> str:
    """Writes the answers so far of the run in `output` to `path`, and returns a message. Readers
    find the old file or the new one, whole. `quote_formulas`: puts an apostrophe before texts of
    CSV and TSV that a spreadsheet would take for formulas. Raises XgptError."""
    columns = Columns(output)
    names = names_in_results(list(dict.fromkeys(
        name for segment in columns.segments for name in segment.names())))
    write = _write_parquet if format_of(path) == "parquet" else partial(
        _write_text, cell=_unformulated if quote_formulas else _cell)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _replacing(path) as file:
            count = write(file, path, chunks_of(output, columns), columns, names)
    except OSError as cause:
        raise XgptError(f"{path}: the results cannot be written: {cause.strerror or cause}; they "
                        f"are in {output / 'results.jsonl'}, and `xgpt report` writes this file "
                        "again") from None
    renamed = [f"column {old!r} of the requests is {new!r} there" for old, new in names.items()
               if old != new]
    return textwrap.fill("; ".join([f"results: {count} rows in {path}", *renamed]), _WIDTH,
                         break_long_words=False, break_on_hyphens=False)


@contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    target = target_of(path)
    temporary = temporary_of(target)
    try:
        with temporary.open("wb") as file:
            if path.name.lower().endswith(COMPRESSED):
                # without name and time, so that the same results are the same bytes
                with gzip.GzipFile("", "wb", fileobj=file, mtime=0) as compressed:
                    yield cast(IO[bytes], compressed)
            else:
                yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def _write_text(file: IO[bytes], path: Path, chunks: Iterator[AnswerRows], columns: Columns,
                names: Mapping[str, str], cell: Callable[[Any], str]) -> int:
    """Writes the rows as text; returns their number."""
    count = 0
    text = io.TextIOWrapper(file, "utf-8", newline="", write_through=True)
    known = format_of(path)
    # a line ends with both characters, so that a text with either of them gets quotes
    table = None if known == "jsonl" else csv.writer(
        text, delimiter="\t" if known == "tsv" else ",", lineterminator="\r\n")
    if table is not None:
        table.writerow([cell(name) for name in ("id", *names.values(), *ANSWER)])
    for chunk in chunks:
        carried = {name: plain_values(column) for name, column in chunk.carried.items()}
        for place, answer in enumerate(chunk.answers):
            row = {"id": answer["id"], **{new: carried[old][place] if old in carried else None
                                          for old, new in names.items()},
                   **{name: answer[name] for name in ANSWER}}
            if table is None:
                line = json_text(row, ensure_ascii=False, default=str)
                text.write(without_surrogates(line) + "\n")
            else:
                table.writerow([cell(value) for value in row.values()])
        count += len(chunk.answers)
    text.flush()
    text.detach()
    return count


def plain_values(column: Any) -> list[Any]:
    """A column of a chunk as JSON values. Other Arrow types become text: moments by ISO 8601, bytes
    by base64."""
    if isinstance(column, list):
        return column
    types = arrow("results of typed columns").pa.types
    kind = column.type
    if types.is_timestamp(kind) or types.is_decimal(kind):  # of nanoseconds Python has none
        return cast("list[Any]", column.cast("string").to_pylist())
    return [_plain(value) for value in values_of(column)]


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, (datetime, date, time)):
        return value.isoformat()
    if isinstance(value, BadRecord):
        return "\ufffd"
    return value if value is None or isinstance(value, (str, int, float)) else str(value)


def _cell(value: Any) -> str:
    """A value as a cell's text; None becomes ""."""
    if value is None:
        return ""
    if isinstance(value, float):
        return json.dumps(value)  # such a file has NaN
    return without_surrogates(value if isinstance(value, str) else json_text(
        value, ensure_ascii=False, default=str))


def _unformulated(value: Any) -> str:
    """A value as a cell's text; an apostrophe precedes texts that a spreadsheet would compute."""
    text = _cell(value)
    is_formula = isinstance(value, str) and text.startswith(_FORMULAS) and not _NUMBER.fullmatch(
        text)
    return f"'{text}" if is_formula else text


def _write_parquet(file: IO[bytes], path: Path, chunks: Iterator[AnswerRows], columns: Columns,
                   names: Mapping[str, str]) -> int:
    """Writes the rows as Parquet; returns their number."""
    count = 0
    pa, pq = arrow(f"writing {path.name}")
    types = _types(pa, columns)
    ids = pa.int64() if columns.has_whole_ids else pa.string()
    answer = {name: pa.int64() if name in COUNTS else pa.float64() if name in TIMES
              else pa.string() for name in ANSWER}
    schema = pa.schema([("id", ids), *((new, types[old]) for old, new in names.items()),
                        *answer.items()])
    with pq.ParquetWriter(file, schema) as writer:
        for chunk in chunks:
            rows = chunk.answers
            arrays = [_array(pa, [int(row["id"]) if columns.has_whole_ids and row["id"] is not None
                                  else row["id"] for row in rows], ids)]
            arrays += [_array(pa, chunk.carried[old], types[old]) if old in chunk.carried
                       else pa.nulls(len(rows), types[old]) for old in names]
            arrays += [_array(pa, [row[name] for row in rows], kind)
                       for name, kind in answer.items()]
            writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=schema))
            count += len(rows)
    return count


def _types(pa: Any, columns: Columns) -> dict[str, Any]:
    """The Arrow type of each column; text where files differ."""
    known = {BOOLEAN: pa.bool_(), INTEGER: pa.int64(), NUMBER: pa.float64(), TEXT: pa.string(),
             None: pa.null()}
    types: dict[str, Any] = {}
    for segment in columns.segments:
        own = ({name: known.get(kind, pa.string()) for name, kind in segment.kinds.items()}
               if segment.kinds is not None else
               {field.name: field.type for field in segment.schema()})
        for name in segment.names():
            types[name] = _wider(pa, types.get(name, pa.null()), own[name])
    return types


def _wider(pa: Any, first: Any, second: Any) -> Any:
    if first == second or pa.types.is_null(second):
        return first
    if pa.types.is_null(first):
        return second
    try:
        return pa.unify_schemas([pa.schema([("x", first)]), pa.schema([("x", second)])],
                                promote_options="permissive").field("x").type
    except pa.ArrowException:
        return pa.string()


def _array(pa: Any, column: Any, kind: Any) -> Any:
    """A list, or an Arrow array, as an Arrow array of type `kind`."""
    if not isinstance(column, list):
        if column.type == kind:
            return column
        if not pa.types.is_string(kind):
            return column.cast(kind)
        column = plain_values(column)
    if pa.types.is_string(kind):
        return pa.array([None if value is None else _cell(value) for value in column], kind)
    if pa.types.is_floating(kind):
        return pa.array([None if value is None else float(value) for value in column], kind)
    return pa.array(column, kind)


class AnswerRows(NamedTuple):
    """Rows of the table. `carried`: values of each input column, a list or an Arrow array."""

    answers: Sequence[Mapping[str, Any]]
    carried: Mapping[str, Any]


def names_in_results(carried: Sequence[str]) -> dict[str, str]:
    """Name of each input column in the results, different from the results' own columns."""
    names: dict[str, str] = {}
    taken = {"id", *ANSWER}
    for name in carried:
        new = name
        while new in taken or (new != name and new in carried):
            new = f"input_{new}"
        names[name] = new
        taken.add(new)
    return names


def chunks_of(output: Path, columns: Columns) -> Iterator[AnswerRows]:
    """Yields all rows, up to the first one that a stopped run has not answered."""
    rows = _rows(output)
    for carried, count in _carried(columns):
        answers = list(islice(rows, count))
        yield AnswerRows(answers, {name: column[:len(answers)] for name, column in carried.items()})
        if len(answers) < count:
            return
    while answers := list(islice(rows, _ROWS_AT_A_TIME)):
        assert not columns.segments, f"{output}: more answers than rows of the input"
        yield AnswerRows(answers, {})


def _carried(columns: Columns) -> Iterator[tuple[Mapping[str, Any], int]]:
    for segment in columns.segments:
        if segment.kinds is None:
            for batch in segment.batches():
                yield {name: batch.column(name) for name in segment.names()}, batch.num_rows
        else:
            for rows in segment.rows():
                yield {name: [row.get(name) for row in rows] for name in segment.kinds}, len(rows)


def _rows(output: Path) -> Iterator[dict[str, Any]]:
    try:
        spool = Spool(output)
    except (OSError, ValueError, LookupError, TypeError, EOFError) as cause:
        raise XgptError(f"{output}: its requests' spool cannot be read ({cause}), so no file of "
                        "results can be made") from None
    answers, errors = _answers(output, spool), _errors(output, spool)
    for _, rows in groupby(heapq.merge(answers, errors, key=lambda each: each[0]),
                           key=lambda each: each[0]):
        # a line that expired has its error in place of an answer
        row = next((row for _, row in rows if row is not None), None)
        if row is None:
            return
        yield row


def _answers(output: Path, spool: Spool) -> Iterator[tuple[tuple[int, int], dict[str, Any] | None]]:
    """Yields (place in the input, row) of each request; the row is None without an answer."""
    results = chain.from_iterable(map(parts, _objects(output / "results.jsonl")))
    ahead = next(results, None)
    for query, record in enumerate(spool.records()):
        result = None
        own = ahead and ahead.get("xgpt", ahead)
        if own and (not isinstance(own, dict) or own.get("index", query) == query):
            result, ahead = ahead, next(results, None)
        if record.sample and result is not None:
            continue  # a table has one row for each row of the input
        row = None if result is None else _answer(result)
        yield (record.file, record.line), None if row is None else {"id": record.id, **row}


def _answer(result: Mapping[str, Any]) -> dict[str, Any]:
    flat = flat_result(result)
    row = {**{name: flat.get(name) for name in ANSWER}, "answer": flat.get("text")}
    error = result.get("error")  # an object in OpenAI's form
    row["error"] = error.get("message") if isinstance(error, dict) else error
    return row


def _errors(output: Path, spool: Spool) -> Iterator[tuple[tuple[int, int], dict[str, Any] | None]]:
    places = {name: place for place, name in enumerate(spool.files)}
    for error in map(flat_error, _objects(output / "errors.jsonl")):
        if isinstance(line := error.get("line"), int):  # else it was changed
            yield (places.get(str(error.get("file")), 0), line), {
                "id": error.get("id"), **dict.fromkeys(ANSWER), "error": error.get("error")}


def _objects(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the objects of a file's lines, up to a torn one; none without a file."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in file:
            try:
                value = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:
                value = None
            if not isinstance(value, dict):
                return
            yield value
