"""Signals that ask a run to stop while no ranks run: a warning before a time limit, a scheduler's
SIGTERM, Ctrl-C, a closed terminal. While ranks run, xgpt/launch/process.py handles them. The signal
is remembered, as a library may catch what its handler raises (torch's import did, twice in 60)."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from xgpt.core.errors import StoppedEarly

# Slurm's warning is SIGUSR1.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT)
_stops: list[StoppedEarly] = []
_before: dict[int, Any] = {}  # handlers that ours replace; empty while none are replaced


def handled_signals() -> list[signal.Signals]:
    """The signals STOP_SIGNALS, without SIGHUP if the command was started to outlive its terminal
    (`nohup`)."""
    return [number for number in STOP_SIGNALS
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]


class _Stopped(KeyboardInterrupt):
    """Raised by the handler; code that catches Exception lets it pass. A plain KeyboardInterrupt
    that passes through an `exec` of text (a dataclass's definition has one) makes CPython end
    `python -m` by SIGINT, whatever the exit code; a subclass does not."""


@contextmanager
def stopping_in_order(*, ends_process: bool = False) -> Iterator[None]:
    """Turns the first stop signal inside the `with` block into StoppedEarly, raised at the latest
    before ranks start. Later signals are ignored, with `ends_process` also after the block. Does
    nothing inside another such block, and outside the main thread."""
    if _before or threading.current_thread() is not threading.main_thread():
        yield
        return
    _before.update({number: signal.getsignal(number) or signal.SIG_DFL
                    for number in handled_signals()})
    for number in _before:
        signal.signal(number, _stop)
    try:
        yield
    except KeyboardInterrupt:
        raise_if_stopped()
        raise
    finally:
        previous = {} if ends_process and _stops else dict(_before)
        _before.clear()
        _stops.clear()
        for number, handler in previous.items():
            signal.signal(number, handler)


def _stop(number: int, frame: FrameType | None) -> None:
    for other in _before:  # not SIG_IGN: Python would tell of one that is on its way
        signal.signal(other, lambda *_: None)
    _stops[:] = [StoppedEarly(
        f"{signal.Signals(number).name} came while no ranks were at work; nothing that was "
        "done is lost, and the same command goes on from there")]
    raise _Stopped


def raise_if_stopped() -> None:
    """Raises StoppedEarly if a stop signal came."""
    if _stops:
        raise _stops[0]
