"""`xgpt run` executes a schedule; `xgpt submit` does all of it."""

from importlib import import_module
from pathlib import Path
from typing import Any

import click

from xgpt.cli.options import job_arguments, print_json
from xgpt.cli.terminal import Terminal
from xgpt.core.job_file import load_job
from xgpt.launch.standby import standby_for

# Imported when a rank has been started: the two import side by side.
_USE_CASES = "xgpt.app.submit"


@click.command()
@job_arguments
def submit(job_file: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    """Profile, schedule, run and report: everything the job file asks for."""
    _do("submit", job_file, overrides, as_json)


@click.command()
@job_arguments
@click.option("--schedule", "schedule_file", type=click.Path(path_type=Path), metavar="FILE",
              help="The schedule to execute; default: schedule.json of the job's output folder.")
def run(job_file: Path, overrides: tuple[str, ...], as_json: bool,
        schedule_file: Path | None) -> None:
    """Execute a schedule on the real model (and go on where a stopped run ended)."""
    _do("run", job_file, overrides, as_json, schedule_file=schedule_file)


def _do(use_case: str, job_file: Path, overrides: tuple[str, ...], as_json: bool,
        **more: Any) -> None:
    job = load_job(job_file, overrides)
    with standby_for(job) as standby:
        metrics = getattr(import_module(_USE_CASES), use_case)(job, Terminal(), standby, **more)
    if as_json:
        print_json(metrics)
