"""The keys of a job file that say where its requests are, how they are written, and in which file
their results are wanted besides results.jsonl."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xgpt.core.errors import nearest
from xgpt.core.request_files.files import COMPRESSED, STDIN, SUFFIXES, RequestFiles, format_of
from xgpt.core.request_keys import CONTENTS
from xgpt.core.sections import Section, is_text

MAX_COUNT = 10**8
RESULT_FORMATS = ("csv", "tsv", "parquet", "jsonl")
_OWN_FILES = ("results.jsonl", "held.jsonl", "errors.jsonl", "steps.jsonl")
_FILES = "a file of requests, a list of files, a pattern (prompts/*.jsonl), or - for standard input"
_ENDS = tuple(end + tail for ends in SUFFIXES.values() for end in ends for tail in ("", COMPRESSED))
_KEYS = ("file", "format", "prompt", "messages", "id", "delimiter", "options", "carry")


def read_requests_key(section: Section, folder: Path) -> tuple[RequestFiles | None, int | None]:
    """(files of requests, count of synthetic ones): at most one of the two."""
    field = section.get("requests")
    if field is None:
        return None, None
    inner = section.mapping("requests")
    if inner is None:
        return _files(section, "requests", folder, _FILES + ", or {count: N}"), None
    if inner.has("file"):
        if inner.has("count"):
            inner.reject("count", "give either file or count")
        files = _described(inner, folder)
        inner.finish()
        return files, None
    count = inner.integer("count", None, 1, MAX_COUNT)
    if not inner.has("count"):
        inner.reject("count", "required: a number of synthetic requests; or file: where they are")
    inner.finish()
    return None, count


def read_results_key(top: Section, files: RequestFiles | None, output: Path,
                     folder: Path) -> Path | None:
    """The file for the results besides results.jsonl; None where none is wanted. By default that of
    a table is a table."""
    field = top.get("results")
    if field is None:
        table = files.table if files is not None else None
        return output / f"results.{table}" if table is not None else None
    if field.value is False or field.value == "off":  # YAML 1.1 reads `off` as false
        return None
    allowed = "a file whose name ends in .csv, .tsv, .parquet or .jsonl; or off"
    text = top.text("results", None, allowed)
    if text is None:
        return None
    path = absolute(text, folder)
    if format_of(path) not in RESULT_FORMATS:
        top.reject("results", allowed)
    elif path.parent == output and path.name in _OWN_FILES:
        top.reject("results", f"{path.name} of the output folder is written in any case: give "
                   "another name")
    elif path.is_dir():
        top.reject("results", "a file, not a folder")
    elif files is not None and path in files.paths:
        top.reject("results", "this file holds the requests: give another name")
    return path


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


def _described(section: Section, folder: Path) -> RequestFiles | None:
    for key in _KEYS:
        section.get(key)  # so that an unknown key's message names them all
    known = section.choice("format", None, tuple(SUFFIXES))
    names = {key: section.text(key, None, "the name of a column") for key in (
        *CONTENTS[:2], "id")}
    if names["prompt"] is not None and names["messages"] is not None:
        section.reject("messages", "give either prompt or messages: a request has one of them")
    delimiter = section.read("delimiter", None, lambda value: value if (
        isinstance(value, str) and len(value) == 1 and value not in '"\r\n') else None,
        "one character, for example ';' or \"\\t\"")
    has_options = section.flag("options", True)
    carry = section.read("carry", None, _names, "a list of columns; [] carries none")
    files = _files(section, "file", folder, _FILES)
    if files is None:
        return None
    if known in ("text", "json", "jsonl", "parquet") and delimiter is not None:
        section.reject("delimiter", "only with CSV and TSV")
    return RequestFiles(paths=files.paths, format=known, delimiter=delimiter, **names, carry=carry,
                        has_options=has_options)


def _names(value: Any) -> tuple[str, ...] | None:
    texts = [item.value for item in value] if isinstance(value, list) else [value]
    are_names = all(is_text(text) for text in texts) and len(set(texts)) == len(texts)
    return tuple(texts) if are_names else None


def _files(section: Section, key: str, folder: Path, allowed: str) -> RequestFiles | None:
    texts = section.read(key, None, _texts, allowed)
    if texts is None:
        return None
    if STDIN.name in texts:
        if len(texts) > 1:
            section.reject(key, "- (standard input) stands alone")
        return RequestFiles(paths=(STDIN,))
    paths: dict[Path, None] = {}
    for text in texts:
        found = _found(text, folder)
        if not found:
            section.reject(key, _not_found(text, folder))
        paths.update(dict.fromkeys(found))  # a file that two of them name is read once
    return RequestFiles(paths=tuple(paths)) if paths else None


def _texts(value: Any) -> tuple[str, ...] | None:
    if isinstance(value, list) and [item.value for item in value] == [None]:
        return (STDIN.name,)  # `--set workload.requests=-`: to YAML a list of nothing
    texts = [item.value for item in value] if isinstance(value, list) else [value]
    return tuple(text.strip() for text in texts) if texts and all(map(is_text, texts)) else None


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
