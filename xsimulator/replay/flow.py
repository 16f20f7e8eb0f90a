"""One replay of a job: its queries, any number of pools, and how queries come to them, `Arrivals`
from outside and `Handover` between two.

All of them are processes on one kernel (xsimulator.replay.kernel); the KV budget is kept by the
pools' rules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from xgpt.core.lengths import FloatArray
from xgpt.core.queries import QueryTimes
from xrunner.rules.slots import SlotUse
from xrunner.rules.steps import BatchingRule, GivingRule, TakingRule
from xsimulator.replay.handed_over import replay_handed
from xsimulator.replay.kernel import ARRIVAL, Kernel
from xsimulator.replay.paged_alone import replay_paged
from xsimulator.replay.pool import HandoverPlan, PoolHead, PoolPlan, PoolProcess
from xsimulator.replay.queries import Queries
from xsimulator.replay.records import HandoverRecords, PoolRecords, ReplayResult
from xsimulator.replay.reserved_alone import replay_reserved
from xsimulator.replay.stage_line import LaterLine
from xsimulator.replay.static_alone import replay_static, takes_whole_batches
from xsimulator.replay.step_clock import StepClock
from xsimulator.replay.told import never_fits


class Arrivals:
    """Queries come at their own seconds, and are dealt in turn to the pools that encode."""

    def __init__(self, kernel: Kernel, queries: Queries, pools: Sequence[PoolProcess],
                 links: Sequence[Handover] = ()) -> None:
        self._kernel, self._queries, self._pools, self._links = kernel, queries, pools, links
        # who comes first is last in the list
        self._coming: list[int] = np.argsort(queries.arrival_s, kind="stable")[::-1].tolist()
        self._next = 0  # pool

    def start(self) -> None:
        """Announces the next ones: there is one event at a time."""
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
            link.give(now)
        for pool in self._pools:
            pool.wake(now)
        self.start()


def submit(queries: Queries, query: int, rule: BatchingRule) -> None:
    """The query comes to a pool of this rule. Raises XgptError where it can never fit."""
    if not rule.submit(query, queries.reserve_tokens[query], queries.inputs[query]):
        raise never_fits(queries, query)


class Handover:
    """The link that takes KV entries from an encode pool to a decode pool, a batch at a time."""

    def __init__(self, plan: HandoverPlan, kernel: Kernel, queries: Queries,
                 pools: dict[str, PoolProcess]) -> None:
        self.plan, self._kernel, self._queries = plan, kernel, queries
        self._source, self._target = pools[plan.source], pools[plan.target]
        self._source.head.outlet = self.send
        encoding, decoding = self._source.rule, self._target.rule
        self._giving = encoding if isinstance(encoding, GivingRule) else None
        self._taking = decoding if isinstance(decoding, TakingRule) else None
        if self._giving is not None and self._taking is not None:
            self._target.head.inlet = self._began
        self._free_s = -math.inf
        self._sent: list[tuple[int, float, float]] = []

    def send(self, joined: tuple[int, ...], step: int, encoded_s: float) -> float:
        """Returns when they arrive, but for those that are done with their first token."""
        queries, leaving = self._queries, []
        if queries.gives_token:
            queries.give_first_tokens(joined, encoded_s)
        for query in joined:
            queries.when_done[query] = self._tell
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

    def give(self, now: float) -> None:
        """Leaves to the target the queries that it is to encode itself."""
        if self._giving is None or self._taking is None:
            return
        given = self._giving.give()
        for waiting in given:
            self._queries.when_done[waiting.query] = self._tell
            self._taking.take(waiting)
        if given:
            self._target.head.note_memory(now)
            self._target.wake(now)

    def records(self) -> HandoverRecords:
        sent: FloatArray = np.array(self._sent, float).reshape(-1, 3)
        return HandoverRecords(source=self.plan.source, target=self.plan.target,
                               step=sent[:, 0].astype(np.int64), start_s=sent[:, 1],
                               end_s=sent[:, 2])

    def _arrive(self, arrived: list[int], now: float) -> None:
        queries, source, target = self._queries, self._source, self._target
        for query in arrived:
            source.rule.finish(query)  # it has left the encode pool
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

    def _tell(self, query: int, now: float) -> None:
        self.plan.release(query)
        self.give(now)
        self._source.wake(now)

    def _began(self, begun: Sequence[int], now: float) -> None:
        assert self._giving is not None, f"{begun = }"
        self._giving.begun(begun)
        self.give(now)


def run(queries: Queries, pools: Sequence[PoolPlan],
        handovers: Sequence[HandoverPlan] = ()) -> ReplayResult:
    """Replays until every query is done. Queries come to all pools but those that only decode.
    Raises XgptError for a query that can never fit."""
    if len(pools) == 1 and not handovers and is_alone(pools[0], queries):
        return replay_alone(pools[0], queries)
    if len(pools) == 2 and len(handovers) == 1 and (
            found := replay_handed(pools[0], pools[1], handovers[0], queries)):
        return found
    kernel = Kernel()
    by_name = {plan.name: PoolProcess(plan, kernel, queries) for plan in pools}
    assert len(by_name) == len(pools), f"{[plan.name for plan in pools]}"
    links = [Handover(plan, kernel, queries, by_name) for plan in handovers]
    Arrivals(kernel, queries, [p for p in by_name.values() if p.plan.role != "decode"],
             links).start()
    kernel.run()
    return _result(queries, [pool.records() for pool in by_name.values()],
                   [link.records() for link in links])


def is_alone(plan: PoolPlan, queries: Queries) -> bool:
    """Whether what a replay's only pool decides does not hang on when: all queries come at one
    time, and the head always waits for each group's tokens, or decodes static batches."""
    is_decided = plan.rule.needs_tokens and plan.rule.slot_use is not SlotUse.KEPT
    return (plan.role == "both" and isinstance(plan.clock, StepClock)
            and (is_decided or takes_whole_batches(plan.rule))
            and len(queries.inputs) > 0 and bool((queries.arrival_s == queries.arrival_s[0]).all()))


def replay_alone(plan: PoolPlan, queries: Queries) -> ReplayResult:
    """The same of a pool that is alone: its turns are numbered, and timed in the end."""
    assert isinstance(plan.clock, StepClock)
    if takes_whole_batches(plan.rule):
        return replay_static(plan, queries)
    found = replay_paged(plan, queries) or replay_reserved(plan, queries)
    if found is not None:
        return found
    line, rule = LaterLine(), plan.rule
    head = PoolHead(plan, queries, line)
    for query in range(len(queries.inputs)):
        submit(queries, query, rule)
    while (group := head.next_group()) is not None:
        turn = line.begin_turn(int(group.awaited[-1][0]) if group.awaited else -1)
        if not head.decode_ahead(group, line):
            head.turn(group, turn)
    times, turns_s = line.decided().times(
        plan.clock, len(plan.stages), float(queries.arrival_s[0]),
        is_one_group=rule.num_groups == 1)
    return _result(queries, [head.records(times, lambda turns: turns_s[
        np.array(turns, np.int64)].tolist())], [], turns_s)


def _result(queries: Queries, pools: Sequence[PoolRecords], links: Sequence[HandoverRecords],
            turns_s: FloatArray | None = None) -> ReplayResult:
    """turns_s: [turns] the seconds of what the queries' times count, None: seconds."""
    count = len(queries.inputs)
    assert queries.num_done == count, f"{count - queries.num_done} queries have nothing to do"
    times = [queries.start_s, queries.first_token_s, queries.last_token_s]
    starts_s, firsts_s, lasts_s = (np.array(own, float) if turns_s is None else
                                   turns_s[np.array(own, np.int64)] for own in times)
    return ReplayResult(
        pools=tuple(pools), handovers=tuple(links), preemptions=queries.preemptions,
        times=QueryTimes(arrival_s=queries.arrival_s, start_s=starts_s, first_token_s=firsts_s,
                         last_token_s=lasts_s), output_tokens=queries.output_tokens)
