"""Requests that had not begun when their deadlines passed: records of errors.jsonl with the code
`expired`, and their places in results.jsonl."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xgpt.core.system.whole_file import write_atomically
from xgpt.requests.request import RequestError
from xgpt.requests.spool import Spool
from xrunner.files.result_line import error_line
from xrunner.query import EXPIRED

_WORDS = "its deadline passed before it began; the same command runs it"


def num_expired(output: Path) -> int:
    """Number of expired requests in errors.jsonl."""
    return sum(_code(row) == EXPIRED for row in _rows(output / "errors.jsonl"))


def write_expired(output: Path, queries: Sequence[int]) -> list[int]:
    """Adds a record for each line of the requests `queries` to errors.jsonl, in the order of the
    lines. Returns all requests of those lines that have no line in results.jsonl: a line of several
    answers has none if one of them is missing."""
    spool, missing, records = Spool(output), list[int](), dict[tuple[int, int, int], RequestError]()
    for query in queries:
        record = spool.record(query)
        first = query - record.sample if record.choices > 1 else query
        missing += range(first, first + record.choices)
        own = 0 if record.choices > 1 else record.sample
        records[record.file, record.line, own] = RequestError(
            line=record.line, file=record.file, id=record.id, is_openai=record.is_openai,
            error=f"answer {own + 1} of its request: {_WORDS}" if own else _WORDS, code=EXPIRED)
    labels = spool.files
    # ranks that died and started again have expired them again
    rows = [row for row in _rows(output / "errors.jsonl") if _code(row) != EXPIRED]
    rows += [error_line(one, labels[one.file] if labels else None) for one in records.values()]
    rows.sort(key=lambda row: _place(row, labels))
    write_atomically(output / "errors.jsonl", "".join(
        json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return sorted(set(missing))


def _rows(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def _code(row: dict[str, Any]) -> object:
    error = row.get("error")
    return error.get("code") if isinstance(error, dict) else row.get("code")


def _place(row: dict[str, Any], labels: Sequence[str]) -> tuple[int, int]:
    """(index of its file, line) of an error record."""
    own = row.get("xgpt", row)
    return labels.index(own["file"]) if labels else 0, own["line"]
