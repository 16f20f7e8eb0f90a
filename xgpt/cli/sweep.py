"""`xgpt sweep`: the best throughput at several latency bounds, the trade-off a user chooses on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import click

from xgpt.app.session import Session, open_session, timing_of, with_room
from xgpt.cli.options import job_arguments, print_json
from xgpt.cli.terminal import Terminal
from xgpt.core.errors import InfeasibleError, InputError, Mistake
from xgpt.core.schedule import Schedule
from xgpt.core.schedule_file import flat
from xgpt.core.units import format_seconds, parse_seconds
from xgpt.report.table import fact, table
from xscheduler.planner import Planner

_SHARES = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0)  # of the latency that throughput alone would choose


@click.command()
@job_arguments
@click.option("--bounds", metavar="S,S,...", help="Latency bounds in seconds, e.g. 5,10,inf; "
              "default: shares of the latency at the highest throughput.")
def sweep(job_file: Path, overrides: tuple[str, ...], as_json: bool, bounds: str | None) -> None:
    """Throughput against the latency bound."""
    session = open_session(job_file, overrides, Terminal(), fetch=False)
    planner = Planner(session.problem, timing_of(session))
    given = _parse(bounds) if bounds is not None else _default_bounds(session, planner)
    rows = [(bound, _at(session, planner, bound)) for bound in given]
    if as_json:
        print_json({"bounds": [
            {"bound_s": bound, **(flat(found) if isinstance(found, Schedule)
                                  else {"infeasible": found})} for bound, found in rows]})
        return
    click.echo(_table(rows))
    refused = [why for _, why in rows if isinstance(why, str)]
    if refused:
        click.echo(fact("infeasible", refused[-1]))


def _table(rows: Sequence[tuple[float, Schedule | str]]) -> str:
    has_margin = any(isinstance(found, Schedule) and found.margin.factor > 1 for _, found in rows)
    header = ("bound", "policy", "queries/s", "latency", "encode", "iterations", "groups",
              "TP", *(("margin",) if has_margin else ()))
    body = [_row(bound, found, has_margin) for bound, found in rows]
    return table(header, body, right=(2, 4, 5, 6, 8))


def _row(bound_s: float, found: Schedule | str, has_margin: bool) -> tuple[str, ...]:
    if isinstance(found, str):
        return (format_seconds(bound_s), "infeasible", *("-",) * (7 if has_margin else 6))
    e = found.estimate
    shared = (format_seconds(bound_s), e.policy, f"{e.figures.throughput_qps:.4g}",
              format_seconds(e.figures.latency_s), str(e.figures.encode_batch),
              str(e.figures.decode_iterations) if e.policy == "rra" else "-", str(e.deployment.num_groups),
              f"{e.deployment.tp_degree} x {e.deployment.tp_gpus}" if e.deployment.tp_degree > 1 else "-")
    return (*shared, f"{found.margin.factor - 1:.1%}") if has_margin else shared


def _at(session: Session, planner: Planner, bound_s: float) -> Schedule | str:
    """The best schedule at this bound, or why there is none."""
    try:
        return with_room(session, planner.find(bound_s))
    except InfeasibleError as why:
        return str(why)


def _default_bounds(session: Session, planner: Planner) -> list[float]:
    best = _at(session, planner, math.inf)
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
