"""The figures of a replay's steady state without the records of its steps."""

from __future__ import annotations

from xgpt.core.problem import Problem, QueryLengths
from xgpt.core.schedule import Estimate
from xprofiler.timing import TimingSource
from xsimulator.replay.job import Replayer
from xsimulator.replay.steady import SteadyFigures, steady_figures, steady_of
from xsimulator.replay.step_clock import StepClocks


def steady_replay(problem: Problem, timing: TimingSource, estimate: Estimate, queries: QueryLengths,
                  clocks: StepClocks | None = None) -> SteadyFigures | None:
    """The steady state of one replay of these queries, whose outputs are known, by one copy: what
    `steady_figures` says of `replay_job`. None where it has none, or met a step larger than any
    that was timed. Raises XgptError for a query that the schedule's KV budget can never hold.

    clocks: of this problem and timing, whose tables other replays have filled."""
    replayer = Replayer(problem, timing, estimate, clocks)
    bounds = problem.constraint, problem.lengths.outputs
    found = replayer.native(queries)
    if found is None:
        result = replayer.run(queries)
        return steady_figures(result, *bounds) if result.is_timed else None
    assert queries.outputs is not None
    return steady_of(found.times, queries.outputs, found.busy_s, *bounds) if (
        found.times.is_known) else None
