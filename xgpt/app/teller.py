"""Tellers, which take the messages and the progress of commands (the command line prints them, the
library logs them), and the progress line of a profile or a run, from files that its ranks write."""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import numpy as np

from xgpt.core.errors import XgptError, run_error_words
from xgpt.core.lengths import FloatArray
from xgpt.core.system.whole_file import write_atomically
from xgpt.core.units import format_seconds
from xgpt.report.lanes import EXPECTED_FILE, read_expected
from xgpt.report.table import paragraph
from xgpt.run_folder.files import DOING_FILE, MESSAGES_FILE, text_or_empty
from xrunner.checkpoint.staging import NOTE_FILE, STAGING_FILE
from xrunner.files.sink import Progress, read_progress

_INTERVAL_S = 1.0  # between progress lines that are written to a file
_LOG = logging.getLogger("xgpt")
_BAR_WIDTH = 16
_LEAST_S = 0.05  # less is not shown: ranks report their progress twice a second
PRIOR = 0.1  # weight of the expected pace beside the seen one, as a share of the expected time
SILENT_S, _STILL_S = 2.0, 0.5  # before a silent activity is shown, and between its lines


class Teller(Protocol):
    """Takes the messages of a command while it works."""

    def say(self, message: str) -> None:
        """Shows a message of one or more lines."""

    def detail(self, message: str) -> None:
        """Shows a message only with `--verbose`."""

    def progress(self, line: str) -> None:
        """Replaces the progress line. May be left out, since most states are soon outdated."""

    def end_progress(self) -> None:
        """Ends the progress line: the next message starts on its own line."""


class LogTeller:
    """Logs messages with the logger `xgpt`, and progress at level debug."""

    def say(self, message: str) -> None:
        _LOG.info("%s", message)

    def detail(self, message: str) -> None:
        self.say(message)

    def progress(self, line: str) -> None:
        _LOG.debug("%s", line)

    def end_progress(self) -> None:
        return


class CallbackTeller(LogTeller):
    """Passes each message and each progress line to a function."""

    def __init__(self, take: Callable[[str], None]) -> None:
        self._take = take

    def say(self, message: str) -> None:
        self._take(message)

    def progress(self, line: str) -> None:
        self._take(line)


class KeptTeller:
    """Passes everything on to another Teller, and writes it to messages.log in the output folder.
    Ignores a folder that cannot be written to: writing results reports that."""

    def __init__(self, tell: Teller, output: Path) -> None:
        self._tell, self._output, self._written_s = tell, output, 0.0
        with suppress(OSError):
            (output / MESSAGES_FILE).write_text("", encoding="utf-8")
            (output / DOING_FILE).unlink(missing_ok=True)  # of one that was killed

    def say(self, message: str) -> None:
        self._tell.say(message)
        self._keep(message)

    def detail(self, message: str) -> None:
        self._tell.detail(message)
        self._keep(message)

    def _keep(self, message: str) -> None:
        stamp = time.strftime("%H:%M:%S")
        lines = [f"{stamp} {line}\n" for line in message.splitlines() if line.strip()]
        with suppress(OSError), (self._output / MESSAGES_FILE).open("a", encoding="utf-8") as file:
            file.writelines(lines)

    def progress(self, line: str) -> None:
        self._tell.progress(line)
        now = time.monotonic()
        if now - self._written_s >= _INTERVAL_S:
            self._written_s = now
            with suppress(OSError):
                write_atomically(self._output / DOING_FILE, line + "\n", is_durable=False)

    def end_progress(self) -> None:
        self._tell.end_progress()
        with suppress(OSError):
            (self._output / DOING_FILE).unlink(missing_ok=True)


@contextmanager
def elapsed_told(tell: Teller, what: str, how_far: Callable[[], str] = str) -> Iterator[None]:
    """Shows a progress line with `what` and the seconds so far while its block runs, from the
    second second on. `how_far`: returns words for its progress, or ""."""
    is_over = threading.Event()

    def say_so() -> None:
        begin_s, wait_s = time.monotonic(), SILENT_S
        while not is_over.wait(wait_s):
            wait_s = _STILL_S
            passed = format_seconds(round(time.monotonic() - begin_s))
            more = how_far()
            tell.progress(f"{what}, {passed} so far{': ' if more else ''}{more}")
        if wait_s == _STILL_S:
            tell.end_progress()

    thread = threading.Thread(target=say_so, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def tell_share(tell: Teller, label: str, path: Path) -> None:
    """Shows the progress in a file of two numbers: the share that is done and the seconds left."""
    text = path.read_text(encoding="utf-8").split() if path.is_file() else []
    if len(text) != 2:
        return
    share, left_s = float(text[0]), float(text[1])
    left = f", {format_seconds(left_s)} left" if left_s > 0 else ""
    tell.progress(f"{label} {bar(round(share * 100), 100)} {share:.0%}{left}")


def tell_run(tell: Teller, path: Path, bound_s: float, silent: str | None = None) -> None:
    """Shows the progress of a run by its progress.json at `path`. `silent`: words for a rank that
    sends no heartbeat."""
    if text := text_or_empty(note := path.parent / NOTE_FILE):
        tell.say(paragraph(f"note: {text}"))
        note.write_text("", encoding="utf-8")  # it stays: no other node says the same
    if (progress := read_progress(path)) is not None:
        left_s = None if silent else time_left_s(progress, path.parent)
        line = text_or_empty(path.parent / STAGING_FILE) or progress_line(
            progress, bound_s, left_s, silent)
        tell.progress(f"running  {line}")


def progress_line(progress: Progress, bound_s: float, left_s: float | None = None,
                  silent: str | None = None) -> str:
    """One line with requests, tokens per second, the time left where it is known, and the P99
    latency against its limit; or with `silent`, the rank that sends no heartbeat."""
    if progress.state == "loading" or not progress.total:
        return "reading the requests and the weights"
    rate = progress.output_tokens / progress.elapsed_s if progress.elapsed_s > 0 else 0.0
    text = (f"{bar(progress.done, progress.total)} {progress.done:,}/{progress.total:,}  "
            f"{rate:,.0f} tok/s")
    if silent is not None:
        return f"{text}  {silent}"
    if left_s is not None:
        text += f"  {format_seconds(left_s)} left"
    if progress.latency_p99_s is not None:
        bound = "" if math.isinf(bound_s) else f" of {bound_s:.3g}"
        text += f"  P99 {progress.latency_p99_s:.3g}{bound} s"
    return text


def bar(done: int, total: int) -> str:
    """The share `done` of `total` as `[####----]`."""
    filled = round(_BAR_WIDTH * done / total) if total else 0
    return "[" + "#" * filled + "-" * (_BAR_WIDTH - filled) + "]"


def time_left_s(progress: Progress, output: Path) -> float | None:
    """Seconds until the run in `output` is done; None where it is not running, nothing is known
    yet, or the expected time has passed and queries are left."""
    if progress.state != "running" or progress.elapsed_s <= 0 or progress.done >= progress.total:
        return None
    path, done_here = output / EXPECTED_FILE, progress.done - progress.done_before
    curve = _expected(path, path.stat().st_mtime_ns) if path.is_file() else None
    is_dated = progress.last_done_s is not None or not done_here
    if curve is not None and is_dated and curve[1][-1] == progress.total:
        left_s = _by_plan(progress, *curve)
    elif done_here > 0:
        left_s = progress.elapsed_s / done_here * (progress.total - progress.done)
    else:
        return None
    return left_s if left_s >= _LEAST_S else None


def _by_plan(progress: Progress, at_s: FloatArray, done: FloatArray) -> float:
    """Seconds left, by comparing the time at which the plan has this many queries done with the
    time at which they were done. (Queries end in bursts, the first only after a while.) From there
    the run continues at that pace, at most to where the plan has one more query done."""
    before_s = float(np.interp(progress.done_before, done, at_s, left=0.0))  # of an earlier run
    whole_s = float(at_s[-1])
    reached_s = float(np.interp(progress.done, done, at_s, left=0.0))
    next_s = float(np.interp(progress.done + 1, done, at_s))
    seen_s = progress.last_done_s or 0.0
    prior_s = PRIOR * whole_s
    pace = (seen_s + prior_s) / (max(reached_s - before_s, 0.0) + prior_s)
    place_s = min(reached_s + max(progress.elapsed_s - seen_s, 0.0) / pace, next_s)
    late = (progress.elapsed_s + prior_s) / (max(place_s - before_s, 0.0) + prior_s)
    return max(whole_s - place_s, 0.0) * max(pace, late)


@lru_cache(maxsize=4)
def _expected(path: Path, written_ns: int) -> tuple[FloatArray, FloatArray] | None:
    """Times in seconds, and queries done until then, of the replay, cached by `written_ns`, when
    its file was written; None where there is none."""
    expected = read_expected(path)
    if expected is None or not expected.done:
        return None
    at_s, done = zip(*expected.done, strict=True)
    return np.array(at_s), np.array(done)


@contextmanager
def file_errors_named(output: Path) -> Iterator[None]:
    """Raises an XgptError for a full disk, a missing folder, or memory that ran out in its block.
    Errors that may be a bug of xgpt are passed on."""
    try:
        yield
    except (OSError, MemoryError, RuntimeError, ImportError) as error:
        if (words := run_error_words(error, output)) is None:
            raise
        raise XgptError(words) from None
