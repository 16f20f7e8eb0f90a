"""Expected figures for the limits other than that on latency, each with its safety margin."""

import math
from collections.abc import Callable

from xgpt.core.constraint import Metric, Prospect
from xgpt.core.errors import InfeasibleError
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate, Schedule
from xgpt.core.units import format_seconds, time_up
from xscheduler.margin import Margins

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
    latency. is_job: also for the makespan. tell: takes a note for the user. Raises InfeasibleError
    if the makespan is too long."""
    problem = margins.problem
    further = [bound for bound in problem.constraint.bounds if bound.metric != "latency"]
    if not further:
        return schedule
    schedule = schedule.changed(bounds=(schedule.bound, *further))
    prospects = pace_prospects(margins, schedule.estimate) if has_margin else []
    makespan = _makespan_of(margins, schedule.estimate, has_margin) if is_job else None
    if makespan is None:
        return schedule.changed(prospects=tuple(prospects))
    if problem.observes:
        tell("note: the makespan can be checked only once output lengths are known")
    elif not makespan.is_kept:
        raise _too_long(makespan, problem.num_queries or 0, problem)
    return schedule.changed(prospects=(*prospects, makespan))


def _makespan_of(margins: Margins, estimate: Estimate, has_margin: bool) -> Prospect | None:
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
