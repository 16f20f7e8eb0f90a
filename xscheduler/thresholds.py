"""The threshold of a static batch's cost (xrunner.rules.static.BatchFormer), chosen after the
schedule by replays of the job: fewest requests late, then shortest makespan."""

import math
from dataclasses import replace

from xgpt.core.problem import Problem
from xgpt.core.schedule import Schedule
from xscheduler.evaluator import Evaluator

THRESHOLDS = (math.inf, *(10.0 * 4**power for power in range(6)))  # chosen


def with_threshold(problem: Problem, evaluator: Evaluator, schedule: Schedule) -> Schedule:
    """The schedule with the best of THRESHOLDS, if the job leaves it open and has requests."""
    batches = schedule.estimate.variables.get("batches")
    if batches is None or batches.threshold is not None or not problem.num_queries:
        return schedule

    best = (math.inf, math.inf), schedule.estimate  # (share late, makespan in seconds), estimate
    for threshold in THRESHOLDS:
        first, *others = (shape.changed(batches=replace(batches, threshold=threshold))
                          for shape in schedule.estimate.shapes)
        estimate = first.beside(tuple(others))
        if (job := evaluator.job(estimate)) is not None:
            late = 0.0 if job.ends is None else 1.0 - job.ends.in_time()
            best = min(best, ((late, job.wall_s), estimate), key=lambda pair: pair[0])
    return schedule.changed(estimate=best[1])
