"""The command `xgpt sweep`."""

from pathlib import Path

import click

from xgpt.app.sweeps.sweep import refusal_of, sweep_points
from xgpt.cli.options import (
    job_options,
    print_json,
    verbose_option,
    with_seconds,
    within_seconds,
)
from xgpt.cli.terminal import Terminal, show
from xgpt.job.sweep_file import load_sweep
from xgpt.report.table import shown


@click.command()
@click.argument("file", type=click.Path(path_type=Path), metavar="JOB.yaml|SWEEP.yaml")
@job_options
@click.option("--bounds", metavar="B,B,...", help="Latency limits: seconds, inf, shares of the "
              "latency at the highest throughput, or percentiles of FT's, e.g. 5,10,50%,ft10,inf.")
@click.option("--over", multiple=True, metavar="AXIS=V,V,...",
              help="Vary model, cluster, gpus, task, engine, profile, policy (policy=all: each "
              "policy), or any dotted key of the job file; may be repeated.")
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR",
              help="Folder of the results (default of a job file: sweep/ in its output folder).")
@click.option("--horizon", type=click.Choice(("steady", "job")),
              help="steady: for a job that never ends (default). job: for the requests of the "
              "file.")
@click.option("--cores", type=click.IntRange(min=1), metavar="N",
              help="Number of planning processes (default: one per core).")
@within_seconds
@verbose_option
@click.option("--best", "is_best", is_flag=True,
              help="Of jobs with arrivals: give up a point once it cannot have the highest "
              "capacity for its price.")
@click.option("--run", "runs", is_flag=True,
              help="Also run every point on this machine, one after the other.")
def sweep(file: Path, overrides: tuple[str, ...], as_json: bool, bounds: str | None,
          over: tuple[str, ...], out: Path | None, horizon: str | None,
          cores: int | None, max_seconds: float | None, is_best: bool, runs: bool,
          is_verbose: bool) -> None:
    """Plan a grid of latency limits, policies, models or clusters: throughput against latency.

    The same command continues a stopped sweep.
    """
    spec = load_sweep(file, overrides=with_seconds(overrides, max_seconds), over=over,
                      bounds=bounds, out=out, horizon=horizon)
    terminal = Terminal(is_verbose=is_verbose)
    swept = sweep_points(spec, terminal, cores=cores, runs=runs, is_best=is_best)
    facts = {"name": swept.name, "folder": swept.folder, "files": swept.files,
             "points": len(swept.rows), "rows": swept.rows}
    refusal = refusal_of(swept)
    if refusal is not None:
        refusal.details = facts
    if as_json and refusal is None:
        print_json(facts)
    elif not as_json:
        show(str(swept))
        if is_verbose:
            show(f"\n{swept.details}")
        *others, last = swept.files
        for path in others:
            terminal.detail(f"written: {shown(path)}")
        terminal.say(f"page: {shown(last)}   settings: --verbose")
    if refusal is not None:
        raise refusal
