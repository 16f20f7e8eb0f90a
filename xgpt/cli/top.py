"""`xgpt top`: a live view of a running job."""

import sys
from pathlib import Path

import click

from xgpt.app.live import NowAndThen, follow, glance
from xgpt.app.place import place_of
from xgpt.cli.options import JobFile
from xgpt.cli.terminal import show
from xgpt.core.errors import XgptError


@click.command()
@click.argument("where", type=JobFile(), metavar="DIR|JOB.yaml")
def top(where: Path) -> None:
    """A live view of a running job, here or under Slurm; q or Ctrl-C leaves it, and the job goes
    on. Where the output is no terminal it prints one state and ends."""
    place = place_of(where)
    is_live = sys.stdout.isatty() and sys.stdin.isatty()
    ask = NowAndThen()
    last = follow(lambda before: glance(place, before, ask)) if is_live else glance(place)
    if last is None:
        raise XgptError(f"{place.output}: no run has started there")
    show(str(last))
