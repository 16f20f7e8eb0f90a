"""Plans a job and analyses the plan: the gain from more of each limit, the effect of changed output
lengths on the schedule, and whether to keep, adjust or replace a deployed schedule."""

import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from xgpt.app.opened_job import OpenedJob
from xgpt.app.schedule import JobPlanner, Plan
from xgpt.core.constraint import Constraint
from xgpt.core.errors import InfeasibleError
from xgpt.core.schedule import Schedule
from xgpt.core.schedule_file import to_json
from xgpt.core.units import format_bytes, format_seconds
from xgpt.report.figures import percent, plain
from xgpt.report.table import fact, figures_of, paragraph, shown_width, table
from xscheduler.cache_sizing import with_room
from xscheduler.drift import DriftRow, drift_rows
from xscheduler.fallback import hint
from xscheduler.live.fixed_stages import Option
from xscheduler.live.reschedule import Reschedule, configuration_words, reschedule
from xscheduler.planner import Horizon, Planner, PlanOptions
from xscheduler.prefix_curve import SavedShare, saved_shares
from xscheduler.price import UNCHANGED, Offer, price


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAnalysis:
    """A plan, or the reason why there is none, and the requested analyses (None: not requested). As
    text the tables that `xgpt schedule` prints."""

    opened: OpenedJob
    horizon: Horizon
    plan: Plan | None
    infeasible: InfeasibleError | None
    hint: str  # words for what a run would do without a schedule
    offers: Sequence[Offer] | None
    drift: Sequence[DriftRow] | None
    ways: Reschedule | None
    prefixes: Sequence[SavedShare] | None = None

    def __str__(self) -> str:
        parts = [] if self.plan is None else [str(self.plan)]
        if (ways := self.ways) is not None:
            parts.append("\n".join([
                "From the schedule that is deployed", fact("keep", _way(ways.keep)),
                fact("adjust", _way(ways.adjust)),
                fact("redeploy", _way(ways.redeploy) + _cost(ways)),
                fact("advice", ways.sentence)]))
        if self.offers is not None:
            parts.append("\n".join(["What more would bring, in steady state", *(textwrap.fill(
                offer.sentence, shown_width(), initial_indent="  ", subsequent_indent="    ",
                break_on_hyphens=False) for offer in self.offers)]))
        if self.drift is not None:
            parts.append(drift_table(self.drift, self.opened.problem.constraint))
        if self.prefixes is not None:
            parts.append(saved_table(self.prefixes))
        return "\n\n".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """The job's own figures (`job`, null for a plan of the steady state), whose `times` these
        are, the keys of the schedule's file, and those of the requested analyses."""
        keys: dict[str, Any] = {} if self.plan is None else {
            "job": figures_of(self.plan.prediction), "times": self.plan.times,
            **to_json(self.plan.schedule)}
        keys["horizon"] = self.horizon
        if self.infeasible is not None:
            keys["infeasible"] = str(self.infeasible)
        asked = (("price", self.offers), ("drift", self.drift), ("reschedule", self.ways),
                 ("prefixes", self.prefixes))
        return keys | {key: value for key, value in asked if value is not None}

    @property
    def recommended(self) -> Schedule | None:
        """The schedule to deploy: the plan's, or the deployed one, kept or adjusted, where that is
        the advice; None without a plan."""
        if self.plan is None or self.ways is None or self.ways.chosen is None or (
                self.ways.choice == "redeploy"):
            return None if self.plan is None else self.plan.schedule
        schedule, chosen = self.plan.schedule, self.ways.chosen
        return with_room(schedule.changed(
            estimate=chosen, gap=schedule.proof.bound_qps / chosen.figures.throughput_qps - 1,
            explanation=(), rejected=()), self.opened.problem)


def analyze_plan(opened: OpenedJob, options: PlanOptions, *, with_price: bool = False,
                 with_drift: bool = False, with_prefixes: bool = False,
                 deployed: Schedule | None = None) -> PlanAnalysis:
    """Plans the job and makes the requested analyses. `deployed`: the schedule in use, to compare
    with."""
    plans = JobPlanner(opened, options)
    plan: Plan | None = None
    infeasible: InfeasibleError | None = None
    try:
        plan = plans.plan()
    except InfeasibleError as why:
        infeasible = why
    opened, planner = plans.of(plan)
    drift: Sequence[DriftRow] | None = None
    if with_drift and plan is not None:
        plan.opened.tell.say(
            "replaying the schedule, and the best one, on 13 changed distributions ...")
        drift = drift_rows(planner.problem, planner.timing, plan.schedule.estimate,
                           search=lambda problem: planner.without_margin(problem).estimate)
    offers: Sequence[Offer] | None = None
    if with_price:
        offers = price(planner.problem, planner.of)
        # the first says why there is no schedule, which the command says anyway
        offers = offers if offers[0].what != UNCHANGED else offers[1:]
    return PlanAnalysis(
        hint="" if infeasible is None else hint(opened.problem, planner.timing), opened=opened,
        horizon=options.horizon, plan=plan, infeasible=infeasible, offers=offers,
        ways=None if deployed is None else _ways(planner, deployed), drift=drift,
        prefixes=saved_shares(opened.problem) if with_prefixes else None)


def saved_table(rows: Sequence[SavedShare]) -> str:
    """Shares of the input tokens that prefixes save, by the tokens of them that are kept."""
    header = ("prefix tokens kept", "saved in input order", "saved in prefix order")
    return table(header, [("all" if row.kept_tokens is None else f"{row.kept_tokens:,}",
                           percent(row.in_input_order), percent(row.in_prefix_order))
                          for row in rows], right=(0, 1, 2)) if rows else "no prefix is shared"


def _ways(planner: Planner, deployed: Schedule) -> Reschedule:
    try:
        steady: Schedule | InfeasibleError = planner.steady()
    except InfeasibleError as why:
        steady = why
    limit_s = None if isinstance(steady, InfeasibleError) else (
        planner.problem.constraint.latency_s / steady.margin.factor)
    return reschedule(deployed, planner.problem, planner.timing, best=steady,
                      latency_limit_s=limit_s)


def _way(way: Option) -> str:
    if way.estimate is None:
        return way.reason or "-"
    e = way.estimate
    text = (f"{plain(e.figures.throughput_qps)} requests/s, latency "
            f"{format_seconds(e.figures.latency_s)}: {configuration_words(e)}")
    return text if way.reason is None else f"not admissible, {way.reason} ({text})"


def _cost(ways: Reschedule) -> str:
    if ways.loading is None:
        return ""
    loading, queries = ways.loading, ways.break_even_queries
    pays = ("never made up for" if math.isinf(queries) else
            "nothing else is admissible" if queries == 0 else
            f"made up for after {math.ceil(queries):,} queries")
    return (f"; loads {format_bytes(loading.total_bytes)}, {format_seconds(loading.from_dram_s)} "
            f"from DRAM or {format_seconds(loading.from_ssd_s)} from SSD: {pays}")


def drift_table(rows: Sequence[DriftRow], constraint: Constraint) -> str:
    """The text of the drift table: throughput and latencies of the schedule under changed output
    lengths, beside the best schedule for each."""
    body = [(row.statistic, _change(row), _known(row.kept.throughput_qps, plain),
             "-" if row.best is None else _known(row.best.throughput_qps, plain),
             _known(row.kept.queries_s, format_seconds), _kept(row.keeps_queries),
             _known(row.kept.sequence_s, format_seconds), _kept(row.keeps_sequence))
            for row in rows]
    text = table(("changed", "by", "requests/s", "best", "all", "", "one query", ""), body,
                 right=(1, 2, 3, 4, 6))
    share = f"{constraint.quantile * 100:g} %"
    words = (f"The same schedule in steady state, replayed with other output lengths. best: the "
             f"best schedule for those lengths, without a margin. all: the latency below which "
             f"{share} of queries are. one query: the mean latency of one as long as the planned "
             f"{share} quantile. over: above the limit by more than the replay's scatter of 2 %.")
    return f"When output lengths change\n{text}\n{paragraph(words)}"


def _change(row: DriftRow) -> str:
    is_skewness = row.statistic == "skewness"
    change = row.change if is_skewness else row.change - 1
    return "-" if change == 0 else f"{change:+.1f}" if is_skewness else f"{change:+.0%}"


def _known(value: float, text: Callable[[float], str]) -> str:
    return "-" if math.isnan(value) else text(value)


def _kept(is_kept: bool | None) -> str:
    return "over" if is_kept is False else ""
