"""What asks a run to stop (a warning before a time limit, a scheduler's SIGTERM, a terminal that is
closed) and comes while no ranks run: while ranks do, it asks them to stop
(xgpt/launch/process.py)."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from xgpt.core.errors import StoppedEarly
from xgpt.launch.asked import forget, is_asked, raise_if_asked, remember
from xgpt.launch.process import to_be_heard

_before: dict[int, Any] = {}  # the handlers that ours stand for; empty where none do


@contextmanager
def warned_in_good_order(*, ends_process: bool = False) -> Iterator[None]:
    """The first such signal ends this with StoppedEarly, at the latest before ranks start
    (xgpt/launch/asked.py); others that follow it change nothing. `ends_process`: nor do they after
    a stop, since the process ends with it. Within another such context, and in other threads than
    the main one, it does nothing. For what writes its files whole."""
    if _before or threading.current_thread() is not threading.main_thread():
        yield
        return
    _before.update({number: signal.getsignal(number) or signal.SIG_DFL
                    for number in to_be_heard()})
    for number in _before:
        signal.signal(number, _stop)
    try:
        yield
    except KeyboardInterrupt:
        raise_if_asked()
        raise
    finally:
        previous = {} if ends_process and is_asked() else dict(_before)
        _before.clear()
        forget()
        for number, handler in previous.items():
            signal.signal(number, handler)


def _stop(number: int, frame: FrameType | None) -> None:
    for other in _before:  # not SIG_IGN: Python would tell of one that is on its way
        signal.signal(other, lambda *_: None)
    said = StoppedEarly(
        f"{signal.Signals(number).name} came while no ranks were at work; nothing that was "
        "done is lost, and the same command goes on from there")
    remember(said)
    raise KeyboardInterrupt  # of which nobody on the way makes a failure of his own
