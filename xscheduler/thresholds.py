"""The threshold of a static batch's cost (xrunner.rules.static.BatchFormer), chosen after the
schedule by replays of the job: fewest requests late, then shortest makespan."""

import math
from dataclasses import replace

from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate, Schedule
from xscheduler.evaluator import Evaluator

THRESHOLDS = (math.inf, *(10.0 * 4**power for power in range(6)))  # chosen


def with_threshold(problem: Problem, evaluator: Evaluator, schedule: Schedule) -> Schedule:
    """The schedule with the best of THRESHOLDS, if the job leaves it open and has requests."""
    batches = schedule.estimate.variables.get("batches")
    if batches is None or batches.threshold is not None or not problem.num_queries:
        return schedule

    def judged(estimate: Estimate) -> tuple[float, float]:
        """(share of requests late, makespan in seconds)"""
        job = evaluator.job(estimate)
        return (1.0, math.inf) if job is None else (
            0.0 if job.ends is None else 1.0 - job.ends.in_time(), job.wall_s)

    tried = []
    for threshold in THRESHOLDS:
        first, *others = (shape.changed(batches=replace(batches, threshold=threshold))
                          for shape in schedule.estimate.shapes)
        tried.append(first.beside(tuple(others)))
    return schedule.changed(estimate=min(tried, key=judged))
