"""Files of requests: their formats and columns, as the job file and their names say, and how they
are opened."""

import gzip
import io
import json
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, cast

from xgpt.core.errors import InputError, wrong
from xgpt.requests.keys import OPTIONS
from xgpt.requests.request import Terms

STDIN = Path("-")

# format -> suffixes of its files; all but Parquet may also be compressed (.gz)
SUFFIXES: dict[str, tuple[str, ...]] = {
    "jsonl": (".jsonl", ".ndjson", ".jsonlines"), "json": (".json",), "text": (".txt", ".text"),
    "csv": (".csv",), "tsv": (".tsv", ".tab"), "parquet": (".parquet", ".pq")}
TABLES = ("csv", "tsv", "parquet")
COMPRESSED = ".gz"
# Name of an entry in messages, else "line"; counted from 1. In CSV it is the line that a row begins
# in; the header has the first.
_ENTRIES = {"json": "item", "parquet": "row"}

# keys of a job that scores
CONTINUATIONS = ("continuation", "continuation_tokens")


def format_of(path: Path) -> str | None:
    """The format by a file's name; None if the name does not tell."""
    name = path.name.lower()
    is_compressed = name.endswith(COMPRESSED)
    name = name.removesuffix(COMPRESSED)
    for known, suffixes in SUFFIXES.items():
        if name.endswith(suffixes):
            return None if is_compressed and known == "parquet" else known
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFiles:
    """Files of a job's requests, in order, with patterns resolved; or standard input alone.
    `format` None: by each file's name, or else by its first characters."""

    paths: tuple[Path, ...]
    format: str | None = None
    prompt: str | None = None  # column, or key of an object; None: the one with this name
    messages: str | None = None
    id: str | None = None
    delimiter: str | None = None  # None: a comma, in TSV a tab, or as the header shows
    has_options: bool = True  # False: max_tokens, seed and the like are ordinary columns
    carry: tuple[str, ...] | None = None  # columns copied into the results; None: all others
    terms: Terms = Terms()  # how the job uses them

    def __str__(self) -> str:
        first = "standard input" if self.is_stdin else str(self.paths[0])
        more = len(self.paths) - 1
        return first + (f" and {more} more file{'s' * (more > 1)}" if more else "")

    @property
    def is_stdin(self) -> bool:
        return self.paths == (STDIN,)

    @property
    def options(self) -> tuple[str, ...]:
        """Keys of a request besides its content and its id."""
        return (*OPTIONS, *CONTINUATIONS) if self.terms.is_scored else OPTIONS

    @property
    def table(self) -> str | None:
        """Format of the first file if that is a table; else None."""
        known = self.format or format_of(self.paths[0])
        return known if known in TABLES else None

    @property
    def rules(self) -> str:
        """JSON of all settings by which files are read as requests, for a digest; "" for one file
        of JSON lines with defaults."""
        said = {key: value for key, value in asdict(self).items()
                if key not in ("paths", "format", "carry") and value not in (None, True, Terms())}
        formats = [self.format or format_of(path) or "jsonl" for path in self.paths]
        labels = list(self.labels) if len(self.paths) > 1 else []
        is_usual = not said and not labels and formats == ["jsonl"]
        return "" if is_usual else json.dumps([said, formats, labels])

    @property
    def labels(self) -> tuple[str, ...]:
        """Name of each file in messages; if two have the same name, paths from the folder that
        holds all."""
        names = [path.name for path in self.paths]
        if len(set(names)) == len(names):
            return tuple(names)
        common = os.path.commonpath([path.parent for path in self.paths])
        return tuple(os.path.relpath(path, common) for path in self.paths)

    def place(self, file: int, line: int) -> str:
        """An entry's place in words: "line 3", with the file's name if there are several."""
        entry = _ENTRIES.get(self.format or format_of(self.paths[file]) or "", "line")
        where = f" of {self.labels[file]}" if len(self.paths) > 1 else ""
        return f"{entry} {line}{where}"


See = Callable[[bytes], object]

_GZIP, _PARQUET, _ZIP = b"\x1f\x8b", b"PAR1", b"PK\x03\x04"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SHEETS = (".xlsx", ".xls", ".ods", ".numbers")
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
_CHUNK_BYTES = 2**20


class _Seen(io.RawIOBase):
    """A file that passes all bytes read to `see`."""

    def __init__(self, file: IO[bytes], see: See) -> None:
        self._file, self._see = file, see

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        view = cast(memoryview, buffer)
        count: int = self._file.readinto(view) or 0  # type: ignore[attr-defined]
        self._see(bytes(view[:count]))
        return count


@contextmanager
def opened(path: Path, files: RequestFiles, see: See, stdin: IO[bytes] | None = None,
           ) -> Iterator[tuple[IO[bytes], str]]:
    """Opens a file, decompressed: (its bytes, its format). `see`: called with all raw bytes read.
    `stdin`: a copy of standard input. Raises InputError for a file that cannot be read, or whose
    format is unknown."""
    try:
        if path == STDIN:
            assert stdin is not None, "standard input is copied before it is read"
            stdin.seek(0)
            yield _told(stdin, path, files, see)
            return
        with path.open("rb") as file:
            yield _told(file, path, files, see)
    except OSError as cause:
        raise unreadable(path, cause.strerror or str(cause)) from None
    except (EOFError, zlib.error) as cause:
        raise unreadable(path, f"the compressed file is damaged or cut off ({cause}); "
                         "copy it again") from None


def unreadable(path: Path, why: str) -> InputError:
    """An InputError for a file of requests that cannot be read."""
    return wrong("standard input" if path == STDIN else path, "requests", None,
                 f"cannot be read: {why}")


def _told(file: IO[bytes], path: Path, files: RequestFiles, see: See) -> tuple[IO[bytes], str]:
    known = files.format or format_of(path)
    if known == "parquet" or (known is None and file.read(4) == _PARQUET):
        file.seek(0)
        while chunk := file.read(_CHUNK_BYTES):  # it is read from its end
            see(chunk)
        file.seek(0)
        return file, "parquet"
    file.seek(0)
    stream = io.BufferedReader(cast(io.RawIOBase, _Seen(file, see)), _CHUNK_BYTES)
    if stream.peek(2)[:2] == _GZIP:
        stream = io.BufferedReader(cast(io.RawIOBase, gzip.GzipFile(fileobj=stream)), _CHUNK_BYTES)
    start = stream.peek(2)
    if start[:2] in _UTF_16:
        raise unreadable(path, "it is UTF-16: save it as UTF-8 (in Excel: 'CSV UTF-8')")
    if known in (None, "json"):
        return stream, _by_content(start, path, known)
    return stream, known or ""


def _by_content(start: bytes, path: Path, known: str | None) -> str:
    """json (an array) or jsonl (an object per line), by the first characters: both may be named
    .json. Raises InputError for other content."""
    first = start.removeprefix(_BYTE_ORDER_MARK).lstrip()[:1]
    if first == b"[":
        return "json"
    if first in (b"{", b""):
        return "jsonl"
    if known is not None:
        raise unreadable(path, "it is no JSON: it should begin with [ (an array) or { (an object "
                         "a line)")
    is_sheet = start.startswith(_ZIP) or path.suffix.lower() in _SHEETS
    hint = " (a spreadsheet? save it as CSV)" if is_sheet else ""
    raise unreadable(
        path, f"nothing tells its format{hint}; give it in the job file, `requests: {{file: "
        f"{path}, format: text}}`; known: {', '.join(SUFFIXES)}")
