"""Which lines of results.jsonl stand in their places: the n-th is of the n-th query of the spool.
The file may have been edited, or lie on a bad block, between a stop and the same command."""

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from operator import index as whole_number
from pathlib import Path
from typing import NamedTuple

from xgpt.requests.choices import num_parts, parts
from xgpt.requests.spool import Spool

_MOST_PARSED = 2**26  # bytes of a file whose lines are parsed; of a longer one's see `told`
_STRING = rb'"(?:[^"\\]|\\.)*+"'
_BEGIN = re.compile(rb'\{"id": (?:"batch_req_(\d+)", "custom_id": (%b|null)|(%b), "index": (\d+)), '
                    % (_STRING, _STRING))


class Line(NamedTuple):
    """A result of `query`, or of so many from that on."""

    query: int
    parts: int


class Checked(NamedTuple):
    """`good_bytes` at the start of the file have the results of the first `num_queries`.
    `behind`: where lines of other queries begin that follow, and the line, by its query. `fault`:
    why the good ones end there; empty where nothing but a torn line follows."""

    good_bytes: int = 0
    num_queries: int = 0
    behind: Mapping[int, tuple[int, Line]] = {}
    fault: str = ""

    @property
    def held(self) -> frozenset[int]:
        """The queries whose results are `behind`."""
        return frozenset(query for _, line in self.behind.values()
                         for query in range(line.query, line.query + line.parts))


def checked(path: Path) -> Checked:
    """Looks at all of a results file, once as long as it stays as it is. A run may be writing
    there."""
    spool = path.parent / "spool" / "spool.json"
    stamps = [(found.st_ino, found.st_size, found.st_mtime_ns)
              for found in (file.stat() for file in (path, spool) if file.is_file())]
    return _checked(path, *stamps) if path.is_file() else Checked()


@lru_cache(4)
def _checked(path: Path, *stamps: tuple[int, int, int]) -> Checked:
    good_bytes = count = offset = 0
    fault, is_over, behind = "", False, dict[int, tuple[int, Line]]()
    spool, is_long = spool_of(path.parent), path.stat().st_size > _MOST_PARSED
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            line, is_whole = told(text, spool, is_long), text.endswith(b"\n")
            if not is_over and is_whole and line is not None and line.query == count:
                good_bytes, count = good_bytes + len(text), count + line.parts
            else:
                if not is_over and is_whole:
                    what = "no result of this job" if line is None else (
                        f"the result of query {line.query}")
                    fault = f"line {number} of {path.name} is {what}, where query {count} belongs"
                is_over = True
                if line is not None and line.query >= count:
                    behind.setdefault(line.query, (offset, line))
            offset += len(text)
    return Checked(good_bytes, count, behind, fault)


def forget() -> None:
    """What was seen of files is looked at anew."""
    _checked.cache_clear()


def told(text: bytes, spool: Spool | None, is_long: bool = False) -> Line | None:
    """What a line is of; None of one that is no result of the spool's job. `is_long`: told by the
    line's frame, its index and its id, where that is enough."""
    is_framed = is_long and text.endswith(b"}\n") and b"\0" not in text and (
        text.count(b'"') % 2 == 0)
    begin = _BEGIN.match(text) if is_framed else None
    if begin is not None and not (begin[1] and b'"of": ' in text):  # of several answers
        line, name = Line(int(begin[1] or begin[4]), 1), begin[2] or begin[3]
    else:
        try:
            row = json.loads(text)
            line = Line(whole_number(row.get("xgpt", row)["index"]), num_parts(row))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return None
        name = json.dumps(row.get("custom_id", row.get("id"))).encode()
    is_own = spool is None or (0 <= line.query < len(spool) and spool.is_named(line.query, name))
    return line if is_own else None


def spool_of(output: Path) -> Spool | None:
    """The spool of an output folder; None where there is none that can be read."""
    try:
        return Spool(output)
    except (OSError, ValueError, LookupError, TypeError, EOFError):
        return None


def lines_behind(path: Path, found: Checked) -> dict[int, str]:
    """The lines that `checked` found `behind`, by their queries, as they were when held."""
    lines = dict[int, str]()
    with path.open("rb") as file:
        for index, (offset, line) in found.behind.items():
            file.seek(offset)
            text = file.readline().decode().removesuffix("\n")
            lines |= {index: text} if line.parts == 1 else {
                index + place: json.dumps(part, ensure_ascii=False)
                for place, part in enumerate(parts(json.loads(text)))}
    return lines
