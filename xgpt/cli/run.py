"""`xgpt run` executes a schedule; `xgpt submit` does all of it."""

from __future__ import annotations

from pathlib import Path

import click

from xgpt.app.checks import check_model, make_folder, refuse_what_cannot_run
from xgpt.app.run import execute
from xgpt.app.session import (
    Session,
    executable,
    find,
    open_session,
    timing_of,
)
from xgpt.cli.options import job_arguments, print_json
from xgpt.cli.terminal import Terminal, say
from xgpt.core.errors import InputError, Mistake
from xgpt.core.job_file import load_job
from xgpt.core.schedule import Schedule
from xgpt.core.schedule_file import load_schedule
from xgpt.report.table import schedule_table
from xprofiler.timing import TimingSource


@click.command()
@job_arguments
def submit(job_file: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    """Profile, schedule, run and report: everything the job file asks for."""
    session = _open_to_run(job_file, overrides)
    timing = timing_of(session)
    schedule = find(session, timing)
    say(f"times: {timing.provenance()}")
    say(schedule_table(schedule))
    _finish(session, timing, schedule, as_json)


@click.command()
@job_arguments
@click.option("--schedule", "schedule_file", type=click.Path(path_type=Path), metavar="FILE",
              help="The schedule to execute; default: schedule.json of the job's output folder.")
def run(job_file: Path, overrides: tuple[str, ...], as_json: bool,
        schedule_file: Path | None) -> None:
    """Execute a schedule on the real model (and go on where a stopped run ended)."""
    session = _open_to_run(job_file, overrides)
    path = schedule_file or session.job.output / "schedule.json"
    schedule = load_schedule(path)
    if schedule.fingerprint != session.problem.fingerprint:
        raise InputError([Mistake(
            file=str(path), line=None, key="fingerprint", value=schedule.fingerprint,
            allowed=f"this job's is {session.problem.fingerprint}: another model, dtype or number "
            "of ranks; find a schedule for this job with `xgpt schedule`")])
    session = executable(session, schedule)
    _finish(session, timing_of(session), schedule, as_json)


def _open_to_run(job_file: Path, overrides: tuple[str, ...]) -> Session:
    job = load_job(job_file, overrides)
    refuse_what_cannot_run(job, Terminal())  # before a model is fetched for it
    session = open_session(job_file, overrides, Terminal(), fetch=True)
    assert session.files is not None, "fetched above"
    say(f"model: {session.job.model}, served by {session.files.served_by}")
    check_model(session)
    make_folder(session.job)
    return executable(session)


def _finish(session: Session, timing: TimingSource, schedule: Schedule, as_json: bool) -> None:
    metrics = execute(session, timing, schedule)
    if as_json:
        print_json(metrics)
