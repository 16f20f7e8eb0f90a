"""The answers of a run as rows, one for every row of the input that was answered or refused, in the
input's order; and what the results take over of the input, beside them."""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from xgpt.core.choices import parts
from xgpt.core.errors import XgptError
from xgpt.core.spool import Spool
from xgpt.core.spool_columns import Columns
from xgpt.report.output import flat_error, flat_result

COUNTS = ("input_tokens", "output_tokens")
TIMES = ("latency_s", "encode_start_s", "ttft_s", "tpot_s")
TEXTS = ("text", "finish_reason", "error")
ANSWER = ("text", "finish_reason", *COUNTS, "error", *TIMES)
_ROWS_AT_A_TIME = 1024


class AnswerRows(NamedTuple):
    """Some rows. `carried`: of each column of the input, a list or an Arrow array as long."""

    answers: Sequence[Mapping[str, Any]]
    carried: Mapping[str, Any]


def names_in_results(carried: Sequence[str]) -> dict[str, str]:
    """What each column of the input is called there: as ours are not."""
    names: dict[str, str] = {}
    taken = {"id", *ANSWER}
    for name in carried:
        new = name
        while new in taken or (new != name and new in carried):
            new = f"input_{new}"
        names[name] = new
        taken.add(new)
    return names


def carried_names(columns: Columns) -> list[str]:
    """The columns that are taken over, in the order in which they came."""
    names: dict[str, None] = {}
    for segment in columns.segments:
        names |= dict.fromkeys(segment.names())
    return list(names)


def chunks_of(output: Path, columns: Columns) -> Iterator[AnswerRows]:
    """Yields all rows up to the first that a stopped run has no answer to."""
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
    for _, row in heapq.merge(answers, errors, key=lambda each: each[0]):
        if row is None:
            return
        yield row


def _answers(output: Path, spool: Spool) -> Iterator[tuple[tuple[int, int], dict[str, Any] | None]]:
    """Yields (place in the input, row) of each query; None of the first without an answer."""
    results = chain.from_iterable(map(parts, _objects(output / "results.jsonl")))
    for record in spool.records():
        result = next(results, None)
        if record.sample and result is not None:
            continue  # a table has a row for each of the input's
        row = None if result is None else _answer(result)
        yield (record.file, record.line), None if row is None else {"id": record.id, **row}


def _answer(result: Mapping[str, Any]) -> dict[str, Any]:
    row = {name: flat_result(result).get(name) for name in ANSWER}
    error = result.get("error")  # of OpenAI's form an object
    row["error"] = error.get("message") if isinstance(error, dict) else error
    return row


def _errors(output: Path, spool: Spool) -> Iterator[tuple[tuple[int, int], dict[str, Any] | None]]:
    places = {name: place for place, name in enumerate(spool.files)}
    for error in map(flat_error, _objects(output / "errors.jsonl")):
        if isinstance(line := error.get("line"), int):  # else it was changed
            yield (places.get(str(error.get("file")), 0), line), {
                "id": error.get("id"), **dict.fromkeys(ANSWER), "error": error.get("error")}


def _objects(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the objects of a file's whole lines up to a torn one; none without a file."""
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
