"""Writes results.jsonl and errors.jsonl.

Results are written line by line in the input's order, so a run that ends at any moment leaves a
valid prefix. A result that waits for an earlier one is in held.jsonl meanwhile, so a killed run
keeps it. Both are synced to disk every few seconds: a power cut takes no more than these."""

import json
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, BinaryIO, NamedTuple, cast

from xgpt.core.errors import XgptError
from xgpt.core.system.whole_file import sync_folder, write_atomically
from xgpt.requests.choices import merged
from xgpt.requests.request import RequestError
from xrunner.files.expired import num_expired
from xrunner.files.result_line import (
    checked_results,
    drop_cached_checks,
    error_line,
    line_of,
    lines_behind,
    result_line,
    spool_of,
)
from xrunner.query import FinishedQuery


def is_same_file(path: Path, descriptor: int) -> bool:
    """Whether `path` still names the open file."""
    own = os.fstat(descriptor)
    try:
        named = path.stat()
    except OSError:
        return False
    return (own.st_dev, own.st_ino) == (named.st_dev, named.st_ino)


def restored_name(path: Path, descriptor: int) -> XgptError:
    """Restores the name of an open file that was removed or replaced; returns the error to
    raise."""
    goes_on = "the same command goes on from there"
    if not path.parent.is_dir():
        return XgptError(f"{path.parent} was removed or renamed while a run wrote in it. A renamed "
                         f"folder has all that was done: give it its name back, and {goes_on}")
    target = path if not path.exists() else path.with_name(f"{path.stem}-kept{path.suffix}")
    with target.open("xb") as file:
        place = 0
        while block := os.pread(descriptor, 2**20, place):
            place += file.write(block)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path.parent)
    if target == path:
        return XgptError(f"{path} was removed while a run wrote to it. What it held is back, and "
                         f"{goes_on}")
    return XgptError(f"{path} was replaced while a run wrote to it. What it held is in "
                     f"{target.name}: give it its name back, and {goes_on}")


HELD_FILE = "held.jsonl"
_LOOK_S = 1.0  # chosen: seconds between checks whether the file has its name
_CHUNK_BYTES = 2**16  # chosen: read at once from a long file's end
_DEAD_BYTES = 2**20  # chosen: stale bytes before the file is rewritten


class Answered(NamedTuple):
    """Results of earlier runs of a job. `written`: number of requests whose results are in
    results.jsonl. `held`: others in held.jsonl or out of order. `fault`: why no more are valid, in
    words."""

    written: int
    held: frozenset[int]
    fault: str = ""

    @property
    def total(self) -> int:
        return self.written + len(self.held)


class ResultWriter:
    """Writes results in order, and holds back a result until all before it are written. Held
    results are in held.jsonl beside `path`; those of an earlier run are taken over. Opens for
    appending after `count_results`."""

    def __init__(self, path: Path, *, first_index: int, model: str,
                 sync_s: float | None = None,
                 token_text: Callable[[int], str] = str) -> None:
        """`sync_s`: seconds between syncs to disk (None: only `close` syncs). `token_text`: text of
        a token, for likelihoods."""
        self._path, held_path = path, path.with_name(HELD_FILE)
        self._lock = threading.Lock()  # held while a file is opened or closed
        # readable, to restore it if it loses its name
        self._file: IO[str] = path.open("a+", encoding="utf-8")
        self._next, self._model, self._token_text = first_index, model, token_text
        self._held, self._left_out = HeldFile(held_path, first_index), set[int]()
        # first answer to a request with several -> their number
        self._choices = _choices_of(self._held)
        self._write_next()
        self._tidy()
        sync_folder(path.parent)
        self._looked_s = time.monotonic()
        self._sync_error: OSError | None = None
        self._is_over = threading.Event()
        self._keeper: threading.Thread | None = None
        if sync_s is not None:
            self._keeper = threading.Thread(target=self._keep, args=(sync_s,), name="keeper",
                                            daemon=True)
            self._keeper.start()

    def write(self, result: FinishedQuery) -> None:
        index, choices = result.query.index, result.query.choices
        assert index >= self._next and index not in self._held.places, (
            f"{index = } {self._next = }")
        self._check()
        line = _text(result, self._model, self._token_text)
        if choices > 1:
            self._choices[index - result.query.sample] = choices
        if index > self._next or choices > 1:
            with self._lock:
                self._held.add(index, line)
        else:
            self._file.write(line + "\n")
            self._next += 1
        self._write_next()
        if self._held.is_untidy:
            self._tidy()

    def leave_out(self, queries: Collection[int]) -> None:
        """Writes, in order, held results that wait for none but `queries`, which have none."""
        self._left_out = set(queries)
        self._write_next()

    def _write_next(self) -> None:
        """Writes results that are next; all answers to one request at once."""
        while self._next in self._held.places or self._next in self._left_out:
            if self._next in self._left_out:
                self._next += 1
                continue
            count = self._choices.get(self._next, 1)
            own = range(self._next, self._next + count)
            if count > 1 and not all(index in self._held.places for index in own):
                break
            self._choices.pop(self._next, None)
            lines = [self._held.take(index) for index in own]
            # one write a line, so a killed process leaves whole lines or one torn last line
            self._file.write((lines[0] if count == 1 else merged(lines)) + "\n")
            self._next += count
        self._file.flush()

    def _tidy(self) -> None:
        os.fsync(self._file.fileno())
        with self._lock:
            self._held.tidy()

    def _check(self, *, is_last: bool = False) -> None:
        """Raises OSError if syncing failed, XgptError if the file lost its name."""
        if self._sync_error is not None:  # the disk may be full
            raise self._sync_error
        if is_last or time.monotonic() - self._looked_s >= _LOOK_S:
            self._looked_s = time.monotonic()
            if not is_same_file(self._path, self._file.fileno()):
                self._file.flush()
                raise restored_name(self._path, self._file.fileno())

    def _keep(self, interval_s: float) -> None:
        """Syncs the files at intervals; runs in a thread."""
        while not self._is_over.wait(interval_s):
            copies = list[int]()
            try:
                with self._lock:
                    held = self._held.descriptor
                    files = [self._file.fileno(), *(() if held is None else (held,))]
                    copies += [os.dup(file) for file in files]
                for copy in copies:
                    os.fsync(copy)
                sync_folder(self._path.parent)
            except OSError as trouble:
                self._sync_error = trouble
                return
            finally:
                for copy in copies:
                    os.close(copy)

    @property
    def num_held(self) -> int:
        return len(self._held.places)

    def close(self) -> None:
        """Writes, syncs and closes everything."""
        try:
            self._is_over.set()
            if self._keeper is not None:
                self._keeper.join()
            self._file.flush()
            self._check(is_last=True)
            self._tidy()
        finally:
            self._held.close()
            self._file.close()
        sync_folder(self._path.parent)


def answered(path: Path) -> Answered:
    """Results of earlier runs, by the results file at `path` and held.jsonl beside it. Changes
    nothing: a run may be writing there."""
    found = checked_results(path)
    held = found.held.union(held_places(path.with_name(HELD_FILE), found.num_queries))
    return Answered(found.num_queries, held, found.fault)


def answered_by_last_line(path: Path) -> Answered:
    """`answered` by the last whole line alone, since lines are in order; for progress displays.
    Counts all lines if the last one does not tell."""
    # where requests expired, lines are missing
    written = None if num_expired(path.parent) else _told_by_last(path)
    if written is None:
        return answered(path)
    return Answered(written, frozenset(held_places(path.with_name(HELD_FILE), written)))


def _told_by_last(path: Path) -> int | None:
    """Number of requests up to the last whole line; None if it does not say which it is."""
    try:
        with path.open("rb") as file:
            at, tail = file.seek(0, os.SEEK_END), b""
            # a torn line may follow, so the whole one ends before the last line end
            while at > 0 and tail.count(b"\n") < 2:
                start = max(at - _CHUNK_BYTES, 0)
                file.seek(start)
                tail, at = file.read(at - start) + tail, start
    except OSError:
        return None
    whole = tail[:tail.rfind(b"\n") + 1]
    line = line_of(whole[whole.rfind(b"\n", 0, -1) + 1:], None)
    return None if line is None else line.query + line.parts


def count_results(path: Path) -> int:
    """Counts the requests with valid lines at the start of a results file; cuts off what follows.
    Valid results behind are moved to held.jsonl. 0 without a file."""
    found, held_path = checked_results(path), path.with_name(HELD_FILE)
    if found.behind:
        held = HeldFile(held_path, found.num_queries)
        held.tidy()
        for index, line in lines_behind(path, found).items():
            if index not in held.places:
                held.add(index, line)
        held.tidy()
    if path.is_file() and path.stat().st_size > found.good_bytes:
        os.truncate(path, found.good_bytes)
        drop_cached_checks()  # times of files are too coarse to rely on
    return found.num_queries


def write_errors(path: Path, errors: Sequence[RequestError], labels: Sequence[str] = ()) -> None:
    """Writes errors.jsonl in the order of the lines; removes it if there are no errors. `labels`:
    of the request files, if there are several."""
    if not errors:
        path.unlink(missing_ok=True)
        return
    lines = [json.dumps(error_line(e, labels[e.file] if labels else None), ensure_ascii=False)
             for e in sorted(errors, key=lambda e: (e.file, e.line))]
    write_atomically(path, "\n".join(lines) + "\n")


def count_errors(path: Path) -> int | None:
    """Number of lines of errors.jsonl; None if one of them is invalid."""
    try:
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        is_whole = all(line.endswith(b"\n") and "id" in json.loads(line) for line in lines)
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    return len(lines) if is_whole else None


def _text(result: FinishedQuery, model: str, token_text: Callable[[int], str]) -> str:
    """The result as a line of text. A result that cannot be encoded (an id with half a surrogate
    pair, say) becomes an error of its request."""
    try:
        text = json.dumps(result_line(result, model, token_text), ensure_ascii=False,
                          allow_nan=False)
        text.encode()
    except (ValueError, TypeError, RecursionError) as cause:
        text = json.dumps(result_line(replace(
            result, text="", finish_reason="error",
            error=f"its answer cannot be written: {type(cause).__name__}: {cause}"), model,
            token_text))
    return text


class HeldFile:
    """held.jsonl, a line per result, each as it will be in results.jsonl. Lines written to
    results.jsonl since stay until `tidy`; readers skip them.

    In memory is the place of each line alone, about 100 bytes a result: in a sorted job all results
    may wait for the last."""

    def __init__(self, path: Path, first_index: int) -> None:
        """Takes over the results of an earlier run from request `first_index` on; the first `add`
        comes after a `tidy`."""
        self._path, self._file = path, cast("BinaryIO | None", None)
        self.places = held_places(path, first_index)  # (offset, bytes) of each held line
        self._size = path.stat().st_size if path.exists() else 0
        self._live = sum(size for _, size in self.places.values())

    def add(self, index: int, line: str) -> None:
        """Writes the line of a result."""
        raw = line.encode() + b"\n"
        self._opened().write(raw)
        self.places[index] = self._size, len(raw)
        self._size, self._live = self._size + len(raw), self._live + len(raw)

    def line(self, index: int) -> str:
        """The line of a held result."""
        offset, size = self.places[index]
        return os.pread(self._opened().fileno(), size, offset)[:-1].decode()

    def take(self, index: int) -> str:
        """The line of a result that is held no more."""
        line = self.line(index)
        self._live -= self.places.pop(index)[1]
        return line

    @property
    def is_untidy(self) -> bool:
        """Whether most of its bytes are of lines that are held no more."""
        return self._size > _DEAD_BYTES + 2 * self._live

    def tidy(self) -> None:
        """Rewrites the file with the held lines alone, or removes it if there are none. Call it
        once all others are synced in results.jsonl."""
        if not self.places:
            self.close()
            self._path.unlink(missing_ok=True)
            self._size = self._live = 0
            return
        temporary, offset = self._path.with_name(f".{self._path.name}.{os.getpid()}.tmp"), 0
        with temporary.open("wb") as file:
            for index in sorted(self.places):
                size = file.write(self.line(index).encode() + b"\n")
                self.places[index], offset = (offset, size), offset + size
            file.flush()
            os.fsync(file.fileno())
        self.close()
        os.replace(temporary, self._path)
        self._size = self._live = offset
        sync_folder(self._path.parent)

    def _opened(self) -> BinaryIO:
        if self._file is None:
            self._file = self._path.open("a+b", buffering=0)
        return self._file

    @property
    def descriptor(self) -> int | None:
        """The open file's descriptor; None if it is closed."""
        return None if self._file is None else self._file.fileno()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def held_places(path: Path, first_index: int) -> dict[int, tuple[int, int]]:
    """(offset, bytes) of each held line by request, from `first_index` on, without torn ones. A run
    may be writing them."""
    places, offset = dict[int, tuple[int, int]](), 0
    try:
        with path.open("rb") as file:
            spool = spool_of(path.parent)
            for text in file:
                line = line_of(text, spool) if text.endswith(b"\n") else None
                if line is not None and line.query >= first_index:
                    places[line.query] = offset, len(text)
                offset += len(text)
    except (FileNotFoundError, NotADirectoryError):
        pass
    return places


def _choices_of(held: HeldFile) -> dict[int, int]:
    """First answer to each request with several answers -> their number. The first may be
    missing."""
    found = {}
    for index in held.places:
        own = json.loads(held.line(index)).get("xgpt")
        if isinstance(own, dict) and own.get("of", 1) > 1:
            found[index - own["sample"]] = own["of"]
    return found
