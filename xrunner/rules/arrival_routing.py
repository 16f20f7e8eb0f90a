"""Routing of requests to replicas as they arrive.

A router chooses replicas by their loads, and hears what begins and ends. It has no clock: equal
calls give equal decisions, in the replay and in a run. Among equal replicas the first is chosen. A
replica whose load is AWAY gets requests only if all are away."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from xgpt.core import controls
from xgpt.core.lengths import FloatArray
from xrunner.rules.routing import AWAY, Load, Recall, Router, Window, replica_shares


class ArrivalRouter(Protocol):
    """A routing rule; the base of those below. `loads`: of each replica now; the driver counts a
    request as waiting at its replica as soon as the router has chosen it."""

    def arrived(self, request: int, loads: Sequence[Load]) -> int | None:
        """The replica of a request that arrives; None: it waits at the router."""

    def begun(self, replica: int, request: int) -> None:
        """Records that the replica has begun to encode the request."""
        return None

    def done(self, replica: int, request: int) -> None:
        """Records that the request has ended, or that the replica has lost it."""
        return None

    def next(self, loads: Sequence[Load]) -> tuple[int, int] | None:
        """(request, replica) of a request that waits at the router and goes now, or None. To be
        called until None after requests have begun or ended."""
        return None

    @property
    def keeps(self) -> bool:
        """Whether requests wait until others have begun or ended."""
        return False

    def turned(self, replica: int, load: Load) -> bool:
        """Whether `next` and `recalls` are to be asked now that a turn has left the replica with
        this load."""
        return False

    def recalls(self, loads: Sequence[Load]) -> Sequence[Recall]:
        """Requests to recall now from replicas; each returns them by `take_back`."""
        return ()

    def take_back(self, replica: int, requests: Sequence[int]) -> None:
        """Takes the requests that a replica returns."""
        return None


class RoundRobin(ArrivalRouter):
    """Chooses replicas in turn."""

    def __init__(self) -> None:
        self._next = 0

    def arrived(self, request: int, loads: Sequence[Load]) -> int:
        replica = _from(self._next, loads)
        self._next = (replica + 1) % len(loads)
        return replica


class Dealt(ArrivalRouter):
    """Keeps to a division made beforehand. `owners`: [requests] replica of each."""

    def __init__(self, owners: Sequence[int]) -> None:
        self.owners = owners

    def arrived(self, request: int, loads: Sequence[Load]) -> int:
        return _from(self.owners[request], loads)


class LeastQueries(ArrivalRouter):
    """Chooses the replica with the fewest requests, waiting and active."""

    def arrived(self, request: int, loads: Sequence[Load]) -> int:
        return min(range(len(loads)), key=lambda replica: sum(loads[replica]))


class LeastTokens(ArrivalRouter):
    """Chooses the replica with the fewest expected tokens of requests that are not done. `tokens`:
    [requests], whole, so that their sums are exact."""

    def __init__(self, tokens: Sequence[int], replicas: int) -> None:
        self.tokens, self._held = tokens, [0] * replicas

    def arrived(self, request: int, loads: Sequence[Load]) -> int:
        replica = min(range(len(loads)), key=lambda one: (loads[one] == AWAY, self._held[one]))
        self._held[replica] += self.tokens[request]
        return replica

    def done(self, replica: int, request: int) -> None:
        self._held[replica] -= self.tokens[request]


class Deferred(ArrivalRouter):
    """Keeps requests, in the order of arrival, until a replica's window lacks one. Among those the
    one with the fewest requests is chosen."""

    def __init__(self, windows: Sequence[Window]) -> None:
        self.windows, self._waiting = windows, deque[int]()

    def arrived(self, request: int, loads: Sequence[Load]) -> int | None:
        self._waiting.append(request)
        found = self.next(loads) if len(self._waiting) == 1 else None
        return None if found is None else found[1]

    def next(self, loads: Sequence[Load]) -> tuple[int, int] | None:
        lacking = [replica for replica, (window, load) in enumerate(
            zip(self.windows, loads, strict=True)) if window.missing(load)]
        if not self._waiting or not lacking:
            return None
        return self._waiting.popleft(), min(lacking, key=lambda replica: sum(loads[replica]))

    @property
    def keeps(self) -> bool:
        return bool(self._waiting)


class JobRouting(ArrivalRouter):
    """The rule of a batch job, by its Router: all requests are there at the start, and replicas are
    topped up after turns that change their loads."""

    def __init__(self, router: Router) -> None:
        replicas = len(router.windows)
        self._router, self._seen, self._begun = router, [Load(-1, -1)] * replicas, [0] * replicas
        self._due = deque((replica, True) for replica in range(replicas))  # whether it had a turn
        self._given = deque[tuple[int, int]]()

    def arrived(self, request: int, loads: Sequence[Load]) -> None: ...

    def begun(self, replica: int, request: int) -> None:
        self._begun[replica] += 1

    def turned(self, replica: int, load: Load) -> bool:
        has_changed, self._seen[replica] = load != self._seen[replica], load
        if has_changed:
            self._due.append((replica, True))
        return has_changed

    def next(self, loads: Sequence[Load]) -> tuple[int, int] | None:
        while self._due and not self._given:
            replica, had_turn = self._due.popleft()
            if had_turn and self._begun[replica]:
                self._router.note_begun(replica, self._begun[replica])
                self._begun[replica] = 0
            if had_turn or self._router.num_left(replica):
                self._given.extend((request, replica) for request in self._router.top_up(
                    replica, loads[replica]))
        return self._given.popleft() if self._given else None

    def recalls(self, loads: Sequence[Load]) -> Sequence[Recall]:
        return self._router.recalls(loads)

    def take_back(self, replica: int, requests: Sequence[int]) -> None:
        self._router.take_back(replica, requests)
        self._due.extend((other, False) for other in range(len(self._seen)))


def router_of(routing: str, *, tokens: Sequence[float] | FloatArray, windows: Sequence[Window],
              seed: int) -> ArrivalRouter:
    """A new router by the rule `routing`. `tokens`: expected, of each request in the order of their
    numbers. `windows`: of each replica. `seed`: of random."""
    assert routing in controls.ARRIVAL_ROUTINGS, f"{routing = }"
    return _ROUTERS[routing](np.rint(np.asarray(tokens, float)), windows, seed)


def _fixed(tokens: FloatArray, windows: Sequence[Window], seed: int) -> Dealt:
    owners = np.empty(len(tokens), int)
    for replica, own in enumerate(replica_shares(tokens, len(windows), controls.FIXED)):
        owners[own] = replica
    return Dealt(owners.tolist())


_ROUTERS: dict[str, Callable[[FloatArray, Sequence[Window], int], ArrivalRouter]] = {
    controls.ROUND_ROBIN: lambda tokens, windows, seed: RoundRobin(),
    controls.RANDOM: lambda tokens, windows, seed: Dealt(
        np.random.default_rng((seed, 51)).integers(len(windows), size=len(tokens)).tolist()),
    controls.LEAST_QUERIES: lambda tokens, windows, seed: LeastQueries(),
    controls.LEAST_TOKENS: lambda tokens, windows, seed: LeastTokens(
        tokens.astype(int).tolist(), len(windows)),
    controls.DEFERRED: lambda tokens, windows, seed: Deferred(windows),
    controls.FIXED: _fixed,
}


def _from(first: int, loads: Sequence[Load]) -> int:
    """`first`, or the next replica in turn that is not away."""
    turns = ((first + turn) % len(loads) for turn in range(len(loads)))
    return next((replica for replica in turns if loads[replica] != AWAY), first)
