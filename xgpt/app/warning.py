"""A warning before a time limit (SIGUSR1) that comes while no ranks run: while ranks do, it asks
them to stop (xgpt/launch/process.py)."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from xgpt.core.errors import StoppedEarly


@contextmanager
def warned_in_good_order() -> Iterator[None]:
    """The signal raises StoppedEarly. For a main thread whose files are written whole."""
    def stop(number: int, frame: FrameType | None) -> None:
        raise StoppedEarly("the time limit is near; what was done is kept, and the same command "
                           "goes on from there")

    previous = signal.signal(signal.SIGUSR1, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, previous)
