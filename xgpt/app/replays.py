"""Replays that commands show: enough queries for a steady state, and a picture of it."""

from __future__ import annotations

import numpy as np

from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate
from xgpt.report import timeline
from xgpt.report.canvas import Drawing
from xprofiler.timing import TimingSource
from xscheduler.prediction import in_run_order
from xsimulator.replay.job import planned_queries, replay_job
from xsimulator.replay.predict import sample_job
from xsimulator.replay.records import ReplayResult
from xsimulator.replay.steady import SteadyFigures, enough_queries, steady_figures

LEAST_QUERIES = 2000
ROUNDS = 12  # that many times what is in the system at once is enough for a steady state
MOST_QUERIES = 50_000


def replay_steady(problem: Problem, timing: TimingSource, estimate: Estimate,
                  num_queries: int | None = None) -> tuple[ReplayResult, SteadyFigures | None]:
    """A replay of `num_queries` (the job's own, with their input lengths where those are known),
    or of enough for a steady state; and the steady state in it."""
    rng = np.random.default_rng(problem.seed)
    known = problem.queries if num_queries is not None else None
    inputs = None if known is None else known.inputs[
        in_run_order(problem, estimate, len(known.inputs))]
    count = num_queries or enough_queries(estimate, least=LEAST_QUERIES, rounds=ROUNDS,
                                          most=MOST_QUERIES)
    queries = planned_queries(problem, *sample_job(problem.lengths, count, rng, inputs))
    result = replay_job(problem, timing, estimate, queries)
    return result, steady_figures(result, problem.constraint, problem.lengths.outputs)


def names_of(problem: Problem, estimate: Estimate) -> list[str]:
    """The names that stages have in a picture."""
    kind = "GPU" if problem.cluster.device.kind == "gpu" else "worker"
    return timeline.stage_names(estimate.deployment.stages, kind)


def steady_timeline(problem: Problem, estimate: Estimate, result: ReplayResult) -> Drawing:
    """A few periods from the middle of a replay."""
    return timeline.draw(result, *timeline.steady_window(result), names_of(problem, estimate))
