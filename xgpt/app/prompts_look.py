"""What is in a file of prompts, as far as writing a job for it needs to know."""

import csv
import io
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xgpt.app.telling import Teller
from xgpt.core.errors import InputError
from xgpt.report.table import paragraph
from xgpt.requests.formats import USUAL, arrow, delimiter_of
from xgpt.requests.keys import CONTENTS
from xgpt.requests.reader import read_requests
from xgpt.requests.request import Request, RequestError
from xgpt.requests.request_files import SUFFIXES, TABLES, RequestFiles, opened

MOST_READ = 50_000  # entries: enough to know what they are like
_MOST_SAMPLED = 50  # rows, for what a column is like
# Names under which data sets keep what a model is to be asked, the likeliest first.
_LIKELY = ("question", "instruction", "query", "text", "input", "content", "sentence", "article",
           "document", "review", "body")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptColumn:
    """One column of a table, or key of JSON objects. `mean_chars`: of its texts; 0 where it holds
    none. `sample`: its first one."""

    name: str
    mean_chars: float
    sample: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptsLook:
    """What the first MOST_READ entries are. Lengths are of the prompts' text, in characters; 0
    where they are tokens."""

    files: RequestFiles
    count: int
    is_all: bool
    mean_chars: float
    most_chars: int
    capped: int  # name their own max_tokens, or a forced length
    most_cap: int
    errors: tuple[RequestError, ...]


def columns_of(path: Path) -> list[PromptColumn]:
    """The columns of a table, or the keys of a JSON file's objects; none of a file of lines of
    text. Raises InputError for a file that cannot be read."""
    files = RequestFiles(paths=(path,))
    with opened(path, files, lambda raw: None) as (stream, known):
        if known == "text":
            return []
        rows = list(itertools.islice(_records(stream, known, path), _MOST_SAMPLED))
    names = dict.fromkeys(name for row in rows for name in row)
    return [_column(name, [row.get(name) for row in rows]) for name in names]


def needs_column(path: Path, columns: list[PromptColumn]) -> bool:
    """Whether somebody has to say which column holds the prompts."""
    names = {column.name for column in columns}
    return bool(columns) and not names & {*CONTENTS, "body"}


def likeliest(columns: list[PromptColumn]) -> PromptColumn | None:
    """The column that most looks like prompts: by its name, else the one of the longest texts."""
    texts = [column for column in columns if column.mean_chars > 0]
    named = {column.name.lower(): column for column in texts}
    for name in _LIKELY:
        if name in named:
            return named[name]
    return max(texts, key=lambda column: column.mean_chars, default=None)


def look_at(path: Path, column: str | None) -> PromptsLook:
    """Reads the entries, with the prompts in this column (None: the one that is called so). Raises
    InputError for a file that cannot be read, or has no such column."""
    files = RequestFiles(paths=(path,), prompt=column)
    source = read_requests(files)
    entries = list(itertools.islice(source, MOST_READ + 1))
    is_all, entries = len(entries) <= MOST_READ, entries[:MOST_READ]
    requests = [entry for entry in entries if isinstance(entry, Request)]
    chars = [_chars(request) for request in requests]
    caps = [cap for request in requests if (cap := request.output_cap(0))]
    return PromptsLook(
        files=files, count=len(requests), is_all=is_all,
        mean_chars=sum(chars) / len(chars) if chars else 0.0, most_chars=max(chars, default=0),
        capped=len(caps), most_cap=max(caps, default=0),
        errors=tuple(entry for entry in entries if isinstance(entry, RequestError)))


def delimiters_of(path: Path) -> dict[Path, str]:
    """What divides the file's cells, where its name says something else."""
    found = dict[Path, str]()
    with suppress(InputError):  # of a header without prompts: their column is asked for next
        next(read_requests(RequestFiles(paths=(path,)), divided=found.__setitem__), None)
    return found


def tell_delimiters(delimiters: Mapping[Path, str], tell: Teller) -> None:
    """Tells what divides the cells of those files whose names do not."""
    if delimiters:
        path, one = next(iter(delimiters.items()))
        others = len(delimiters) - 1
        more = f" (and so in {others} more of the files)" if others else ""
        tell.say(paragraph(f"note: the cells of {path.name} are divided by {one!r}, by its "
                           f"header{more}; the key `delimiter` beside `file` sets another"))


def files_here(folder: Path) -> list[Path]:
    """Files of the folder that could hold prompts, by their names."""
    ends = tuple(end + tail for ends in SUFFIXES.values() for end in ends for tail in ("", ".gz"))
    return sorted(path for path in folder.iterdir()
                  if path.is_file() and path.name.lower().endswith(ends)
                  and path.name not in ("requirements.txt", "constraints.txt", "package.json"))


def _records(stream: Any, known: str, path: Path) -> Iterator[dict[str, Any]]:
    """The first rows of a table, or objects of a JSON file, whatever they are."""
    if known == "parquet":
        table = arrow(f"reading {path.name}").pq.ParquetFile(stream)
        batch = next(table.iter_batches(_MOST_SAMPLED), None)
        if batch is None or not batch.num_rows:
            yield dict.fromkeys(table.schema_arrow.names)
        else:
            yield from batch.to_pylist()
    elif known in TABLES:
        delimiter = delimiter_of(stream, USUAL[known])
        text = io.TextIOWrapper(stream, "utf-8-sig", "replace", newline="")
        reader = csv.DictReader(text, delimiter=delimiter)
        rows = list(itertools.islice(reader, _MOST_SAMPLED))
        yield from ({str(k).strip(): v for k, v in row.items() if k is not None} for row in rows)
        if not rows:
            yield dict.fromkeys(reader.fieldnames or ())
        text.detach()
    elif known == "json":
        value = _or_nothing(lambda: json.loads(stream.read()))
        yield from (item for item in value or () if isinstance(item, dict))
    else:
        for line in itertools.islice(stream, _MOST_SAMPLED):
            item = _or_nothing(lambda line=line: json.loads(line))  # type: ignore[misc]
            if isinstance(item, dict):
                yield item


def _or_nothing(read: Callable[[], Any]) -> Any:
    """What was read; None of what is no JSON: who reads the requests says why."""
    try:
        return read()
    except (ValueError, RecursionError):
        return None


def _column(name: str, values: list[Any]) -> PromptColumn:
    texts = [value for value in values if isinstance(value, str) and value.strip()]
    numbers = [text for text in texts if _is_number(text)]
    is_text = len(texts) > 2 * len(numbers)
    return PromptColumn(
        name=name, mean_chars=sum(map(len, texts)) / len(texts) if texts and is_text else 0.0,
        sample=" ".join(str(next((v for v in values if v not in (None, "")), "")).split()))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _chars(request: Request) -> int:
    if request.messages is not None:
        return sum(len(message.get("content", "")) for message in request.messages)
    return len(request.prompt or "")
