"""`xgpt status`: how far a run is, from the files it writes, and whether it is alive."""

import textwrap
from dataclasses import asdict
from pathlib import Path

import click

from xgpt.app.status import how_to_go_on, run_status
from xgpt.app.telling import progress_line
from xgpt.cli.options import job_arguments, print_json
from xgpt.core.errors import XgptError
from xgpt.core.job_file import load_job
from xgpt.report.table import WIDTH


@click.command()
@job_arguments
def status(job_file: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    """How far the job's run is (works from another terminal, and after it ended)."""
    job = load_job(job_file, overrides)
    run = run_status(job.output)
    if run is None:
        raise XgptError(f"{job.output}: no run has started there")
    if as_json:
        print_json({"output": job.output, **asdict(run.progress), "is_alive": run.is_alive,
                    "results": job.output / "results.jsonl", "num_results": run.num_results,
                    "num_held": run.num_held})
        return
    click.echo(f"{job.name}: {run.progress.state}, {job.output}")
    if run.progress.total or run.progress.state == "loading":
        click.echo(progress_line(run.progress, job.constraint.latency_s))
    if (words := how_to_go_on(run, job.output)) is not None:
        click.echo(textwrap.fill(words, WIDTH, break_on_hyphens=False))
