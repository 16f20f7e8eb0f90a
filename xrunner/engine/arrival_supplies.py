"""Supplies of heads whose requests arrive over time: none is handed on before it arrives, and an
idle head sleeps until the next arrival or message."""

import time
from collections.abc import Callable, Sequence
from functools import partial

from xrunner.engine.arrivals import Arriving, RoutedArrivals
from xrunner.engine.head import Head, Supply
from xrunner.engine.replicas import ToReplicas, submit
from xrunner.query import FinishedQuery, PreparedQuery

IDLE_NOTE = "waiting for requests to arrive"


class FromArrivals(Supply):
    """Supply of a job's only head."""

    note = IDLE_NOTE

    def __init__(self, queries: Sequence[PreparedQuery], arriving: Arriving,
                 sleep: Callable[[float], None] = time.sleep) -> None:
        """`queries`: the job's, by index, read on access."""
        self._queries, self._arriving, self._sleep = queries, arriving, sleep

    @property
    def is_open(self) -> bool:
        return not self._arriving.is_empty

    @property
    def next_in_s(self) -> float:
        return self._arriving.next_s - self._arriving.clock()

    def look(self, head: Head, wait_s: float = 0.0) -> None:
        if wait_s:
            self._sleep(wait_s)
        due = self._arriving.due()
        submit(head, [self._queries[index] for index, _ in due], [at_s for _, at_s in due])

    def close(self, head: Head) -> bool:
        return self._arriving.is_empty


class ArrivalsToReplicas(ToReplicas):
    """Rank 0's supply of several replicas' heads."""

    note = IDLE_NOTE
    router: RoutedArrivals

    @property
    def next_in_s(self) -> float:
        arriving = self.router.arriving
        return arriving.next_s - arriving.clock()

    def look(self, head: Head, wait_s: float = 0.0) -> None:
        super().look(head, wait_s)
        self.router.route(lambda: [account.load for account in self._accounts],
                          partial(self._top_up, head))

    def finished(self, result: FinishedQuery) -> None:
        super().finished(result)
        self.router.note_done(result.replica or 0, result.query.index)
