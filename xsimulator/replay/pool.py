"""One pool of a replay: a head that decides by the pool's rule, and stages that work in order.

A step enters all stages of its pool when the head takes it up, since each stage works its steps in
order: so a pool has one event for each turn that waits, and none for each stage. The head goes on
without an event of its own until another one comes first."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from xgpt.core.schedule import Role
from xrunner.rules.rra import RraRule, decide_plain, plain_rounds
from xrunner.rules.slots import Departures, SlotUse
from xrunner.rules.steps import BatchingRule, Step, StepKind
from xsimulator.replay.kernel import TURN, Kernel
from xsimulator.replay.queries import GroupRows, Queries
from xsimulator.replay.records import PoolRecords, RowLog, StepLog
from xsimulator.replay.step_clock import PoolClock, StepClock, StepSizes

LEAST_AHEAD = 8  # steps that are worth being taken at once


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """What a pool is made of. `stages`: their indices in the Estimate; `kv_tokens`: its budget."""

    name: str
    rule: BatchingRule
    clock: PoolClock
    stages: tuple[int, ...]
    kv_tokens: int
    role: Role = "both"


class PoolProcess:
    """A pool at work. Its head takes its turns in the order its rule says, each only once the
    tokens it waits for are there; a query's last token counts when the head takes it up, as a run
    measures it."""

    def __init__(self, plan: PoolPlan, kernel: Kernel, queries: Queries) -> None:
        self.plan, self.rule = plan, plan.rule
        # (queries, number of the step that ends their encoding, when) -> when they have arrived in
        # the pool that they are handed over to; None: queries that are encoded stay
        self.outlet: Callable[[tuple[int, ...], int, float], float] | None = None
        self._kernel, self._queries, self._clock = kernel, queries, plan.clock
        self._phased = plan.rule if isinstance(plan.rule, RraRule) else None
        self._groups: dict[int, GroupRows] = {}
        self._free_s = [-math.inf] * len(plan.stages)
        self._is_idle = True
        self._departures = Departures(plan.rule.slot_use)
        self._is_kept = plan.rule.slot_use is SlotUse.KEPT
        # of each step, in the order in which the head took them up: [stages] seconds and ends
        self._steps = StepLog()
        self._sizes = RowLog()  # tokens, encoded, decoded, context
        self._durations, self._ends = RowLog(), RowLog()
        self._memory: list[tuple[float, int]] = []  # (from when on, tokens held)
        self._held = -1

    def wake(self, now: float) -> None:
        """There may be work: a head with nothing to do looks for it."""
        if self._is_idle:
            self._is_idle = False
            self._kernel.at(now, TURN, self._take_turns)

    def note_memory(self, now: float) -> None:
        """The rule may hold more of the KV budget, or less, from `now` on."""
        held = self.rule.reserved_tokens
        if held != self._held:
            self._held = held
            self._memory.append((now, held))

    def records(self) -> PoolRecords:
        plan, shape = self.plan, (len(self._steps), len(self.plan.stages))
        sizes = self._sizes.array(4)
        end_s, durations_s = self._ends.array(shape[1]), self._durations.array(shape[1])
        # a step beyond what was measured never ends, and those after it never begin
        start_s = np.subtract(end_s, durations_s, out=np.full(shape, np.inf),
                              where=np.isfinite(durations_s))
        memory = np.array(self._memory, float).reshape(-1, 2)
        tokens, encoded, decoded = (sizes[:, i].astype(np.int64) for i in range(3))
        return PoolRecords(
            name=plan.name, role=plan.role, stages=plan.stages, steps=self._steps,
            decoded=decoded, encoded=encoded, tokens=tokens, context=sizes[:, 3], end_s=end_s,
            start_s=start_s,
            memory_s=memory[:, 0], memory_tokens=memory[:, 1].astype(np.int64),
            kv_tokens=plan.kv_tokens)

    def _take_turns(self, now: float) -> None:
        """The head takes its turns until another event comes first, or there is nothing to do."""
        rule, free_s, groups, is_free_until = (
            self.rule, self._free_s, self._groups, self._kernel.is_free_until)
        self._is_idle = False
        while (index := rule.next_group()) is not None:
            group = groups.get(index)
            if group is None:
                group = groups[index] = GroupRows()
            at_s = now if now > free_s[0] else free_s[0]
            if rule.needs_tokens and group.awaited and group.awaited[-1][0] > at_s:
                at_s = group.awaited[-1][0]
            if not is_free_until(at_s):
                self._kernel.at(at_s, TURN, partial(self._resume, group))
                return
            now = at_s
            if not self._decode_ahead(group, now):
                self._turn(group, now)
        self._is_idle = True

    def _decode_ahead(self, group: GroupRows, now: float) -> bool:
        """Takes the only group's steps in which nothing changes but contexts, all at once; False
        where there are few of them, or anything else may happen meanwhile."""
        clock = self._clock
        if self._phased is None or not isinstance(clock, StepClock) or not (
                self._kernel.is_free_until(math.inf)):
            return False
        if group.awaited and (group.awaited[-1][1] or group.awaited[-1][2]):
            return False  # first or last tokens are to be taken up
        count = min(plain_rounds(self._phased) - 1, group.plain_steps())
        if count < LEAST_AHEAD:
            return False
        rows, contexts, longest = group.decode_run(count)
        seconds = clock.decode_run(rows, contexts, longest)
        # one group's steps are one after the other on all stages
        ends = np.add.accumulate(np.concatenate([[now], seconds.ravel()]))[1:].reshape(
            seconds.shape)
        self._free_s[:] = ends[-1].tolist()
        self._steps.append(decide_plain(self._phased, count), count)
        sizes = np.zeros((count, 4))
        sizes[:, 2], sizes[:, 3] = rows, contexts
        self._sizes.extend(sizes)
        self._durations.extend(seconds)
        self._ends.extend(ends)
        group.awaited[:] = [(self._free_s[-1], (), [])]
        return True

    def _resume(self, group: GroupRows, now: float) -> None:
        self._turn(group, now)
        self._take_turns(now)

    def _turn(self, group: GroupRows, now: float) -> None:
        if now > self._free_s[0]:
            self._free_s[0] = now
        if group.awaited and self.rule.needs_tokens:
            self._collect(group, now)
        step = self.rule.decide()
        if step is not None:
            self._execute(group, step, now)
        self.note_memory(now)

    def _collect(self, group: GroupRows, now: float) -> None:
        """Take up the tokens of the group's steps."""
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
            elif due:  # the rows of a whole batch are free
                for other in self._groups.values():
                    other.clear()
            queries.end(due, now)
        group.awaited.clear()

    def _execute(self, group: GroupRows, step: Step, now: float) -> None:
        for query in step.evicted:
            if query in group:  # else it was encoded in part, and has no row yet
                self._queries.evict(query, group.leave(query))
                self._departures.leave()
        rows, mean, longest, moved, handed = 0, 0.0, 0.0, 0.0, 0
        first: Sequence[int] = ()
        done: list[int] = []
        spans: list[tuple[int, int]] = []
        if step.kind is StepKind.DECODE and step.joined:  # they were handed over
            handed = self._join(group, step.joined, done)
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
        ready_s = self._work(step, sizes, now)
        if self.outlet is not None and spans:
            ready_s = self.outlet(step.joined, len(self._steps) - 1, ready_s)
        group.awaited.append((ready_s, first, done))

    def _work(self, step: Step, sizes: StepSizes, now: float) -> float:
        """The step goes through the stages; when the last of them is through with it."""
        seconds = self._clock.seconds(sizes)
        ends, at_s, free_s = [], now, self._free_s
        for stage, duration in enumerate(seconds):
            free = free_s[stage]
            at_s = (at_s if at_s > free else free) + duration
            free_s[stage] = at_s
            ends.append(at_s)
        self._steps.append(step)
        self._sizes.append(sizes[1:5])
        self._durations.append(seconds)
        self._ends.append(ends)
        return at_s

    def _spans(self, step: Step, now: float) -> list[tuple[int, int]]:
        """(first token, tokens) of what is encoded; the encoding of some begins now."""
        queries = self._queries
        if step.chunks:
            queries.begin([chunk.query for chunk in step.chunks if chunk.first == 0], now)
            return [(chunk.first, chunk.tokens) for chunk in step.chunks]
        queries.begin(step.joined, now)
        inputs, made = queries.inputs, queries.made
        return [(0, inputs[query] + made[query]) for query in step.joined]

    def _join(self, group: GroupRows, joined: tuple[int, ...], done: list[int]) -> int:
        """They are active from now on; those without an iteration to go are added to `done`.
        Returns their tokens of context."""
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
