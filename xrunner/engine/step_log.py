"""The executed steps of one rank, with times that are known once a step is over."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from xrunner.comm.messages import StepMessage
from xrunner.files.heartbeat import Heartbeat
from xrunner.rank.threads import Threads
from xrunner.step_record import StepRecord

_LIMIT = 200_000  # chosen: steps kept for the report; a longer job keeps its last ones
Event = Any  # position in a GPU's queue: torch.cuda.Event


class TimedStep:
    """A step given to the device. On a CPU its times are known at once. On a GPU it lies between
    two events. It begins when the host launched it. If the device was then at step `before`, it
    begins after that one's end, by the device's own clock."""

    def __init__(self, begin_s: float, end_s: float | None = None, begin: Event = None,
                 end: Event = None, before: TimedStep | None = None) -> None:
        """`end_s`: None if events tell it."""
        self._asked_s, self._begin, self._end, self._before = begin_s, begin, end, before
        self._times = None if end_s is None else (begin_s, end_s)

    def is_over(self) -> bool:
        return self._times is not None or bool(self._end.query())

    def times(self) -> tuple[float, float]:
        """Waits for the step; its begin and end in seconds of the host's clock."""
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
    """Times of a device's successive steps by the host's clock, without waiting for them. On a GPU
    by events in its queue; on a CPU a step is over when its call returns."""

    def __init__(self, clock: Callable[[], float],
                 put_event: Callable[[], Event] | None = None) -> None:
        """`put_event`: puts an event into the device's queue (None: the device is synchronous)."""
        self._clock, self._put_event = clock, put_event
        self._begun_s = 0.0
        self._begin: Event = None
        self._last: TimedStep | None = None

    def begin(self) -> None:
        self._begun_s = self._clock()
        if self._put_event is not None:
            if self._last is not None and self._last.is_over():
                self._last = None  # the device is idle: it begins now
            self._begin = self._put_event()

    def end(self) -> TimedStep:
        """The step given to the device since `begin`."""
        if self._put_event is None:
            return TimedStep(self._begun_s, self._clock())
        self._last = TimedStep(self._begun_s, None, self._begin, self._put_event(), self._last)
        return self._last


def timeline_of(device: torch.device, clock: Callable[[], float]) -> Timeline:
    """A timeline of the device. `clock`: returns seconds."""
    return Timeline(clock, _cuda_event if device.type == "cuda" else None)


def _cuda_event() -> Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


class StepLog:
    """Logs steps, a device's with delay: their times are known once they are over."""

    def __init__(self, device: torch.device, clock: Callable[[], float],
                 heartbeat: Heartbeat | None = None) -> None:
        """`heartbeat`: called with every step."""
        self.steps: deque[StepRecord] = deque(maxlen=_LIMIT)
        self.busy_s = 0.0  # over all steps, also those no longer kept
        self.threads: Threads | None = None  # of a run on a CPU: adjusted step by step
        self._timeline, self._heartbeat = timeline_of(device, clock), heartbeat
        self._open: deque[tuple[TimedStep, StepRecord, int]] = deque()

    def begin(self, message: StepMessage | None = None) -> None:
        """Begins a step. `message`: its message, if the rank received one."""
        self.look()
        if self._heartbeat is not None and message is not None:
            self._heartbeat.begin(message)
        self._timeline.begin()

    def end(self, record: StepRecord, seats: int) -> None:
        """Ends the step begun last. `record`: without times. `seats`: requests on this rank."""
        self._open.append((self._timeline.end(), record, seats))

    def look(self) -> None:
        """Logs the steps that are over."""
        self._tell(lambda worked: worked.is_over())

    def wait(self) -> None:
        """Waits until every step is over, and logs it."""
        self._tell(lambda worked: True)

    def close(self) -> None:
        """Waits for all steps and ends the log."""
        self.wait()
        if self._heartbeat is not None:
            self._heartbeat.stop()

    def _tell(self, is_next: Callable[[TimedStep], bool]) -> None:
        while self._open and is_next(self._open[0][0]):
            worked, record, seats = self._open.popleft()
            start_s, end_s = worked.times()
            record = record._replace(start_s=start_s, end_s=end_s)
            self.steps.append(record)
            self.busy_s += record.seconds
            if self._heartbeat is not None:
                self._heartbeat(record.end_s, self.busy_s, seats, record)
            if self.threads is not None:
                self.threads.look()
