"""report.html of a sweep: throughput against the bound for each policy, as in the paper's Figures 6
to 8 (cost, time and memory can be put on the axes instead), the gain over the baselines, where the
best policy changes and why, and the points that have no schedule."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from xgpt.core.policies import baselines, policy, policy_names
from xgpt.core.system.whole_file import write_atomically
from xgpt.core.units import GIB, format_bytes, format_seconds
from xgpt.report.chart import PALETTE, Axis, Chart, Mark, Series
from xgpt.report.figures import percent, plain
from xgpt.report.html_page import render_page
from xgpt.report.sweep_rows import (
    INFEASIBLE,
    OK,
    REFUSED,
    Row,
    SweepRows,
    bound_words,
    grouped,
    number_of,
    read_sweep,
)
from xgpt.report.words import counted

REPORT_NAME = "report.html"
_MOST_REASON = 300  # characters
NO_BOUND_AT = 1.25  # of the widest bound: where points without one are drawn
_BETWEEN = 0.07  # of the widest bound: between numbers below the axis
_FEW = 6  # scenarios whose gains are lines over the bound; of more, a column each
_ORDINALS = ("tightest bound", "second", "third", "fourth", "fifth", "sixth")


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
    rates = f"{best[0].throughput} queries/s {_within(best[0])}"
    if len(best) > 1:
        rates = f"from {rates} to {best[-1].throughput} {_within(best[-1])}"
    return f"{is_best}: {rates}"


def _within(winner: Winner) -> str:
    return "without a bound" if winner.bound == "none" else f"within {winner.bound}"


def winners(scenario: str, rows: Sequence[Row]) -> list[Winner]:
    """The best policy at each bound, from the tightest on."""
    found: list[Winner] = []
    good = sorted((row for row in rows if row.get("status") == OK and _rate(row)),
                  key=lambda row: (bound_of(row), -_rate(row)))
    infeasible = {(bound_of(row), str(row.get("policy"))) for row in rows
                  if row.get("status") == INFEASIBLE}
    before: dict[str, float] = {}
    tighter_s = 0.0
    for bound_s, own in itertools.groupby(good, bound_of):
        best: dict[str, Row] = {}  # of each policy, the best policy first
        for row in own:
            best.setdefault(str(row.get("chosen") or row.get("policy")), row)
        now = {name: _rate(row) for name, row in best.items()}
        first, *others = now
        found.append(Winner(
            scenario=scenario, policy=title_of(first), throughput=plain(now[first]),
            controls=str(best[first].get("controls") or "").partition(": ")[2],
            bound=bound_words(bound_s),
            ahead=f"{percent(now[first] / now[others[0]] - 1, 1)} ({title_of(others[0])})"
            if others else "", why=_why(first, before, now, has_none_before=(
                tighter_s, first) in infeasible, has_none_now={
                    name for bound, name in infeasible if bound == bound_s})))
        before, tighter_s = now, bound_s
    return found


def _why(first: str, before: dict[str, float], now: dict[str, float], *, has_none_before: bool,
         has_none_now: Collection[str]) -> str:
    """Why `first` is best now and was not under the tighter bound; both with the best first. A
    policy that no point asked for has no figure, and is not one without a schedule."""
    if not before or first == (last := next(iter(before))):
        return ""
    new = (f"{title_of(first)} rises from {plain(before[first])} to {plain(now[first])} queries/s"
           if first in before else f"{title_of(first)} keeps no tighter bound" if has_none_before
           else f"{title_of(first)} was not compared at the tighter bound")
    old = (f"{title_of(last)} from {plain(before[last])} to {plain(now[last])}" if last in now else
           f"{title_of(last)} has no schedule here" if last in has_none_now else
           f"{title_of(last)} was not compared here")
    return f"{new}; {old}"


def lacking(rows: Sequence[Row]) -> list[tuple[str, str, str, str]]:
    """(scenarios, policies, bounds, why) of points that have no schedule, those of one reason
    together."""
    without = grouped((row for row in rows if row.get("status") != OK), "reason")
    return [(_some(own, "scenario"), _some(own, "policy"), _some(own, "bound"),
             reason if len(reason) <= _MOST_REASON else f"{reason[:_MOST_REASON]} ...")
            for (reason,), own in without.items()]


def _some(rows: Sequence[Row], key: str) -> str:
    distinct = list(dict.fromkeys(str(row.get(key)) for row in rows))
    return ", ".join(distinct[:3]) + (f" and {len(distinct) - 3} more" if len(distinct) > 3 else "")


class Quantity(NamedTuple):
    """What an axis may show of a row."""

    label: str
    of: Callable[[Row], float | None]


def by_scenario(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Points that differ in copies, policy and bound alone."""
    return {scenario: own for (scenario,), own in grouped(rows, "scenario").items()}


def sweep_charts(rows: Sequence[Row]) -> list[Chart]:
    """The gain, all points at once where there are several scenarios, and a plot a scenario."""
    good = [row for row in rows if row.get("status") == OK]
    if not good:
        return []
    colours = {name: PALETTE[place % len(PALETTE)] for place, name in enumerate(
        dict.fromkeys(map(line_of, rows)))}
    scenarios = by_scenario(good)
    drawn = [chart for chart in (_gains(scenarios), _measured(good)) if chart is not None]
    if len(scenarios) > 1:
        drawn.append(_explorer("all", "All points", good, rows, colours))
    return drawn + [_explorer(f"scenario-{place}", name, own, rows, colours)
                    for place, (name, own) in enumerate(scenarios.items())]


def bound_of(row: Row) -> float:
    """In seconds; infinity for none, and where it is not known."""
    bound_s = number_of(row, "bound_s")
    return math.inf if bound_s is None else bound_s


def _rate(row: Row) -> float:
    """Queries/s; 0 where it has none."""
    return number_of(row, "throughput_qps") or 0.0


def title_of(name: str) -> str:
    """A policy's name as it is shown: `auto` is whichever is best."""
    return "best of all" if name == "auto" else (
        policy(name).title if name in policy_names() else name)


def line_of(row: Row) -> str:
    """What the line is called that a row's point is on: its policy, and the copies asked for."""
    title, copies = title_of(str(row.get("policy"))), row.get("copies")
    if copies in (None, "auto"):
        return title
    return f"{title}, {copies} {'copy' if str(copies) == '1' else 'copies'}"


def gains(rows: Sequence[Row], over: str = "") -> dict[float, float]:
    """Bound -> the best throughput of policies that are searched over that of the baseline `over`,
    or of the best baseline, where both are there."""
    found = {}
    for bound_s in sorted({bound_of(row) for row in rows}):
        here = [row for row in rows if bound_of(row) == bound_s]
        best, base = (max((_rate(row) for row in here
                           if (row.get("policy") in baselines()) == is_base
                           and (not is_base or row["policy"] == over or not over)), default=0.0)
                      for is_base in (False, True))
        if best and base:
            found[bound_s] = best / base
    return found


def _quantities(rows: Sequence[Row], place_of_none: float) -> tuple[list[Quantity], list[Quantity]]:
    """(across, up) of those that the rows have; of those across, the ones that differ."""
    def of(name: str, scale: float = 1.0) -> Callable[[Row], float | None]:
        def value(row: Row) -> float | None:
            found = number_of(row, name)
            return None if found is None or not math.isfinite(found) else found * scale
        return value

    def bound(row: Row) -> float | None:
        return place_of_none if math.isinf(bound_of(row)) else bound_of(row)

    across = [Quantity("latency bound, seconds", bound),
              Quantity("expected latency, seconds", of("latency_s")),
              Quantity("devices", of("gpus")), Quantity("copies of the model", of("replicas")),
              Quantity("time of the job, seconds", of("makespan_s")),
              Quantity("device-seconds a query", of("gpu_s_per_query"))]
    up = [Quantity("queries/s", of("throughput_qps")),
          Quantity("output tokens/s", of("output_tokens_per_s")),
          Quantity("device-seconds a query", of("gpu_s_per_query")),
          Quantity("time of the job, seconds", of("makespan_s")),
          Quantity("memory of the fullest rank, GiB", of("memory_bytes", 1 / GIB)),
          Quantity("expected latency, seconds", of("latency_s")),
          Quantity("queries/s, measured", of("measured_qps")),
          Quantity("latency P99, seconds, measured", of("measured_latency_p99_s"))]
    differ = [q for q in across if len({q.of(row) for row in rows} - {None}) > 1]
    return differ or across[:1], [q for q in up if any(q.of(row) is not None for row in rows)]


def _explorer(name: str, title: str, rows: Sequence[Row], everything: Sequence[Row],
              colours: dict[str, str]) -> Chart:
    """A line for each policy and number of copies asked for (of several scenarios: points), with
    the choice of what the axes show."""
    finite = [bound_of(row) for row in rows if math.isfinite(bound_of(row))]
    end_s = NO_BOUND_AT * max(finite, default=1.0)
    across, up = _quantities(rows, end_s)
    is_one = len({row.get("scenario") for row in rows}) == 1
    series = []
    for line, colour in colours.items():
        points = sorted((row for row in rows if line_of(row) == line), key=bound_of)
        bounded = sum(math.isfinite(bound_of(row)) for row in points)
        own: list[Row | None] = [*points]
        if is_one and 0 < bounded < len(own):
            own.insert(bounded, None)  # no line leads to a place that is no bound
        if own:
            columns = {q.label: [None if row is None else q.of(row) for row in own]
                       for q in (*across, *up)}
            series.append(Series(
                label=line, kind="line+dots" if is_one else "dots", colour=colour,
                x=columns[across[0].label], y=columns[up[0].label], columns=columns,
                notes=["" if row is None else _note(row, is_one) for row in own]))
    has_none = across[0].label.startswith("latency bound") and bool(finite) and any(
        math.isinf(bound_of(row)) for row in rows)
    missing = len({(line_of(row), row.get("bound")) for row in everything
                   if row.get("scenario") == rows[0].get("scenario")}) - len(rows) if is_one else 0
    return Chart(
        name=name, title=title, series=series, is_wide=not is_one, height=340,
        x=Axis(label=across[0].label, from_zero=True, ticks=_ticks(finite) if has_none else ()),
        y=Axis(label=up[0].label, from_zero=True),
        marks=[Mark(label="no bound", at=end_s)] if has_none else [],
        x_choices=[q.label for q in across], y_choices=[q.label for q in up],
        caption=f"{missing} of its points have no schedule; the last table says why."
        if missing > 0 else "")


def _ticks(bounds: Sequence[float]) -> list[float]:
    """The bounds themselves, but those that would stand in one another's way."""
    found = [0.0]
    for bound_s in sorted(set(bounds), reverse=True):
        if all(abs(bound_s - other) > _BETWEEN * max(bounds) for other in found):
            found.append(bound_s)
    return sorted(found)


def _note(row: Row, is_one: bool) -> str:
    """What a point is: its schedule, latency, memory and bound."""
    words = [] if is_one else [str(row.get("scenario"))]
    words.append(str(row.get("controls") or row.get("chosen") or ""))
    bound_s = bound_of(row)
    words.append("no bound" if math.isinf(bound_s) else f"bound {format_seconds(bound_s)}")
    if (latency_s := number_of(row, "latency_s")) is not None:
        words.append(f"latency {format_seconds(latency_s)}")
    if (held := number_of(row, "memory_bytes")) is not None:
        words.append(f"{format_bytes(held)} on the fullest rank")
    return "; ".join(word for word in words if word)


def _gains(scenarios: dict[str, list[Row]]) -> Chart | None:
    """The gain over the best baseline, or any other: a column a scenario, or a line of few."""
    points = [(name, rank, bound_s, gain, rows) for name, rows in scenarios.items()
              for rank, (bound_s, gain) in enumerate(gains(rows).items())]
    if not points:
        return None
    is_few = len({name for name, *_ in points}) <= _FEW
    bounds = [bound_words(b) for b in sorted({bound_s for _, _, bound_s, *_ in points})]
    x = Axis(label="latency bound", names=bounds) if is_few else Axis(
        label="", names=list(scenarios))
    by_label: dict[str, list[tuple[str, int, float, float, list[Row]]]] = {}
    for point in points:
        by_label.setdefault(point[0] if is_few else _rank_words(point[1], point[2]), []).append(
            point)
    others = {f"times {title_of(name)}'s": {scenario: gains(rows, name)
                                           for scenario, rows in scenarios.items()}
              for name in baselines() if any(row.get("policy") == name
                                             for rows in scenarios.values() for row in rows)}
    up = "times the best baseline's throughput"
    across = x.label or "scenario"
    series = [Series(
        label=label, kind="line+dots" if is_few else "dots", colour=PALETTE[place % len(PALETTE)],
        x=(names := [bound_words(b) if is_few else name for name, _, b, *_ in own]),
        y=[gain for *_, gain, _ in own],
        notes=[name if is_few else f"bound: {bound_words(b)}" for name, _, b, *_ in own],
        columns={across: names, up: [gain for *_, gain, _ in own],
                 **{words: [values[name].get(b) for name, _, b, *_ in own]
                    for words, values in others.items()}})
        for place, (label, own) in enumerate(by_label.items())]
    return Chart(name="gain", title="Gain over the baselines", series=series, x=x, is_wide=True,
                 y=Axis(label=up, from_zero=True), height=340 if is_few else 420,
                 marks=[Mark(label="as good as the baseline", at=1.0, axis="y")],
                 x_choices=[across], y_choices=[up, *others])


def _rank_words(rank: int, bound_s: float) -> str:
    return "no bound" if math.isinf(bound_s) else (
        _ORDINALS[rank] if rank < len(_ORDINALS) else "wider")


def _measured(rows: Sequence[Row]) -> Chart | None:
    """Predicted against measured throughput, of points that were run."""
    both = [(row, predicted, measured) for row in rows
            if (predicted := number_of(row, "job_throughput_qps")
                or number_of(row, "throughput_qps"))
            and (measured := number_of(row, "measured_qps"))]
    if not both:
        return None
    most = max(max(p, m) for _, p, m in both)
    return Chart(
        name="measured", title="Measured against predicted", x=Axis(
            label="predicted queries/s", from_zero=True),
        y=Axis(label="measured queries/s", from_zero=True), series=[
            Series(label="a run", kind="dots", x=[p for _, p, _ in both], y=[m for *_, m in both],
                   notes=[f"{_note(row, False)}; {plain(m / p)} times" for row, p, m in both]),
            Series(label="as predicted", x=[0.0, most], y=[0.0, most], colour="muted",
                   is_dashed=True)])
