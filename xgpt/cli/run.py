"""`xgpt run` executes a schedule; `xgpt submit` does all of it."""

from pathlib import Path

import click

from xgpt.app.plan import plan_job
from xgpt.app.run import execute, open_to_run, to_run
from xgpt.cli.options import job_arguments, print_json
from xgpt.cli.terminal import Terminal, say
from xgpt.core.job_file import load_job
from xgpt.core.schedule_file import load_schedule
from xgpt.report.table import schedule_table


@click.command()
@job_arguments
def submit(job_file: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    """Profile, schedule, run and report: everything the job file asks for."""
    plan = plan_job(open_to_run(load_job(job_file, overrides), Terminal()))
    say(f"times: {plan.timing.provenance()}")
    say(schedule_table(plan.schedule))
    metrics = execute(plan.opened, plan.timing, plan.schedule)
    if as_json:
        print_json(metrics)


@click.command()
@job_arguments
@click.option("--schedule", "schedule_file", type=click.Path(path_type=Path), metavar="FILE",
              help="The schedule to execute; default: schedule.json of the job's output folder.")
def run(job_file: Path, overrides: tuple[str, ...], as_json: bool,
        schedule_file: Path | None) -> None:
    """Execute a schedule on the real model (and go on where a stopped run ended)."""
    opened = open_to_run(load_job(job_file, overrides), Terminal())
    path = schedule_file or opened.job.output / "schedule.json"
    plan = to_run(opened, load_schedule(path), path)
    metrics = execute(plan.opened, plan.timing, plan.schedule)
    if as_json:
        print_json(metrics)
