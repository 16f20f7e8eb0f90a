"""Lengths from a file: CSV or JSON lines with columns input and output, or one column alone, or the
results.jsonl of a finished job (ours, or in OpenAI's batch form)."""

import csv
import json
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from xgpt.core.errors import InputError, Mistake, wrong
from xgpt.core.lengths import MAX_LENGTH_TOKENS, IntArray
from xgpt.core.system.whole_file import read_text

Side: TypeAlias = Literal["input", "output"]
MAX_MISTAKES = 20  # of a bad file; the rest would only repeat them

_NAMES: dict[Side, tuple[str, ...]] = {
    "input": ("input", "input_tokens", "prompt_tokens"),
    "output": ("output", "output_tokens", "completion_tokens")}
_Row: TypeAlias = "tuple[int, Mapping[str, Any]]"  # line, values by column


def read_lengths(path: Path, side: Side) -> IntArray:
    """Reads one side's lengths, [num_rows]: the column of that name, or the file's only column."""
    rows = _read_rows(path)
    key = _column(rows[0][1], side)
    if key is None and len(rows[0][1]) == 1 and not any(
            _column(rows[0][1], other) for other in _NAMES):  # the other side's is no substitute
        key = next(iter(rows[0][1]))
    if key is None:
        raise wrong(path, "lengths", None,
                    f"no column {side}; has {', '.join(map(str, rows[0][1]))}",
                    rows[0][0])
    return _checked(path, rows, key)[:, 0]


def read_length_pairs(path: Path) -> IntArray | None:
    """Reads (input, output) of every row, [num_rows, 2]; None where the file lacks one of them."""
    rows = _read_rows(path)
    inputs, outputs = _column(rows[0][1], "input"), _column(rows[0][1], "output")
    if inputs is None or outputs is None:
        return None
    return _checked(path, rows, inputs, outputs)


def _column(row: Mapping[str, Any], side: Side) -> str | None:
    return next((name for name in _NAMES[side] if name in row), None)


def _checked(path: Path, rows: list[_Row], *keys: str) -> IntArray:
    """[rows, keys] lengths. Raises InputError with the first bad one of each row."""
    values = [[_length(row.get(key)) for key in keys] for _, row in rows]
    bad = [(line, row, keys[numbers.index(None)])
           for (line, row), numbers in zip(rows, values, strict=True) if None in numbers]
    if bad:
        raise InputError([Mistake(file=str(path), line=line, key=key, value=row.get(key),
                                  allowed=f"a whole number from 1 to {MAX_LENGTH_TOKENS}")
                          for line, row, key in bad[:MAX_MISTAKES]])
    return np.array(values, dtype=np.int64)


def _length(value: object) -> int | None:
    if isinstance(value, str) and value.strip().isascii() and value.strip().isdigit():
        value = int(value) if len(value) < 20 else None
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_LENGTH_TOKENS:
        return value
    return None


def _read_rows(path: Path) -> list[_Row]:
    try:
        text = read_text(path, "utf-8-sig")
    except UnicodeDecodeError as cause:
        raise wrong(path, "lengths", None, f"not UTF-8 text: {cause.reason}") from None
    except OSError as cause:
        raise wrong(path, "lengths", None, f"cannot be read: {cause.strerror}") from None
    except ValueError as cause:
        raise wrong(path, "lengths", None, f"cannot be read: {cause}") from None
    is_json = text.lstrip().startswith("{")
    rows = list(_json_rows(path, text) if is_json else _csv_rows(path, text))
    if not rows or not rows[0][1]:
        raise wrong(path, "lengths", None, "holds no lengths")
    return rows


def _json_rows(path: Path, text: str) -> Iterator[_Row]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as cause:
            raise wrong(path, "lengths", None, f"not JSON: {cause}", number) from None
        if not isinstance(record, dict):
            raise wrong(path, "lengths", None, "not a JSON object", number)
        yield number, _usage(record) or record


def _usage(record: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """`response.body.usage` of an OpenAI batch line."""
    value: object = record
    for key in ("response", "body", "usage"):
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else None


def _csv_rows(path: Path, text: str) -> Iterator[_Row]:
    reader = csv.reader(text.splitlines())
    header: list[str] | None = None
    try:
        for cells in reader:
            cells = [cell.strip() for cell in cells]
            if not any(cells):
                continue
            if header is None:
                if any(_length(cell) is None for cell in cells):
                    header = cells
                    continue
                header = ["length"] if len(cells) == 1 else ["input", "output"]
            if len(cells) > len(header):
                raise wrong(path, "lengths", None, f"more cells than columns ({len(header)})",
                            reader.line_num)
            yield reader.line_num, dict(zip_longest(header, cells))
    except csv.Error as cause:
        raise wrong(path, "lengths", None, f"not CSV: {cause}", reader.line_num) from None
