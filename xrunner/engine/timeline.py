"""When a stage's device began and ended each step, by the host's clock, though the host waits for
none of them: on a GPU by events in its queue; on a CPU work is done when its call returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch


class Event(Protocol):
    """A place in a GPU's queue: torch.cuda.Event."""

    def query(self) -> bool:
        """Whether the GPU has come there."""

    def synchronize(self) -> None:
        """Returns when it has."""

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from here to there, once it has come to both."""


class Worked(Protocol):
    """A step that was asked of the device."""

    def is_over(self) -> bool: ...

    def times(self) -> tuple[float, float]:
        """Begin and end, by the host's clock; waits for them."""


class Timeline:
    """Steps of one device, one after the other."""

    def __init__(self, clock: Callable[[], float],
                 put_event: Callable[[], Event] | None = None) -> None:
        """`put_event`: puts one into the device's queue; None: it is done with what it is asked
        when the call returns."""
        self._clock, self._put_event = clock, put_event
        self._begun_s = 0.0
        self._begin: Event | None = None
        self._last: _Queued | None = None

    def begin(self) -> None:
        self._begun_s = self._clock()
        if self._put_event is not None:
            if self._last is not None and self._last.is_over():
                self._last = None  # the device waits for this step: it begins now
            self._begin = self._put_event()

    def end(self) -> Worked:
        """Of all that was asked of the device since `begin`."""
        if self._put_event is None:
            return _Done(self._begun_s, self._clock())
        assert self._begin is not None
        self._last = _Queued(self._begun_s, self._begin, self._put_event(), self._last)
        return self._last


def timeline_of(device: torch.device, clock: Callable[[], float]) -> Timeline:
    """`clock`: seconds."""
    return Timeline(clock, _cuda_event if device.type == "cuda" else None)


def _cuda_event() -> Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


class _Done:
    def __init__(self, begin_s: float, end_s: float) -> None:
        self._times = begin_s, end_s

    def is_over(self) -> bool:
        return True

    def times(self) -> tuple[float, float]:
        return self._times


class _Queued:
    """Begins when the host asked for it or, where the device was at another step then, as long
    after the end of that as the device's own clock says."""

    def __init__(self, asked_s: float, begin: Event, end: Event, before: _Queued | None) -> None:
        self._asked_s, self._begin, self._end, self._before = asked_s, begin, end, before
        self._times: tuple[float, float] | None = None

    def is_over(self) -> bool:
        return self._times is not None or self._end.query()

    def times(self) -> tuple[float, float]:
        if self._times is None:
            self._end.synchronize()
            begin_s = self._asked_s
            if self._before is not None:
                _, before_s = self._before.times()
                begin_s = before_s + self._before._end.elapsed_time(self._begin) / 1e3
                self._before = None
            self._times = begin_s, begin_s + self._begin.elapsed_time(self._end) / 1e3
        return self._times
