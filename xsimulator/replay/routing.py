"""Replay of a job on several replicas together. The runner's routing rule (xrunner.rules.routing)
assigns requests and takes them back while the replicas work. Messages take no time here."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from xgpt.core.lengths import FloatArray
from xgpt.core.problem import QueryLengths, QueryTimes
from xrunner.rules.routing import Load, Router, expected_tokens, window_of
from xrunner.rules.steps import withdraw_waiting
from xsimulator.replay.event_replay import Handover, submit
from xsimulator.replay.job import Replayer
from xsimulator.replay.kernel import ARRIVAL, ROUTING, Kernel
from xsimulator.replay.pool import PoolProcess
from xsimulator.replay.queries import Queries
from xsimulator.replay.records import ReplayResult
from xsimulator.replay.step_clock import ScaledClock


class RoutedReplica:
    """One replica: its pools and the requests that are assigned to it."""

    def __init__(self, replayer: Replayer, lengths: QueryLengths, kernel: Kernel,
                 slow_down: float = 1.0) -> None:
        """slow_down: factor on its step times."""
        self.queries = Queries(lengths, encode_gives_token=not (
            replayer.problem.model.is_encoder_decoder), forecasting=replayer.forecasting)
        clocks = [ScaledClock(clock, [slow_down] * len(pool.stages)) if slow_down != 1 else clock
                  for pool, clock in zip(replayer.estimate.deployment.pools,
                                         replayer.clocks(lengths), strict=True)]
        plans, handovers = replayer.plans(replayer.rules(lengths), clocks)
        self.pools = {plan.name: PoolProcess(plan, kernel, self.queries) for plan in plans}
        self.links = [Handover(plan, kernel, self.queries, self.pools) for plan in handovers]
        self._encoding = next(p for p in self.pools.values() if p.plan.role != "decode")
        self.assigned: set[int] = set()

    @property
    def load(self) -> Load:
        begun = self.queries.num_begun
        return Load(len(self.assigned) - begun, begun - self.queries.num_done)

    def in_order(self) -> list[int]:
        """Its requests in the order in which it began them."""
        return sorted(self.assigned, key=lambda one: (self.queries.start_s[one] or 0.0, one))

    def assign(self, requests: Sequence[int], now: float) -> None:
        self.assigned.update(requests)
        for request in requests:
            submit(self.queries, request, self._encoding.rule)
        for link in self.links:
            link.pass_on(now)
        self._encoding.wake(now)

    def take_back(self, count: int) -> list[int]:
        """Takes back and returns the last `count` requests that it has not begun, or fewer."""
        requests = withdraw_waiting(self._encoding.rule, min(count, self.load.waiting))
        self.assigned.difference_update(requests)
        return requests


class _Dispatcher:
    """Assigns requests to the replicas, as rank 0 does (xrunner.engine.replicas)."""

    def __init__(self, router: Router, copies: Sequence[RoutedReplica], kernel: Kernel) -> None:
        self._router, self._copies, self._kernel = router, copies, kernel
        self._begun, self._loads = [0] * len(copies), [Load(-1, -1)] * len(copies)
        self._changed: list[int] = []  # replicas that have begun requests, or ended some
        self.num_taken_back = 0

    def start(self, now: float) -> None:
        for copy in range(len(self._copies)):
            self._top_up(copy, now)

    def on_turn(self, copy: int, now: float) -> None:
        """Called after a replica's turn, which may have begun or ended requests."""
        load = self._copies[copy].load
        if load != self._loads[copy]:
            self._loads[copy] = load
            if not self._changed:
                self._kernel.at(now, ROUTING, self._route)
            self._changed.append(copy)

    def _route(self, now: float) -> None:
        changed, self._changed = self._changed, []
        for copy in changed:
            self._update(copy, now)
        for giver, takers in self._router.recalls([one.load for one in self._copies]):
            requests = self._copies[giver].take_back(len(takers))
            self.num_taken_back += len(requests)
            self._router.take_back(giver, requests)
            for other in range(len(self._copies)):
                if self._router.num_left(other):
                    self._top_up(other, now)

    def _update(self, copy: int, now: float) -> None:
        own = self._copies[copy]
        if own.queries.num_begun > self._begun[copy]:
            self._router.note_begun(copy, own.queries.num_begun - self._begun[copy])
            self._begun[copy] = own.queries.num_begun
        self._top_up(copy, now)

    def _top_up(self, copy: int, now: float) -> None:
        own = self._copies[copy]
        if requests := self._router.top_up(copy, own.load):
            own.assign(requests, now)


def replay_routed(replayers: Sequence[Replayer], lengths: QueryLengths, routing: str,
                  slow_downs: Sequence[float] = ()) -> RoutedReplay:
    """The replay of a job on replicas, each by its own replayer's estimate, until every request is
    done. slow_downs: factor on the step times of each replica (default 1)."""
    assert lengths.outputs is not None
    kernel = Kernel()
    copies = [RoutedReplica(replayer, lengths, kernel, slow) for replayer, slow in zip(
        replayers, slow_downs or [1.0] * len(replayers), strict=True)]
    tokens = expected_tokens(lengths.inputs, lengths.most_outputs,
                             replayers[0].problem.lengths.outputs.mean,
                             lengths.outputs == lengths.most_outputs)
    supply = _Dispatcher(Router(
        tokens, windows=[window_of(one.estimate) for one in replayers], routing=routing,
        speeds=[one.estimate.figures.throughput_qps for one in replayers],
        prefixes=lengths.prefixes if all(
            one.estimate.shares_prefixes for one in replayers) else None), copies, kernel)
    for number, copy in enumerate(copies):
        for pool in copy.pools.values():
            pool.after_turn = partial(supply.on_turn, number)
    kernel.at(0.0, ARRIVAL, supply.start)
    kernel.run()
    return RoutedReplay(copies, supply.num_taken_back)


class RoutedReplay:
    """The replay of one job on several replicas. rows: [replicas] indices of their requests."""

    def __init__(self, copies: Sequence[RoutedReplica], num_taken_back: int) -> None:
        self._copies, self.num_taken_back = copies, num_taken_back
        self.rows = [copy.in_order() for copy in copies]

    @property
    def results(self) -> list[ReplayResult]:
        """The result of each replica for its own requests, in its order."""
        return [_result(copy, np.array(own, np.int64))
                for copy, own in zip(self._copies, self.rows, strict=True)]


def _result(copy: RoutedReplica, own: np.ndarray) -> ReplayResult:
    queries = copy.queries
    assert queries.num_done == len(own), f"{len(own) - queries.num_done} requests are not done"

    def column(values: Sequence[float | None]) -> FloatArray:
        return np.array([values[request] for request in own], float)

    return ReplayResult(
        pools=tuple(pool.records() for pool in copy.pools.values()),
        handovers=tuple(link.records() for link in copy.links), preemptions=queries.preemptions,
        times=QueryTimes(arrival_s=np.zeros(len(own)), start_s=column(queries.start_s),
                         first_token_s=column(queries.first_token_s),
                         last_token_s=column(queries.last_token_s)),
        output_tokens=queries.output_tokens[own])
