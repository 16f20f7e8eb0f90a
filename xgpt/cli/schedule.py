"""`xgpt schedule`: the best schedule within the bound, and what was proved about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from xgpt.app.session import Session, open_session, timing_of
from xgpt.cli.options import job_arguments, print_json, writable_file
from xgpt.cli.terminal import Terminal, say
from xgpt.core.errors import InfeasibleError
from xgpt.core.json_values import plain
from xgpt.core.schedule import Schedule
from xgpt.core.schedule_file import flat, load_schedule, save_schedule
from xgpt.core.units import parse_share
from xgpt.report.choice_table import choice_table
from xgpt.report.table import schedule_table, stage_table
from xgpt.report.what_if_tables import drift_table, offers_table, reschedule_table
from xprofiler.timing import TimingSource
from xscheduler.beginning import hint
from xscheduler.drift import DriftRow, drift_rows
from xscheduler.live.reschedule import Reschedule, reschedule
from xscheduler.planner import Horizon, Planner, PlanOptions
from xscheduler.price import AS_IT_IS, Offer, price
from xscheduler.room import with_room
from xscheduler.search import GAP


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """What was asked for; None where it was not, or where there is no schedule."""

    schedule: Schedule | None
    infeasible: InfeasibleError | None
    offers: Sequence[Offer] | None = None
    drift: Sequence[DriftRow] | None = None
    ways: Reschedule | None = None

    def to_dict(self) -> dict[str, Any]:
        """One flat object: the schedule's keys, then those asked for."""
        found: dict[str, Any] = {} if self.schedule is None else flat(self.schedule)
        if self.infeasible is not None:
            found["infeasible"] = str(self.infeasible)
        for key, value in (("price", self.offers), ("drift", self.drift),
                           ("reschedule", self.ways)):
            if value is not None:
                found[key] = value
        return found


def _share(_context: click.Context, _parameter: click.Parameter, text: str) -> float:
    try:
        share = parse_share(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is no share, such as 1% or 0.01") from None
    if not 0 <= share < 1:
        raise click.BadParameter(f"{text!r} is not between 0% and 100%")
    return share


@click.command()
@job_arguments
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE",
              help="Also write the schedule to FILE (for simulate and run); with --from, the one "
              "recommended.")
@click.option("--price", "with_price", is_flag=True,
              help="What 10 % more latency, a GPU or node, and 10 % more memory would bring.")
@click.option("--drift", "with_drift", is_flag=True,
              help="What becomes of it when output lengths change (replays: a minute or two).")
@click.option("--from", "from_file", type=click.Path(path_type=Path), metavar="FILE",
              help="A schedule that is deployed: keep it, adjust it, or deploy another?")
@click.option("--gap", default=f"{GAP:.1%}", show_default=True, metavar="SHARE", callback=_share,
              help="Stop once no schedule can be better by more than this.")
@click.option("--max-nodes", type=click.IntRange(min=1), metavar="N",
              help="Stop each policy's search after N boxes of configurations.")
@click.option("--horizon", type=click.Choice(("job", "steady")), default="job", show_default=True,
              help="Plan for the job's own queries, as submit does, or for a job without end.")
def schedule(job_file: Path, overrides: tuple[str, ...], as_json: bool, out: Path | None,
             with_price: bool, with_drift: bool, from_file: Path | None, gap: float,
             max_nodes: int | None, horizon: Horizon) -> None:
    """Find the schedule with the highest throughput within the job's latency bound."""
    if out is not None:
        writable_file(out, "--out")
    current = None if from_file is None else load_schedule(from_file)
    session = open_session(job_file, overrides, Terminal(), fetch=False)
    timing = timing_of(session)
    planner = Planner(session.problem, timing, PlanOptions(
        gap=gap, max_nodes=max_nodes, horizon=horizon), tell=say)
    answer = _found(planner)
    if with_price:
        answer = replace(answer, offers=_offers(planner))
    if current is not None:
        answer = replace(answer, ways=_ways(planner, current))
    if with_drift and answer.schedule is not None:
        say("replaying the schedule, and the best one, on 13 changed distributions ...")
        answer = replace(answer, drift=drift_rows(
            session.problem, timing, answer.schedule.estimate,
            search=lambda problem: planner.without_margin(problem).estimate))
    if out is not None:
        _write(session, answer, out)
    if not as_json:
        _show(session, timing, answer)
    if answer.infeasible is not None:
        hinted = InfeasibleError(f"{answer.infeasible}{hint(session.problem, timing)}")
        hinted.details = plain(answer.to_dict())
        raise hinted
    if as_json:
        print_json(answer.to_dict())


def _found(planner: Planner) -> _Answer:
    try:
        return _Answer(schedule=planner.plan(), infeasible=None)
    except InfeasibleError as why:
        return _Answer(schedule=None, infeasible=why)


def _offers(planner: Planner) -> Sequence[Offer]:
    offers = price(planner.problem, planner.of)
    # the first says why there is no schedule now, which the command does anyway
    return offers if offers[0].what != AS_IT_IS else offers[1:]


def _ways(planner: Planner, current: Schedule) -> Reschedule:
    try:
        steady: Schedule | InfeasibleError = planner.steady()
    except InfeasibleError as why:
        steady = why
    limit_s = None if isinstance(steady, InfeasibleError) else (
        planner.problem.constraint.latency_s / steady.margin.factor)
    return reschedule(current, planner.problem, planner.timing, best=steady,
                      latency_limit_s=limit_s)


def _write(session: Session, answer: _Answer, out: Path) -> None:
    found, ways = answer.schedule, answer.ways
    if found is None:
        return
    if ways is not None and ways.chosen is not None and ways.choice != "redeploy":
        qps = ways.chosen.figures.throughput_qps
        found = with_room(found.changed(estimate=ways.chosen, gap=found.proof.bound_qps / qps - 1, explanation=(),
            rejected=()), session.problem)
    save_schedule(found, out)
    say(f"schedule written to {out}")


def _show(session: Session, timing: TimingSource, answer: _Answer) -> None:
    problem, found = session.problem, answer.schedule
    parts = []
    if found is not None:
        cluster = problem.cluster
        head = (f"{problem.model.name} on {cluster.name} ({cluster.num_devices} x "
                f"{cluster.device.name}), {problem.dtype}\ntimes: {timing.provenance()}")
        tables = [head, schedule_table(found), choice_table(found), stage_table(found)]
        parts.append("\n".join(filter(None, tables)))
    if answer.ways is not None:
        parts.append(reschedule_table(answer.ways))
    if answer.offers is not None:
        parts.append(offers_table(answer.offers))
    if answer.drift is not None:
        parts.append(drift_table(answer.drift, problem.constraint))
    if parts:
        click.echo("\n\n".join(parts))
