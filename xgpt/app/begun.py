"""What an earlier command of the same job left decides before anything is planned anew: times and
the memory that is free change from hour to hour, and with them the plan."""

from typing import Any

from xgpt.app.laid_out import on_ranks
from xgpt.app.opened import OpenedJob
from xgpt.app.plan import Plan
from xgpt.app.resume import is_left_whole, schedule_there, take_over
from xgpt.app.run import to_run
from xgpt.app.run_files import RESULTS_FILE, is_intact, is_told_done, tell_fault
from xgpt.app.run_folder import going_on, plan_for_ranks, requests_of
from xgpt.app.timing import timing_of
from xgpt.core.errors import InputError
from xgpt.core.schedule import Schedule
from xgpt.core.spool import num_queries
from xgpt.report.table import paragraph
from xprofiler.profile_file import load_profile
from xprofiler.profile_timing import ProfileTiming
from xprofiler.timing import TimingSource
from xrunner.files.intake import hand_on
from xrunner.files.results import answered
from xrunner.plan import as_begun, saved_fingerprint

BY_WHAT_WAS_BEGUN = ("the schedule found now does not hold all requests of the run that is in the "
                     "folder, and not finished: it goes on by the schedule that it was begun with")


def taken_over(opened: OpenedJob) -> dict[str, Any] | None:
    """What metrics.json holds of a job all of whose results are there, though not what is told of
    them: nothing is measured, planned or run again. None where there is something to run. Tells of
    results that somebody else changed. For who has the folder's lock."""
    output = opened.job.output
    tell_fault(output, opened.tell)
    found = answered(output / RESULTS_FILE)
    if not found.total or is_told_done(output) or found.total < (num_queries(output) or 0):
        return None
    own, schedule = _schedule_of(opened) or (opened, None)
    requests, spool = requests_of(own)
    plan = as_begun(plan_for_ranks(own, schedule, requests))
    if not is_intact(output) and saved_fingerprint(output) == plan.fingerprint:
        hand_on(requests, spool, plan, own.problem.model)
    return take_over(own, _times(own), schedule) if is_left_whole(plan) else None


def goes_on(opened: OpenedJob, plan: Plan) -> Plan:
    """The plan; or, of a job whose unfinished run has requests that it does not hold, the one that
    run was begun with. Not to go on by would be to begin from zero."""
    requests, _ = requests_of(plan.opened)
    if going_on(plan_for_ranks(plan.opened, plan.schedule, requests), plan.schedule) is not None:
        return plan
    if (begun := _schedule_of(opened)) is None:
        return plan
    opened.tell.say(paragraph(f"note: {BY_WHAT_WAS_BEGUN}"))
    return to_run(opened, begun[1], opened.job.output / "schedule.json")


def _schedule_of(opened: OpenedJob) -> tuple[OpenedJob, Schedule] | None:
    """The schedule that is in the job's folder, and the job on its ranks; None without one that
    this job can execute."""
    schedule = schedule_there(opened.job.output)
    try:
        own = None if schedule is None else on_ranks(opened, schedule.estimate.num_devices)
    except InputError:
        return None
    if schedule is None or own is None:
        return None
    return (own, schedule) if schedule.fingerprint == own.problem.fingerprint else None


def _times(opened: OpenedJob) -> TimingSource | None:
    """Those that the run was planned with; None where it did not leave them."""
    if opened.job.profile is not None or not opened.is_local:
        return timing_of(opened)
    try:
        return ProfileTiming(load_profile(opened.job.output / "profile.json"))
    except (InputError, OSError):
        return None
