"""`xgpt sweep`: the best throughput at several latency bounds, the trade-off a user chooses on."""

from pathlib import Path

import click

from xgpt.app.opened import open_file
from xgpt.app.sweep import sweep_job
from xgpt.cli.options import job_arguments, print_json
from xgpt.cli.terminal import Terminal
from xgpt.core.errors import wrong
from xgpt.core.json_values import flat
from xgpt.core.schedule import Schedule
from xgpt.core.units import parse_seconds


@click.command()
@job_arguments
@click.option("--bounds", metavar="S,S,...", help="Latency bounds in seconds, e.g. 5,10,inf; "
              "default: shares of the latency at the highest throughput.")
def sweep(job_file: Path, overrides: tuple[str, ...], as_json: bool, bounds: str | None) -> None:
    """Throughput against the latency bound."""
    given = None if bounds is None else _parse(bounds)
    trade_off = sweep_job(open_file(job_file, overrides, Terminal()), given)
    if not as_json:
        click.echo(str(trade_off))
        return
    print_json({"bounds": [
        {"bound_s": bound_s, **(flat(answer) if isinstance(answer, Schedule)
                                else {"infeasible": answer})}
        for bound_s, answer in trade_off.rows]})


def _parse(text: str) -> list[float]:
    bounds = []
    for part in text.split(","):
        try:
            bounds.append(parse_seconds(part))
        except ValueError as cause:
            raise wrong("--bounds", "bound", part, str(cause)) from None
        if not bounds[-1] > 0:
            raise wrong("--bounds", "bound", part, "more than 0 seconds")
    return bounds
