"""What asks a run to stop (a warning before a time limit, a scheduler's SIGTERM, Ctrl-C, a terminal
that is closed) and comes while no ranks run: while ranks do, it asks them to stop
(xgpt/launch/process.py). A library whose import tries this and that may catch what a signal's
handler raises (seen with torch's, twice in 60 signals): it is remembered."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from xgpt.core.errors import StoppedEarly

# Slurm's warning is SIGUSR1.
TO_STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT)
_asked: list[StoppedEarly] = []
_before: dict[int, Any] = {}  # the handlers that ours stand for; empty where none do


def to_be_heard() -> list[signal.Signals]:
    """TO_STOP, without a closing terminal's where the command was started to outlive it
    (`nohup`)."""
    return [number for number in TO_STOP
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]


class _Stopped(KeyboardInterrupt):
    """The stop that a signal asks for, as an interrupt: code that catches Exception lets it pass. A
    plain KeyboardInterrupt that passes through an `exec` of text (a dataclass's definition has one)
    makes CPython end `python -m` by SIGINT, whatever the exit code; a subclass does not."""


@contextmanager
def warned_in_good_order(*, ends_process: bool = False) -> Iterator[None]:
    """The first such signal ends this with StoppedEarly, at the latest before ranks start; others
    that follow it change nothing. `ends_process`: nor do they afterwards. Within another such
    context, and in other threads than the main one, it does nothing. For what writes its files
    whole."""
    if _before or threading.current_thread() is not threading.main_thread():
        yield
        return
    _before.update({number: signal.getsignal(number) or signal.SIG_DFL for number in to_be_heard()})
    for number in _before:
        signal.signal(number, _stop)
    try:
        yield
    except KeyboardInterrupt:
        raise_if_asked()
        raise
    finally:
        previous = {} if ends_process and _asked else dict(_before)
        _before.clear()
        _asked.clear()
        for number, handler in previous.items():
            signal.signal(number, handler)


def _stop(number: int, frame: FrameType | None) -> None:
    for other in _before:  # not SIG_IGN: Python would tell of one that is on its way
        signal.signal(other, lambda *_: None)
    _asked[:] = [StoppedEarly(
        f"{signal.Signals(number).name} came while no ranks were at work; nothing that was "
        "done is lost, and the same command goes on from there")]
    raise _Stopped


def raise_if_asked() -> None:
    """Raises the StoppedEarly of a signal that came."""
    if _asked:
        raise _asked[0]
