"""Which lines of results.jsonl stand in their places: the n-th is of the n-th query of the spool.
A file may have been edited, or lie on a bad block, between a stop and the same command."""

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from xgpt.core.choices import num_parts, parts
from xgpt.core.spool import Spool

# Bytes of a file whose lines are parsed, one by one: seconds. Of lines of a longer file the frame,
# the index and the id are looked at.
_MOST_PARSED = 2**26
_STRING = rb'"(?:[^"\\]|\\.)*+"'
_BEGIN = re.compile(rb'\{"id": (?:"batch_req_(\d+)", "custom_id": (%b|null)|(%b), "index": (\d+)), '
                    % (_STRING, _STRING))


class Checked(NamedTuple):
    """`good_bytes` at the start of the file have the results of the first `count` queries.
    `behind`: where the lines of other queries begin that follow these, and of how many each is, by
    the first of them. `fault`: why the good ones end there, in words; empty where nothing but a
    torn line follows."""

    good_bytes: int = 0
    count: int = 0
    behind: Mapping[int, tuple[int, int]] = {}
    fault: str = ""


class _Line(NamedTuple):
    index: int
    parts: int
    name: bytes  # the id, as JSON


def checked(path: Path) -> Checked:
    """Looks at all of a results file, once as long as it stays as it is. A run may be writing
    there."""
    try:
        found = path.stat()
    except OSError:
        return Checked()
    spool = path.parent / "spool" / "spool.json"
    is_there = spool.is_file()
    return _checked(path, (found.st_ino, found.st_size, found.st_mtime_ns,
                           spool.stat().st_mtime_ns if is_there else 0))


@lru_cache(4)
def _checked(path: Path, stamp: tuple[int, ...]) -> Checked:
    good_bytes = count = offset = 0
    fault, is_over, behind = "", False, dict[int, tuple[int, int]]()
    spool, is_long = spool_of(path.parent), stamp[1] > _MOST_PARSED
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            line = _quick(text) if is_long else None
            line = line or told(text)
            is_own = line is not None and is_of(spool, line.index, line.name)
            if not is_over and is_own and line is not None and line.index == count and (
                    text.endswith(b"\n")):
                good_bytes, count = good_bytes + len(text), count + line.parts
            elif not is_over:
                is_over = True
                if line is not None or text.endswith(b"\n"):
                    fault = (f"line {number} of {path.name} is "
                             f"{_in_words(line, is_own, count)}")
            if is_over and is_own and line is not None and line.index >= count:
                behind.setdefault(line.index, (offset, line.parts))
            offset += len(text)
    return Checked(good_bytes, count, behind, fault)


def _in_words(line: _Line | None, is_own: bool, place: int) -> str:
    if line is None:
        return f"no result, where that of query {place} belongs"
    if not is_own:
        return f"none of this job's results, where that of query {place} belongs"
    if line.index == place:
        return f"that of query {place}, and has no end"
    return f"the result of query {line.index}, where that of query {place} belongs"


def spool_of(output: Path) -> Spool | None:
    """The spool of an output folder; None where there is none that can be read."""
    try:
        return Spool(output)
    except (OSError, ValueError):
        return None


def is_of(spool: Spool | None, index: int, name: bytes) -> bool:
    """Whether a line of this index and id, as JSON, can be of the spool's job."""
    return spool is None or (index < len(spool) and spool.is_named(index, name))


def told(text: bytes) -> _Line | None:
    """What a line is of; None of one that is no result."""
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):  # of UnicodeDecodeError too
        return None
    if not isinstance(row, dict) or (index := first_index(row)) is None:
        return None
    return _Line(index, num_parts(row), json.dumps(row.get("custom_id", row.get("id"))).encode())


def _quick(text: bytes) -> _Line | None:
    """The same, told from the frame; None where that does not tell."""
    begin = _BEGIN.match(text)
    if begin is None or not text.endswith(b"}\n") or b"\0" in text or text.count(b'"') % 2:
        return None
    batch, batch_name, name, index = begin.groups()
    if batch and b'"of": ' in text:  # several answers
        return None
    return _Line(int(index or batch), 1, name or batch_name)


def first_index(row: Mapping[str, Any]) -> int | None:
    """The index of the query, or of the first of those, that a line is of."""
    own = row.get("xgpt", row)  # of OpenAI's form
    index = own.get("index") if isinstance(own, dict) else None
    return index if isinstance(index, int) and index >= 0 else None


def lines_behind(path: Path, found: Checked) -> dict[int, str]:
    """The lines that `checked` found `behind`, by their queries, as they were when held."""
    lines = dict[int, str]()
    with path.open("rb") as file:
        for index, (offset, count) in found.behind.items():
            file.seek(offset)
            text = file.readline().decode().removesuffix("\n")
            lines |= {index: text} if count == 1 else {
                index + place: json.dumps(part, ensure_ascii=False)
                for place, part in enumerate(parts(json.loads(text)))}
    return lines
