"""A discrete event kernel: what happens, in the order of (seconds, priority, sequence).

Nothing in it is random, and nothing is shared between two kernels."""

import heapq
from collections.abc import Callable

Act = Callable[[float], None]  # is called with the event's time

# Priorities of events at one time: first what brings work, then those who look for it, then those
# who hear of what they did.
ARRIVAL, TURN, NEWS = 0, 1, 2


class Kernel:
    """The events that are still to come."""

    def __init__(self) -> None:
        self._events: list[tuple[float, int, int, Act]] = []
        self._sequence = 0  # events at one time and priority happen in the order of their making

    def at(self, time_s: float, priority: int, act: Act) -> None:
        """`act` is called at `time_s`."""
        self._sequence += 1
        heapq.heappush(self._events, (time_s, priority, self._sequence, act))

    def is_free_until(self, time_s: float) -> bool:
        """Whether no event comes before `time_s` or at it, so that who works now may go on to
        then without asking for an event of his own."""
        return not self._events or self._events[0][0] > time_s

    def run(self) -> None:
        """Acts on all events in order, until none is left."""
        while self._events:
            time_s, _, _, act = heapq.heappop(self._events)
            act(time_s)
