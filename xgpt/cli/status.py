"""`xgpt status`: how far a run is, from the files it writes, and whether it is alive; with what
Slurm says of a job that was handed in."""

import textwrap
from dataclasses import asdict
from pathlib import Path

import click

from xgpt.app.messages import doing
from xgpt.app.place import place_of
from xgpt.app.stall import age_s, are_silent, signs_of_life
from xgpt.app.status import how_to_go_on, job_status
from xgpt.app.telling import progress_line, time_left_s
from xgpt.cli.options import print_json, run_arguments
from xgpt.cli.terminal import show
from xgpt.core.errors import XgptError
from xgpt.report.table import paragraph


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
        found = None if run is None else run.answered
        print_json({"output": output, **({} if run is None else asdict(run.progress)),
                    "state": status.state, "is_alive": None if run is None else run.is_alive,
                    "results": output / "results.jsonl",
                    "num_results": 0 if found is None else found.written,
                    "num_held": 0 if found is None else len(found.held),
                    "sign_of_life_s": None if run is None else run.silent_s,
                    "ranks": [] if run is None else [
                        {**asdict(rank), "sign_of_life_s": age_s(rank)} for rank in run.ranks],
                    "slurm": status.to_dict()})
        return
    show(f"{place.name}: {status.state}, {output}")
    if run is not None and (run.progress.total or status.state == "loading"):
        show(progress_line(run.progress, place.bound_s, None if are_silent(run.ranks)
                           else time_left_s(run.progress, output)))
    if run is not None and status.is_active and (signs := signs_of_life(run.ranks)) is not None:
        show(paragraph(signs))
    if status.is_active and status.state == "starting" and (what := doing(output)):
        show(paragraph(what))
    words = None if run is None or status.is_active else how_to_go_on(run, output)
    for sentence in filter(None, (status.in_words, words)):
        show(paragraph(sentence))
    if (cause := status.cause) is not None:
        show(textwrap.indent(cause, "  "))
