"""Expected figures for the limits other than that on latency, each with its safety margin."""

import math
from collections.abc import Callable

from xgpt.core.constraint import METRIC_WORDS, Metric, Prospect
from xgpt.core.errors import InfeasibleError
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate, Schedule
from xgpt.core.units import format_seconds, time_up
from xscheduler.margin import Margins
from xsimulator.roofline_limit import num_surely_late

PACE: tuple[Metric, ...] = ("ttft", "tpot")


def pace_prospects(margins: Margins, estimate: Estimate) -> list[Prospect]:
    """Expected TTFT and TPOT, in seconds, for those that have a limit."""
    constraint, found = margins.problem.constraint, []
    for metric in PACE:
        bound = constraint.bound_on(metric)
        if bound is None or math.isinf(bound.limit_s):
            continue
        expected_s = getattr(estimate.figures, f"{metric}_s") or 0.0
        found.append(Prospect(metric=metric, limit_s=bound.limit_s, expected_s=expected_s,
                              with_margin_s=expected_s * margins.margin(estimate, metric).factor))
    return found


def keeps_pace_limits(margins: Margins, estimate: Estimate) -> bool:
    """Whether an estimate keeps the limits on TTFT and TPOT with its safety margin."""
    return all(one.is_kept for one in pace_prospects(margins, estimate))


def with_prospects(schedule: Schedule, margins: Margins, tell: Callable[[str], None], *,
                   is_job: bool, has_margin: bool) -> Schedule:
    """The schedule with all limits of its problem and the expected figures for those not on
    latency. is_job: also for the makespan and deadlines. tell: takes a note for the user. Raises
    InfeasibleError if the makespan is too long, or too many requests are late."""
    problem = margins.problem
    further = [bound for bound in problem.constraint.bounds if bound.metric != "latency"]
    if not further:
        return schedule
    schedule = schedule.changed(bounds=(schedule.bound, *further))
    prospects = pace_prospects(margins, schedule.estimate) if has_margin else []
    if not is_job:
        return schedule.changed(prospects=tuple(prospects))
    of_job = [found for of in (_makespan_of, deadline_prospect) if (
        found := of(margins, schedule.estimate, has_margin=has_margin)) is not None]
    if of_job and problem.observes:
        tell(f"note: {' and '.join(METRIC_WORDS[one.metric] for one in of_job)} can be checked "
             "only once output lengths are known")
    late = num_surely_late(problem)
    if late:
        tell(f"note: {late:,} of {problem.num_queries:,} requests cannot be in time by any order "
             "(prefill alone takes longer)")
    for one in of_job:
        if not one.is_kept and not problem.observes:
            raise _too_late(one) if one.metric == "deadline" else _too_long(
                one, problem.num_queries or 0, problem)
    return schedule.changed(prospects=(*prospects, *of_job))


def deadline_prospect(margins: Margins, estimate: Estimate, *,
                      has_margin: bool) -> Prospect | None:
    """The deadlines of the job's requests by replay; None without any or without known times."""
    bound = margins.problem.constraint.bound_on("deadline")
    job = None if bound is None else margins.evaluator.job(estimate)
    if bound is None or job is None or job.ends is None:
        return None
    factor = margins.margin(estimate, "deadline").factor if has_margin else 1.0
    latest_s = float(job.ends.deadlines_s.max())
    expected_s = latest_s * job.ends.stretch(bound.quantile)
    return Prospect(metric="deadline", limit_s=latest_s, expected_s=expected_s,
                    with_margin_s=expected_s * factor, share=bound.quantile,
                    in_time=job.ends.in_time(), in_time_with_margin=job.ends.in_time(factor))


def _makespan_of(margins: Margins, estimate: Estimate, *, has_margin: bool) -> Prospect | None:
    """Makespan of the job's requests by replay; None without a limit on it or a known time."""
    bound = margins.problem.constraint.bound_on("makespan")
    if bound is None or math.isinf(bound.limit_s):
        return None
    job = margins.evaluator.job(estimate)
    if job is None:
        return None
    factor = margins.margin(estimate, "makespan").factor if has_margin else 1.0
    return Prospect(metric="makespan", limit_s=bound.limit_s, expected_s=job.wall_s,
                    with_margin_s=job.wall_s * factor)


def _too_late(prospect: Prospect) -> InfeasibleError:
    """The error for too many requests beyond their deadlines, with the deadlines that would do."""
    sure = prospect.in_time_with_margin or 0.0
    lower = f"Lower constraint.attainment to {math.floor(100 * sure) / 100:g}, or make"
    return InfeasibleError(
        f"no schedule was found that has {prospect.share:.4g} of the requests with a deadline in "
        f"time: the best is expected to have {prospect.in_time:.3f}, {sure:.3f} with the safety "
        f"margin. {lower if sure >= 0.01 else 'Make'} the "
        f"deadlines {prospect.with_margin_s / prospect.limit_s:.2f} times as long (the latest "
        f"{time_up(prospect.with_margin_s)})", prospect.with_margin_s)


def _too_long(prospect: Prospect, num_queries: int, problem: Problem) -> InfeasibleError:
    """The error for a makespan beyond its limit, with the shortest one, and how many devices may
    do."""
    devices, device = problem.cluster.num_devices, problem.cluster.device
    margin = "" if prospect.with_margin_s <= 1.001 * prospect.expected_s else (
        f", {format_seconds(prospect.expected_s)} without the safety margin")
    more = "" if device.kind == "cpu" else (
        f". About {math.ceil(devices * prospect.with_margin_s / prospect.limit_s)} may do: "
        f"`xgpt plan --on {device.name}`, or `objective: devices` on a larger cluster, says how "
        "many")
    return InfeasibleError(
        f"no schedule answers the {num_queries:,} requests within "
        f"{format_seconds(prospect.limit_s)}: {devices} x {device.name} need "
        f"{time_up(prospect.with_margin_s)}{margin}{more}")
