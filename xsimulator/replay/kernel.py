"""A deterministic discrete event kernel. Events happen in the order of (seconds, priority,
sequence)."""

import heapq
from collections.abc import Callable

Act = Callable[[float], None]  # is called with the event's time

# priorities of simultaneous events: requests arrive, pools take turns, requests are routed anew
ARRIVAL, TURN, ROUTING = 0, 1, 2


class Kernel:
    """The queue of future events."""

    def __init__(self) -> None:
        self._events: list[tuple[float, int, int, Act]] = []
        self._sequence = 0  # ties happen in the order in which they were scheduled

    def at(self, time_s: float, priority: int, act: Act) -> None:
        """Schedules a call of `act` at `time_s`."""
        self._sequence += 1
        heapq.heappush(self._events, (time_s, priority, self._sequence, act))

    def is_free_until(self, time_s: float) -> bool:
        """Whether no event is scheduled up to `time_s`. The caller may then proceed to that time
        without an event of its own."""
        return not self._events or self._events[0][0] > time_s

    def run(self) -> None:
        """Runs all events in order until none is left."""
        while self._events:
            time_s, _, _, act = heapq.heappop(self._events)
            act(time_s)
