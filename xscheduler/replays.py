"""Replays of configurations on one part of the cluster, all with the same random requests."""

import math
from collections.abc import Hashable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from xgpt.core.errors import XgptError
from xgpt.core.lengths import IntArray, JointLengths
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate
from xprofiler.timing import TimingSource
from xsimulator.replay.job import planned_queries
from xsimulator.replay.prediction import steady_queries, with_limit_length
from xsimulator.replay.steady_replay import steady_replay
from xsimulator.replay.steady_state import SteadyFigures
from xsimulator.replay.step_clock import StepClocks
from xsimulator.sharing import sharing_of

SEED = 20240427
_DRAWN = 4096  # chosen: requests drawn at a time
_SHOWN = ("throughput_qps", "latency_s", "ttft_s", "tpot_s")


class Replayed(NamedTuple):
    """An estimate and the steady-state figures of its replay with `queries` requests. figures None:
    no steady state, or steps had sizes without known times."""

    estimate: Estimate
    figures: SteadyFigures | None
    queries: int

    @property
    def throughput_qps(self) -> float:
        """Requests/s of one replica; 0 without a steady state."""
        return 0.0 if self.figures is None else self.figures.throughput_qps

    @property
    def latency_s(self) -> float:
        """Latency, in seconds, at the constraint's quantile; infinite without a steady state."""
        return math.inf if self.figures is None else self.figures.latency_s

    def shown(self, problem: Problem) -> Estimate:
        """The estimate with the replay's figures; those that it lacks stay the formula's."""
        if self.figures is None:
            return self.estimate
        known = {name: value for name in _SHOWN
                 if not math.isnan(value := getattr(self.figures, name))}
        return self.estimate.changed(**known, output_tokens_per_s=(
            self.figures.throughput_qps * problem.lengths.outputs.mean))


class DrawnLengths:
    """Lengths of random requests, drawn once: a longer replay begins with the same requests."""

    def __init__(self, lengths: JointLengths, seed: int | tuple[int, int]) -> None:
        self._lengths, self._rng = lengths, np.random.default_rng(seed)
        self._drawn: IntArray = np.empty((2, 0), np.int64)

    def first(self, count: int) -> tuple[IntArray, IntArray]:
        """(inputs, outputs) of the first `count` requests, each [requests]."""
        while self._drawn.shape[1] < count:
            more = self._lengths.sample(_DRAWN, self._rng)
            self._drawn = np.concatenate([self._drawn, np.stack(more)], axis=1)
        inputs, outputs = self._drawn[:, :count]
        return inputs, outputs


class Replays:
    """Replays configurations of one problem with common random numbers."""

    def __init__(self, problem: Problem, timing: TimingSource) -> None:
        self.problem, self.timing = problem, timing
        self.clocks = StepClocks(problem, timing)
        self._drawn = DrawnLengths(problem.lengths, SEED)
        self.known: dict[Hashable, Replayed] = {}

    def of(self, estimate: Estimate, queries: int) -> Replayed:
        """The replay of an estimate with `queries` requests, in steady state."""
        problem = self.problem
        if estimate.shares_prefixes and sharing_of(problem) is not None:
            asked = steady_queries(problem, estimate, queries, np.random.default_rng(SEED))
        else:
            asked = planned_queries(problem, *self._drawn.first(queries))
        if problem.constraint.kind == "sequence" and asked.outputs is not None:
            asked = replace(asked, outputs=with_limit_length(
                asked.outputs, problem.lengths.outputs.quantile(problem.constraint.quantile)))
        try:
            # formed batches of one job have no steady state: its first ones differ from its last
            steady = estimate.changed(batches=None) if estimate.variables.get("batches") else (
                estimate)
            figures = steady_replay(problem, self.timing, steady, asked, self.clocks)
        except XgptError:  # a request that never fits
            figures = None
        return Replayed(estimate, figures, queries)
