"""`xgpt status`: how far a run is, from the files it writes."""

from __future__ import annotations

from pathlib import Path

import click

from xgpt.cli.bars import progress_line
from xgpt.cli.options import job_arguments, print_json
from xgpt.errors import XgptError
from xgpt.job_file import load_job
from xrunner.io.progress import read_progress


@click.command()
@job_arguments
def status(job_file: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    """How far the job's run is (works from another terminal, and after it ended)."""
    job = load_job(job_file, overrides)
    progress = read_progress(job.output / "progress.json")
    if progress is None:
        raise XgptError(f"{job.output}: no run has started there")
    if as_json:
        print_json({"output": job.output, **{k: getattr(progress, k)
                                             for k in progress.__dataclass_fields__}})
        return
    click.echo(f"{job.name}: {progress.state}, {job.output}")
    click.echo(progress_line(progress, job.constraint.latency_s))
