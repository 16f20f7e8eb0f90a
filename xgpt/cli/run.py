"""`xgpt run` executes a schedule; `xgpt submit` does all of it, here or through Slurm."""

import json
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from xgpt.cli.options import (
    JOB_FILE,
    job_arguments,
    job_options,
    print_json,
    verbose_option,
    with_seconds,
    within_seconds,
)
from xgpt.cli.terminal import Terminal, show
from xgpt.core.errors import BoundMissed
from xgpt.core.schedule_file import to_json
from xgpt.job.job import Job
from xgpt.job.job_file import load_job
from xgpt.launch.launcher import allocation_here
from xgpt.launch.standby import standby_for

# Imported when a rank has been started: the two import side by side.
_USE_CASES, _SLURM, _FINISHED = "xgpt.app.submit", "xgpt.app.hand_in", "xgpt.app.running.finished"
METRICS = "metrics.json"  # xgpt.run_folder.files.METRICS_FILE, which a job that is done has
_BY_DEFAULTS = "slurm.launch=srun"  # makes the section where a job file has none

_strict_option = click.option(
    "--strict", "is_strict", is_flag=True,
    help="End with exit code 4 where the run is done but a bound was not kept.")


@click.command()
@click.argument("job_files", nargs=-1, required=True, type=JOB_FILE, metavar="JOB.yaml...")
@job_options
@click.option("--slurm", "through_slurm", is_flag=True,
              help="Hand the job in to Slurm though its file has no section `slurm`, or from "
              "within an allocation.")
@click.option("--again", "is_again", is_flag=True,
              help="Run a job that is done, or half done, from its beginning; what it left is kept "
              "in a folder earlier-DATE of its output.")
@click.option("--results", metavar="FILE", type=click.Path(path_type=Path),
              help="Write the results into this file besides: .csv, .tsv, .parquet or .jsonl.")
@within_seconds
@click.option("--dry-run", is_flag=True,
              help="Print the schedule and, for Slurm, the batch script; start nothing.")
@_strict_option
@verbose_option
def submit(job_files: tuple[Path, ...], overrides: tuple[str, ...], as_json: bool,
           through_slurm: bool, is_again: bool, results: Path | None, max_seconds: float | None,
           dry_run: bool, is_strict: bool, is_verbose: bool) -> None:
    """Profile, schedule, run and report: everything the job file asks for.

    A job that is done says so, and runs nothing (`--again` runs it anew).
    Several jobs run one after another; those of the same model on the same layout of ranks load
    it once. With a section `slurm` the job is handed in to Slurm, in whose allocation the rest
    happens; several such job files become one array.
    """
    if results is not None and len(job_files) > 1:
        raise click.UsageError("--results is of one job file; give each its own key `results`")
    if results is not None:  # from where the command is called; the job file's start elsewhere
        overrides = (*overrides, f"results={json.dumps(str(results.absolute()))}")
    overrides = with_seconds(overrides, max_seconds)
    wanted = [_wanted(path, overrides, through_slurm) for path in job_files]
    tell = Terminal(is_verbose=is_verbose)
    is_for_slurm = any(job.slurm is not None for job, _ in wanted)
    if through_slurm or (is_for_slurm and allocation_here() is None):
        if is_strict:
            raise click.UsageError("--strict is of a run here; of one that is handed in to Slurm, "
                                   "metrics.json says whether its bounds were kept (bound_kept)")
        shown = import_module(_SLURM).hand_in_jobs(wanted, tell, is_dry=dry_run,
                                                    is_again=is_again)
        if as_json:
            print_json(shown)
        elif dry_run and is_verbose:
            show(shown["script"])
        return
    jobs = [job for job, _ in wanted]
    if dry_run:
        _show_plans(jobs, as_json, tell, is_verbose=is_verbose)
    elif len(jobs) > 1:
        shown = import_module(_USE_CASES).submit_all(jobs, tell, is_again=is_again)
        _done(shown, shown["jobs"], as_json, is_strict)
    elif (found := _done_already(jobs[0], tell, is_again=is_again)) is None:
        _do("submit", jobs[0], as_json, is_strict, tell)
    else:
        _done(found, [found], as_json, is_strict)


@click.command()
@job_arguments
@click.option("--schedule", "schedule_file", type=click.Path(path_type=Path), metavar="FILE",
              help="The schedule to execute; default: schedule.json of the job's output folder.")
@_strict_option
@verbose_option
def run(job_file: Path, overrides: tuple[str, ...], as_json: bool,
        schedule_file: Path | None, is_strict: bool, is_verbose: bool) -> None:
    """Execute a schedule on the real model (and go on where a stopped run ended)."""
    _do("run", load_job(job_file, overrides), as_json, is_strict, Terminal(is_verbose=is_verbose),
        schedule_file=schedule_file)


@click.command()
@job_arguments
@click.option("--again", "is_again", is_flag=True,
              help="Score a job that is done, or half done, from its beginning.")
@click.option("--dry-run", is_flag=True, help="Print the schedule; start nothing.")
@_strict_option
@verbose_option
def score(job_file: Path, overrides: tuple[str, ...], as_json: bool, is_again: bool, dry_run: bool,
          is_strict: bool, is_verbose: bool) -> None:
    """Log-likelihood per token of given continuations: `submit` with `workload.score: true`."""
    job = load_job(job_file, (*overrides, "workload.score=true"))
    tell = Terminal(is_verbose=is_verbose)
    if dry_run:
        _show_plans([job], as_json, tell, is_verbose=is_verbose)
    elif (found := _done_already(job, tell, is_again=is_again)) is None:
        _do("submit", job, as_json, is_strict, tell)
    else:
        _done(found, [found], as_json, is_strict)


def _show_plans(jobs: Sequence[Job], as_json: bool, tell: Terminal, *, is_verbose: bool) -> None:
    plans = [import_module(_USE_CASES).planned(job, tell) for job in jobs]
    if as_json:
        shown = [to_json(plan.schedule) for plan in plans]
        print_json(shown[0] if len(jobs) == 1 else {"schedules": shown})
        return
    for job, plan in zip(jobs, plans, strict=True):
        show(str(plan) if len(jobs) == 1 else f"== {job.name}\n{plan}\n")


def _wanted(path: Path, overrides: tuple[str, ...], through_slurm: bool,
            ) -> tuple[Job, tuple[str, ...]]:
    """The job, and the `--set`s that make it of its file."""
    job = load_job(path, overrides)
    if job.slurm is not None or not through_slurm:
        return job, overrides
    overrides = (*overrides, _BY_DEFAULTS)
    return load_job(path, overrides), overrides


def _done_already(job: Job, tell: Terminal, *, is_again: bool) -> dict[str, Any] | None:
    """See xgpt.app.running.finished, which is not imported where there is nothing to be told: a
    rank is to be started first."""
    if not is_again and not (job.output / METRICS).exists():
        return None
    found: dict[str, Any] | None = import_module(_FINISHED).done_already(
        job, tell, is_again=is_again)
    return found


def _do(use_case: str, job: Job, as_json: bool, is_strict: bool, tell: Terminal,
        **more: Any) -> None:
    with standby_for(job) as standby:
        metrics = getattr(import_module(_USE_CASES), use_case)(job, tell, standby, **more)
    _done(metrics, [metrics], as_json, is_strict)


def _done(shown: Mapping[str, Any], runs: Sequence[Mapping[str, Any]], as_json: bool,
          is_strict: bool) -> None:
    """Prints what there is to print of runs that are done. Raises BoundMissed."""
    missed = [run for run in runs if is_strict and run.get("bound_kept") is False]
    if missed:
        refusal = BoundMissed("; ".join(
            f"{run.get('name')}: {bound['sentence']}" for run in missed
            for bound in run["bounds"] if bound["is_kept"] is False))
        refusal.details = shown
        raise refusal
    if as_json:
        print_json(shown)
