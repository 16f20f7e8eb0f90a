"""`xgpt stop`: end a run in good order."""

from pathlib import Path

import click

from xgpt.app.place import place_of
from xgpt.app.stop import stop_job
from xgpt.cli.options import print_json, run_arguments
from xgpt.cli.terminal import show


@click.command()
@run_arguments
def stop(where: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    """End the run of an output folder, or of a job file, in good order.

    A job that waits in Slurm's queue is taken out of it. A run stops after the steps under way; the
    same command goes on from there.
    """
    output = place_of(where, overrides).output
    said = stop_job(output)
    if as_json:
        print_json({"output": output, "message": said})
    else:
        show(said)
