"""Engines side by side: what each comes to with its own best schedule, by whose times, and why it
does not execute the job."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from xgpt.core.constraint import Bound
from xgpt.core.schedule import Schedule
from xgpt.core.units import format_seconds
from xgpt.report.figures import plain
from xgpt.report.policy_words import controls_line
from xgpt.report.table import fact, paragraph, table


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
