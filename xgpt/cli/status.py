"""`xgpt status`: how far a run is, from the files it writes, and whether it is alive."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import click

from xgpt.app.progress import progress_line
from xgpt.cli.options import job_arguments, print_json
from xgpt.core.errors import XgptError
from xgpt.core.job_file import load_job
from xgpt.core.spool import num_queries
from xgpt.report.table import WIDTH
from xrunner.io.lock import is_locked
from xrunner.io.progress import Progress, read_progress
from xrunner.io.results import answered

_UNKNOWN = Progress(state="starting", total=0, done=0, output_tokens=0, elapsed_s=0.0,
                    latency_p50_s=None, latency_p99_s=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """`progress.state` as the run wrote it, or "died": nobody works on it, and it did not end in
    good order. Of a run that ended before all was done, `progress.done` is what is on the disk: in
    results.jsonl and, done but with one before it that is not, in held.jsonl."""

    progress: Progress
    is_alive: bool | None  # None: cannot be told
    num_results: int  # in results.jsonl
    num_held: int = 0  # in held.jsonl


def run_status(output: Path) -> RunStatus | None:
    """None where no run has started."""
    # in this order: a run that ends in between is done, not dead
    is_alive = is_locked(output)
    found = read_progress(output / "progress.json")
    results = answered(output / "results.jsonl")
    if found is None and not is_alive and not (output / "run.json").is_file():
        return None
    progress = found or _UNKNOWN
    if is_alive is False and progress.state not in ("done", "stopped"):
        progress = replace(progress, state="died")
    if progress.state in ("died", "stopped"):
        progress = replace(progress, done=results.total,
                           total=progress.total or num_queries(output) or 0)
    return RunStatus(progress=progress, is_alive=is_alive, num_results=results.written,
                     num_held=len(results.held))


@click.command()
@job_arguments
def status(job_file: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    """How far the job's run is (works from another terminal, and after it ended)."""
    job = load_job(job_file, overrides)
    found = run_status(job.output)
    if found is None:
        raise XgptError(f"{job.output}: no run has started there")
    if as_json:
        print_json({"output": job.output, **asdict(found.progress), "is_alive": found.is_alive,
                    "results": job.output / "results.jsonl", "num_results": found.num_results,
                    "num_held": found.num_held})
        return
    click.echo(f"{job.name}: {found.progress.state}, {job.output}")
    if found.progress.total:
        click.echo(progress_line(found.progress, job.constraint.latency_s))
    elif found.progress.state == "loading":
        click.echo("loading the model")
    if (words := _how_to_go_on(found, job.output)) is not None:
        click.echo(textwrap.fill(words, WIDTH, break_on_hyphens=False))


def _how_to_go_on(found: RunStatus, output: Path) -> str | None:
    state, kept = found.progress.state, f"{found.num_results} results are in results.jsonl"
    if found.num_held:
        kept += f" and {found.num_held} in held.jsonl, until those before them are done"
    if found.is_alive is False and 0 < found.progress.total <= found.progress.done and (
            not (output / "metrics.json").is_file()):
        return ("all results are there, but the command was killed before it wrote metrics.json "
                "and the report: the same command writes them, and runs nothing again")
    if state == "stopped":
        return f"{kept}; the same command goes on after them"
    if state == "died":
        return ("no process works on it any more (it failed, or it or the machine was killed): "
                f"{kept}; the same command goes on after them")
    return None
