"""The stages of one pool of a replay, which work its steps in the order in which the head takes
them up: each step when it is decided (StageLine) or, where nothing that is decided hangs on when,
all of them in the end (LaterLine), since what steps take is found much quicker for many."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from xgpt.core.lengths import FloatArray, IntArray
from xrunner.rules.steps import Step
from xsimulator.policies.continuous.native import native
from xsimulator.replay.records import RowLog, StepLog
from xsimulator.replay.step_clock import ManySizes, PoolClock, StepClock, StepSizes


class DecodeRun(NamedTuple):
    """Decode steps of one group in a row: queries, [steps] their mean and longest contexts."""

    rows: int
    contexts: FloatArray
    longest: FloatArray


class StepTimes(NamedTuple):
    """Steps in the order in which the head took them up: [steps, 4] tokens, encoded, decoded and
    context; [steps, stages] seconds and ends."""

    steps: Sequence[Step]
    sizes: FloatArray
    durations_s: FloatArray
    end_s: FloatArray


class Line(Protocol):
    """Stages that steps are given to."""

    @property
    def num_steps(self) -> int: ...

    def work(self, step: Step, sizes: StepSizes, now: float) -> float:
        """The step goes through the stages; when the last of them is through with it."""


class StageLine:
    """Stages whose clock says what each step takes. `free_s`: [stages] when each is next free."""

    def __init__(self, clock: PoolClock, num_stages: int) -> None:
        self._clock, self.free_s = clock, [-math.inf] * num_stages
        self._steps, self._sizes = StepLog(), RowLog()
        self._durations, self._ends = RowLog(), RowLog()

    @property
    def num_steps(self) -> int:
        return len(self._steps)

    def work(self, step: Step, sizes: StepSizes, now: float) -> float:
        """See Line."""
        seconds = self._clock.seconds(sizes)
        ends, at_s, free_s = [], now, self.free_s
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

    def times(self) -> StepTimes:
        stages = len(self.free_s)
        return StepTimes(self._steps, self._sizes.array(4), self._durations.array(stages),
                         self._ends.array(stages))


class LaterLine:
    """Stages whose times are asked for in the end. Until then turns of the head are counted, and
    each turn is kept with the one whose tokens it waits for."""

    def __init__(self) -> None:
        self._steps, self._sizes = StepLog(), RowLog()
        self._spans: list[tuple[int, int]] = []
        self._num_spans: list[tuple[int, int]] = []  # (step, its spans)
        self._waits: list[int] = []  # of each turn: another turn, -1 for none
        self._turn_of: list[int] = []  # of each step

    @property
    def num_steps(self) -> int:
        return len(self._turn_of)

    def begin_turn(self, waits: int) -> int:
        """The head takes a turn, once the tokens of the turn `waits` are there; its number."""
        self._waits.append(waits)
        return len(self._waits) - 1

    def work(self, step: Step, sizes: StepSizes, now: float) -> float:
        """See Line; `now` is the latest turn."""
        if sizes.spans:
            self._num_spans.append((len(self._turn_of), len(sizes.spans)))
            self._spans += sizes.spans
        self._turn_of.append(len(self._waits) - 1)
        self._steps.append(step)
        self._sizes.append(sizes[1:])
        return now

    def work_ahead(self, first: Step, run: DecodeRun) -> int:
        """Steps of the only group, one after the other, the first of which is given; each after
        that has a turn of its own. Returns the last one's."""
        count, turn = len(run.contexts), len(self._waits) - 1
        self._waits += range(turn, turn + count - 1)
        self._turn_of += range(turn, turn + count)
        self._steps.append(first, count)
        sizes = np.zeros((count, 7))
        sizes[:, 2], sizes[:, 3], sizes[:, 4] = run
        self._sizes.extend(sizes)
        return turn + count - 1

    def decided(self) -> Decided:
        """All steps so far."""
        owners = np.array(self._num_spans, np.int64).reshape(-1, 2)
        return Decided(self._steps, ManySizes(
            self._sizes.array(7), np.repeat(owners[:, 0], owners[:, 1]),
            np.repeat(owners[:, 1], owners[:, 1]), np.array(self._spans, np.int64).reshape(-1, 2)),
            np.array(self._waits, np.int64), np.array(self._turn_of, np.int64))


class Decided(NamedTuple):
    """Steps that are to be timed, their sizes, the turn that each turn waits for and the turn of
    each step, as LaterLine keeps them."""

    steps: Sequence[Step]
    sizes: ManySizes
    waits: IntArray
    turn_of: IntArray

    def times(self, clock: StepClock, num_stages: int, begin_s: float, *,
              is_one_group: bool) -> tuple[StepTimes, FloatArray]:
        """(what the stages did, [turns] when the head took each), from `begin_s` on."""
        durations_s = clock.many(self.sizes)
        if is_one_group:  # each of its steps waits for the one before
            end_s = one_after_the_other(begin_s, durations_s)
            ends = np.concatenate([[begin_s], end_s[:, -1]])
            turns_s = ends[np.searchsorted(self.turn_of, np.arange(len(self.waits)))]
        else:
            turns_s, end_s = in_line(self.waits, self.turn_of, durations_s, begin_s)
        return StepTimes(self.steps, self.sizes.sizes[:, :4], durations_s,
                         end_s.reshape(-1, num_stages)), turns_s


def one_after_the_other(begin_s: float, durations_s: FloatArray) -> FloatArray:
    """[steps, stages] the ends of steps of which each begins when the one before is through."""
    return np.asarray(np.add.accumulate(np.concatenate([[begin_s], durations_s.ravel()]))[1:]
                      .reshape(durations_s.shape))


def in_line(waits: IntArray, turn_of: IntArray, durations_s: FloatArray,
            begin_s: float) -> tuple[FloatArray, FloatArray]:
    """([turns] when the head took each, [steps, stages] ends): each stage works its steps in order,
    and a turn begins when the head is free and the tokens of the turn it waits for (-1: of none)
    are there. turn_of: [steps], rising."""
    library = native()
    return _in_line(waits.tolist(), turn_of, durations_s, begin_s) if library is None else (
        library.in_line(waits, turn_of, durations_s, begin_s))


def _in_line(waits: Sequence[int], turn_of: IntArray, durations_s: FloatArray,
             begin_s: float) -> tuple[FloatArray, FloatArray]:
    num_turns, stages = len(waits), durations_s.shape[1]
    free_s, ready_s, turns_s = [begin_s] + [-math.inf] * (stages - 1), [math.inf] * num_turns, []
    seconds_of: list[list[float] | None] = [None] * num_turns
    for turn, seconds in zip(turn_of.tolist(), durations_s.tolist(), strict=True):
        seconds_of[turn] = seconds
    ends: list[list[float]] = []
    for turn, (wait, own) in enumerate(zip(waits, seconds_of, strict=True)):
        at_s = free_s[0]
        if wait >= 0 and ready_s[wait] > at_s:
            at_s = ready_s[wait]
        turns_s.append(at_s)
        if own is None:
            free_s = [at_s, *free_s[1:]]
            continue
        row = []
        for free, duration in zip(free_s, own, strict=True):
            at_s = (at_s if at_s > free else free) + duration
            row.append(at_s)
        free_s = row
        ready_s[turn] = at_s
        ends.append(row)
    return np.array(turns_s), np.array(ends, float).reshape(len(ends), stages)
