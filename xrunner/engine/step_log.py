"""The steps of one rank as they are told of, once they are over."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from xrunner.comm.messages import StepMessage
from xrunner.files.beat import Beat
from xrunner.rank.threads import Threads
from xrunner.step_record import StepRecord

_LIMIT = 200_000  # steps kept for the report; a longer job keeps its last ones
Event = Any  # a place in a GPU's queue: torch.cuda.Event


class Worked:
    """A step that was asked of the device. On a CPU its times are known at once. On a GPU it lies
    between two events: it begins when the host asked for it or, where the device was at another
    step (`before`) then, as long after the end of that as the device's own clock says."""

    def __init__(self, begin_s: float, end_s: float | None = None, begin: Event = None,
                 end: Event = None, before: Worked | None = None) -> None:
        """`end_s`: None where events say it."""
        self._asked_s, self._begin, self._end, self._before = begin_s, begin, end, before
        self._times = None if end_s is None else (begin_s, end_s)

    def is_over(self) -> bool:
        return self._times is not None or bool(self._end.query())

    def times(self) -> tuple[float, float]:
        """Begin and end, by the host's clock; waits for them."""
        if self._times is None:
            self._end.synchronize()
            begin_s = self._asked_s
            if self._before is not None:
                _, before_s = self._before.times()
                begin_s = before_s + self._before._end.elapsed_time(self._begin) / 1e3
                self._before = None
            self._times = begin_s, begin_s + self._begin.elapsed_time(self._end) / 1e3
        return self._times


class Timeline:
    """When a device began and ended each step, one after the other, by the host's clock, though the
    host waits for none of them: on a GPU by events in its queue; on a CPU work is done when its
    call returns."""

    def __init__(self, clock: Callable[[], float],
                 put_event: Callable[[], Event] | None = None) -> None:
        """`put_event`: puts one into the device's queue; None: it is done with what it is asked
        when the call returns."""
        self._clock, self._put_event = clock, put_event
        self._begun_s = 0.0
        self._begin: Event = None
        self._last: Worked | None = None

    def begin(self) -> None:
        self._begun_s = self._clock()
        if self._put_event is not None:
            if self._last is not None and self._last.is_over():
                self._last = None  # the device waits for this step: it begins now
            self._begin = self._put_event()

    def end(self) -> Worked:
        """Of all that was asked of the device since `begin`."""
        if self._put_event is None:
            return Worked(self._begun_s, self._clock())
        self._last = Worked(self._begun_s, None, self._begin, self._put_event(), self._last)
        return self._last


def timeline_of(device: torch.device, clock: Callable[[], float]) -> Timeline:
    """`clock`: seconds."""
    return Timeline(clock, _cuda_event if device.type == "cuda" else None)


def _cuda_event() -> Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


class StepLog:
    """A step that was asked of a device is over some time later; what it took is known then."""

    def __init__(self, device: torch.device, clock: Callable[[], float],
                 beat: Beat | None = None) -> None:
        """`beat`: is told of every step."""
        self.steps: deque[StepRecord] = deque(maxlen=_LIMIT)
        self.busy_s = 0.0  # kept apart from the steps, some of which are forgotten
        self.threads: Threads | None = None  # of a run on a CPU: looked after, step by step
        self._timeline, self._beat = timeline_of(device, clock), beat
        self._open: deque[tuple[Worked, StepRecord, int]] = deque()

    def begin(self, message: StepMessage | None = None) -> None:
        """What is asked of the device from now on is a step. `message`: which the rank was told."""
        self.look()
        if self._beat is not None and message is not None:
            self._beat.begin(message)
        self._timeline.begin()

    def end(self, record: StepRecord, seats: int) -> None:
        """All of it was asked for. `record`: without its times; `seats`: queries that the rank
        has."""
        self._open.append((self._timeline.end(), record, seats))

    def look(self) -> None:
        """Tells of the steps that are over."""
        self._tell(lambda worked: worked.is_over())

    def settle(self) -> None:
        """Returns when every step is over, and told of."""
        self._tell(lambda worked: True)

    def close(self) -> None:
        """There are no more steps."""
        self.settle()
        if self._beat is not None:
            self._beat.stop()

    def _tell(self, is_next: Callable[[Worked], bool]) -> None:
        while self._open and is_next(self._open[0][0]):
            worked, record, seats = self._open.popleft()
            start_s, end_s = worked.times()
            record = record._replace(start_s=start_s, end_s=end_s)
            self.steps.append(record)
            self.busy_s += record.seconds
            if self._beat is not None:
                self._beat(record.end_s, self.busy_s, seats, record)
            if self.threads is not None:
                self.threads.look()
