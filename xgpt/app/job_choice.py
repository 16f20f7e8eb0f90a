"""The schedule of a session's own job: the best in steady state or, for a short job, what answers
its queries sooner."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from xgpt.app.prediction import job_lengths, predict
from xgpt.app.session import Session, with_room
from xgpt.core.errors import XgptError
from xgpt.core.schedule import Estimate, Schedule
from xprofiler.timing import TimingSource
from xscheduler.job_time import Space, for_the_job, searched_spaces
from xscheduler.uncertainty import Doubts


def choose_for_the_job(session: Session, timing: TimingSource, steady: Schedule,
                       spaces: Callable[[], Sequence[Space]] | None = None) -> Schedule:
    """`steady`, or what is quicker for the queries there are (xscheduler.job_time). spaces: what is
    looked at; by default the policies that are searched."""
    problem = session.problem
    if not problem.num_queries or session.job.workload.output_tokens.kind == "observe":
        return steady  # what every query at its cap would take says nothing
    most = _num_runnable(session, with_room(session, steady))

    def wall_s(estimate: Estimate, replays: int) -> float:
        schedule = with_room(session, replace(steady, estimate=estimate))
        if _num_runnable(session, schedule) < most:
            return math.inf
        try:
            found = predict(session, timing, schedule, replays=replays)
        except XgptError:  # times that the profile refuses
            return math.inf
        return math.inf if found is None else found.wall_s

    doubts = Doubts(problem, timing, replays=True)
    return for_the_job(steady, problem.num_queries, wall_s,
                       spaces or (lambda: searched_spaces(problem, timing)), doubts.margin)


def _num_runnable(session: Session, schedule: Schedule) -> int:
    """Requests that the schedule has room for; 0 where their lengths are not known."""
    known = job_lengths(session, schedule)
    return 0 if known is None else len(known.inputs)
