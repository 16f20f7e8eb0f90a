"""What one asks of a run that is going on: `xgpt status`, how far it is, from the files it writes,
whether it is alive, and what Slurm says of it; `xgpt top`, the same live; `xgpt stop`, its end."""

import sys
import textwrap
from dataclasses import asdict
from pathlib import Path

import click

from xgpt.app.telling import progress_line, time_left_s
from xgpt.app.top import NowAndThen, follow, glance, stop_job
from xgpt.cli.options import JOB_FILE, print_json, run_arguments
from xgpt.cli.terminal import show
from xgpt.core.errors import XgptError
from xgpt.report.table import paragraph
from xgpt.run_folder.files import doing, place_of
from xgpt.run_folder.state import State, age_s, are_silent, job_status, signs_of_life


@click.command()
@run_arguments
def status(where: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    """How far a run is (works from another terminal, and after it ended)."""
    place = place_of(where, overrides)
    output = place.output
    status = job_status(output)
    if status is None:
        raise XgptError(f"{output}: no run has started there")
    run = status.run
    if as_json:
        print_json({"output": output, **asdict(run.progress), "state": status.state,
                    "is_alive": run.is_alive, "results": output / "results.jsonl",
                    "num_results": run.answered.written, "num_held": len(run.answered.held),
                    "sign_of_life_s": run.silent_s, "ranks": [
                        {**asdict(rank), "sign_of_life_s": age_s(rank)} for rank in run.ranks],
                    "slurm": status.to_dict()})
        return
    show(f"{place.name}: {status.state}, {output}")
    if run.progress.total or run.progress.state == "loading":
        show(progress_line(run.progress, place.bound_s, None if are_silent(run.ranks)
                           else time_left_s(run.progress, output)))
    if status.is_active and (signs := signs_of_life(run.ranks)) is not None:
        show(paragraph(signs))
    if status.is_active and status.state == State.STARTING and (what := doing(output)):
        show(paragraph(what))
    words = None if status.is_active else run.next_step
    for sentence in filter(None, (status.in_words, words)):
        show(paragraph(sentence))
    if (cause := status.cause) is not None:
        show(textwrap.indent(cause, "  "))


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


@click.command()
@click.argument("where", type=JOB_FILE, metavar="DIR|JOB.yaml")
def top(where: Path) -> None:
    """A live view of a running job, here or under Slurm; Ctrl-C leaves it, and the job goes
    on. Where the output is no terminal it prints one state and ends."""
    place = place_of(where)
    is_live = sys.stdout.isatty() and sys.stdin.isatty()
    ask = NowAndThen()
    last = follow(lambda before: glance(place, before, ask)) if is_live else glance(place)
    if last is None:
        raise XgptError(f"{place.output}: no run has started there")
    show(str(last))
