"""`xgpt sweep`: the best throughput at several latency bounds, the trade-off a user chooses on."""

from __future__ import annotations

import math
from pathlib import Path

import click

from xgpt.app.session import open_session, timing_of
from xgpt.cli.options import job_arguments, print_json
from xgpt.cli.terminal import Terminal, say
from xgpt.core.errors import InfeasibleError, InputError, Mistake
from xgpt.core.schedule import Schedule
from xgpt.core.schedule_file import flat
from xgpt.core.units import parse_seconds
from xgpt.report.sweep_table import sweep_table
from xscheduler.planner import Planner, PlanOptions

_SHARES = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0)  # of the latency that throughput alone would choose


@click.command()
@job_arguments
@click.option("--bounds", metavar="S,S,...", help="Latency bounds in seconds, e.g. 5,10,inf; "
              "default: shares of the latency at the highest throughput.")
def sweep(job_file: Path, overrides: tuple[str, ...], as_json: bool, bounds: str | None) -> None:
    """Throughput against the latency bound."""
    session = open_session(job_file, overrides, Terminal(), fetch=False)
    planner = Planner(session.problem, timing_of(session), PlanOptions(horizon="steady"), tell=say)
    given = _parse(bounds) if bounds is not None else _default_bounds(planner)
    rows = [(bound, _at(planner, bound)) for bound in given]
    if as_json:
        print_json({"bounds": [
            {"bound_s": bound, **(flat(found) if isinstance(found, Schedule)
                                  else {"infeasible": found})} for bound, found in rows]})
        return
    click.echo(sweep_table(rows))


def _at(planner: Planner, bound_s: float) -> Schedule | str:
    """The best schedule at this bound, or why there is none."""
    try:
        return planner.plan(bound_s)
    except InfeasibleError as why:
        return str(why)


def _default_bounds(planner: Planner) -> list[float]:
    best = _at(planner, math.inf)
    if isinstance(best, str):
        raise InfeasibleError(best)
    return [float(f"{share * best.estimate.figures.latency_s:.3g}") for share in _SHARES] + [math.inf]


def _parse(text: str) -> list[float]:
    bounds = []
    for part in text.split(","):
        try:
            bounds.append(parse_seconds(part))
        except ValueError as cause:
            raise InputError([Mistake(file="--bounds", line=None, key="bound", value=part,
                                      allowed=str(cause))]) from None
        if not bounds[-1] > 0:
            raise InputError([Mistake(file="--bounds", line=None, key="bound", value=part,
                                      allowed="more than 0 seconds")])
    return bounds
