"""What an earlier command of the same job left decides before anything is planned anew: times and
the memory that is free change from hour to hour, and with them the plan."""

from typing import Any

from xgpt.app.laid_out import on_ranks
from xgpt.app.opened import OpenedJob
from xgpt.app.plan import Plan
from xgpt.app.resume import is_left_whole, take_over
from xgpt.app.run import to_run
from xgpt.app.run_files import RESULTS_FILE, is_told_done
from xgpt.app.run_folder import going_on, plan_for_ranks, requests_of
from xgpt.app.timing import timing_of
from xgpt.core.errors import InputError
from xgpt.core.schedule import Schedule
from xgpt.core.schedule_file import load_schedule
from xgpt.core.spool import num_queries
from xgpt.report.table import paragraph
from xprofiler.profile_file import load_profile
from xprofiler.profile_timing import ProfileTiming
from xprofiler.timing import TimingSource
from xrunner.io.results import answered

BY_WHAT_WAS_BEGUN = ("the schedule found now does not hold all requests of the run that is in the "
                     "folder, and not finished: it goes on by the schedule that it was begun with")


def taken_over(opened: OpenedJob) -> dict[str, Any] | None:
    """What metrics.json holds of a job whose command was killed before it wrote that, and after all
    results were there: nothing is measured, planned or run again. None where there is something to
    run. For who has the folder's lock."""
    output = opened.job.output
    total = num_queries(output)
    if not total or is_told_done(output) or answered(output / RESULTS_FILE).total < total:
        return None
    if (begun := _schedule_of(opened)) is None:
        return None
    own, schedule = begun
    requests, _ = requests_of(own)
    if not is_left_whole(plan_for_ranks(own, schedule, requests)):
        return None
    return take_over(own, _times(own), schedule)


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
    try:
        schedule = load_schedule(opened.job.output / "schedule.json")
        own = on_ranks(opened, schedule.estimate.num_devices)
    except (InputError, OSError):
        return None
    return (own, schedule) if schedule.fingerprint == own.problem.fingerprint else None


def _times(opened: OpenedJob) -> TimingSource:
    """Those that the run was planned with, as far as it left them."""
    if opened.is_local and opened.job.profile is None:
        try:
            return ProfileTiming(load_profile(opened.job.output / "profile.json"))
        except (InputError, OSError):
            pass
    return timing_of(opened)
