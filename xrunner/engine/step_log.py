"""The steps of one rank as they are told of, once they are over."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from xrunner.comm.messages import StepMessage
from xrunner.engine.timeline import Worked, timeline_of
from xrunner.files.beat import Beat
from xrunner.rank.threads import Threads
from xrunner.step_record import StepRecord

_LIMIT = 200_000  # steps kept for the report; a longer job keeps its last ones
_Given = ParamSpec("_Given")
_Out = TypeVar("_Out")


class StepLog:
    """A step that was asked of a device is over some time later; what it took is known then."""

    def __init__(self, device: torch.device, clock: Callable[[], float],
                 beat: Beat | None = None) -> None:
        """`beat`: is told of every step."""
        self.steps: deque[StepRecord] = deque(maxlen=_LIMIT)
        self.busy_s = 0.0  # kept apart from the steps, some of which are forgotten
        # of that what the model computed, and sums over a group; on a GPU the host does not know
        self._computed_s: float | None = 0.0 if device.type == "cpu" else None
        self.threads: Threads | None = None  # of a run on a CPU: looked after, step by step
        self._timeline, self._beat = timeline_of(device, clock), beat
        self._open: deque[tuple[Worked, StepRecord, int]] = deque()

    def begin(self, message: StepMessage | None = None) -> None:
        """What is asked of the device from now on is a step. `message`: which the rank was told."""
        self.look()
        if self._beat is not None and message is not None:
            self._beat.begin(message)
        self._timeline.begin()

    def computed(self, work: Callable[_Given, _Out], *given: _Given.args,
                 **named: _Given.kwargs) -> _Out:
        """What `work` gives, which is the model's own part of a step."""
        if self._computed_s is None:
            return work(*given, **named)
        begin_s = time.perf_counter()
        out = work(*given, **named)
        self._computed_s += time.perf_counter() - begin_s
        return out

    @property
    def host_s(self) -> float | None:
        """Of `busy_s`, what steps took besides: messages, tables, contexts, slots. None on a GPU,
        which works while the host does that."""
        return None if self._computed_s is None else max(self.busy_s - self._computed_s, 0.0)

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
