"""The replay of a pool that is alone and works static batches: what PoolHead decides with
xrunner.rules.static, a batch at once. Nobody joins a batch or leaves it, so the rounds of its
decoding differ by contexts alone until the last of its queries is done."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from xgpt.core.lengths import FloatArray, IntArray
from xgpt.core.queries import QueryTimes
from xrunner.rules.static import StaticRule, WholeBatch, rests, whole_batches
from xrunner.rules.steps import BatchingRule, Step, StepKind
from xsimulator.replay.pool import PoolPlan, records_of
from xsimulator.replay.queries import Queries
from xsimulator.replay.records import ReplayResult, StepLog
from xsimulator.replay.stage_line import StepTimes, in_line
from xsimulator.replay.step_clock import ManySizes, StepClock, StepSizes
from xsimulator.replay.told import never_fits

NO_TURN = -1


def takes_whole_batches(rule: BatchingRule) -> bool:
    """Whether `replay_static` serves a pool of this rule."""
    return type(rule) is StaticRule and rests(rule)


def replay_static(plan: PoolPlan, queries: Queries) -> ReplayResult:
    """What xsimulator.replay.flow.run comes to, to the bit, where all queries come at one time.
    Raises XgptError for a query that can never fit."""
    rule, clock = plan.rule, plan.clock
    assert isinstance(rule, StaticRule) and isinstance(clock, StepClock), f"{rule = } {clock = }"
    for query, needed in enumerate(zip(queries.reserve_tokens, queries.inputs, strict=True)):
        if not rule.submit(query, *needed):
            raise never_fits(queries, query)
    turns = _Turns(rule, queries)
    for batch in whole_batches(rule):
        turns.take(batch)
    sizes, durations_s = turns.timed(clock, len(plan.stages))
    turns_s, end_s = in_line(np.array(turns.waits), np.array(turns.turn_of), durations_s,
                             float(queries.arrival_s[0]))
    start_s, first_s, last_s = turns_s[np.array(turns.times)]
    changes, held = np.array(turns.memory).T
    return ReplayResult(
        pools=(records_of(plan, StepTimes(turns.steps, sizes[:, :4], durations_s, end_s),
                          turns_s[changes].tolist(), held.tolist()),),
        handovers=(), preemptions=0, output_tokens=queries.output_tokens,
        times=QueryTimes(arrival_s=queries.arrival_s, start_s=start_s, first_token_s=first_s,
                         last_token_s=last_s))


class _Run(NamedTuple):
    """A group's decode steps in one batch: number of the first step, how many steps later each next
    one is, and how many there are; rows. `mean` and `longest` context, less `iterations`."""

    step: int
    stride: int
    num_steps: int
    rows: int
    mean: float
    longest: float
    iterations: int  # of the group, the first step's included


class _Turns:
    """The turns of the head, as xsimulator.replay.stage_line.LaterLine counts them."""

    def __init__(self, rule: StaticRule, queries: Queries) -> None:
        self._queries = queries
        self.steps, self.turn_of = StepLog(), list[int]()
        self.waits: list[int] = []  # of each turn: another turn
        self.memory: list[tuple[int, int]] = []  # (turn, tokens held since then)
        # [start, first token, last token] of each query: the turn
        self.times = [[NO_TURN] * len(queries.inputs) for _ in range(3)]
        self._encodes: list[tuple[int, StepSizes]] = []  # (number of the step, its sizes)
        self._runs: list[_Run] = []
        self._iterations = [0] * rule.num_groups  # decode steps so far

    def take(self, batch: WholeBatch) -> None:
        """The turns of a batch, up to that in which its last token is taken up."""
        self._note_memory(batch.reserved_tokens, len(self.waits))
        encoded = [NO_TURN] * len(batch.parts)  # of each group: its last ENCODE step's turn
        for group, parts in enumerate(batch.parts):
            for joined in parts:
                if joined:
                    encoded[group] = len(self.waits)
                    self._encode(batch.phase, group, joined)
                self.waits.append(NO_TURN)
        members = [[query for part in parts for query in part] for parts in batch.parts]
        self._decode(batch.phase, members, encoded)
        self._note_memory(0, len(self.waits) - 1)

    def timed(self, clock: StepClock, num_stages: int) -> tuple[FloatArray, FloatArray]:
        """([steps, 7] their sizes, as in ManySizes, [steps, stages] seconds)."""
        sizes, durations_s = np.zeros((len(self.steps), 7)), np.empty((len(self.steps), num_stages))
        for step, own in self._encodes:
            sizes[step] = own[1:]
            durations_s[step] = clock.seconds(own)
        if self._runs:
            self._fill_decodes(sizes)
        at, none = np.flatnonzero(sizes[:, 2]), np.empty(0, np.int64)
        durations_s[at] = clock.many(ManySizes(sizes[at], none, none, none.reshape(0, 2)))
        return sizes, durations_s

    def _note_memory(self, held: int, turn: int) -> None:
        if not self.memory or held != self.memory[-1][1]:
            self.memory.append((turn, held))

    def _encode(self, phase: int, group: int, joined: tuple[int, ...]) -> None:
        turn, inputs, starts = len(self.waits), self._queries.inputs, self.times[0]
        for query in joined:
            starts[query] = turn
        spans = [(0, inputs[query]) for query in joined]
        self._encodes.append((len(self.steps), StepSizes(
            spans, sum([tokens for _, tokens in spans]), len(joined), 0, 0.0, 0.0, 0.0, 0)))
        self.steps.append(Step(kind=StepKind.ENCODE, group=group, phase=phase, iteration=0,
                               joined=joined))
        self.turn_of.append(turn)

    def _decode(self, phase: int, members: list[list[int]], encoded: list[int]) -> None:
        """Rounds of a turn of each group: it takes up the tokens of the group's step before, and
        decides the next, until those just taken up are the last. (A step of the batch before whose
        tokens nobody took up is over by then: the first group, which always has queries, has waited
        for steps behind it.)"""
        groups, begin, left = len(members), len(self.waits), self._queries.left
        rounds, latest = max((max(left[query] for query in own), group)
                             for group, own in enumerate(members) if own)
        last = begin + rounds * groups + latest
        self._tell_queries(members, begin, last)
        self._add_turns(members, encoded, begin, last)
        active = [group for group, own in enumerate(members) if own]
        counts = [rounds + (group < latest) for group in active]
        first = len(self.steps)
        for place, (group, count) in enumerate(zip(active, counts, strict=True)):
            if count:
                self._add_run(group, members[group], first + place, len(active), count)
        if any(counts):
            self.steps.append_rounds([Step(kind=StepKind.DECODE, group=group, phase=phase,
                                           iteration=1) for group in active], sum(counts))

    def _tell_queries(self, members: list[list[int]], begin: int, last: int) -> None:
        _, firsts, lasts = self.times
        for group, own in enumerate(members):
            first = begin + group + (0 if self._queries.gives_token else len(members))
            for query in own:
                firsts[query], lasts[query] = first, last

    def _add_turns(self, members: list[list[int]], encoded: list[int], begin: int,
                   last: int) -> None:
        """Turns begin .. last, all with a step where the group has queries, but for the last."""
        groups = len(members)
        self.waits += encoded[:last + 1 - begin]
        if all(members):
            self.waits += range(begin, last + 1 - groups)
            self.turn_of += range(begin, last)
        else:
            self.waits += [turn if members[(turn - begin) % groups] else NO_TURN
                           for turn in range(begin, last + 1 - groups)]
            self.turn_of += [turn for turn in range(begin, last)
                             if members[(turn - begin) % groups]]

    def _add_run(self, group: int, members: list[int], step: int, stride: int, count: int) -> None:
        queries, before = self._queries, self._iterations[group]
        rows, inputs = len(members), queries.inputs
        base = sum([inputs[query] for query in members]) - rows * before
        mean = base / rows
        longest = max((float(inputs[query] - before) for query in members if queries.left[query]),
                      default=mean)
        self._runs.append(_Run(step, stride, count, rows, mean, longest, before + 1))
        self._iterations[group] += count

    def _fill_decodes(self, sizes: FloatArray) -> None:
        steps, strides, counts, rows, means, longest, iterations = (
            np.array(own) for own in zip(*self._runs, strict=True))
        run: IntArray = np.repeat(np.arange(len(counts)), counts)
        number = np.arange(len(run)) - (np.cumsum(counts) - counts)[run]  # of the run's steps
        at = steps[run] + strides[run] * number
        number += iterations[run]
        sizes[at, 2], sizes[at, 3], sizes[at, 4] = rows[run], means[run] + number, (
            longest[run] + number)
