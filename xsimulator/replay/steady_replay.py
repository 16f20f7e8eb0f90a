"""Steady-state figures of a replay without records of its steps."""

from xgpt.core.problem import Problem, QueryLengths
from xgpt.core.schedule import Estimate
from xprofiler.timing import TimingSource
from xsimulator.replay.job import Replayer
from xsimulator.replay.steady_state import SteadyFigures, steady_figures, steady_from_times
from xsimulator.replay.step_clock import StepClocks


def steady_replay(problem: Problem, timing: TimingSource, estimate: Estimate, queries: QueryLengths,
                  clocks: StepClocks | None = None) -> SteadyFigures | None:
    """Steady-state figures of a replay of requests with known outputs on one replica; None without
    a steady state, or if a step has no known time. Raises XgptError for a request that never fits
    into the KV cache.

    clocks: tables of step times of this problem and timing, shared with other replays."""
    replayer = Replayer(problem, timing, estimate, clocks)
    bounds = problem.constraint, problem.lengths.outputs
    found = replayer.native(queries)
    if found is None:
        result = replayer.run(queries)
        return steady_figures(result, *bounds) if result.is_timed else None
    assert queries.outputs is not None
    return steady_from_times(found.times, queries.outputs, found.busy_s, *bounds) if (
        found.times.is_known) else None
