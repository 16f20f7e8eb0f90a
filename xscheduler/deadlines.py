"""The schedule that has enough requests of a job in time.

Deadlines, as the makespan, are limits on the whole job: replays of its own requests tell how many
are in time, in the input's order or by rising deadlines. If the schedule with the most throughput
has too few, configurations of lower latency follow, of each latency the one with the most
throughput."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate, Schedule, Status
from xscheduler.evaluator import Evaluator
from xscheduler.makespan import MOST_REPLAYED, JobClock, entries_within, words_of
from xscheduler.margin import Margins
from xscheduler.prospects import deadline_prospect, keeps_pace_limits
from xscheduler.space import Cell, Limits

MOST_CONFIGS = 30  # chosen: configurations that are replayed


def best_in_time(problem: Problem, evaluator: Evaluator, schedule: Schedule,
                 cells: Sequence[Cell], *, has_margin: bool = True,
                 cuts: Callable[[], bool] = lambda: False) -> Schedule:
    """`schedule` if enough of the job's requests are in time by it. Else the quickest found that
    has enough, or the one with the most. Arguments: see xscheduler.makespan.best_for_job."""
    count, limit_s = problem.num_queries, schedule.bound.limit_s
    margins, asked = Margins(problem, evaluator), problem.adjustment
    orders = [margins]
    if asked.order == "auto":  # the order is chosen later: xscheduler.ordering
        by_deadline = replace(problem, adjustment=replace(
            asked, order="deadline", window=asked.window or 0))
        orders.append(Margins(by_deadline, Evaluator(by_deadline, evaluator.timing)))

    def judged(estimate: Estimate) -> tuple[bool, float]:
        """(whether too few are in time, seconds of the job or, if so, of the deadline it needs)"""
        best = True, math.inf
        for of in orders:
            clock = JobClock(of.problem, of.evaluator, schedule)
            found = deadline_prospect(of, clock.roomy(estimate), has_margin=has_margin)
            if best[0] and found is not None and math.isfinite(seconds := clock(estimate, None)):
                best = min(best, (False, seconds) if found.is_kept else (
                    True, found.with_margin_s))
        return best

    if problem.constraint.bound_on("deadline") is None or not count or problem.observes:
        return schedule
    own = judged(schedule.estimate)
    if not own[0] or math.isinf(own[1]):
        return schedule
    constraint, best, chosen = problem.constraint, own, schedule.estimate
    entries = entries_within(cells, Limits(
        latency_s=limit_s, ttft_s=constraint.limit_s("ttft"), tpot_s=constraint.limit_s("tpot")))
    most, latency_s = min(max(MOST_REPLAYED // count, 1), MOST_CONFIGS), math.inf
    for entry in entries:
        if entry.latency_s >= latency_s:
            continue
        most, latency_s = most - 1, entry.latency_s
        estimate = evaluator.shown(entry.estimate)
        longer = margins.margin(estimate).factor if has_margin else 1.0
        if estimate.figures.latency_s * longer <= limit_s and (
                not has_margin or keeps_pace_limits(margins, estimate)):
            best, chosen = min((best, chosen), (judged(estimate), estimate),
                               key=lambda pair: pair[0])
        if cuts() or most <= 0:
            break
    if chosen is schedule.estimate:
        return schedule
    note = (f"Chosen for the deadlines of this job's {count} requests. The schedule with the "
            f"highest steady-state throughput ({schedule.figures.throughput_qps:.4g} requests/s by "
            f"{words_of(schedule.estimate)}) has too few in time.")
    return schedule.changed(
        estimate=chosen, gap=schedule.proof.bound_qps / chosen.figures.throughput_qps - 1,
        status=Status.JOB, explanation=(note,), margin=margins.margin(chosen).kept())
