"""`xgpt report`: the page of a finished or stopped run."""

from pathlib import Path

import click

from xgpt.app.library import write_report
from xgpt.cli.options import job_arguments, print_json
from xgpt.core.job_file import load_job


@click.command()
@job_arguments
def report(job_file: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    """Write report.html from what the job's output folder holds."""
    path = write_report(load_job(job_file, overrides))
    if as_json:
        print_json({"report": path})
    else:
        click.echo(str(path))
