"""The commands on a run's folder: `xgpt status`, `top`, `stop` and `report`."""

import math
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import get_args

import click

from xgpt.app.report import Form, write_reports, write_tables
from xgpt.app.teller import time_left_s
from xgpt.app.top import CachedSlurmState, follow, glance, rank_lines, stop_job
from xgpt.cli.options import (
    check_writable,
    job_options,
    place_argument,
    print_json,
    run_arguments,
)
from xgpt.cli.terminal import show
from xgpt.core.errors import wrong
from xgpt.core.system.whole_file import why_no_folder
from xgpt.core.units import format_seconds
from xgpt.report.table import fact, shown
from xgpt.report.words import counted
from xgpt.run_folder.files import RunFolder, current_activity, find_run, no_run_error
from xgpt.run_folder.state import (
    JobStatus,
    State,
    age_s,
    are_silent,
    job_status,
    notes_of,
    oldest_s,
    signs_of_life,
)
from xrunner.files.results import count_errors


@click.command()
@run_arguments
def status(where: Path | None, overrides: tuple[str, ...], as_json: bool) -> None:
    """Show the progress of a run, from any terminal and also after it ended."""
    place = find_run(where, overrides)
    output = place.output
    status = job_status(output)
    if status is None:
        raise no_run_error(output)
    run = status.run
    if as_json:
        print_json({"output": output, **asdict(run.progress), "state": status.state,
                    "is_alive": run.is_alive, "results": output / "results.jsonl",
                    "num_results": run.answered.written, "num_held": len(run.answered.held),
                    "sign_of_life_s": oldest_s(run.ranks), "ranks": [
                        {**asdict(rank), "sign_of_life_s": age_s(rank)} for rank in run.ranks],
                    "slurm": status.to_dict()})
        return
    show(fact(place.name, "   ".join(_how_far(status))))
    words = None if status.is_active else run.next_step
    for sentence in filter(None, (*_more(place, status), status.in_words, words)):
        show(fact("", sentence))
    if any(rank.replica for rank in run.ranks):
        show("\n".join(rank_lines(run.ranks)))
    if (cause := status.cause) is not None:
        show(textwrap.indent(cause, "  "))


def _how_far(status: JobStatus) -> Iterator[str]:
    """Yields state, requests done, speed, and the time left or taken."""
    now, run = status.run.progress, status.run
    yield status.state
    if not now.total:
        yield from ["reading the requests and the weights"] * (now.state == "loading")
        return
    yield f"{now.done:,}/{now.total:,} ({now.done / now.total:.0%})"
    if now.elapsed_s > 0:
        yield f"{now.output_tokens / now.elapsed_s:,.0f} tok/s"
    left_s = None if are_silent(run.ranks) else time_left_s(now, run.output)
    if status.is_active and left_s is not None:
        yield f"{format_seconds(left_s)} left"
    elif now.elapsed_s > 0:
        yield f"{format_seconds(now.elapsed_s)} so far" if status.is_active else (
            f"in {format_seconds(now.elapsed_s)}")


def _more(place: RunFolder, status: JobStatus) -> Iterator[str]:
    """Yields lines on latency against its limit, errors, ranks, and the path of the results."""
    run, said = status.run, []
    if (latency_s := run.progress.latency_p99_s) is not None:
        limit = "no limit" if math.isinf(place.bound_s) else (
            f"limit {format_seconds(place.bound_s)}")
        said.append(f"latency P99 {format_seconds(latency_s)}, {limit}")
    if count := count_errors(place.output / "errors.jsonl"):
        said.append(counted(count, "error"))
    if status.is_active and run.ranks and not are_silent(run.ranks):
        said.append(f"{counted(len(run.ranks), 'rank')} alive")
    yield "   ".join(said)
    if status.is_active and are_silent(run.ranks):
        yield signs_of_life(run.ranks) or ""
    is_starting = status.is_active and status.state == State.STARTING
    yield notes_of(run.ranks) or current_activity(place.output) * is_starting
    found = (place.results, place.output / "results.jsonl")
    yield next((shown(path) for path in found if path is not None and path.is_file()), "")


@click.command()
@run_arguments
def stop(where: Path | None, overrides: tuple[str, ...], as_json: bool) -> None:
    """Stop a run after its current steps.

    The same command goes on from there. A job that waits in Slurm's queue is cancelled.
    """
    output = find_run(where, overrides).output
    said = stop_job(output)
    if as_json:
        print_json({"output": output, "message": said})
    else:
        show(said)


@click.command()
@place_argument
def top(where: Path | None) -> None:
    """Show a running job live, here or under Slurm.

    Ctrl-C ends the view, not the job. Prints the state once where the output is no terminal.
    """
    place = find_run(where)
    is_live = sys.stdout.isatty() and sys.stdin.isatty()
    ask = CachedSlurmState()
    last = follow(lambda: glance(place, ask)) if is_live else glance(place)
    if last is None:
        raise no_run_error(place.output)
    show(str(last))


@click.command()
@click.argument("where", nargs=-1, type=click.Path(path_type=Path), metavar="[DIR|JOB.yaml ...]")
@click.option("--format", "form", type=click.Choice(get_args(Form)), default="html",
              help="html: a page (default). png: pictures.")
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE",
              help="Path to write (of pictures: a folder; default: report.html in the folder, or "
              "./compare.html for several).")
@job_options
def report(where: tuple[Path, ...], form: Form, out: Path | None, overrides: tuple[str, ...],
           as_json: bool) -> None:
    """Write the report of a run or a sweep, or compare several runs."""
    places = [find_run(one, overrides) for one in where or (None,)]
    if out is not None and form == "png":
        allowed = "a folder, for a picture per chart" if out.exists() and not out.is_dir() else (
            why_no_folder(out))
        if allowed is not None:
            raise wrong("command line", "--out", str(out), allowed)
    else:
        check_writable(out, "--out")
    tables = write_tables(places)  # first: a page links them
    paths = [*write_reports([place.output for place in places], form, out), *tables]
    if as_json:
        print_json({"report": paths[0], "files": paths})
    else:
        for path in paths:
            show(str(path))
