"""`xgpt schedule`: the best schedule within the bound, and what was proved about it."""

from __future__ import annotations

from pathlib import Path

import click

from xgpt.cli.options import job_arguments, print_json, say, writable_file
from xgpt.cli.session import find, open_session, timing_of
from xgpt.report.table import schedule_table, stage_table
from xgpt.schedule import save_schedule


@click.command()
@job_arguments
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE",
              help="Also write the schedule to FILE (for simulate and run).")
def schedule(job_file: Path, overrides: tuple[str, ...], as_json: bool, out: Path | None) -> None:
    """Find the schedule with the highest throughput within the job's latency bound."""
    if out is not None:
        writable_file(out, "--out")
    session = open_session(job_file, overrides, fetch=False)
    timing = timing_of(session)
    found = find(session, timing)
    if out is not None:
        save_schedule(found, out)
        say(f"schedule written to {out}")
    if as_json:
        print_json(found.to_dict())
        return
    problem = session.problem
    click.echo(f"{problem.model.name} on {problem.cluster.name} ({problem.cluster.num_devices} x "
               f"{problem.cluster.device.name}), {problem.dtype}")
    click.echo(f"times: {timing.provenance()}")
    click.echo(schedule_table(found))
    click.echo(stage_table(found))
