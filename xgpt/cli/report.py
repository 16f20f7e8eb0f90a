"""`xgpt report`: the page of a finished or stopped run."""

from __future__ import annotations

from pathlib import Path

import click

from xgpt.cli.options import job_arguments, print_json
from xgpt.core.errors import XgptError
from xgpt.core.job_file import load_job


@click.command()
@job_arguments
def report(job_file: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    """Write report.html from what the job's output folder holds."""
    from xgpt.report.page import write_report

    job = load_job(job_file, overrides)
    if not (job.output / "schedule.json").is_file():
        raise XgptError(f"{job.output}: no run has started there")
    path = write_report(job.output)
    if as_json:
        print_json({"report": path})
    else:
        click.echo(str(path))
