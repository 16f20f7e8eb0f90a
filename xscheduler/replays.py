"""Replays of configurations on one part of the cluster, all with the same random requests."""

import math
from collections.abc import Hashable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from xgpt.core.errors import XgptError
from xgpt.core.lengths import IntArray
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
DRAWN = 4096  # chosen: requests drawn at a time
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


class Replays:
    """Replays configurations of one problem with common random numbers."""

    def __init__(self, problem: Problem, timing: TimingSource) -> None:
        self.problem, self.timing = problem, timing
        self._clocks = StepClocks(problem, timing)
        self._rng = np.random.default_rng(SEED)
        self._drawn: tuple[IntArray, IntArray] = np.empty(0, np.int64), np.empty(0, np.int64)
        self.known: dict[Hashable, Replayed] = {}

    def of(self, estimate: Estimate, queries: int) -> Replayed:
        """The replay of an estimate with `queries` requests, in steady state."""
        problem = self.problem
        if estimate.shares_prefixes and sharing_of(problem) is not None:
            asked = steady_queries(problem, estimate, queries, np.random.default_rng(SEED))
        else:
            asked = planned_queries(problem, *self._draw(queries))
        if problem.constraint.kind == "sequence" and asked.outputs is not None:
            asked = replace(asked, outputs=with_limit_length(
                asked.outputs, problem.lengths.outputs.quantile(problem.constraint.quantile)))
        try:
            # formed batches of one job have no steady state: its first ones differ from its last
            steady = estimate.changed(batches=None) if estimate.variables.get("batches") else (
                estimate)
            figures = steady_replay(problem, self.timing, steady, asked, self._clocks)
        except XgptError:  # a request that never fits
            figures = None
        return Replayed(estimate, figures, queries)

    def _draw(self, count: int) -> tuple[IntArray, IntArray]:
        """(inputs, outputs) of `count` random requests, each [requests]."""
        while len(self._drawn[0]) < count:  # a longer replay begins with the same requests
            more = self.problem.lengths.sample(DRAWN, self._rng)
            self._drawn = (np.concatenate([self._drawn[0], more[0]]),
                           np.concatenate([self._drawn[1], more[1]]))
        return self._drawn[0][:count], self._drawn[1][:count]
