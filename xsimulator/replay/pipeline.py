"""The pipeline of one pool: its stages work the pool's steps in order."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from xgpt.core.lengths import FloatArray
from xrunner.rules.steps import Step
from xsimulator.replay.step_clock import PoolClock, StepSizes


class StepTimes(NamedTuple):
    """Steps in order. sizes: [steps, 4] tokens, encoded, decoded, context; others: [steps,
    stages]."""

    steps: Sequence[Step]
    sizes: FloatArray
    durations_s: FloatArray
    end_s: FloatArray


class Pipeline:
    """The stages of a pool. free_s: [stages] seconds at which each stage is free next."""

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
        """Sends a step through the stages; returns the seconds at which the last is done."""
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
        """The steps so far, with their sizes and times."""
        stages = len(self.free_s)
        return StepTimes(self._steps, np.array(self._sizes, float).reshape(-1, 4),
                         np.array(self._durations, float).reshape(-1, stages),
                         np.array(self._ends, float).reshape(-1, stages))
