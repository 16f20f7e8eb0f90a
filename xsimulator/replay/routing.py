"""The way of requests to replicas on one kernel: when each arrives, and to which replica a routing
rule (xrunner.rules.arrival_routing) gives it. Messages take no time here."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from xrunner.rules.arrival_routing import ArrivalRouter, RoundRobin
from xrunner.rules.routing import Load
from xrunner.rules.steps import BatchingRule, withdraw_waiting
from xsimulator.replay.kernel import ARRIVAL, ROUTING, Kernel
from xsimulator.replay.native_replay import never_fits
from xsimulator.replay.pool import PoolProcess
from xsimulator.replay.queries import Queries


def submit(queries: Queries, query: int, rule: BatchingRule) -> None:
    """Submits a request to a pool's rule. Raises XgptError if it can never fit."""
    known = {} if queries.forecasts is None else {"forecast": queries.forecasts[query]}
    if not rule.submit(query, queries.reserve_tokens[query], queries.inputs[query], **known):
        raise never_fits(queries.job, query)


class Replica:
    """The pools of one replica. Requests go to those that encode, in turn."""

    def __init__(self, queries: Queries, pools: Sequence[PoolProcess],
                 when_fed: Sequence[Callable[[float], None]] = ()) -> None:
        """when_fed: called after requests were submitted."""
        self.pools, self._queries, self._when_fed = pools, queries, when_fed
        self._encoding = [pool for pool in pools if pool.plan.role != "decode"]
        self._next = 0

    def submit(self, request: int) -> None:
        """Submits a request; raises XgptError if it can never fit."""
        submit(self._queries, request, self._encoding[self._next].rule)
        self._next = (self._next + 1) % len(self._encoding)

    def wake(self, now: float) -> None:
        """Lets its pools take up what was submitted."""
        for act in (*self._when_fed, *(pool.wake for pool in self._encoding)):
            act(now)

    def take_back(self, count: int) -> list[int]:
        """Takes back and returns the last `count` requests that it has not begun, or fewer."""
        taken: list[int] = []
        for pool in self._encoding:
            taken += withdraw_waiting(pool.rule, count - len(taken))
        return taken


class Routing:
    """Process that gives requests to replicas as they arrive, those of one moment in the order of
    their numbers. A request with an infinite arrival is one of a closed loop: it arrives when an
    answer ends, before the head that has collected the last token decides its next step. Requests
    that wait at the router go when all turns of that moment are over."""

    def __init__(self, kernel: Kernel, queries: Queries, replicas: Sequence[Replica],
                 router: ArrivalRouter | None = None) -> None:
        """router: None for a single replica."""
        self._kernel, self._queries, self._replicas = kernel, queries, replicas
        self._router = router or RoundRobin()
        # the next arrival is the last of the list
        self._coming: list[int] = np.argsort(queries.arrival_s, kind="stable")[::-1].tolist()
        self.owners = [-1] * len(self._coming)
        self._loads = [Load(0, 0)] * len(replicas)
        self._fed: dict[int, None] = {}  # replicas to wake, in order
        self._is_due, self.num_taken_back = False, 0
        if router is not None or np.isinf(queries.arrival_s).any():
            queries.arrival_s = queries.arrival_s.copy()
            queries.on_begin, queries.on_end = self._begun, self._ended
            for number, replica in enumerate(replicas):
                for pool in replica.pools:
                    pool.after_turn = partial(self._turned, number)

    def start(self) -> None:
        """Schedules the next arrival."""
        if self._coming and (next_s := float(self._queries.arrival_s[self._coming[-1]])) < math.inf:
            self._kernel.at(next_s, ARRIVAL, self._come)

    def _come(self, now: float) -> None:
        coming, arrival_s = self._coming, self._queries.arrival_s
        while coming and arrival_s[coming[-1]] <= now:
            self._arrive(coming.pop())
        self._give_waiting(now)
        self.start()

    def _arrive(self, request: int) -> None:
        replica = self._router.arrived(request, self._loads)
        if replica is not None:
            self._give(request, replica)

    def _give(self, request: int, replica: int) -> None:
        self.owners[request], self._fed[replica] = replica, None
        self._change(replica, 1, 0)
        self._replicas[replica].submit(request)

    def _give_waiting(self, now: float) -> None:
        """Gives out requests that wait at the router."""
        while (found := self._router.next(self._loads)) is not None:
            self._give(*found)
        self._wake(now)

    def _wake(self, now: float) -> None:
        """Wakes the replicas that got requests."""
        for replica in self._fed:
            self._replicas[replica].wake(now)
        self._fed.clear()

    def _change(self, replica: int, waiting: int, active: int) -> None:
        load = self._loads[replica]
        self._loads[replica] = Load(load.waiting + waiting, load.active + active)

    def _begun(self, request: int, now: float) -> None:
        replica = self.owners[request]
        self._change(replica, -1, 1)
        self._router.begun(replica, request)
        self._ask(self._router.keeps, now)

    def _ended(self, requests: Sequence[int], now: float) -> None:
        for request in requests:
            replica = self.owners[request]
            self._change(replica, 0, -1)
            self._router.done(replica, request)
        arrival_s = self._queries.arrival_s
        for _ in requests:
            if self._coming and arrival_s[self._coming[-1]] == math.inf:
                arrival_s[self._coming[-1]] = now
                self._arrive(self._coming.pop())
        self._wake(now)
        self._ask(self._router.keeps, now)

    def _turned(self, replica: int, now: float) -> None:
        self._ask(self._router.turned(replica, self._loads[replica]), now)

    def _ask(self, is_due: bool, now: float) -> None:
        """Lets the router decide when all turns of this moment are over."""
        if is_due and not self._is_due:
            self._is_due = True
            self._kernel.at(now, ROUTING, self._route)

    def _route(self, now: float) -> None:
        self._is_due = False
        self._give_waiting(now)
        for giver, takers in self._router.recalls(self._loads):
            requests = self._replicas[giver].take_back(
                min(len(takers), self._loads[giver].waiting))
            self._change(giver, -len(requests), 0)
            self.num_taken_back += len(requests)
            self._router.take_back(giver, requests)
            self._give_waiting(now)
