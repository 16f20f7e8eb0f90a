"""`xgpt sweep`: the best throughput at several latency bounds, the trade-off a user chooses on."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import click

from xgpt.cli.options import job_arguments, print_json
from xgpt.cli.session import Session, find, open_session, timing_of
from xgpt.errors import InfeasibleError, InputError, Mistake
from xgpt.schedule import Schedule
from xgpt.units import format_seconds, parse_seconds
from xprofiler.timing import TimingSource

_SHARES = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0)  # of the latency that throughput alone would choose


@click.command()
@job_arguments
@click.option("--bounds", metavar="S,S,...", help="Latency bounds in seconds, e.g. 5,10,inf; "
              "default: shares of the latency at the highest throughput.")
def sweep(job_file: Path, overrides: tuple[str, ...], as_json: bool, bounds: str | None) -> None:
    """Throughput against the latency bound."""
    session = open_session(job_file, overrides, fetch=False)
    timing = timing_of(session)
    given = _parse(bounds) if bounds is not None else _default_bounds(session, timing)
    rows = [(bound, _at(session, timing, bound)) for bound in given]
    if as_json:
        print_json({"bounds": [
            {"bound_s": bound, **(found.to_dict() if isinstance(found, Schedule)
                                  else {"infeasible": found})} for bound, found in rows]})
        return
    click.echo("bound     throughput    latency   encode  decode      decode    TP")
    click.echo("          queries/s               batch   iterations  batch     degree x GPUs")
    for bound, found in rows:
        label = f"{format_seconds(bound):<9}"
        if isinstance(found, str):
            click.echo(f"{label} none: {found.splitlines()[0][:66]}")
            continue
        e = found.estimate
        click.echo(f"{label} {e.throughput_qps:<13.4g} {format_seconds(e.latency_s):<9} "
                   f"{e.encode_batch:<7} {e.decode_iterations:<11} {e.decode_batch:<9.4g} "
                   f"{e.tp_degree} x {e.tp_gpus}")


def _at(session: Session, timing: TimingSource, bound_s: float) -> Schedule | str:
    """The best schedule at this bound, or why there is none."""
    constraint = replace(session.problem.constraint, latency_s=bound_s)
    problem = replace(session.problem, constraint=constraint)
    try:
        return find(replace(session, problem=problem), timing)
    except InfeasibleError as why:
        return str(why)


def _default_bounds(session: Session, timing: TimingSource) -> list[float]:
    best = _at(session, timing, math.inf)
    if isinstance(best, str):
        raise InfeasibleError(best)
    return [float(f"{share * best.estimate.latency_s:.3g}") for share in _SHARES] + [math.inf]


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
