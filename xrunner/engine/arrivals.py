"""Requests that arrive over time, on rank 0, and the replicas that they go to. The rule that
chooses these (xrunner.rules.arrival_routing) is driven by the replay as well."""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from xgpt.core.controls import FIXED
from xgpt.core.lengths import FloatArray
from xrunner.rules.arrival_routing import ArrivalRouter
from xrunner.rules.routing import AWAY, Load, Router, Window

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
        if self._next is not None and self._arrival_s is not None:
            return float(self._arrival_s[self._next])
        return self._idle_s[0] if self._next is not None and self._idle_s else math.inf

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


class RoutedArrivals(Router):
    """Gives out requests when they arrive, each to the replica that `rule` chooses for good. They
    are numbered by their places in run order."""

    def __init__(self, rule: ArrivalRouter, arriving: Arriving, order: Sequence[int],
                 windows: Sequence[Window]) -> None:
        """`order`: index of each place."""
        super().__init__([], windows=windows, routing=FIXED)  # shares grow as requests arrive
        self.arriving, self._rule = arriving, rule
        self._places = {index: place for place, index in enumerate(order)}
        self._unbegun = [deque[int]() for _ in windows]  # given to each replica
        self._unrouted, self._held = deque[int](), 0  # before the rule; number waiting within it

    @property
    def is_empty(self) -> bool:
        left = self._held or self._unrouted or any(self._shares)
        return self.arriving.is_empty and not left

    def route(self, loads: Callable[[], Sequence[Load]], give: Callable[[int], None]) -> None:
        """Chooses replicas for all requests that have arrived. `loads`: of each replica now.
        `give`: gives a replica what was chosen for it (`top_up`)."""
        def counted() -> list[Load]:
            return [AWAY if one in self.away else load._replace(
                waiting=load.waiting + self.num_left(one)) for one, load in enumerate(loads())]

        def put(place: int, replica: int) -> None:
            self._held -= 1
            self._shares[replica].append(place)
            give(replica)

        for index, at_s in self.arriving.due():
            self.arrived_s[self._places[index]] = at_s
            self._unrouted.append(self._places[index])
        while self._unrouted and len(self.away) < len(self.windows):
            place, self._held = self._unrouted.popleft(), self._held + 1
            if (chosen := self._rule.arrived(place, counted())) is not None:
                put(place, chosen)
        while self._held and (found := self._rule.next(counted())) is not None:
            put(*found)

    def top_up(self, replica: int, load: Load) -> list[int]:
        given = super().top_up(replica, load)
        self._unbegun[replica].extend(given)
        return given

    def note_begun(self, replica: int, count: int) -> None:
        for _ in range(min(count, len(self._unbegun[replica]))):  # batches may begin in any order
            self._rule.begun(replica, self._unbegun[replica].popleft())

    def note_done(self, replica: int, index: int) -> None:
        """Records that a request has ended."""
        place = self._places[index]
        if place in self._unbegun[replica]:  # it has expired
            self._unbegun[replica].remove(place)
        self._rule.done(replica, place)
        del self.arrived_s[place]

    def give_back(self, replica: int, places: Sequence[int], others: Sequence[int]) -> None:
        """Routes again all requests of a replica that goes away."""
        self.away.add(replica)
        for place in (*places, *self._shares[replica]):
            self._rule.done(replica, place)
            self._unrouted.append(place)
        self._shares[replica].clear()
        self._unbegun[replica].clear()
