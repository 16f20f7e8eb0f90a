"""One replay of a job by events: its requests, any number of pools, `Arrivals` from outside, and a
`Handover` between two pools.

All of them are processes on one kernel (xsimulator.replay.kernel). The KV budget is kept by the
pools' rules. The native replay (xsimulator.replay.native_replay) gives the same result sooner, for
the rules that it knows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from xgpt.core.lengths import FloatArray
from xgpt.core.problem import QueryTimes
from xrunner.rules.steps import BatchingRule, Step
from xrunner.rules.waa import WaaDecodeRule, WaaEncodeRule
from xsimulator.replay.kernel import ARRIVAL, Kernel
from xsimulator.replay.native_replay import never_fits, replay_natively
from xsimulator.replay.pool import HandoverPlan, PoolPlan, PoolProcess
from xsimulator.replay.queries import Queries
from xsimulator.replay.records import HandoverRecords, PoolRecords, ReplayResult


class Arrivals:
    """Process that submits arriving requests to the pools that encode, in turn."""

    def __init__(self, kernel: Kernel, queries: Queries, pools: Sequence[PoolProcess],
                 links: Sequence[Handover] = ()) -> None:
        self._kernel, self._queries, self._pools, self._links = kernel, queries, pools, links
        # the next arrival is the last of the list
        self._coming: list[int] = np.argsort(queries.arrival_s, kind="stable")[::-1].tolist()
        self._next = 0  # pool

    def start(self) -> None:
        """Schedules the next arrival."""
        if self._coming:
            first_s = float(self._queries.arrival_s[self._coming[-1]])
            self._kernel.at(first_s, ARRIVAL, self._come)

    def _come(self, now: float) -> None:
        coming, arrival_s = self._coming, self._queries.arrival_s
        while coming and arrival_s[coming[-1]] <= now:
            query, pool = coming.pop(), self._pools[self._next]
            submit(self._queries, query, pool.rule)
            self._next = (self._next + 1) % len(self._pools)
        for link in self._links:
            link.pass_on(now)
        for pool in self._pools:
            pool.wake(now)
        self.start()


def submit(queries: Queries, query: int, rule: BatchingRule) -> None:
    """Submits a request to a pool's rule. Raises XgptError if it can never fit."""
    known = {} if queries.forecasts is None else {"forecast": queries.forecasts[query]}
    if not rule.submit(query, queries.reserve_tokens[query], queries.inputs[query], **known):
        raise never_fits(queries.job, query)


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


def run(queries: Queries, pools: Sequence[PoolPlan],
        handovers: Sequence[HandoverPlan] = ()) -> ReplayResult:
    """The result of a replay until every request is done. Requests arrive at the pools that encode.
    Raises XgptError for a request that can never fit."""
    found = replay_natively(queries.job, pools, handovers)
    if found is not None:
        return found.result()
    kernel = Kernel()
    by_name = {plan.name: PoolProcess(plan, kernel, queries) for plan in pools}
    assert len(by_name) == len(pools), f"{[plan.name for plan in pools]}"
    links = [Handover(plan, kernel, queries, by_name) for plan in handovers]
    Arrivals(kernel, queries, [p for p in by_name.values() if p.plan.role != "decode"],
             links).start()
    kernel.run()
    return _result(queries, [pool.records() for pool in by_name.values()],
                   [link.records() for link in links])


def _result(queries: Queries, pools: Sequence[PoolRecords],
            links: Sequence[HandoverRecords]) -> ReplayResult:
    count = len(queries.inputs)
    assert queries.num_done == count, f"{count - queries.num_done} requests have nothing to do"
    starts_s, firsts_s, lasts_s = (np.array(own, float) for own in (
        queries.start_s, queries.first_token_s, queries.last_token_s))
    return ReplayResult(
        pools=tuple(pools), handovers=tuple(links), preemptions=queries.preemptions,
        times=QueryTimes(arrival_s=queries.arrival_s, start_s=starts_s, first_token_s=firsts_s,
                         last_token_s=lasts_s), output_tokens=queries.output_tokens)
