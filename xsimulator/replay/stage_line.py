"""The stages of one pool, which work its steps in the order in which the head takes them up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from xgpt.core.lengths import FloatArray, IntArray
from xrunner.rules.steps import Step
from xsimulator.replay.step_clock import PoolClock, StepSizes


class StepTimes(NamedTuple):
    """Steps in the order in which the head took them up: [steps, 4] tokens, encoded, decoded and
    context; [steps, stages] seconds and ends."""

    steps: Sequence[Step]
    sizes: FloatArray
    durations_s: FloatArray
    end_s: FloatArray


class StageLine:
    """Stages whose clock says what each step takes. `free_s`: [stages] when each is next free."""

    def __init__(self, clock: PoolClock, num_stages: int) -> None:
        self._clock, self.free_s = clock, [-math.inf] * num_stages
        self._steps: list[Step] = []
        self._sizes: list[tuple[float, ...]] = []
        self._durations: list[list[float]] = []
        self._ends: list[list[float]] = []

    @property
    def num_steps(self) -> int:
        return len(self._steps)

    def work(self, step: Step, sizes: StepSizes, now: float) -> float:
        """The step goes through the stages; when the last of them is through with it."""
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
        return StepTimes(self._steps, np.array(self._sizes, float).reshape(-1, 4),
                         np.array(self._durations, float).reshape(-1, stages),
                         np.array(self._ends, float).reshape(-1, stages))


def in_line(waits: IntArray, turn_of: IntArray, durations_s: FloatArray,
            begin_s: float) -> tuple[FloatArray, FloatArray]:
    """([turns] when the head took each, [steps, stages] ends): each stage works its steps in order,
    and a turn begins when the head is free and the tokens of the turn it waits for (-1: of none)
    are there. turn_of: [steps], rising."""
    num_turns, stages = len(waits), durations_s.shape[1]
    free_s, ready_s, turns_s = [begin_s] + [-math.inf] * (stages - 1), [math.inf] * num_turns, []
    seconds_of: list[list[float] | None] = [None] * num_turns
    for turn, seconds in zip(turn_of.tolist(), durations_s.tolist(), strict=True):
        seconds_of[turn] = seconds
    ends: list[list[float]] = []
    for turn, (wait, own) in enumerate(zip(waits.tolist(), seconds_of, strict=True)):
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
