"""The commands `xgpt submit`, `run` and `score`."""

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

# Imported after the first rank has started, so that both import at the same time.
_SUBMIT, _SLURM = "xgpt.app.submit", "xgpt.app.remote_jobs"
_FINISHED = "xgpt.app.running.finished"
METRICS = "metrics.json"  # xgpt.run_folder.files.METRICS_FILE, without importing it
_BY_DEFAULTS = "slurm.launch=srun"  # makes the section where a job file has none

_strict_option = click.option(
    "--strict", "is_strict", is_flag=True,
    help="Exit with code 4 if the run misses a limit of its job.")


@click.command()
@click.argument("job_files", nargs=-1, required=True, type=JOB_FILE, metavar="JOB.yaml...")
@job_options
@click.option("--slurm", "through_slurm", is_flag=True,
              help="Submit the job to Slurm even without a section `slurm` in its file, or from "
              "inside an allocation.")
@click.option("--again", "is_again", is_flag=True,
              help="Start over, even if the job is finished. Old results move to "
              "OUTPUT/earlier-DATE.")
@click.option("--results", metavar="FILE", type=click.Path(path_type=Path),
              help="Also write the results to this file: .csv, .tsv, .parquet or .jsonl.")
@within_seconds
@click.option("--dry-run", is_flag=True,
              help="Only print the plan; with --verbose also why, and Slurm's batch script.")
@_strict_option
@verbose_option
def submit(job_files: tuple[Path, ...], overrides: tuple[str, ...], as_json: bool,
           through_slurm: bool, is_again: bool, results: Path | None, max_seconds: float | None,
           dry_run: bool, is_strict: bool, is_verbose: bool) -> None:
    """Profile, plan and run a job, and write its report.

    A stopped job continues; a finished one is not run again (`--again` does).
    Several jobs run one after another; those of the same model on the same ranks load it once.
    With a section `slurm` the job is submitted to Slurm and runs in an allocation; several such
    job files become one array.
    """
    if results is not None and len(job_files) > 1:
        raise click.UsageError("--results is for one job file; give each its own key `results`")
    if results is not None:  # from where the command is called; the job file's start elsewhere
        overrides = (*overrides, f"results={json.dumps(str(results.absolute()))}")
    overrides = with_seconds(overrides, max_seconds)
    wanted = [_job_and_overrides(path, overrides, through_slurm) for path in job_files]
    tell = Terminal(is_verbose=is_verbose)
    is_for_slurm = any(job.slurm is not None for job, _ in wanted)
    if through_slurm or (is_for_slurm and allocation_here() is None):
        if is_strict:
            raise click.UsageError("--strict is for a run here; for one in Slurm, metrics.json "
                                   "says whether its limits were met (bound_kept)")
        shown = import_module(_SLURM).submit_batch(wanted, tell, is_dry=dry_run,
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
        shown = import_module(_SUBMIT).submit_all(jobs, tell, is_again=is_again)
        _print_done(shown, shown["jobs"], as_json, is_strict)
    elif (found := _finished_result(jobs[0], tell, is_again=is_again)) is None:
        _run_job("submit", jobs[0], as_json, is_strict, tell)
    else:
        _print_done(found, [found], as_json, is_strict)


@click.command()
@job_arguments
@click.option("--schedule", "schedule_file", type=click.Path(path_type=Path), metavar="FILE",
              help="Schedule to execute (default: schedule.json of the job's output folder).")
@_strict_option
@verbose_option
def run(job_file: Path, overrides: tuple[str, ...], as_json: bool,
        schedule_file: Path | None, is_strict: bool, is_verbose: bool) -> None:
    """Run a job by a given schedule, or continue a stopped run."""
    _run_job("run", load_job(job_file, overrides), as_json, is_strict,
             Terminal(is_verbose=is_verbose), schedule_file=schedule_file)


@click.command()
@job_arguments
@click.option("--again", "is_again", is_flag=True,
              help="Start over, even if the job is finished.")
@click.option("--dry-run", is_flag=True, help="Only print the schedule.")
@_strict_option
@verbose_option
def score(job_file: Path, overrides: tuple[str, ...], as_json: bool, is_again: bool, dry_run: bool,
          is_strict: bool, is_verbose: bool) -> None:
    """Compute log-likelihoods of given continuations: `submit` with `workload.score: true`."""
    job = load_job(job_file, (*overrides, "workload.score=true"))
    tell = Terminal(is_verbose=is_verbose)
    if dry_run:
        _show_plans([job], as_json, tell, is_verbose=is_verbose)
    elif (found := _finished_result(job, tell, is_again=is_again)) is None:
        _run_job("submit", job, as_json, is_strict, tell)
    else:
        _print_done(found, [found], as_json, is_strict)


def _show_plans(jobs: Sequence[Job], as_json: bool, tell: Terminal, *, is_verbose: bool) -> None:
    plans = [import_module(_SUBMIT).planned(job, tell) for job in jobs]
    if as_json:
        shown = [to_json(plan.schedule) for plan in plans]
        print_json(shown[0] if len(jobs) == 1 else {"schedules": shown})
        return
    for job, plan in zip(jobs, plans, strict=True):
        show(str(plan) if len(jobs) == 1 else f"== {job.name}\n{plan}\n")
        if is_verbose:
            show(f"\n{plan.details}")


def _job_and_overrides(path: Path, overrides: tuple[str, ...],
                       through_slurm: bool) -> tuple[Job, tuple[str, ...]]:
    """The job and its `--set`s, with a section `slurm` where it must be submitted to Slurm."""
    job = load_job(path, overrides)
    if job.slurm is not None or not through_slurm:
        return job, overrides
    overrides = (*overrides, _BY_DEFAULTS)
    return load_job(path, overrides), overrides


def _finished_result(job: Job, tell: Terminal, *, is_again: bool) -> dict[str, Any] | None:
    """See xgpt.app.running.finished, which is imported only for a job with metrics: else a rank is
    started first."""
    if not is_again and not (job.output / METRICS).exists():
        return None
    found: dict[str, Any] | None = import_module(_FINISHED).finished_result(
        job, tell, is_again=is_again)
    return found


def _run_job(use_case: str, job: Job, as_json: bool, is_strict: bool, tell: Terminal,
             **more: Any) -> None:
    with standby_for(job) as standby:
        metrics = getattr(import_module(_SUBMIT), use_case)(job, tell, standby, **more)
    _print_done(metrics, [metrics], as_json, is_strict)


def _print_done(shown: Mapping[str, Any], runs: Sequence[Mapping[str, Any]], as_json: bool,
                is_strict: bool) -> None:
    """Prints the `--json` object of finished runs, if wanted. Raises BoundMissed for `--strict`."""
    missed = [run for run in runs if is_strict and run.get("bound_kept") is False]
    if missed:
        refusal = BoundMissed("; ".join(
            f"{run.get('name')}: {bound['sentence']}" for run in missed
            for bound in run["bounds"] if bound["is_kept"] is False))
        refusal.details = shown
        raise refusal
    if as_json:
        print_json(shown)
