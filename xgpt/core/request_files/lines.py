"""Files of lines: a JSON object a line, or a prompt a line; and a JSON array, which is one value
and so is read as a whole. Blank lines are skipped."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from xgpt.core.request_files.files import RequestFiles
from xgpt.core.request_files.rows import Row, of_object
from xgpt.core.request_files.source import unreadable
from xgpt.core.workload import BadRecord

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_jsonl(stream: IO[bytes], files: RequestFiles) -> Iterator[Row]:
    """Yields a row a line."""
    for number, line in _lines(stream):
        try:
            yield Row(number, *of_object(_object(line), files))
        except BadRecord as cause:
            yield Row(number, str(cause))


def read_text(stream: IO[bytes]) -> Iterator[Row]:
    """Yields a prompt a line, without what ends it."""
    for number, line in _lines(stream):
        try:
            yield Row(number, {"prompt": _decoded(line).removesuffix("\r")})
        except BadRecord as cause:
            yield Row(number, str(cause))


def read_array(stream: IO[bytes], files: RequestFiles, path: Path) -> Iterator[Row]:
    """Yields a row an item: an object, or a text, which is a prompt. Raises InputError for a file
    that is not whole."""
    try:
        items = json.loads(stream.read().removeprefix(BYTE_ORDER_MARK).decode("utf-8"))
    except UnicodeDecodeError as cause:
        raise unreadable(path, f"not UTF-8: {cause.reason} at byte {cause.start}") from None
    except RecursionError:
        raise unreadable(path, "nested too deeply") from None
    except ValueError as cause:
        raise unreadable(path, f"no whole JSON array: {cause}. Is it cut off? Of a file of one "
                         "object a line the format is jsonl") from None
    if not isinstance(items, list):
        raise unreadable(path, "its JSON is no array: [{\"prompt\": ...}, ...] is wanted, or one "
                         "object a line, whose format is jsonl")
    for number, item in enumerate(items, start=1):
        if isinstance(item, str):
            yield Row(number, {"prompt": item})
        elif not isinstance(item, dict):
            yield Row(number, "neither a JSON object nor a text")
        else:
            try:
                yield Row(number, *of_object(item, files))
            except BadRecord as cause:
                yield Row(number, str(cause))


def _lines(stream: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yields those that are not blank, with their numbers from 1."""
    for number, raw in enumerate(stream, start=1):
        line = raw.removesuffix(b"\n").removeprefix(BYTE_ORDER_MARK if number == 1 else b"")
        if line.strip():
            yield number, line


def _decoded(line: bytes) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as cause:
        raise BadRecord(f"not UTF-8: {cause.reason} at byte {cause.start}") from None


def _object(line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(_decoded(line))
    except ValueError as cause:  # JSONDecodeError, or a number of more than 4,300 digits
        raise BadRecord(f"not JSON: {cause}") from None
    except RecursionError:
        raise BadRecord("not usable: JSON nested too deeply") from None
    if not isinstance(record, dict):
        raise BadRecord("not a JSON object")
    return record
