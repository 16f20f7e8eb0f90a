"""What one asks of a run's folder: `xgpt status`, how far the run is, from the files it writes,
whether it is alive, and what Slurm says of it; `xgpt top`, the same live; `xgpt stop`, its end;
`xgpt report`, its page, a sweep's, or that of several runs."""

import sys
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import get_args

import click

from xgpt.app.report import Form, write_reports, write_tables
from xgpt.app.telling import progress_line, time_left_s
from xgpt.app.top import NowAndThen, follow, glance, stop_job
from xgpt.cli.options import JOB_FILE, check_writable, job_options, print_json, run_arguments
from xgpt.cli.terminal import show
from xgpt.core.errors import XgptError, wrong
from xgpt.core.system.whole_file import why_no_folder
from xgpt.report.table import paragraph
from xgpt.run_folder.files import doing, place_of
from xgpt.run_folder.state import State, age_s, are_silent, job_status, oldest_s, signs_of_life


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
                    "sign_of_life_s": oldest_s(run.ranks), "ranks": [
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


@click.command()
@click.argument("where", nargs=-1, required=True, type=click.Path(path_type=Path),
                metavar="DIR|JOB.yaml ...")
@click.option("--format", "form", type=click.Choice(get_args(Form)), default="html",
              help="A page (the default), or pictures.")
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE",
              help="Where to write (pictures: a folder); default: report.html in the folder, and "
              "for several ./compare.html.")
@job_options
def report(where: tuple[Path, ...], form: Form, out: Path | None, overrides: tuple[str, ...],
           as_json: bool) -> None:
    """Report what lies in a run's or a sweep's folder; compare several runs."""
    places = [place_of(one, overrides) for one in where]
    if out is not None and form == "png":
        allowed = "a folder: there is a picture a chart" if out.exists() and not out.is_dir() else (
            why_no_folder(out))
        if allowed is not None:
            raise wrong("command line", "--out", str(out), allowed)
    else:
        check_writable(out, "--out")
    paths = [*write_reports([place.output for place in places], form, out), *write_tables(places)]
    if as_json:
        print_json({"report": paths[0], "files": paths})
    else:
        for path in paths:
            show(str(path))
