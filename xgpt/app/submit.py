"""A job from its file's words to its results: planned, shown, run."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from xgpt.app.begun import goes_on, taken_over
from xgpt.app.compiling import begin_compiling
from xgpt.app.messages import KeptTeller, end_kept
from xgpt.app.opened import OpenedJob, open_job
from xgpt.app.plan import Plan, plan_job
from xgpt.app.run import execute_locked, open_to_run, to_run
from xgpt.app.telling import Teller
from xgpt.app.troubles import troubles_told
from xgpt.core.job import Job
from xgpt.core.schedule_file import load_schedule
from xgpt.launch.asked import warned_in_good_order
from xgpt.launch.standby import Standby
from xgpt.report.table import paragraph, schedule_table
from xrunner.files.lock import output_lock


@contextmanager
def at_work(opened: OpenedJob) -> Iterator[tuple[OpenedJob, int]]:
    """The job as one that works in its output folder, what it says kept there, and the folder's
    lock: held while it is profiled, too, so that `xgpt status`, `top` and `stop` find it."""
    output = opened.job.output
    with (troubles_told(output), output_lock(output) as lock, end_kept(output),
          troubles_told(output)):
        yield replace(opened, tell=KeptTeller(opened.tell, output)), lock


def submit(job: Job, tell: Teller, standby: Standby | None = None) -> dict[str, Any]:
    """Profiles, plans and runs the job; returns what metrics.json holds: at once, of a run
    whose command was killed with all results there. `standby`: may serve as its ranks. Raises
    StoppedEarly where it was asked to stop."""
    begin_compiling(job)
    with warned_in_good_order(), at_work(open_to_run(job, tell, standby)) as (opened, lock):
        if (found := taken_over(opened)) is not None:
            return found
        plan = goes_on(opened, plan_job(opened))
        opened.tell.say(paragraph(f"times: {plan.timing.provenance()}"))
        opened.tell.say(schedule_table(plan.schedule))
        return execute_locked(plan.opened, plan.timing, plan.schedule, lock)


def planned(job: Job, tell: Teller) -> Plan:
    """The plan by which `submit` would run the job, as far as this machine tells it."""
    return plan_job(open_job(job, tell, "lengths"))


def run(job: Job, tell: Teller, standby: Standby | None = None,
        schedule_file: Path | None = None) -> dict[str, Any]:
    """Does the same by the schedule of a file, by default the one in the job's output folder."""
    with warned_in_good_order(), at_work(open_to_run(job, tell, standby)) as (opened, lock):
        if (found := taken_over(opened)) is not None:
            return found
        path = schedule_file or opened.job.output / "schedule.json"
        plan = to_run(opened, load_schedule(path), path)
        return execute_locked(plan.opened, plan.timing, plan.schedule, lock)
