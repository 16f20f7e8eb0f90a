"""The threshold of a static batch's cost (xrunner.rules.static.BatchFormer), chosen after the
schedule: replays of the job say which has the fewest requests late, then the shortest makespan."""

import math
from dataclasses import replace

from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate, Schedule
from xscheduler.evaluator import Evaluator

# chosen: a cost is tokens, or seconds, times the requests of a batch; the first stands if equal
THRESHOLDS = (math.inf, *(10.0 * 4**power for power in range(6)))


def with_threshold(problem: Problem, evaluator: Evaluator, schedule: Schedule) -> Schedule:
    """The schedule with the best of THRESHOLDS, if the job leaves it open and has requests."""
    batches = schedule.estimate.variables.get("batches")
    if batches is None or batches.threshold is not None or not problem.num_queries:
        return schedule

    def formed(threshold: float) -> Estimate:
        own = {"batches": replace(batches, threshold=threshold)}
        first, *others = (shape.changed(**own) for shape in schedule.estimate.shapes)
        return first.beside(tuple(others))

    def judged(threshold: float) -> tuple[float, float]:
        """(share of requests late, makespan in seconds)"""
        job = evaluator.job(formed(threshold))
        if job is None:
            return 1.0, math.inf
        return 0.0 if job.ends is None else 1.0 - job.ends.in_time(), job.wall_s

    return schedule.changed(estimate=formed(min(THRESHOLDS, key=judged)))
