"""Discrete-event replay of a job: the policy's own batching rules, the timing source's steps.

Resources are pools of stages, each stage working its steps in order; a pool's head, which takes its
turns in the order its rule says and each only once the tokens it waits for are back; the link that
hands KV entries from an encode pool to a decode pool; and the KV budget, which the rules keep. A
step enters all stages of its pool when the head takes it up, since stages work in order: so there
is one event for each turn that waits, each handover and each wake-up, not one for each stage.

Events are ordered by (time, priority, sequence); nothing is random here, and nothing is shared
between replays. A query's last token counts when the head takes it up, as a run measures it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from xgpt.core.errors import XgptError
from xgpt.core.lengths import FloatArray, IntArray
from xrunner.rules.slots import Departures, SlotUse
from xrunner.rules.steps import BatchingRule, Step, StepKind
from xsimulator.replay.records import HandoverRecords, PoolRecords, ReplayResult
from xsimulator.replay.rows import GroupRows
from xsimulator.replay.step_clock import Clock, StepSizes

# Of events at one time: what brings work first, then the heads that look for it.
_ARRIVAL, _TURN = 0, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """From the encode pool to the decode pool: seconds of moving the KV of that many tokens, and
    what the encode rule is told when a query is done (its room is free)."""

    seconds: Callable[[int], float]
    release: Callable[[int], None]


@dataclass(slots=True, kw_only=True)
class Pool:
    """One pool of stages while it is replayed."""

    name: str
    rule: BatchingRule
    clock: Clock
    stages: tuple[int, ...]  # indices in the Estimate
    kv_tokens: int
    padded: bool  # attention reads every row at the longest context of its group
    groups: dict[int, GroupRows] = field(default_factory=dict)
    free_s: list[float] = field(default_factory=list)
    is_idle: bool = True
    departures: Departures = field(init=False)
    steps: list[Step] = field(default_factory=list)
    sizes: list[tuple[int, int, int, float]] = field(default_factory=list)
    durations: list[list[float]] = field(default_factory=list)
    ends: list[list[float]] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.departures = Departures(self.rule.slot_use)

    def note_memory(self, now: float) -> None:
        """What is held of the KV budget from `now` on."""
        held = self.rule.reserved_tokens
        if not self.memory or self.memory[-1][1] != held:
            self.memory.append((now, held))

    def records(self) -> PoolRecords:
        sizes = np.array(self.sizes, float).reshape(-1, 4)
        shape = (len(self.steps), len(self.stages))
        end_s = np.array(self.ends, float).reshape(shape)
        memory = np.array(self.memory, float).reshape(-1, 2)
        decoded, encoded, tokens = (sizes[:, i].astype(np.int64) for i in range(3))
        return PoolRecords(
            name=self.name, stages=self.stages, steps=tuple(self.steps), decoded=decoded,
            encoded=encoded, tokens=tokens, context=sizes[:, 3], end_s=end_s,
            start_s=end_s - np.array(self.durations, float).reshape(shape),
            memory_s=memory[:, 0], memory_tokens=memory[:, 1].astype(np.int64),
            kv_tokens=self.kv_tokens)


class Engine:
    """One replay. `pools`: one that does both phases, or an encode and a decode pool."""

    def __init__(self, pools: Sequence[Pool], *, inputs: IntArray, outputs: IntArray,
                 reserve_tokens: IntArray, encode_gives_token: bool,
                 handover: Handover | None = None) -> None:
        """Per query: input tokens, output tokens, KV tokens it reserves. `encode_gives_token`:
        encoding yields the first output token (decoder-only models)."""
        assert (handover is None) == (len(pools) == 1), f"{len(pools) = }"
        self._pools, self._handover = pools, handover
        self._inputs: list[int] = np.asarray(inputs).tolist()
        self._reserve: list[int] = np.asarray(reserve_tokens).tolist()
        self._outputs = np.asarray(outputs, np.int64)
        self._gives_token = int(encode_gives_token)
        self._left: list[int] = (self._outputs - self._gives_token).tolist()  # iterations to go
        assert min(self._left, default=0) >= 0, "an output has at least one token"
        self._made = [0] * len(self._inputs)  # tokens generated before the latest eviction
        self._start_s: list[float | None] = [None] * len(self._inputs)
        self._done_s: list[float] = [-1.0] * len(self._inputs)
        self._num_done = 0
        self._events: list[tuple[float, int, int, Callable[[float], None]]] = []
        self._sequence = 0
        self._link_free_s = 0.0
        self._handovers: list[tuple[int, float, float]] = []
        self._preemptions = 0

    def run(self) -> ReplayResult:
        """Until every query is done. Raises XgptError for one that can never fit."""
        first = self._pools[0]
        for pool in self._pools:
            pool.free_s = [0.0] * len(pool.stages)
        for query, (reserve, tokens) in enumerate(zip(self._reserve, self._inputs, strict=True)):
            if not first.rule.submit(query, reserve, tokens):
                raise XgptError(f"query {query} reserves {reserve} tokens of KV cache: more than "
                                "the schedule gives one micro-batch")
        self._turns(first, 0.0)
        while self._events:
            time_s, _, _, act = heapq.heappop(self._events)
            act(time_s)
        assert self._num_done == len(self._inputs), (
            f"{len(self._inputs) - self._num_done} queries are left with nothing to do")
        start_s = np.array(self._start_s, float)
        done_s = np.array(self._done_s, float)
        return ReplayResult(
            pools=tuple(pool.records() for pool in self._pools),
            handovers=self._handover_records(), encode_start_s=start_s,
            latency_s=done_s - start_s, output_tokens=self._outputs,
            preemptions=self._preemptions, makespan_s=float(done_s.max(initial=0.0)))

    def _handover_records(self) -> HandoverRecords | None:
        if self._handover is None:
            return None
        moved: FloatArray = np.array(self._handovers, float).reshape(-1, 3)
        return HandoverRecords(step=moved[:, 0].astype(np.int64), start_s=moved[:, 1],
                               end_s=moved[:, 2])

    def _at(self, time_s: float, priority: int, act: Callable[[float], None]) -> None:
        self._sequence += 1
        heapq.heappush(self._events, (time_s, priority, self._sequence, act))

    def _turns(self, pool: Pool, now: float) -> None:
        """The pool's head takes its turns until another event comes first, or none is left."""
        rule, free_s, groups = pool.rule, pool.free_s, pool.groups
        pool.is_idle = False
        while (index := rule.next_group()) is not None:
            group = groups.get(index)
            if group is None:
                group = groups[index] = GroupRows()
            at_s = now if now > free_s[0] else free_s[0]
            if rule.needs_tokens and group.awaited and group.awaited[-1][1] > at_s:
                at_s = group.awaited[-1][1]
            if self._events and self._events[0][0] <= at_s:
                def resume(time_s: float, group: GroupRows = group) -> None:
                    self._turn(pool, group, time_s)
                    self._turns(pool, time_s)
                self._at(at_s, _TURN, resume)
                return
            now = at_s
            self._turn(pool, group, now)
        pool.is_idle = True

    def _turn(self, pool: Pool, group: GroupRows, now: float) -> None:
        pool.free_s[0] = max(pool.free_s[0], now)
        if group.awaited and pool.rule.needs_tokens:
            self._collect(pool, group, now)
        step = pool.rule.decide()
        if step is not None:
            self._execute(pool, group, step, now)
        pool.note_memory(now)

    def _collect(self, pool: Pool, group: GroupRows, now: float) -> None:
        """Take up the tokens of the group's steps."""
        is_kept = pool.rule.slot_use is SlotUse.KEPT
        for _, _, done in group.awaited:
            for query in done:
                pool.rule.finish(query)
            due = pool.departures.finish(done)
            for query in due:
                if not is_kept:
                    group.leave(query)
                self._done(pool, query, now)
            if is_kept and due:  # the rows of a whole batch are free
                for other in pool.groups.values():
                    other.clear()
        group.awaited.clear()

    def _done(self, pool: Pool, query: int, now: float) -> None:
        self._done_s[query] = now
        self._num_done += 1
        if self._handover is not None:
            self._handover.release(query)
            self._wake(self._pools[0], now)

    def _wake(self, pool: Pool, now: float) -> None:
        if pool.is_idle:
            pool.is_idle = False
            self._at(now, _TURN, lambda time_s: self._turns(pool, time_s))

    def _execute(self, pool: Pool, group: GroupRows, step: Step, now: float) -> None:
        for query in step.evicted:
            if query in group:  # else it was encoded in part, and has no row yet
                self._evict(pool, group, query)
        index = len(pool.steps)
        rows, mean, top, moved, done = 0, 0.0, 0.0, 0.0, []
        handed = 0
        if step.kind is StepKind.DECODE and step.joined:
            handed = self._join_handed(pool, group, step.joined)
        if step.kind is not StepKind.ENCODE:
            rows, mean, top, moved = group.decode()
            moved *= pool.rule.slot_use is SlotUse.COMPACTED
            done = group.take_done()
        spans: list[tuple[int, int]] = []
        if step.kind is not StepKind.DECODE:
            spans = self._spans(step, now)
            done = done + self._join_encoded(pool, group, step.joined)
        seconds = pool.clock.seconds(StepSizes(
            spans=spans, encoded=len(step.joined) if spans else 0, decoded=rows,
            context=top if pool.padded else mean, moved=moved, handed=handed))
        ends, at_s, free_s = [], now, pool.free_s
        for stage, duration in enumerate(seconds):
            free = free_s[stage]
            at_s = (at_s if at_s > free else free) + duration
            free_s[stage] = at_s
            ends.append(at_s)
        pool.steps.append(step)
        pool.sizes.append((rows, len(step.joined) if spans else 0,
                           sum([count for _, count in spans]), mean))
        pool.durations.append(seconds)
        pool.ends.append(ends)
        if self._handover is not None and spans:
            at_s = self._hand_over(pool, step, index, at_s)
        group.awaited.append((index, at_s, done))

    def _spans(self, step: Step, now: float) -> list[tuple[int, int]]:
        """What is encoded, and when the encoding of each began."""
        if step.chunks:
            for chunk in step.chunks:
                if self._start_s[chunk.query] is None:
                    self._start_s[chunk.query] = now
            return [(chunk.first, chunk.tokens) for chunk in step.chunks]
        for query in step.joined:
            if self._start_s[query] is None:
                self._start_s[query] = now
        return [(0, self._inputs[query] + self._made[query]) for query in step.joined]

    def _join_encoded(self, pool: Pool, group: GroupRows, joined: tuple[int, ...]) -> list[int]:
        """They are active from now on; those done with their first token are named."""
        if self._handover is not None:
            return []
        done = []
        pool.departures.join(len(joined))
        for query in joined:
            if self._made[query]:  # encoded again: that gives the token after those it had
                self._left[query] -= self._gives_token
            left = self._left[query]
            group.join(query, self._inputs[query] + self._made[query], left)
            if left == 0:
                done.append(query)
        return done

    def _join_handed(self, pool: Pool, group: GroupRows, joined: tuple[int, ...]) -> int:
        """Queries whose KV entries came from the encode pool; their tokens."""
        pool.departures.join(len(joined))
        for query in joined:
            group.join(query, self._inputs[query], self._left[query])
        return sum([self._inputs[query] for query in joined])

    def _evict(self, pool: Pool, group: GroupRows, query: int) -> None:
        left = group.leave(query)
        self._made[query] += self._gives_token + self._left[query] - left
        self._left[query] = left
        pool.departures.leave()
        self._preemptions += 1

    def _hand_over(self, pool: Pool, step: Step, index: int, encoded_s: float) -> float:
        """One handover at a time; queries done with their first token stay behind. When it ends."""
        assert self._handover is not None
        leaving = [query for query in step.joined if self._left[query] > 0]
        for query in step.joined:
            if self._left[query] == 0:
                self._at(encoded_s, _ARRIVAL, partial(self._end_early, pool, query))
        if not leaving:
            return encoded_s
        begin_s = max(encoded_s, self._link_free_s)
        tokens = sum([self._inputs[query] for query in leaving])
        self._link_free_s = end_s = begin_s + self._handover.seconds(tokens)
        self._handovers.append((index, begin_s, end_s))
        self._at(end_s, _ARRIVAL, lambda now: self._arrive(leaving, now))
        return end_s

    def _end_early(self, pool: Pool, query: int, now: float) -> None:
        pool.rule.finish(query)
        pool.note_memory(now)
        self._done(pool, query, now)

    def _arrive(self, queries: list[int], now: float) -> None:
        decode = self._pools[1]
        for query in queries:
            self._pools[0].rule.finish(query)  # it has left the encode pool
            is_taken = decode.rule.submit(query, self._reserve[query], self._inputs[query])
            assert is_taken, f"{query = } has no room in the decode pool"
        for pool in self._pools:
            pool.note_memory(now)
        self._wake(decode, now)
        self._wake(self._pools[0], now)
