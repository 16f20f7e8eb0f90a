"""The command `xgpt workload`: lengths and arrivals of requests."""

from pathlib import Path

import click

from xgpt.app.workload import workload_figures, workload_screen
from xgpt.cli.options import JOB_FILE, job_options, print_json
from xgpt.cli.terminal import Terminal, show


@click.command()
@click.argument("source", type=JOB_FILE, metavar="JOB.yaml|TRACE")
@job_options
def workload(source: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    """Show how long a job's requests are, and when they arrive. TRACE: a CSV file with columns such
    as TIMESTAMP, ContextTokens and GeneratedTokens (docs/job-file.md)."""
    found = workload_figures(source, overrides, Terminal())
    if as_json:
        print_json(found)
    else:
        show(workload_screen(found))
