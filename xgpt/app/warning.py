"""What asks a run to stop (a warning before a time limit, a scheduler's SIGTERM, a terminal that is
closed) and comes while no ranks run: while ranks do, it asks them to stop
(xgpt/launch/process.py)."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from xgpt.core.errors import StoppedEarly
from xgpt.launch.asked import forget, remember
from xgpt.launch.process import to_be_heard


@contextmanager
def warned_in_good_order() -> Iterator[None]:
    """The first such signal raises StoppedEarly, at the latest before ranks start
    (xgpt/launch/asked.py); others that follow it change nothing; Ctrl-C is Python's own. For a main
    thread whose files are written whole."""
    def stop(number: int, frame: FrameType | None) -> None:
        for other in previous:
            signal.signal(other, signal.SIG_IGN)
        said = StoppedEarly(
            f"{signal.Signals(number).name} came while no ranks were at work; nothing that was "
            "done is lost, and the same command goes on from there")
        remember(said)
        raise said

    previous = {number: signal.getsignal(number) or signal.SIG_DFL for number in to_be_heard()
                if number != signal.SIGINT}
    for number in previous:
        signal.signal(number, stop)
    try:
        yield
    finally:
        forget()
        for number, handler in previous.items():
            signal.signal(number, handler)
