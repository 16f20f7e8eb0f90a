"""Files of lines: a JSON object a line, or a prompt a line; and a JSON array, which is one value
and so is read as a whole. Blank lines are skipped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from xgpt.requests.chat import BadRecord
from xgpt.requests.file_rows import (
    RepeatedKeyError,
    Row,
    of_object,
    parsed,
    parsed_items,
)
from xgpt.requests.request_files import RequestFiles
from xgpt.requests.source import unreadable

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
MAX_LINE_BYTES = 2**24  # of a request; more is another file by mistake, or an attack
MAX_ARRAY_BYTES = 2**27  # of a JSON array, which is in memory as a whole
_TOO_LONG = f"longer than {MAX_LINE_BYTES // 2**20} MiB, the most that a line may have"
_SKIPPED_BYTES = 2**20


def read_jsonl(stream: IO[bytes], files: RequestFiles) -> Iterator[Row]:
    """Yields a row a line."""
    for number, line in _lines(stream):
        try:
            yield Row(number, *of_object(_object(_whole(line)), files))
        except BadRecord as cause:
            yield Row(number, str(cause))


def read_text(stream: IO[bytes]) -> Iterator[Row]:
    """Yields a prompt a line, without what ends it."""
    for number, line in _lines(stream):
        try:
            yield Row(number, {"prompt": _decoded(_whole(line)).removesuffix("\r")})
        except BadRecord as cause:
            yield Row(number, str(cause))


def read_array(stream: IO[bytes], files: RequestFiles, path: Path) -> Iterator[Row]:
    """Yields a row an item: an object, or a text, which is a prompt. Raises InputError for a file
    that is not whole."""
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
    for number, item in enumerate(items, start=1):
        if isinstance(item, str):
            yield Row(number, {"prompt": item})
        elif isinstance(item, RepeatedKeyError):
            yield Row(number, str(item))
        elif not isinstance(item, dict):
            yield Row(number, "neither a JSON object nor a text")
        else:
            try:
                yield Row(number, *of_object(item, files))
            except BadRecord as cause:
                yield Row(number, str(cause))


def _lines(stream: IO[bytes]) -> Iterator[tuple[int, bytes | None]]:
    """Yields those that are not blank, with their numbers from 1; None of one that is too long,
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


def _whole(line: bytes | None) -> bytes:
    if line is None:
        raise BadRecord(_TOO_LONG)
    return line


def _decoded(line: bytes) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as cause:
        raise BadRecord(f"not UTF-8: {cause.reason} at byte {cause.start}") from None


def _object(line: bytes) -> dict[str, Any]:
    try:
        record = parsed(_decoded(line))
    except ValueError as cause:  # JSONDecodeError, or a number of more than 4,300 digits
        raise BadRecord(f"not JSON: {cause}") from None
    if not isinstance(record, dict):
        raise BadRecord("not a JSON object")
    return record
