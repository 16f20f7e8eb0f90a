"""The keys of a job file that say where its requests are, how they are written, and in which file
their results are wanted besides results.jsonl."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from xgpt.core.errors import nearest
from xgpt.job import typed
from xgpt.requests.request_files import COMPRESSED, STDIN, SUFFIXES, RequestFiles, format_of

MAX_COUNT = 10**8
RESULT_FORMATS = ("csv", "tsv", "parquet", "jsonl")
_OWN_FILES = ("results.jsonl", "held.jsonl", "errors.jsonl", "steps.jsonl")
_FILES = "a file of requests, a list of files, a pattern (prompts/*.jsonl), or - for standard input"
_ENDS = tuple(end + tail for ends in SUFFIXES.values() for end in ends for tail in ("", COMPRESSED))
_RESULTS = "a file whose name ends in .csv, .tsv, .parquet or .jsonl; or off"


def files_of(value: Any, folder: Path) -> tuple[Path, ...]:
    """The files of a name, a pattern, or several of these in a list; or standard input alone."""
    if value == [None]:
        return (STDIN,)  # `--set workload.requests=-`: to YAML a list of nothing
    texts = typed.texts_of(value)
    if not texts:
        raise ValueError
    if STDIN.name in texts:
        if len(texts) > 1:
            raise ValueError("- (standard input) stands alone")
        return (STDIN,)
    found = {name: _found(name, folder) for name in texts}
    if missing := [name for name in texts if not found[name]]:
        raise ValueError("; ".join(_not_found(name, folder) for name in missing))
    # a file that two of them name is read once
    return tuple(dict.fromkeys(path for name in texts for path in found[name]))


_Column = Annotated[str, typed.text("the name of a column")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """The keys of `workload.requests`, where it is a mapping."""

    file: Annotated[tuple[Path, ...] | None, typed.InFolder(files_of, _FILES)] = None
    count: Annotated[int, typed.whole(1, MAX_COUNT)] | None = None
    format: Annotated[str | None, typed.choice(tuple(SUFFIXES))] = None
    prompt: _Column | None = None
    messages: _Column | None = None
    id: _Column | None = None
    delimiter: Annotated[str | None, typed.that(
        lambda value: isinstance(value, str) and len(value) == 1 and value not in '"\r\n',
        "one character, for example ';' or \"\\t\"", type="string")] = None
    options: typed.Flag = True
    carry: Annotated[tuple[str, ...] | None, typed.that(
        lambda value: len(set(texts := typed.texts_of(value))) == len(texts),
        "a list of columns; [] carries none", typed.texts_of)] = None


AnyRequests = Annotated[Any, typed.OrMapping(
    Requests, typed.InFolder(files_of), _FILES + ", or {count: N}")]


def requests_of(own: Requests | tuple[Path, ...] | None,
                reading: typed.Reading) -> tuple[RequestFiles | None, int | None]:
    """(files of requests, count of synthetic ones): at most one of the two."""
    key = "workload.requests"
    if not isinstance(own, Requests):
        return (None if own is None else RequestFiles(paths=own)), None
    if not reading.has(f"{key}.file"):
        if not reading.has(f"{key}.count"):
            reading.reject(f"{key}.count", "required: a number of synthetic requests; or file: "
                           "where they are")
        return None, own.count
    if own.count is not None:
        reading.reject(f"{key}.count", "give either file or count")
    if own.prompt is not None and own.messages is not None:
        reading.reject(f"{key}.messages", "give either prompt or messages: a request has one of "
                       "them")
    if own.format in ("text", "json", "jsonl", "parquet") and own.delimiter is not None:
        reading.reject(f"{key}.delimiter", "only with CSV and TSV")
    return None if own.file is None else RequestFiles(
        paths=own.file, format=own.format, prompt=own.prompt, messages=own.messages, id=own.id,
        delimiter=own.delimiter, carry=own.carry, has_options=own.options), None


def _results(value: Any, folder: Path) -> Path | None:
    if value is False or value == "off":  # YAML 1.1 reads `off` as false
        return None
    path = absolute(typed.text_of(value), folder)
    if format_of(path) not in RESULT_FORMATS:
        raise ValueError
    if path.is_dir():
        raise ValueError("a file, not a folder")
    return path


Results = Annotated[Path | None, typed.InFolder(_results, _RESULTS, type=["string", "boolean"])]


def results_of(own: Path | None, files: RequestFiles | None, output: Path,
               reading: typed.Reading) -> Path | None:
    """The file for the results besides results.jsonl; None where none is wanted. By default that of
    a table is a table."""
    if not reading.has("results"):
        table = files.table if files is not None else None
        return output / f"results.{table}" if table is not None else None
    if own is not None and own.parent == output and own.name in _OWN_FILES:
        reading.reject("results", f"{own.name} of the output folder is written in any case: give "
                       "another name")
    elif own is not None and files is not None and own in files.paths:
        reading.reject("results", "this file holds the requests: give another name")
    return own


def absolute(text: str, folder: Path) -> Path:
    """`text` as an absolute path; relative ones start at the job file's folder."""
    is_home = text == "~" or text.startswith("~/")
    # NOTE: abspath and not resolve: a link stays what the user called it, a loop of links no error
    return Path(os.path.abspath(folder / (Path(text).expanduser() if is_home else Path(text))))


def is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name too long, or one with a null byte
        return False


def _found(text: str, folder: Path) -> Sequence[Path]:
    """The file of this name, or those that match it as a pattern, sorted."""
    if is_file(path := absolute(text, folder)):
        return [path]
    if not glob.has_magic(text):
        return []
    # the pattern alone: the folder's own name may have brackets
    matches = glob.glob(os.path.expanduser(text), root_dir=folder, recursive=True)
    return sorted(path for match in matches if is_file(path := absolute(match, folder)))


def _not_found(text: str, folder: Path) -> str:
    path = absolute(text, folder)
    if glob.has_magic(text):
        return f"no file matches {path}"
    try:
        if path.is_dir():
            return f"{path} is a folder: name its files, for example {path.name}/*.jsonl"
        beside = sorted(one.name for one in path.parent.iterdir()
                        if one.name.lower().endswith(_ENDS))
    except (OSError, ValueError):
        beside = []
    hint = f"; {nearest(path.name, beside[:20]).replace('known:', 'there:')}" if beside else ""
    return f"no such file: {path}{hint}"
