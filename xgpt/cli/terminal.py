"""Prints text, messages and progress: on a terminal one progress line that is rewritten, elsewhere
a plain line every half minute."""

import math
import os
import shutil
import sys
import textwrap
import time

import click

from xgpt.core.errors import visible

_PLAIN_EVERY_S = 30.0  # chosen: about 3,000 lines in a day's log
_REDRAW_EVERY_S = 0.2


def show(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Prints text with control characters made visible. Commands print everything but JSON, which
    has escapes, through this."""
    click.echo(visible(text), err=err, nl=nl)


def say(message: str) -> None:
    """Prints a message on stderr, so that stdout has only the command's result."""
    shown = visible(message)
    if is_terminal():  # long lines are broken between words
        columns = shutil.get_terminal_size((80, 24)).columns
        shown = "\n".join(
            line if len(line) <= columns else textwrap.fill(
                line, columns, break_long_words=False, break_on_hyphens=False)
            for line in shown.split("\n"))
    show(shown, err=True)


def open_what_is_closed() -> None:
    """Opens the null device for each of stdin, stdout and stderr that the caller closed (`2>&-`,
    some daemons). Else the next file that is opened would get its number, and the output of
    libraries."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))


def is_terminal() -> bool:
    return sys.stderr.isatty()


class Terminal:
    """Prints messages and progress (a Teller, xgpt.app.teller). `is_verbose`: details, too. Without
    a terminal, progress is a line every _PLAIN_EVERY_S seconds."""

    def __init__(self, *, is_verbose: bool = False) -> None:
        self._is_verbose = is_verbose
        self._width, self._shown = 0, ""
        self._last_s = -math.inf if is_terminal() else time.monotonic()

    def say(self, message: str) -> None:
        self.end_progress()  # which is drawn again below the message
        say(message)

    def detail(self, message: str) -> None:
        if self._is_verbose:
            self.say(message)

    def progress(self, line: str) -> None:
        now, on_terminal = time.monotonic(), is_terminal()
        wait_s = _REDRAW_EVERY_S if on_terminal else _PLAIN_EVERY_S
        if line == self._shown or now - self._last_s < wait_s:
            return
        self._last_s, self._shown = now, line
        if not on_terminal:
            say(line)
            return
        limit = shutil.get_terminal_size((80, 24)).columns - 1
        line = visible(line)[:limit]
        click.echo("\r" + line.ljust(min(self._width, limit)), err=True, nl=False)
        self._width = len(line)

    def end_progress(self) -> None:
        if self._width and is_terminal():
            click.echo("\r" + " " * self._width + "\r", err=True, nl=False)
            self._width, self._last_s, self._shown = 0, -math.inf, ""
