"""A file of requests opened: its bytes shown to who digests them, decompressed, its format told."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

from xgpt.core.errors import InputError, wrong
from xgpt.requests.request_files import STDIN, SUFFIXES, RequestFiles, format_of

See = Callable[[bytes], object]

_GZIP, _PARQUET, _ZIP = b"\x1f\x8b", b"PAR1", b"PK\x03\x04"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SHEETS = (".xlsx", ".xls", ".ods", ".numbers")
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
_CHUNK_BYTES = 2**20


class _Seen(io.RawIOBase):
    """A file that shows what is read of it."""

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
    """(the file's bytes from its start on, its format). `stdin`: what came there, which can be read
    again. Raises InputError for a file that cannot be read or whose format nothing tells."""
    try:
        if path == STDIN:
            assert stdin is not None, "what came on standard input is kept before it is read"
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


def _buffered(raw: io.RawIOBase) -> io.BufferedReader:
    return io.BufferedReader(raw, _CHUNK_BYTES)


def unreadable(path: Path, why: str) -> InputError:
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
    stream = _buffered(_Seen(file, see))
    if stream.peek(2)[:2] == _GZIP:
        stream = _buffered(cast(io.RawIOBase, gzip.GzipFile(fileobj=stream)))
    start = stream.peek(2)
    if start[:2] in _UTF_16:
        raise unreadable(path, "it is UTF-16: save it as UTF-8 (in Excel: 'CSV UTF-8')")
    if known in (None, "json"):
        return stream, _by_content(start, path, known)
    return stream, known or ""


def _by_content(start: bytes, path: Path, known: str | None) -> str:
    """JSON, an array or an object a line, by the first characters; both are called .json."""
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
