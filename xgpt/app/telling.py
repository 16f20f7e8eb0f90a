"""Whom a use case tells the user things through (the command line prints them, the library logs
them), and how far a profile or a run is, in one line, as the files tell that its ranks write."""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from xgpt.app.time_left import time_left_s
from xgpt.core.units import format_seconds
from xrunner.io.sink import Progress, read_progress

_LOG = logging.getLogger("xgpt")
_BAR_WIDTH = 16
SILENT_S, _STILL_S = 2.0, 0.5  # before something that is silent is told of, and between words


class Teller(Protocol):
    """Takes what a use case has to say while it works."""

    def say(self, message: str) -> None:
        """Takes a message of a line or more."""

    def progress(self, line: str, *, is_last: bool = False) -> None:
        """Takes the present state of something that takes a while, in one line. Most states are
        outdated before anybody has read them and may be left out, but not the last."""

    def end_progress(self) -> None:
        """Takes note that what is said next has a line of its own."""


class LogTeller:
    """Hands messages to the logger `xgpt`, and shows no progress."""

    def say(self, message: str) -> None:
        _LOG.info("%s", message)

    def progress(self, line: str, *, is_last: bool = False) -> None:
        _LOG.debug("%s", line)

    def end_progress(self) -> None:
        return


@contextmanager
def told_while(tell: Teller, what: str, how_far: Callable[[], str] = str) -> Iterator[None]:
    """Tells that something silent goes on, once that has taken two seconds, until it ends; with it
    `how_far` it is, in words (or none)."""
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
    """Tells what a file of two numbers holds: the share that is done, and the seconds left."""
    text = path.read_text(encoding="utf-8").split() if path.is_file() else []
    if len(text) != 2:
        return
    share, left_s = float(text[0]), float(text[1])
    left = f", {format_seconds(left_s)} left" if left_s > 0 else ""
    tell.progress(f"{label} {bar(round(share * 100), 100)} {share:.0%}{left}", is_last=share >= 1)


def tell_run(tell: Teller, path: Path, bound_s: float, silent: str | None = None) -> None:
    """Tells how far a run is whose progress.json is at `path`. `silent`: a rank of it, in words."""
    progress = read_progress(path)
    if progress is not None:
        left_s = None if silent else time_left_s(progress, path.parent)
        tell.progress(progress_line(progress, bound_s, left_s, silent),
                      is_last=progress.state in ("done", "stopped"))


def progress_line(progress: Progress, bound_s: float, left_s: float | None = None,
                  silent: str | None = None) -> str:
    """Queries, tokens per second, time left where it is known and the latency so far against its
    bound, or the rank of which nothing is heard, in at most 79 columns."""
    if progress.state == "loading":
        return "reading the queries and the weights"
    rate = progress.output_tokens / progress.elapsed_s if progress.elapsed_s > 0 else 0.0
    text = (f"{bar(progress.done, progress.total)} {progress.done}/{progress.total} queries "
            f"{rate:.0f} tok/s")
    if silent is not None:
        return f"{text} {silent}"
    if left_s is not None:
        text += f" {format_seconds(left_s)} left"
    if progress.latency_p99_s is not None:
        bound = "" if math.isinf(bound_s) else f"/{bound_s:.3g}"
        text += f" p99 {progress.latency_p99_s:.3g}{bound} s"
    return text


def bar(done: int, total: int) -> str:
    """How much of it is done, as `[####----]`."""
    filled = round(_BAR_WIDTH * done / total) if total else 0
    return "[" + "#" * filled + "-" * (_BAR_WIDTH - filled) + "]"
