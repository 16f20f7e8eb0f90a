"""Requests that had not begun when their deadlines passed: records of errors.jsonl with the code
`expired`, and their places in results.jsonl."""

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
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
    return sum(_code(row) == EXPIRED for row in _rows(output))


def expired_requests(output: Path) -> list[int]:
    """All requests of the expired lines in errors.jsonl, in order."""
    rows = [row for row in _rows(output) if _code(row) == EXPIRED]
    if not rows:
        return []
    spool = Spool(output)
    lines = {_place(row, spool.files) for row in rows}
    return [query for query, record in enumerate(spool.records())
            if (record.file, record.line) in lines]


def write_expired(output: Path, queries: Iterable[int]) -> list[int]:
    """Adds a record for each line of the requests `queries` to errors.jsonl, in the order of the
    lines. Returns all requests of those lines that have no line in results.jsonl: a line of several
    answers has none if one of them is missing."""
    spool, missing, records = Spool(output), set[int](), dict[tuple[int, int, int], RequestError]()
    for query in queries:
        record = spool.record(query)
        first, own = (query - record.sample, 0) if record.choices > 1 else (query, record.sample)
        missing.update(range(first, first + record.choices))
        records[record.file, record.line, own] = RequestError(
            line=record.line, file=record.file, id=record.id, is_openai=record.is_openai,
            error=f"answer {own + 1} of its request: {_WORDS}" if own else _WORDS, code=EXPIRED)
    labels = spool.files
    # ranks that died and started again have expired them again
    rows = [row for row in _rows(output) if _code(row) != EXPIRED]
    rows += [error_line(one, labels[one.file] if labels else None) for one in records.values()]
    write_atomically(output / "errors.jsonl", "".join(
        json.dumps(row, ensure_ascii=False) + "\n" for row in sorted(
            rows, key=lambda row: _place(row, labels))))
    return sorted(missing)


def _rows(output: Path) -> list[dict[str, Any]]:
    with suppress(FileNotFoundError), (output / "errors.jsonl").open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]
    return []


def _code(row: dict[str, Any]) -> object:
    own = row["error"] if isinstance(row.get("error"), dict) else row
    return own.get("code")


def _place(row: dict[str, Any], labels: Sequence[str]) -> tuple[int, int]:
    """(index of its file, line) of an error record."""
    own = row.get("xgpt", row)
    return labels.index(own["file"]) if labels else 0, own["line"]
