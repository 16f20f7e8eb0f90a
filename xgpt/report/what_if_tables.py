"""What `xgpt schedule` shows when asked for more than the schedule: what more of each limit would
bring, ways to go on from a deployed schedule, drifting lengths, and engines side by side."""

import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from xgpt.core.constraint import Bound, Constraint
from xgpt.core.schedule import Schedule
from xgpt.core.units import format_bytes, format_seconds
from xgpt.report.figures import plain
from xgpt.report.table import fact, paragraph, shown_width, table
from xgpt.report.words import controls_line
from xscheduler.drift import DriftRow
from xscheduler.live.given_stages import Way
from xscheduler.live.reschedule import Reschedule, variables
from xscheduler.price import Offer

_INDENT = "  "


def offers_table(offers: Sequence[Offer]) -> str:
    """What a little more of each limit would bring."""
    return "\n".join(["What more would bring", *(
        textwrap.fill(offer.sentence, shown_width(), initial_indent=_INDENT, break_on_hyphens=False,
                      subsequent_indent=2 * _INDENT) for offer in offers)])


def reschedule_table(ways: Reschedule) -> str:
    """The three ways to go on from a deployed schedule, and which is recommended."""
    lines = [fact("keep", _way(ways.keep)), fact("adjust", _way(ways.adjust)),
             fact("redeploy", _way(ways.redeploy) + _cost(ways)), fact("advice", ways.sentence)]
    return "\n".join(["From the schedule that is deployed", *lines])


def _way(way: Way) -> str:
    if way.estimate is None:
        return way.reason or "-"
    e = way.estimate
    text = (f"{plain(e.figures.throughput_qps)} queries/s, latency "
            f"{format_seconds(e.figures.latency_s)}: {variables(e)}")
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
    """The schedule under changed output lengths, beside the best schedule for each."""
    body = [(row.statistic, _change(row), _known(row.kept.throughput_qps, plain),
             "-" if row.best is None else _known(row.best.throughput_qps, plain),
             _known(row.kept.queries_s, format_seconds), _kept(row.keeps_queries),
             _known(row.kept.sequence_s, format_seconds), _kept(row.keeps_sequence))
            for row in rows]
    text = table(("changed", "by", "queries/s", "best", "all", "", "one query", ""), body,
                 right=(1, 2, 3, 4, 6))
    share = f"{constraint.quantile * 100:g} %"
    words = (f"Replayed as it is, while output lengths differ. best: the best schedule for those "
             f"lengths, without a margin. all: the latency that {share} of all queries keep. one "
             f"query: the mean latency of one as long as the planned {share} quantile. over: over "
             f"the bound by more than the replay's scatter of 2 %.")
    return f"When output lengths change\n{text}\n{paragraph(words)}"


def _change(row: DriftRow) -> str:
    is_skewness = row.statistic == "skewness"
    change = row.change if is_skewness else row.change - 1
    return "-" if change == 0 else f"{change:+.1f}" if is_skewness else f"{change:+.0%}"


def _known(value: float, text: Callable[[float], str]) -> str:
    return "-" if math.isnan(value) else text(value)


def _kept(is_kept: bool | None) -> str:
    return "over" if is_kept is False else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRow:
    """What one engine comes to. `times_of`: which kind of times it was planned with, in a word or
    two; `times`: these times, in full. `infeasible`: why no schedule keeps the bound. `refused`:
    why it does not execute the job; nothing was planned then. `missing`: what it lacks on this
    machine. `note`: what is to be known besides."""

    engine: str
    schedule: Schedule | None = None
    times_of: str = ""
    times: str = ""
    infeasible: str = ""
    refused: tuple[str, ...] = ()
    missing: str = ""
    note: str = ""

    @property
    def is_kept(self) -> bool | None:
        """Whether its schedule keeps the bound on latency; None where nothing was planned, or
        there is no bound."""
        if self.infeasible:
            return False
        if self.schedule is None or math.isinf(self.schedule.bound.limit_s):
            return None
        return self.schedule.figures.latency_s <= self.schedule.bound.limit_s

    def to_dict(self) -> dict[str, object]:
        """Its figures, flat."""
        found: dict[str, object] = {
            "engine": self.engine, "times_of": self.times_of, "times": self.times,
            "is_kept": self.is_kept, "infeasible": self.infeasible or None,
            "refused": self.refused, "missing": self.missing or None, "note": self.note}
        if self.schedule is not None:
            estimate = self.schedule.estimate
            found |= {"policy": estimate.policy, "variables": estimate.variables,
                      "throughput_qps": estimate.figures.throughput_qps,
                      "latency_s": estimate.figures.latency_s,
                      "bound_s": self.schedule.bound.limit_s}
        return found


def engine_table(rows: Sequence[EngineRow], bound: Bound) -> str:
    """A line an engine; below, each one's controls, times, and what keeps it from more."""
    body = [(row.engine, *_figures(row), row.times_of or "-") for row in rows]
    limit = f"within {format_seconds(bound.limit_s)}" if math.isfinite(bound.limit_s) else "bound"
    lines = ["Engines, each with the schedule that is best for it",
             table(("engine", "queries/s", "latency", limit, "policy", "times"), body,
                   right=(1, 2))]
    for row in rows:
        facts = list(filter(None, (
            row.times and f"times: {row.times}", row.note, row.infeasible,
            row.missing and f"cannot run here as it is: {row.missing}")))
        if row.schedule is not None:
            facts.insert(0, controls_line(row.schedule.estimate))
        facts += [f"does not execute this job: {why}" for why in row.refused]
        lines += [fact(row.engine if index == 0 else "", text)
                  for index, text in enumerate(facts)]
    kinds = {row.times_of for row in rows if row.schedule is not None}
    if len(kinds) > 1:
        lines.append(paragraph("Times of different kinds: figures are as far apart as the times "
                               "are, besides the engines."))
    return "\n".join(lines)


def _figures(row: EngineRow) -> tuple[str, str, str, str]:
    if row.schedule is None:
        return "-", "-", "no schedule" if row.infeasible else "refused", "-"
    figures = row.schedule.figures
    kept = {True: "yes", False: "no", None: "-"}[row.is_kept]
    return (plain(figures.throughput_qps), format_seconds(figures.latency_s), kept,
            row.schedule.estimate.policy)
