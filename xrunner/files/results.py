"""results.jsonl and errors.jsonl. Results are written in the input's order, line by line, so that
whenever a run ends, what is on disk is a valid prefix. What is done and waits for one before it
lies in held.jsonl from that moment, so that a run that is stopped or killed keeps it. Every few
seconds, beside the run, both are put on the disk: a power cut takes no more than those."""

import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, NamedTuple

from xgpt.core.errors import XgptError
from xgpt.core.system.whole_file import sync_folder, write_atomically
from xgpt.requests.choices import merged
from xgpt.requests.request import RequestError
from xrunner.files.result_line import (
    checked,
    error_line,
    forget,
    lines_behind,
    result_line,
    spool_of,
    told,
)
from xrunner.query import FinishedQuery


def is_still(path: Path, descriptor: int) -> bool:
    """Whether the open file is the one that the path names."""
    own = os.fstat(descriptor)
    try:
        named = path.stat()
    except OSError:
        return False
    return (own.st_dev, own.st_ino) == (named.st_dev, named.st_ino)


def put_back(path: Path, descriptor: int) -> XgptError:
    """Gives the content of a file that is open, and has lost its name, its name back; what to say
    of it."""
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
_LOOK_S = 1.0  # between looks whether the file has its name
_CHUNK_BYTES = 2**16  # of a long file's end that are read at once
_DEAD_CHARS = 2**20  # of lines that are in results.jsonl by now, before the file is written anew


class Answered(NamedTuple):
    """What earlier runs of a job left: the first `written` queries are in results.jsonl, the
    results of those `held` in held.jsonl, or out of their places. `fault`: why not more are
    written, in words, where somebody else changed the file."""

    written: int
    held: frozenset[int]
    fault: str = ""

    @property
    def total(self) -> int:
        return self.written + len(self.held)


class ResultWriter:
    """Holds back a result until all before it are written: queries are admitted in order, or in
    random order within a window, and the long ones end late. What is held back lies in held.jsonl
    beside `path` meanwhile, and what an earlier run left there is taken up. Opens for appending
    after `count_results`."""

    def __init__(self, path: Path, *, first_index: int, model: str,
                 sync_s: float | None = None,
                 token_text: Callable[[int], str] = str) -> None:
        """`sync_s`: what has been written for so long is on the disk; None: with `close`.
        `token_text`: the text of a token, where likelihoods of some are told."""
        self._path, held_path = path, path.with_name(HELD_FILE)
        self._lock = threading.Lock()  # held where a file is opened or closed
        # to be read, too, where it loses its name
        self._file: IO[str] = path.open("a+", encoding="utf-8")
        self._next, self._model, self._token_text = first_index, model, token_text
        self._held = read_held(held_path, first_index)
        # of the first answer to a request that asks for several: how many
        self._choices = _choices_of(self._held)
        self._held_file = HeldFile(held_path)
        self._write_next()
        self._tidy()
        sync_folder(path.parent)
        self._looked_s = time.monotonic()
        self._trouble: OSError | None = None
        self._is_over = threading.Event()
        self._keeper: threading.Thread | None = None
        if sync_s is not None:
            self._keeper = threading.Thread(target=self._keep, args=(sync_s,), name="keeper",
                                            daemon=True)
            self._keeper.start()

    def write(self, result: FinishedQuery) -> None:
        index, choices = result.query.index, result.query.choices
        assert index >= self._next and index not in self._held, f"{index = } {self._next = }"
        self._check()
        line = _text(result, self._model, self._token_text)
        self._held[index] = line
        if choices > 1:
            self._choices[index - result.query.sample] = choices
        self._write_next()
        if index in self._held:
            with self._lock:
                self._held_file.add(line)
            return
        if self._held_file.is_untidy(self._held):
            self._tidy()

    def _write_next(self) -> None:
        """Writes those whose turn has come, all answers to one request at once."""
        has_written = False
        while self._next in self._held:
            count = self._choices.get(self._next, 1)
            own = range(self._next, self._next + count)
            if count > 1 and not all(index in self._held for index in own):
                break
            self._choices.pop(self._next, None)
            lines = [self._held.pop(index) for index in own]
            # one write call a line: a killed process leaves whole lines, or one torn last line
            self._file.write((lines[0] if count == 1 else merged(lines)) + "\n")
            self._next, has_written = self._next + count, True
        if has_written:
            self._file.flush()

    def _tidy(self) -> None:
        os.fsync(self._file.fileno())
        with self._lock:
            self._held_file.tidy(self._held)

    def _check(self, *, is_last: bool = False) -> None:
        """Raises OSError where results do not reach the disk, XgptError where their file lost its
        name."""
        if self._trouble is not None:  # the disk may be full
            raise self._trouble
        if is_last or time.monotonic() - self._looked_s >= _LOOK_S:
            self._looked_s = time.monotonic()
            if not is_still(self._path, self._file.fileno()):
                self._file.flush()
                raise put_back(self._path, self._file.fileno())

    def _keep(self, interval_s: float) -> None:
        """Puts the files on the disk now and then, in a thread of its own."""
        while not self._is_over.wait(interval_s):
            copies = list[int]()
            try:
                with self._lock:
                    held = self._held_file.descriptor
                    files = [self._file.fileno(), *(() if held is None else (held,))]
                    copies += [os.dup(file) for file in files]
                for copy in copies:
                    os.fsync(copy)
                sync_folder(self._path.parent)
            except OSError as trouble:
                self._trouble = trouble
                return
            finally:
                for copy in copies:
                    os.close(copy)

    @property
    def num_held(self) -> int:
        return len(self._held)

    def close(self) -> None:
        """All that was written is on the disk then."""
        try:
            self._is_over.set()
            if self._keeper is not None:
                self._keeper.join()
            self._file.flush()
            self._check(is_last=True)
            self._tidy()
        finally:
            self._held_file.close()
            self._file.close()
        sync_folder(self._path.parent)


def answered(path: Path) -> Answered:
    """Looks at the results file at `path` and what is held beside it. Nothing is changed: a run may
    be writing there."""
    found = checked(path)
    held = found.held.union(read_held(path.with_name(HELD_FILE), found.num_queries))
    return Answered(found.num_queries, held, found.fault)


def answered_by_last_line(path: Path) -> Answered:
    """`answered` for who only looks: lines are in the input's order, so the last whole one tells
    how many there are, and no other is read. Where it does not tell, all are counted."""
    written = _told_by_last(path)
    if written is None:
        return answered(path)
    return Answered(written, frozenset(read_held(path.with_name(HELD_FILE), written)))


def _told_by_last(path: Path) -> int | None:
    """The queries up to the last whole line of a results file; None where it does not say which
    query it is of."""
    try:
        with path.open("rb") as file:
            at, tail = file.seek(0, os.SEEK_END), b""
            # a torn line may follow; the whole one is then between two ends of lines
            while at > 0 and tail.count(b"\n") < 2:
                start = max(at - _CHUNK_BYTES, 0)
                file.seek(start)
                tail, at = file.read(at - start) + tail, start
    except OSError:
        return None
    whole = tail[:tail.rfind(b"\n") + 1]
    line = told(whole[whole.rfind(b"\n", 0, -1) + 1:], None)
    return None if line is None else line.query + line.parts


def count_results(path: Path) -> int:
    """Counts the queries whose lines stand in their places at the start of a results file, and cuts
    off what follows: results are held from then on. It is 0 without a file."""
    found, held_path = checked(path), path.with_name(HELD_FILE)
    if found.behind:
        HeldFile(held_path).tidy({**lines_behind(path, found),
                                  **read_held(held_path, found.num_queries)})
    if path.is_file() and path.stat().st_size > found.good_bytes:
        os.truncate(path, found.good_bytes)
        forget()  # the same size may be reached again before the clock of files goes on
    return found.num_queries


def write_errors(path: Path, errors: Sequence[RequestError], labels: Sequence[str] = ()) -> None:
    """Writes errors.jsonl in the order of the lines; there is no file when there is none to report.
    `labels`: of the files of requests, where there are several."""
    if not errors:
        path.unlink(missing_ok=True)
        return
    lines = [json.dumps(error_line(e, labels[e.file] if labels else None), ensure_ascii=False)
             for e in sorted(errors, key=lambda e: (e.file, e.line))]
    write_atomically(path, "\n".join(lines) + "\n")


def count_errors(path: Path) -> int | None:
    """How many lines errors.jsonl has; None where one of them tells of no request."""
    try:
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        is_whole = all(line.endswith(b"\n") and "id" in json.loads(line) for line in lines)
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    return len(lines) if is_whole else None


def _text(result: FinishedQuery, model: str, token_text: Callable[[int], str]) -> str:
    """Its line. What cannot be written as one (an id with half of a surrogate pair, say) is an
    error of this query's, not the end of all."""
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
    """A file that gets a line a result, each as it will be in results.jsonl. Lines whose turn has
    come stay until the file is tidied: whoever reads it leaves out what results.jsonl has."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[str] | None = None
        self._num_chars = 0

    def add(self, line: str) -> None:
        if self._file is None:
            self._file = self._path.open("a", encoding="utf-8")
        self._num_chars += self._file.write(line + "\n")
        self._file.flush()

    def is_untidy(self, held: Mapping[int, str]) -> bool:
        """Whether it is mostly of lines that are not `held` any more."""
        return self._num_chars > _DEAD_CHARS + 2 * sum(map(len, held.values()))

    def tidy(self, held: Mapping[int, str]) -> None:
        """Writes what is held and nothing else, or removes the file where that is nothing. To be
        called when the others are safe in results.jsonl."""
        self.close()
        if not held:
            self._path.unlink(missing_ok=True)
            self._num_chars = 0
            return
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}.tmp")
        with temporary.open("w", encoding="utf-8") as file:
            self._num_chars = sum(file.write(line + "\n") for _, line in sorted(held.items()))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self._path)
        sync_folder(self._path.parent)

    @property
    def descriptor(self) -> int | None:
        """Of the file while it is open."""
        return None if self._file is None else self._file.fileno()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def read_held(path: Path, first_index: int) -> dict[int, str]:
    """The line of each query from `first_index` on whose result is held; what is torn is left out.
    A run may be writing there."""
    held: dict[int, str] = {}
    try:
        with path.open("rb") as file:
            spool = spool_of(path.parent)
            for text in file:
                line = told(text, spool) if text.endswith(b"\n") else None
                if line is not None and line.query >= first_index:
                    held[line.query] = text.decode().removesuffix("\n")
    except FileNotFoundError:
        pass
    return held


def _choices_of(held: Mapping[int, str]) -> dict[int, int]:
    """Of the first answer to each request that asks for several, which may not be held itself: how
    many."""
    found = {}
    for index, line in held.items():
        own = json.loads(line).get("xgpt")
        if isinstance(own, dict) and own.get("of", 1) > 1:
            found[index - own["sample"]] = own["of"]
    return found
