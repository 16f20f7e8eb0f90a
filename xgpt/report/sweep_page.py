"""report.html of a sweep: throughput against the bound, gains, where the best policy changes and
why, and the points that have no schedule."""

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from xgpt.core.units import format_seconds
from xgpt.core.whole_file import write_atomically
from xgpt.report.chart import Chart
from xgpt.report.figures import percent, plain
from xgpt.report.html_page import render_page
from xgpt.report.sweep_charts import bound_of, by_scenario, gains, sweep_charts, title_of
from xgpt.report.sweep_rows import INFEASIBLE, OK, REFUSED, Row, SweepRows, number_of, read_sweep
from xgpt.report.words import counted

REPORT_NAME = "report.html"
_MOST_REASON = 300  # characters


class Winner(NamedTuple):
    """The best policy of a scenario under a bound; `why` where it is another than under the
    tighter one."""

    scenario: str
    bound: str
    policy: str
    throughput: str
    ahead: str  # of the next best, by policy
    controls: str
    why: str


def write_sweep_page(folder: Path, path: Path | None = None) -> Path:
    """Writes the page of the sweep in `folder`, which may be going on still, to `path`, by default
    its report.html, and returns that. Raises InputError where there is no sweep,
    MissingExtraError without jinja2."""
    sweep = read_sweep(folder)
    drawn = sweep_charts(sweep.rows)
    path = path or folder / REPORT_NAME
    write_atomically(path, render_page("sweep.html.j2", REPORT_NAME, drawn, **_context(
        sweep, drawn)))
    return path


def _context(sweep: SweepRows, drawn: Sequence[Chart]) -> dict[str, Any]:
    meta, rows = sweep.meta, sweep.rows
    scenarios = by_scenario(rows)
    counts = Counter(str(row.get("status")) for row in rows)
    found = [gain for own in scenarios.values() for gain in gains(own).values()]
    tiles = [("Points", f"{len(rows):,}", f"of {meta.get('points', len(rows))}"),
             ("With a schedule", f"{counts[OK]:,}", f"{counts[INFEASIBLE]} infeasible, "
              f"{counts[REFUSED]} refused"),
             ("Gain, median", plain(float(np.median(found))) if found else "-",
              "times the best baseline" if found else "no baseline to compare with"),
             ("Time of the sweep",
              format_seconds(float(meta["seconds"])) if meta.get("seconds") else "-", "")]
    state = str(meta.get("state"))
    return {
        "name": str(meta.get("name")), "tiles": tiles,
        "headline": headline(rows),
        "banner": None if state == "done" else
        f"This sweep is not done ({state}): the same command goes on with it.",
        "overview": [chart for chart in drawn if not chart.name.startswith("scenario-")],
        "charts": [chart for chart in drawn if chart.name.startswith("scenario-")],
        "winners": [winner for name, own in scenarios.items() for winner in winners(name, own)],
        "lacking": lacking(rows), "axes": [
            (str(axis.get("title")), ", ".join(map(str, axis.get("values", ()))))
            for axis in meta.get("axes", ())],
        "times": sorted({str(row["times"]) for row in rows if row.get("times")}),
        "source": str(meta.get("source", ""))}


def headline(rows: Sequence[Row]) -> str:
    """Which policies are best how often, and how fast the slowest and the fastest of them are."""
    scenarios = by_scenario(rows)
    said = [counted(len(scenarios), "scenario")] * (len(scenarios) != 1) + [
        counted(len(rows), "point")]
    best = [winner for name, own in scenarios.items() for winner in winners(name, own)]
    if not best:
        return f"{', '.join(said)}, none with a schedule" if rows else said[-1]
    (name, count), *others = Counter(winner.policy for winner in best).most_common()
    is_best = f"{name} is best" + (f" in {count} of {counted(len(best), 'case')}" if others else "")
    is_best += "".join(f", {other} in {times}" for other, times in others)
    if len(scenarios) > 1:
        return f"{', '.join(said)}: {is_best}"
    rates = f"{best[0].throughput} queries/s {_bound_words(best[0])}"
    if len(best) > 1:
        rates = f"from {rates} to {best[-1].throughput} {_bound_words(best[-1])}"
    return f"{is_best}: {rates}"


def _bound_words(winner: Winner) -> str:
    return "without a bound" if winner.bound == "none" else f"within {winner.bound}"


def winners(scenario: str, rows: Sequence[Row]) -> list[Winner]:
    """The best policy at each bound, from the tightest on."""
    found: list[Winner] = []
    good = [row for row in rows if row.get("status") == OK and number_of(row, "throughput_qps")]
    before: dict[str, float] = {}
    best_before = None
    for bound_s in sorted({bound_of(row) for row in good}):
        rates: dict[str, float] = {}
        by_policy: dict[str, Row] = {}
        for row in good:
            if bound_of(row) == bound_s:
                name = str(row.get("chosen") or row.get("policy"))
                rate = number_of(row, "throughput_qps") or 0.0
                if rate > rates.get(name, 0.0):
                    rates[name], by_policy[name] = rate, row
        first, *others = sorted(rates, key=lambda name: -rates[name])
        controls = str(by_policy[first].get("controls") or "").partition(": ")[2]
        found.append(Winner(
            scenario=scenario, controls=controls, policy=title_of(first),
            throughput=plain(rates[first]),
            bound="none" if math.isinf(bound_s) else format_seconds(bound_s),
            ahead=f"{percent(rates[first] / rates[others[0]] - 1, 1)} ({title_of(others[0])})"
            if others else "", why=_why(first, best_before, before, rates)))
        before, best_before = rates, first
    return found


def _why(first: str, best_before: str | None, before: dict[str, float],
         rates: dict[str, float]) -> str:
    """Why `first` is best now and was not under the tighter bound."""
    if best_before is None or first == best_before:
        return ""
    new = (f"{title_of(first)} rises from {plain(before[first])} to {plain(rates[first])} queries/s"
           if first in before else f"{title_of(first)} keeps no tighter bound")
    old = (f"{title_of(best_before)} from {plain(before[best_before])} to "
           f"{plain(rates[best_before])}" if best_before in rates else
           f"{title_of(best_before)} has no schedule here")
    return f"{new}; {old}"


def lacking(rows: Sequence[Row]) -> list[tuple[str, str, str, str]]:
    """(scenarios, policies, bounds, why) of points that have no schedule, those of one reason
    together."""
    by_reason: dict[str, list[Row]] = {}
    for row in rows:
        if row.get("status") != OK:
            reason = str(row.get("reason") or row.get("status"))
            by_reason.setdefault(reason, []).append(row)
    return [(_some(own, "scenario"), _some(own, "policy"), _some(own, "bound"),
             reason if len(reason) <= _MOST_REASON else f"{reason[:_MOST_REASON]} ...")
            for reason, own in by_reason.items()]


def _some(rows: Sequence[Row], key: str) -> str:
    distinct = list(dict.fromkeys(str(row.get(key)) for row in rows))
    return ", ".join(distinct[:3]) + (f" and {len(distinct) - 3} more" if len(distinct) > 3 else "")
