"""A replay of other queries than the planner's."""

from __future__ import annotations

import numpy as np

from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate
from xprofiler.timing import TimingSource
from xsimulator.replay.figures import steady_replay
from xsimulator.replay.job import planned_queries
from xsimulator.replay.predict import checked_queries, with_watched
from xsimulator.replay.steady import SteadyFigures
from xsimulator.replay.step_clock import StepClocks


def replay_checked(problem: Problem, timing: TimingSource, estimate: Estimate, seed: int,
                   clocks: StepClocks | None = None) -> SteadyFigures | None:
    """The steady state in a replay of sampled queries that checks the bounds' figures; None where
    it has none, or met a step larger than any that was timed."""
    count = checked_queries(problem, estimate)
    inputs, outputs = problem.lengths.sample(count, np.random.default_rng(seed))
    if problem.constraint.kind == "sequence":
        outputs = with_watched(outputs, problem.lengths.outputs.quantile(
            problem.constraint.quantile))
    return steady_replay(problem, timing, estimate, planned_queries(problem, inputs, outputs),
                         clocks)
