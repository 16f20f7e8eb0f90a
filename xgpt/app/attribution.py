"""Why a run took longer or shorter than predicted: one thing after the other taken from the run.

    predicted        sampled output lengths, the profile's step times
    with its lengths the run's own lengths, the profile's step times
    with its times   the run's own lengths and the measured time of each of its steps
    measured         what is left: the head, messages, and ranks that wait for one another
"""

from dataclasses import dataclass
from pathlib import Path

from xgpt.core.errors import XgptError
from xgpt.core.lengths import IntArray
from xgpt.core.problem import Problem
from xgpt.core.queries import QueryLengths
from xgpt.core.schedule import Schedule
from xprofiler.timing import TimingSource
from xscheduler.evaluator import in_run_order, job_lengths
from xsimulator.replay.job import Replayer
from xsimulator.replay.recorded import load_recording


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """Seconds of the whole job, as predicted, with the run's lengths, with its step times too, and
    as measured; `same_steps`: share of the replay's steps that were of the recorded size."""

    predicted_s: float
    with_lengths_s: float
    with_times_s: float
    measured_s: float
    same_steps: float

    @property
    def sentence(self) -> str:
        def change(to_s: float, from_s: float) -> str:
            return f"{100 * (to_s / from_s - 1):+.0f} %"

        total = change(self.measured_s, self.predicted_s)
        return (f"time of the run against its prediction {total}: output lengths "
                f"{change(self.with_lengths_s, self.predicted_s)}, step times "
                f"{change(self.with_times_s, self.with_lengths_s)}, the rest "
                f"{change(self.measured_s, self.with_times_s)}")


def attribute(problem: Problem, timing: TimingSource, schedule: Schedule, output: Path,
              predicted_s: float) -> Attribution | None:
    """Attributes the time of the whole run in `output`; None where its record does not tell: it was
    stopped or resumed, or is longer than the log."""
    estimate = schedule.estimate
    try:
        recording = load_recording(output, estimate.deployment.pools)
        replayer = Replayer(problem, timing, estimate)
        order = in_run_order(problem, estimate, len(recording.inputs))
        queries = QueryLengths(
            inputs=recording.inputs[order], outputs=recording.outputs[order],
            most_outputs=_most_outputs(problem, schedule, len(recording.inputs)))
        own, clocks = replayer.run(queries), recording.clocks()
        timed = replayer.run(queries, clocks=clocks)
    except (XgptError, ValueError, KeyError, AssertionError):  # an explanation ends no run
        return None
    matched = sum(clock.num_matched for clock in clocks)
    return Attribution(
        predicted_s=predicted_s, with_lengths_s=own.makespan_s, with_times_s=timed.makespan_s,
        measured_s=recording.wall_s,
        same_steps=matched / max(sum(clock.num_steps for clock in clocks), 1))


def _most_outputs(problem: Problem, schedule: Schedule, num_queries: int) -> IntArray:
    """[queries] tokens that each query reserved for its output: decides when it was admitted."""
    known = job_lengths(problem, schedule.estimate)
    if known is None or len(known.inputs) != num_queries:
        raise XgptError(f"the run answered {num_queries} requests, others can run")
    return known.most_outputs
