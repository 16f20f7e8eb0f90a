"""`xgpt run` executes a schedule; `xgpt submit` does all of it."""

from __future__ import annotations

from pathlib import Path

import click

from xgpt.app import deepspeed_engine
from xgpt.app.run import check_model, execute, make_folder
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
from xgpt.core.job import Job
from xgpt.core.job_file import LOCAL_CLUSTER, load_job
from xgpt.core.local import detect, usable_cores, why_no_torch
from xgpt.core.schedule import Schedule
from xgpt.core.schedule_file import load_schedule
from xgpt.report.table import schedule_table
from xprofiler.timing import TimingSource

_RANKS_PER_CORE = 4  # more would only take turns, and each loads its own libraries

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
    refuse_what_cannot_run(load_job(job_file, overrides))  # before a model is fetched for it
    session = open_session(job_file, overrides, Terminal(), fetch=True)
    assert session.files is not None, "fetched above"
    say(f"model: {session.job.model}, served by {session.files.served_by}")
    check_model(session)
    make_folder(session)
    return executable(session)


def refuse_what_cannot_run(job: Job) -> None:
    """Raises InputError for a job that this version plans, but does not execute."""
    most = _RANKS_PER_CORE * usable_cores() * (len(job.run.hosts) or 1)
    is_local = job.cluster == LOCAL_CLUSTER
    machine = detect() if is_local else None
    gpus = machine if machine is not None and machine.device.kind == "gpu" else None
    why = why_no_torch("gpu") if gpus is not None else None
    checks: list[tuple[bool, str, object, str]] = [
        (job.slurm is not None, "slurm", job.slurm, "nothing yet: this version starts ranks on "
         "this machine only; inside an allocation, use --set slurm=null"),
        (not is_local, "cluster", job.cluster, "`local`: this version executes on this machine's "
         "GPUs or, where it has none, cores; `xgpt schedule`, `simulate` and `sweep` plan for any "
         "cluster"),
        (why is not None, "cluster", job.cluster, f"this machine has GPUs, but {why}: install a "
         "build with it or, to run on CPU ranks, set CUDA_VISIBLE_DEVICES to nothing"),
        ((job.run.ranks or 1) > most, "run.ranks", job.run.ranks,
         f"at most {most} on {'the hosts' if job.run.hosts else 'this machine'}: "
         f"{most // _RANKS_PER_CORE} cores"),
        (job.workload.requests is None and job.workload.count is None, "workload.requests", None,
         "a run needs a file of requests, or {count: N}"),
    ]
    mistakes = [Mistake(file=str(job.source), line=None, key=key, value=value, allowed=allowed)
                for is_wrong, key, value, allowed in checks if is_wrong]
    mistakes += deepspeed_engine.mistakes_of(job)
    if mistakes:
        raise InputError(mistakes)
    if gpus is not None and (job.run.ranks or 1) > gpus.num_devices:
        say(f"note: {job.run.ranks} ranks share {gpus.num_devices} x {gpus.device.name}: each has "
            "a part of a GPU's memory and waits for the others' turns, which is no faster than "
            "fewer ranks")
    deepspeed_engine.check_installed(job)


def _finish(session: Session, timing: TimingSource, schedule: Schedule, as_json: bool) -> None:
    metrics = execute(session, timing, schedule)
    if as_json:
        print_json(metrics)
