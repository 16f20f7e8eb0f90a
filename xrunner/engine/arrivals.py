"""Requests that arrive over time, on rank 0, and the replicas that they go to. The rule that
chooses these (xrunner.rules.arrival_routing) is driven by the replay as well."""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from xgpt.core.lengths import FloatArray
from xrunner.rules.arrival_routing import ArrivalRouter
from xrunner.rules.routing import AWAY, Load, Recall, Window

Clock = Callable[[], float]


class Arriving:
    """The requests of a run that are to come, in the order in which they arrive."""

    def __init__(self, order: Iterator[int], clock: Clock, *, arrival_s: FloatArray | None = None,
                 concurrency: int = 0, begins_s: float = 0.0) -> None:
        """`order`: indices of the requests. `arrival_s`: seconds by the run's `clock`, [requests];
        None: so many clients (`concurrency`) send one each at `begins_s`, and the next one when an
        answer has come."""
        assert (arrival_s is None) == (concurrency > 0), f"{concurrency = }"
        self.clock, self._order, self._arrival_s = clock, order, arrival_s
        self._idle_s = deque([begins_s] * concurrency)  # since when clients wait for no answer
        self._next = next(order, None)

    @property
    def is_empty(self) -> bool:
        """Whether all requests have arrived."""
        return self._next is None

    @property
    def next_s(self) -> float:
        """Clock time of the next arrival; infinite: there is none before an answer."""
        if self._next is None:
            return math.inf
        if self._arrival_s is not None:
            return float(self._arrival_s[self._next])
        return self._idle_s[0] if self._idle_s else math.inf

    @property
    def wait_s(self) -> float:
        """Seconds until the next arrival."""
        return max(self.next_s - self.clock(), 0.0)

    def due(self) -> list[tuple[int, float]]:
        """Requests that have arrived since the last call, with their times."""
        now, found = self.clock(), list[tuple[int, float]]()
        while self._next is not None and (at_s := self.next_s) <= now:
            found.append((self._next, at_s))
            if self._arrival_s is None:
                self._idle_s.popleft()
            self._next = next(self._order, None)
        return found

    def answered(self) -> None:
        """Records that a request has ended: its client sends the next one."""
        if self._arrival_s is None:
            self._idle_s.append(self.clock())


class RoutedArrivals:
    """Gives arriving requests out to replicas, as xrunner.rules.routing.Router does a batch job's.
    Requests are numbered by their places in run order."""

    def __init__(self, rule: ArrivalRouter, arriving: Arriving, order: Sequence[int],
                 windows: Sequence[Window]) -> None:
        """`order`: index of each place."""
        self.windows, self.arriving, self._rule = list(windows), arriving, rule
        self._places = {index: place for place, index in enumerate(order)}
        self._lines = [deque[int]() for _ in windows]  # chosen, and not given to the replica yet
        self._unbegun = [deque[int]() for _ in windows]  # given to it
        self._lost = deque[int]()  # of replicas that went away: they are routed again
        self._held = 0  # requests that wait at the rule
        self.arrived_s: dict[int, float] = {}  # by place, until it is done
        self.away: set[int] = set()  # replicas that can execute nothing now

    @property
    def is_empty(self) -> bool:
        """Whether all requests have arrived and are given out."""
        return self.arriving.is_empty and not (self._held or self._lost or any(self._lines))

    @property
    def is_done(self) -> bool:
        return self.is_empty

    def route(self, loads: Callable[[], Sequence[Load]], give: Callable[[int], None]) -> None:
        """Chooses replicas for all requests that have arrived. `loads`: of each replica now.
        `give`: gives a replica what was chosen for it (`top_up`)."""
        def counted() -> list[Load]:
            return [AWAY if replica in self.away else load
                    for replica, load in enumerate(loads())]

        def put(replica: int, place: int) -> None:
            self._lines[replica].append(place)
            give(replica)

        for index, at_s in self.arriving.due():
            self.arrived_s[self._places[index]] = at_s
            self._lost.append(self._places[index])
        while self._lost and len(self.away) < len(self.windows):
            place = self._lost.popleft()
            self._held += 1
            if (chosen := self._rule.arrived(place, counted())) is not None:
                self._held -= 1
                put(chosen, place)
        while self._held and (found := self._rule.next(counted())) is not None:
            self._held -= 1
            put(found[1], found[0])

    def top_up(self, replica: int, load: Load) -> list[int]:
        """Places of the requests to give to a replica now."""
        given = [*self._lines[replica]]
        self._lines[replica].clear()
        self._unbegun[replica].extend(given)
        return given

    def num_left(self, replica: int) -> int:
        """Number of requests that are chosen for a replica and not given out."""
        return len(self._lines[replica])

    def note_begun(self, replica: int, count: int) -> None:
        """Records that the replica has begun `count` more requests."""
        for _ in range(count):
            self._rule.begun(replica, self._unbegun[replica].popleft())

    def note_done(self, replica: int, index: int) -> None:
        """Records that a request has ended."""
        place = self._places[index]
        if place in self._unbegun[replica]:  # it has expired
            self._unbegun[replica].remove(place)
        self._rule.done(replica, place)
        del self.arrived_s[place]

    def recalls(self, loads: Sequence[Load]) -> list[Recall]:
        """None: a request stays with the replica that was chosen for it."""
        return []

    def take_back(self, replica: int, places: Sequence[int]) -> None:
        raise AssertionError(f"{replica = } {places = }: nothing was recalled")

    def give_back(self, replica: int, places: Sequence[int], others: Sequence[int]) -> None:
        """Routes again all requests of a replica that goes away."""
        self.away.add(replica)
        left = [*places, *self._lines[replica]]
        for place in left:
            self._rule.done(replica, place)
        self._lost.extend(left)
        self._lines[replica].clear()
        self._unbegun[replica].clear()
