"""`xgpt simulate`: a given schedule's Estimate, and a replay that checks it."""

from pathlib import Path

import click

from xgpt.app.opened import open_file
from xgpt.app.schedule import settled
from xgpt.app.simulate import simulate_job
from xgpt.cli.options import (
    check_writable,
    job_arguments,
    print_json,
    with_seconds,
    within_seconds,
)
from xgpt.cli.terminal import Terminal, say, show
from xgpt.core.errors import MissingExtraError
from xgpt.core.schedule_file import load_schedule
from xgpt.report.chart import SUFFIXES, can_draw


@click.command()
@job_arguments
@click.option("--schedule", "schedule_file", type=click.Path(path_type=Path), metavar="FILE",
              help="A schedule.json; default: the control variables of the job's `schedule:`.")
@click.option("--timeline", "timeline_file", type=click.Path(path_type=Path), metavar="FILE",
              help="Draw the replay's steady state: FILE.html, .svg, .png or .pdf; and "
              "FILE.trace.json.gz for Perfetto.")
@within_seconds
def simulate(job_file: Path, overrides: tuple[str, ...], as_json: bool,
             schedule_file: Path | None, timeline_file: Path | None,
             max_seconds: float | None) -> None:
    """Estimate a given schedule: throughput, latency, memory; replayed as a check."""
    pictures = [] if timeline_file is None else _picture_files(timeline_file)
    for path in pictures if timeline_file is None else [timeline_file, *pictures]:
        check_writable(path, "--timeline")
    given = None if schedule_file is None else load_schedule(schedule_file).estimate
    opened, timing = settled(open_file(
        job_file, with_seconds(overrides, max_seconds), Terminal()), given)
    simulation = simulate_job(opened, timing, given)
    if pictures:
        simulation.draw(*pictures)
    if as_json:
        print_json(simulation.to_dict())
        return
    show(str(simulation))
    for path in pictures:
        say(f"written: {path}")


def _picture_files(path: Path) -> list[Path]:
    """[picture, trace] of `--timeline FILE`: a page where the name does not say otherwise, and
    FILE.trace.json.gz, whatever dots FILE has."""
    if path.suffix in SUFFIXES and not can_draw():
        raise MissingExtraError("matplotlib", "report", f"drawing a {path.suffix} (a name that "
                                "ends in .html needs jinja2 alone)")
    is_named = path.suffix in (*SUFFIXES, ".html")
    stem = path.stem if is_named else path.name
    return [path if is_named else path.with_name(f"{stem}.html"),
            path.with_name(f"{stem}.trace.json.gz")]
