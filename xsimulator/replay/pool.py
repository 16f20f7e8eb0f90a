"""One pool of a replay: a head that decides by the pool's rule, and a pipeline of stages.

Stages work their steps in order. So a step's times on all stages are known when the head decides
it. A pool has one event for each turn that must wait, and none for stages."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from xgpt.core.policies import Role
from xrunner.rules.slots import Departures, SlotUse
from xrunner.rules.steps import BatchingRule, Step, StepKind
from xsimulator.native import NativeTables
from xsimulator.replay.kernel import TURN, Kernel
from xsimulator.replay.pipeline import Pipeline, StepTimes
from xsimulator.replay.queries import GroupRows, Queries
from xsimulator.replay.records import PoolRecords
from xsimulator.replay.step_clock import PoolClock, StepSizes


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """The parts of a pool. stages: indices in the Estimate. kv_tokens: capacity of its KV cache."""

    name: str
    rule: BatchingRule
    clock: PoolClock
    stages: tuple[int, ...]
    kv_tokens: int
    role: Role = "both"


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoverPlan:
    """The link from pool `source` to pool `target`. `seconds`: of a handover of so many tokens, a
    number or an array. `table`: these seconds as a table for csrc, if there is one. `release`:
    called with each request that is done, so that the source's rule frees its room."""

    seconds: Callable[[Any], Any]
    release: Callable[[int], None]
    source: str = "encode"
    target: str = "decode"
    table: NativeTables | None = None


class ReplicaPlan(NamedTuple):
    """The parts of a replica."""

    pools: Sequence[PoolPlan]
    handovers: Sequence[HandoverPlan] = ()


def records_of(plan: PoolPlan, times: StepTimes, memory_s: Sequence[float],
               memory_tokens: Sequence[int]) -> PoolRecords:
    """The records of a pool. memory_tokens: KV tokens reserved from each of `memory_s` on."""
    durations_s = times.durations_s
    # a step without a known time never ends, and later ones never begin
    start_s = np.subtract(times.end_s, durations_s, out=np.full(durations_s.shape, np.inf),
                          where=np.isfinite(durations_s))
    tokens, encoded, decoded = (times.sizes[:, i].astype(np.int64) for i in range(3))
    return PoolRecords(
        name=plan.name, role=plan.role, stages=plan.stages, steps=times.steps,
        decoded=decoded, encoded=encoded, tokens=tokens, context=times.sizes[:, 3],
        end_s=times.end_s, start_s=start_s, kv_tokens=plan.kv_tokens,
        memory_s=np.array(memory_s, float), memory_tokens=np.array(memory_tokens, np.int64))


class PoolHead:
    """The head of a pool: in each turn it collects tokens and decides a step. A request ends when
    the head collects its last token, as in a run."""

    def __init__(self, plan: PoolPlan, queries: Queries, pipeline: Pipeline) -> None:
        self.plan, self.rule, self._queries, self._pipeline = plan, plan.rule, queries, pipeline
        # hands over (requests, step that ended their encoding, when), and returns when they arrive
        # in the other pool; None: encoded requests stay
        self.outlet: Callable[[tuple[int, ...], int, float], float] | None = None
        # called with each step, if it takes requests in from another pool
        self.inlet: Callable[[Step, float], None] | None = None
        self._groups: dict[int, GroupRows] = {}
        self._departures = Departures(plan.rule.slot_use)
        self._is_kept = plan.rule.slot_use is SlotUse.KEPT
        self._memory: list[tuple[float, int]] = []  # (from when on, tokens held)
        self._held = -1

    def next_group(self) -> GroupRows | None:
        """The group that takes the next turn; None if there is nothing to do."""
        index = self.rule.next_group()
        if index is None:
            return None
        group = self._groups.get(index)
        if group is None:
            group = self._groups[index] = GroupRows()
        return group

    def note_memory(self, now: float) -> None:
        """Records the number of reserved KV tokens if it has changed."""
        held = self.rule.reserved_tokens
        if held != self._held:
            self._held = held
            self._memory.append((now, held))

    def records(self) -> PoolRecords:
        return records_of(self.plan, self._pipeline.times(), [now for now, _ in self._memory],
                          [held for _, held in self._memory])

    def turn(self, group: GroupRows, now: float) -> None:
        """Takes a group's turn: collects its tokens and decides its next step."""
        if group.awaited and self.rule.needs_tokens:
            self._collect(group, now)
        step = self.rule.decide()
        if step is not None:
            self._execute(group, step, now)
        self.note_memory(now)

    def _collect(self, group: GroupRows, now: float) -> None:
        """Collects the tokens of the group's steps, and ends the requests that are done."""
        queries, finish = self._queries, self.rule.finish
        for _, first, done in group.awaited:
            if first:
                queries.give_first_tokens(first, now)
            if not done:
                continue
            for query in done:
                finish(query)
            due = self._departures.finish(done)
            if not self._is_kept:
                for query in due:
                    group.leave(query)
            elif due:  # a whole batch is done
                for other in self._groups.values():
                    other.clear()
            queries.end(due, now)
        group.awaited.clear()

    def _execute(self, group: GroupRows, step: Step, now: float) -> None:
        if self.inlet is not None:
            self.inlet(step, now)
        if step.evicted:
            self._evict(group, step.evicted, now)
        rows, mean, longest, moved, handed = 0, 0.0, 0.0, 0.0, 0
        first: Sequence[int] = ()
        done: list[int] = []
        spans: list[tuple[int, int]] = []
        if step.handed:
            handed = self._join(group, step.handed, done)
        if step.kind is not StepKind.ENCODE:
            rows, mean, longest, moved = group.decode()
            moved *= self.rule.slot_use is SlotUse.COMPACTED
            done = group.take_done()
            if not self._queries.gives_token:
                first, group.fresh = group.fresh, []
        if step.kind is not StepKind.DECODE:
            spans = self._spans(step, now)
            if self.outlet is None:
                self._join(group, step.joined, done)
                if self._queries.gives_token:
                    first = step.joined
        sizes = StepSizes(spans, sum([tokens for _, tokens in spans]),
                          len(step.joined) if spans else 0, rows, mean, longest, moved, handed)
        ready_s = self._pipeline.work(step, sizes, now)
        if self.outlet is not None and spans:
            ready_s = self.outlet(step.joined, self._pipeline.num_steps - 1, ready_s)
        group.awaited.append((ready_s, first, done))

    def _evict(self, group: GroupRows, evicted: Sequence[int], now: float) -> None:
        """Frees the rows of evicted requests. The rest of their static batch ends with that."""
        groups = [*self._groups.values()] if self._is_kept else [group]
        for query in evicted:
            for own in groups:
                if query in own:  # else it was encoded in part, without a row
                    self._queries.evict(query, own.leave(query))
                    self._departures.leave()
        if self._is_kept:
            for own in groups:
                own.clear()
            self._queries.end(self._departures.finish(()), now)

    def _spans(self, step: Step, now: float) -> list[tuple[int, int]]:
        """(first token, tokens) of each input or chunk that is encoded; records their starts."""
        queries = self._queries
        if step.chunks:
            queries.begin([chunk.query for chunk in step.chunks], now)
            return [(chunk.first, chunk.tokens) for chunk in step.chunks]
        queries.begin(step.joined, now)
        inputs, generated = queries.inputs, queries.generated
        return [(0, inputs[query] + generated[query]) for query in step.joined]

    def _join(self, group: GroupRows, joined: tuple[int, ...], done: list[int]) -> int:
        """Adds requests to the group, and those without an iteration to go to `done`. Returns their
        context tokens in total."""
        tokens = 0
        self._departures.join(len(joined))
        for query, context, left in self._queries.enter(joined):
            group.join(query, context, left)
            tokens += context
            if left == 0:
                done.append(query)
        if not self._queries.gives_token:
            group.fresh += joined
        return tokens


class PoolProcess:
    """A pool as a process. Its head takes turns in the order of its rule, each as soon as the
    tokens of the group's last step are there."""

    def __init__(self, plan: PoolPlan, kernel: Kernel, queries: Queries) -> None:
        self.plan, self.rule = plan, plan.rule
        self._pipeline = Pipeline(plan.clock, len(plan.stages))
        self.head = PoolHead(plan, queries, self._pipeline)
        self.after_turn: Callable[[float], None] | None = None
        self._kernel, self._is_idle = kernel, True

    def wake(self, now: float) -> None:
        """Lets an idle head take turns at `now`."""
        if self._is_idle:
            self._is_idle = False
            self._kernel.at(now, TURN, self._take_turns)

    def records(self) -> PoolRecords:
        return self.head.records()

    def _take_turns(self, now: float) -> None:
        """Takes turns until another event comes first or there is nothing to do."""
        head, free_s, is_free_until = self.head, self._pipeline.free_s, self._kernel.is_free_until
        rule, self._is_idle = self.rule, False
        while (group := head.next_group()) is not None:
            at_s = now if now > free_s[0] else free_s[0]
            if rule.needs_tokens and group.awaited and group.awaited[-1][0] > at_s:
                at_s = group.awaited[-1][0]
            if not is_free_until(at_s):
                self._kernel.at(at_s, TURN, partial(self._resume, group))
                return
            now = at_s
            self._turn(group, now)
        self._is_idle = True

    def _resume(self, group: GroupRows, now: float) -> None:
        self._turn(group, now)
        self._take_turns(now)

    def _turn(self, group: GroupRows, now: float) -> None:
        if now > self._pipeline.free_s[0]:
            self._pipeline.free_s[0] = now
        self.head.turn(group, now)
        if self.after_turn is not None:
            self.after_turn(now)
