"""Why a run took longer or shorter than predicted: one thing after the other taken from the run.

    predicted        sampled output lengths, the profile's step times
    with its lengths the run's own lengths, the profile's step times
    with its times   the run's own lengths and the measured time of each of its steps
    measured         what is left: the head, messages, and ranks that wait for one another
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from xgpt.core.errors import XgptError
from xgpt.core.lengths import IntArray
from xgpt.core.problem import Problem
from xgpt.core.queries import QueryLengths
from xgpt.core.schedule import Schedule
from xprofiler.timing import TimingSource
from xscheduler.evaluator import in_run_order, job_lengths
from xsimulator.replay.job import Replayer
from xsimulator.replay.predict import MOST_PREDICTED
from xsimulator.replay.recorded import Recording, load_recordings


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
    stopped or resumed, is longer than the log, of more queries than a prediction replays, or by
    copies of several shapes. Of several copies of the model the last to be done decides, each with
    the queries that it took."""
    estimate = schedule.estimate
    if (problem.num_queries or 0) > MOST_PREDICTED or estimate.others:
        return None
    try:
        recordings = load_recordings(output, estimate.deployment)
        count = sum(len(recording.queries) for recording in recordings)
        order = in_run_order(problem, estimate, count)
        most = np.empty(count, np.int64)  # by place in the job
        most[order] = _most_outputs(problem, schedule, count)
        replayer = Replayer(problem, timing, estimate.one_copy)
        parts = [_part(replayer, recording, order if len(recordings) == 1 else None, most)
                 for recording in recordings if len(recording.queries)]
    except (XgptError, OSError, ValueError, LookupError, TypeError, AttributeError,
            AssertionError):  # an explanation ends no run, whatever its record is like
        return None
    return Attribution(
        predicted_s=predicted_s, with_lengths_s=max(part.own_s for part in parts),
        with_times_s=max(part.timed_s for part in parts), measured_s=recordings[0].wall_s,
        same_steps=sum(part.matched for part in parts) / max(sum(part.steps for part in parts), 1))


class _Part(NamedTuple):
    """Seconds of what a copy of the model took, and the replay's steps."""

    own_s: float
    timed_s: float
    matched: int
    steps: int


def _part(replayer: Replayer, recording: Recording, order: Sequence[int] | None,
          most: IntArray) -> _Part:
    """`order`: of the recording's queries, where they are not in that in which they were taken up;
    `most`: output tokens that each of the job's queries reserved."""
    rows = np.arange(len(recording.queries)) if order is None else np.array(order)
    queries = QueryLengths(inputs=recording.inputs[rows], outputs=recording.outputs[rows],
                           most_outputs=most[recording.queries[rows]])
    own, clocks = replayer.run(queries), recording.clocks()
    timed = replayer.run(queries, clocks=clocks)
    return _Part(own.makespan_s, timed.makespan_s, sum(clock.num_matched for clock in clocks),
                 sum(clock.num_steps for clock in clocks))


def _most_outputs(problem: Problem, schedule: Schedule, num_queries: int) -> IntArray:
    """[queries] tokens that each query reserved for its output: decides when it was admitted."""
    known = job_lengths(problem, schedule.estimate)
    if known is None or len(known.inputs) != num_queries:
        raise XgptError(f"the run answered {num_queries} requests, others can run")
    return known.most_outputs
