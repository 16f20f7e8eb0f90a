"""One replay by events: its requests, the pools of any number of replicas, and handovers between
pools of one.

All of them are processes on one kernel (xsimulator.replay.kernel). The KV budget is kept by the
pools' rules. The native replay (xsimulator.replay.native_replay) gives the same result sooner, for
the rules that it knows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from xgpt.core.lengths import FloatArray, IntArray
from xgpt.core.problem import QueryTimes
from xrunner.rules.arrival_routing import ArrivalRouter
from xrunner.rules.steps import Step
from xrunner.rules.waa import WaaDecodeRule, WaaEncodeRule
from xsimulator.replay.kernel import ARRIVAL, Kernel
from xsimulator.replay.native_replay import replay_natively
from xsimulator.replay.pool import HandoverPlan, PoolPlan, PoolProcess, ReplicaPlan
from xsimulator.replay.queries import Queries
from xsimulator.replay.records import HandoverRecords, ReplayResult
from xsimulator.replay.routing import Replica, Routing


class Handover:
    """Process that moves KV cache from an encode pool to a decode pool, one batch at a time."""

    def __init__(self, plan: HandoverPlan, kernel: Kernel, queries: Queries,
                 pools: dict[str, PoolProcess]) -> None:
        self.plan, self._kernel, self._queries = plan, kernel, queries
        self._source, self._target = pools[plan.source], pools[plan.target]
        self._source.head.outlet = self.send
        encoding, decoding = self._source.rule, self._target.rule
        self._encode_rule = encoding if isinstance(encoding, WaaEncodeRule) else None
        self._decode_rule = decoding if isinstance(decoding, WaaDecodeRule) else None
        if self._encode_rule is not None and self._decode_rule is not None:
            self._target.head.inlet = self._on_step
        self._free_s = -math.inf
        self._sent: list[tuple[int, float, float]] = []

    def send(self, joined: tuple[int, ...], step: int, encoded_s: float) -> float:
        """Sends requests that were encoded by `encoded_s`; returns the seconds at which they
        arrive. Requests that end with their first token stay."""
        queries, leaving = self._queries, []
        if queries.gives_token:
            queries.give_first_tokens(joined, encoded_s)
        for query in joined:
            queries.when_done[query] = self._release
            if queries.left[query] > 0:
                leaving.append(query)
            else:
                self._kernel.at(encoded_s, ARRIVAL, partial(self._end_early, query))
        if not leaving:
            return encoded_s
        begin_s = max(encoded_s, self._free_s)
        tokens = sum([queries.inputs[query] for query in leaving])
        self._free_s = end_s = begin_s + float(self.plan.seconds(tokens))
        self._sent.append((step, begin_s, end_s))
        self._kernel.at(end_s, ARRIVAL, partial(self._arrive, leaving))
        return end_s

    def pass_on(self, now: float) -> None:
        """Passes waiting requests on to the decode pool, which encodes them itself."""
        if self._encode_rule is None or self._decode_rule is None:
            return
        passed = self._encode_rule.share_inputs()
        for waiting in passed:
            self._queries.when_done[waiting.query] = self._release
            self._decode_rule.submit_input(waiting)
        if passed:
            self._target.head.note_memory(now)
            self._target.wake(now)

    def records(self) -> HandoverRecords:
        """Step, start and end of each handover so far."""
        sent: FloatArray = np.array(self._sent, float).reshape(-1, 3)
        return HandoverRecords(source=self.plan.source, target=self.plan.target,
                               step=sent[:, 0].astype(np.int64), start_s=sent[:, 1],
                               end_s=sent[:, 2])

    def _arrive(self, arrived: list[int], now: float) -> None:
        queries, source, target = self._queries, self._source, self._target
        for query in arrived:
            source.rule.finish(query)  # leaves the encode pool
            is_taken = target.rule.submit(query, queries.reserve_tokens[query],
                                          queries.inputs[query])
            assert is_taken, f"{query = } has no room in the decode pool"
        for pool in (source, target):
            pool.head.note_memory(now)
        for pool in (target, source):
            pool.wake(now)

    def _end_early(self, query: int, now: float) -> None:
        self._source.rule.finish(query)
        self._source.head.note_memory(now)
        self._queries.end([query], now)

    def _release(self, query: int, now: float) -> None:
        self.plan.release(query)
        self.pass_on(now)
        self._source.wake(now)

    def _on_step(self, step: Step, now: float) -> None:
        assert self._encode_rule is not None and self._decode_rule is not None, f"{step = }"
        joined = (*step.handed, *step.joined) if self._decode_rule.tells_joined else ()
        if joined:
            self._encode_rule.system.note_joined(joined, step.phase)
            self._source.wake(now)
        if joined or step.chunks:
            self._encode_rule.note_begun(c.query for c in step.chunks if c.first == 0)
            self.pass_on(now)


class RoutedReplay(NamedTuple):
    """A replay on several replicas. results: of each replica for its own requests. rows:
    [replicas] indices of these requests, in the order in which they were begun. num_taken_back:
    requests that were recalled from replicas."""

    results: list[ReplayResult]
    rows: list[IntArray]
    num_taken_back: int


def run(queries: Queries, pools: Sequence[PoolPlan],
        handovers: Sequence[HandoverPlan] = ()) -> ReplayResult:
    """The result of a replay on one replica until every request is done. Requests arrive at the
    pools that encode, in turn. Raises XgptError for a request that can never fit."""
    found = replay_natively(queries.job, [ReplicaPlan(pools, handovers)])
    if found is not None:
        return found.results()[0]
    return run_routed(queries, [ReplicaPlan(pools, handovers)]).results[0]


def run_routed(queries: Queries, plans: Sequence[ReplicaPlan],
               router: ArrivalRouter | None = None) -> RoutedReplay:
    """A replay on several replicas until every request is done. router: None for a single replica.
    Raises XgptError for a request that can never fit."""
    kernel = Kernel()
    replicas, links = list[Replica](), list[list[Handover]]()
    for plan in plans:
        by_name = {pool.name: PoolProcess(pool, kernel, queries) for pool in plan.pools}
        assert len(by_name) == len(plan.pools), f"{[pool.name for pool in plan.pools]}"
        links.append([Handover(one, kernel, queries, by_name) for one in plan.handovers])
        replicas.append(Replica(queries, [*by_name.values()], [one.pass_on for one in links[-1]]))
    routing = Routing(kernel, queries, replicas, router)
    routing.start()
    kernel.run()
    count = len(queries.inputs)
    assert queries.num_done == count, f"{count - queries.num_done} requests have nothing to do"
    times = {name: np.array(getattr(queries, name), float)
             for name in ("arrival_s", "start_s", "first_token_s", "last_token_s")}
    rows, numbers = [np.arange(count)], None
    if len(replicas) > 1:
        numbers = rows[0]  # steps give the job's own
        owners, order = np.array(routing.owners), np.argsort(times["start_s"], kind="stable")
        rows = [order[owners[order] == number] for number in range(len(replicas))]
    return RoutedReplay([ReplayResult(
        pools=tuple(replace(pool.records(), requests=numbers) for pool in replica.pools),
        handovers=tuple(link.records() for link in own_links),
        times=QueryTimes(**{name: column[own] for name, column in times.items()}),
        output_tokens=queries.output_tokens[own],
        preemptions=sum(queries.evictions[request] for request in own.tolist()))
        for replica, own_links, own in zip(replicas, links, rows, strict=True)],
        rows, routing.num_taken_back)
