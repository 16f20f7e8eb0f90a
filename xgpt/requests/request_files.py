"""Where a job's requests are and how they are written: what a job file says of them, and what the
names of files tell of their format."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from xgpt.requests.keys import OPTIONS
from xgpt.requests.request import Terms

STDIN = Path("-")

# format -> how its files' names end; each but the last may be compressed besides (.gz)
SUFFIXES: dict[str, tuple[str, ...]] = {
    "jsonl": (".jsonl", ".ndjson", ".jsonlines"), "json": (".json",), "text": (".txt", ".text"),
    "csv": (".csv",), "tsv": (".tsv", ".tab"), "parquet": (".parquet", ".pq")}
TABLES = ("csv", "tsv", "parquet")
COMPRESSED = ".gz"
# What one entry of each format is called; counted from 1. Of CSV it is the line that a row begins
# in, the header's being the first.
_ENTRIES = {"json": "item", "parquet": "row"}

# of a job that scores
CONTINUATIONS = ("continuation", "continuation_tokens")


def format_of(path: Path) -> str | None:
    """The format that a file's name tells; None where it tells none."""
    name = path.name.lower()
    is_compressed = name.endswith(COMPRESSED)
    name = name.removesuffix(COMPRESSED)
    for known, suffixes in SUFFIXES.items():
        if name.endswith(suffixes):
            return None if is_compressed and known == "parquet" else known
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFiles:
    """The files of a job's requests, in their order, patterns resolved; or standard input alone.
    `format` None: each by its name, or its first characters where that tells nothing."""

    paths: tuple[Path, ...]
    format: str | None = None
    prompt: str | None = None  # which column, or key of an object, it is; None: the one called so
    messages: str | None = None
    id: str | None = None
    delimiter: str | None = None  # None: a comma, of TSV a tab, or as the header shows
    has_options: bool = True  # False: max_tokens, seed and the like are columns like any other
    carry: tuple[str, ...] | None = None  # columns that go into the results; None: all others
    purpose: str | None = None  # "score": of continuations; None: they are answered
    engine: str | None = None  # which honours keys of its own; None: ours
    pooled: str | None = None  # texts are embedded, pooled so; None: they are not

    def __str__(self) -> str:
        first = "standard input" if self.is_stdin else str(self.paths[0])
        more = len(self.paths) - 1
        return first + (f" and {more} more file{'s' * (more > 1)}" if more else "")

    @property
    def is_stdin(self) -> bool:
        return self.paths == (STDIN,)

    @property
    def terms(self) -> Terms:
        """What is made of them."""
        return Terms(self.purpose == "score", self.engine, self.pooled or "")

    @property
    def options(self) -> tuple[str, ...]:
        """Keys of a request besides its content and its id."""
        return (*OPTIONS, *CONTINUATIONS) if self.purpose == "score" else OPTIONS

    @property
    def table(self) -> str | None:
        """The format of a table that the first file is by its name; None of anything else."""
        known = self.format or format_of(self.paths[0])
        return known if known in TABLES else None

    @property
    def rules(self) -> str:
        """Stands for all that makes requests of the files' bytes; nothing for one of JSON lines."""
        said = {key: value for key, value in asdict(self).items()
                if key not in ("paths", "format", "carry") and value not in (None, True)}
        formats = [self.format or format_of(path) or "jsonl" for path in self.paths]
        labels = list(self.labels) if len(self.paths) > 1 else []
        is_usual = not said and not labels and formats == ["jsonl"]
        return "" if is_usual else json.dumps([said, formats, labels])

    @property
    def labels(self) -> tuple[str, ...]:
        """What messages call each file: by its name or, where two are called alike, its path from
        the folder that all lie in."""
        names = [path.name for path in self.paths]
        if len(set(names)) == len(names):
            return tuple(names)
        common = os.path.commonpath([path.parent for path in self.paths])
        return tuple(os.path.relpath(path, common) for path in self.paths)

    def place(self, file: int, line: int) -> str:
        """"line 3", of several files with the file's name."""
        entry = _ENTRIES.get(self.format or format_of(self.paths[file]) or "", "line")
        where = f" of {self.labels[file]}" if len(self.paths) > 1 else ""
        return f"{entry} {line}{where}"
