"""Progress for a person: one line that rewrites itself on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import shutil
import time
from pathlib import Path
from types import TracebackType

import click

from xgpt.cli.options import is_terminal, say
from xgpt.core.units import format_seconds
from xrunner.io.progress import Progress, read_progress

_PLAIN_EVERY_S = 5.0
_REDRAW_EVERY_S = 0.2
_BAR_WIDTH = 16


class Line:
    """Writes a changing status: `\\r` on a terminal, a line every few seconds where it is none."""

    def __init__(self) -> None:
        self._is_terminal = is_terminal()
        self._last_s, self._width, self._shown = -math.inf, 0, ""

    def show(self, text: str, *, force: bool = False) -> None:
        now = time.monotonic()
        wait_s = _REDRAW_EVERY_S if self._is_terminal else _PLAIN_EVERY_S
        if text == self._shown or (now - self._last_s < wait_s and not force):
            return
        self._last_s, self._shown = now, text
        if not self._is_terminal:
            say(text)
            return
        limit = shutil.get_terminal_size((80, 24)).columns - 1
        text = text[:limit]
        click.echo("\r" + text.ljust(min(self._width, limit)), err=True, nl=False)
        self._width = len(text)

    def end(self) -> None:
        if self._is_terminal and self._width:
            click.echo("", err=True)


class StepBar:
    """How much is done, read from a file of two numbers: its share, and seconds left."""

    def __init__(self, label: str) -> None:
        self._label, self._line = label, Line()

    def __enter__(self) -> StepBar:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._line.end()

    def read(self, path: Path) -> None:
        text = path.read_text(encoding="utf-8").split() if path.is_file() else []
        if len(text) != 2:
            return
        share, left_s = float(text[0]), float(text[1])
        left = f", {format_seconds(left_s)} left" if left_s > 0 else ""
        self._line.show(f"{self._label} {_bar(round(share * 100), 100)} {share:.0%}{left}",
                        force=share >= 1)


class RunBar:
    """Queries, tokens per second, time left, and the latency so far against its bound."""

    def __init__(self, path: Path, bound_s: float) -> None:
        self._path, self._bound_s, self._line = path, bound_s, Line()

    def update(self) -> None:
        progress = read_progress(self._path)
        if progress is not None:
            self._line.show(progress_line(progress, self._bound_s),
                            force=progress.state in ("done", "stopped"))

    def end(self) -> None:
        self._line.end()


def progress_line(progress: Progress, bound_s: float) -> str:
    """One state of a run in at most 79 columns."""
    if progress.state == "loading":
        return "loading the model"
    rate = progress.output_tokens / progress.elapsed_s if progress.elapsed_s > 0 else 0.0
    text = (f"{_bar(progress.done, progress.total)} {progress.done}/{progress.total} queries "
            f"{rate:.0f} tok/s")
    done_here = progress.done - progress.done_before
    if (progress.state == "running" and done_here > 0 and progress.done < progress.total
            and progress.elapsed_s > 0):
        left_s = progress.elapsed_s / done_here * (progress.total - progress.done)
        text += f" {format_seconds(left_s)} left"
    if progress.latency_p99_s is not None:
        bound = "" if math.isinf(bound_s) else f"/{bound_s:.3g}"
        text += f" p99 {progress.latency_p99_s:.3g}{bound} s"
    return text


def _bar(done: int, total: int) -> str:
    filled = round(_BAR_WIDTH * done / total) if total else 0
    return "[" + "#" * filled + "-" * (_BAR_WIDTH - filled) + "]"
