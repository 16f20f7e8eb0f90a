"""Ranks that outnumber the machine's cores: how much longer a stage's steps take in this replay.

A timing source says what steps take while all ranks work (`TimingFacts.sharing` times as long as
on cores of their own). In a run some of them wait, and leave their cores to the others: with k
ranks at work on c cores, each goes on at the rate min(1, c / k). A stage's slow-down is the mean
over its own work of that; since it decides when others work, it is found by a few rounds of
replaying. (One figure a stage, not one a step: what the system's scheduler does from step to step
cannot be known.)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from xgpt.core.lengths import FloatArray
from xgpt.core.schedule import StageAssignment
from xsimulator.replay.records import PoolRecords, ReplayResult
from xsimulator.replay.step_clock import Clock, StepSizes

ROUNDS = 4  # a further one moves the makespan by less than a hundredth


class SharedClock:
    """A clock whose seconds are those of `clock` times `factors` [stages of the pool]."""

    def __init__(self, clock: Clock, factors: Sequence[float]) -> None:
        self._clock, self._factors = clock, tuple(factors)

    def seconds(self, sizes: StepSizes) -> list[float]:
        return [s * factor for s, factor in zip(
            self._clock.seconds(sizes), self._factors, strict=True)]


def slow_downs(result: ReplayResult, stages: Sequence[StageAssignment],
               cores: float) -> list[list[float]]:
    """How much longer each stage's work takes, for each pool [its stages]: seconds for one second
    on cores of its own, if its steps lie as they do in `result`. `cores`: ranks that can work at
    once."""
    degrees = {stage.index: stage.tp_degree for stage in stages}
    times, progress = _progress(result.pools, degrees, cores)
    factors = []
    for pool in result.pools:
        busy = (pool.end_s - pool.start_s).sum(axis=0)
        done = (np.interp(pool.end_s, times, progress)
                - np.interp(pool.start_s, times, progress)).sum(axis=0)
        factors.append([float(b / d) if d > 0 else 1.0 for b, d in zip(busy, done, strict=True)])
    return factors


def _progress(pools: Sequence[PoolRecords], degrees: dict[int, int],
              cores: float) -> tuple[FloatArray, FloatArray]:
    """Returns times, and the work that a rank always at work would have done until each."""
    starts = np.concatenate([pool.start_s.ravel() for pool in pools])
    ends = np.concatenate([pool.end_s.ravel() for pool in pools])
    width = np.concatenate([np.tile([degrees[stage] for stage in pool.stages], len(pool.steps))
                            for pool in pools]).astype(float)
    times = np.concatenate([starts, ends])
    order = np.argsort(times, kind="stable")
    at_work = np.cumsum(np.concatenate([width, -width])[order])[:-1]
    times = times[order]
    rate = 1 / np.maximum(at_work / cores, 1.0)
    return times, np.concatenate([[0.0], np.cumsum(np.diff(times) * rate)])
