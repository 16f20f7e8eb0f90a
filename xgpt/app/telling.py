"""Whom a use case tells the user things through: the command line prints them, the library logs
them."""

from __future__ import annotations

import logging
from typing import Protocol

_LOG = logging.getLogger("xgpt")


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
