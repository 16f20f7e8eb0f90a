"""report.html of a sweep: throughput against the latency limit for each policy, as in the paper's
Figures 6 to 8, with other quantities for the axes to choose. It shows where the best policy changes
and why, and the points without a schedule."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from xgpt.core.system.whole_file import write_atomically
from xgpt.core.units import GIB, format_bytes, format_seconds
from xgpt.report import sweep_served as service
from xgpt.report.chart import PALETTE, Axis, Chart, Mark, Series
from xgpt.report.figures import plain
from xgpt.report.html_page import render_page
from xgpt.report.sweep_rows import (
    GIVEN_UP,
    INFEASIBLE,
    OK,
    REFUSED,
    Row,
    SweepRows,
    all_winners,
    bound_of,
    bound_words,
    grouped,
    headline,
    lacking,
    line_of,
    number_of,
    rate_of,
    rate_words,
    read_sweep,
    title_of,
)

REPORT_NAME = "report.html"
NO_BOUND_AT = 1.25  # chosen: times the widest limit, where points without one are drawn
_BETWEEN = 0.07  # chosen: of the widest limit, least distance of numbers below the axis


def write_sweep_page(folder: Path, path: Path | None = None) -> Path:
    """Writes the page of the sweep in `folder`, finished or not, and returns its path. `path`:
    default report.html in the folder. Raises InputError if there is no sweep, MissingExtraError
    without jinja2."""
    sweep = read_sweep(folder)
    drawn = sweep_charts(sweep.rows)
    path = path or folder / REPORT_NAME
    write_atomically(path, render_page("sweep.html.j2", REPORT_NAME, drawn, **_context(
        sweep, drawn)))
    return path


def _context(sweep: SweepRows, drawn: Sequence[Chart]) -> dict[str, Any]:
    meta, rows = sweep.meta, sweep.rows
    counts, is_served = Counter(str(row.get("status")) for row in rows), service.are_served(rows)
    best = max((row for row in rows if row.get("status") == OK), default={}, key=rate_of)
    tiles = [(f"Best {rate_words(rows)}", plain(rate_of(best)) if best else "-",
              f"{title_of(str(best.get('chosen') or best.get('policy')))} on "
              f"{best.get('gpus') or '?'} devices, limit: {bound_words(bound_of(best))}"
              if best else ""),
             ("Points", f"{len(rows):,}", f"of {meta.get('points', len(rows))}"),
             ("With a schedule", f"{counts[OK]:,}", ", ".join(
                 f"{counts[status]} {status}" for status in (INFEASIBLE, REFUSED, GIVEN_UP)
                 if counts[status])),
             ("Time of the sweep",
              format_seconds(float(meta["seconds"])) if meta.get("seconds") else "-", "")]
    if is_served:
        top = max(rows, key=service.worth_of)
        tiles[0] = ("Best capacity per price", plain(service.worth_of(top)),
                    str(top["deployment"]))
    state = str(meta.get("state"))
    return {
        "name": str(meta.get("name")), "tiles": tiles,
        "headline": service.served_headline(rows) if is_served else headline(rows),
        "banner": None if state == "done" else
        f"This sweep is not done ({state}): the same command goes on with it.",
        "served": service.served_tables(rows) if is_served else [],
        "charts": drawn, "winners": (best_rows := [] if is_served else all_winners(rows)),
        "columns": {name: any(getattr(one, name) not in ("", "-") for one in best_rows)
                    for name in ("upper", "second", "why")} | {
            "scenario": len({one.scenario for one in best_rows}) > 1},
        "lacking": lacking(rows), "axes": [
            (str(axis.get("title")), ", ".join(
                title_of(str(value)) if axis.get("name") == "policy" else str(value)
                for value in axis.get("values", ())))
            for axis in meta.get("axes", ())],
        "times": sorted({str(row["times"]) for row in rows if row.get("times")}),
        "source": str(meta.get("source", ""))}


class Quantity(NamedTuple):
    """A quantity of a row that an axis can show."""

    label: str
    of: Callable[[Row], float | None]


def sweep_charts(rows: Sequence[Row]) -> list[Chart]:
    """A chart of all points, if there are several scenarios, and one for each scenario."""
    if service.are_served(rows) and not service.lines_of(rows):
        return service.served_charts(rows)
    good = [row for row in rows if row.get("status") == OK or row.get("attainment") is not None]
    if not good:
        return []
    colours = {name: PALETTE[place % len(PALETTE)] for place, name in enumerate(
        dict.fromkeys(map(line_of, rows)))}
    scenarios = grouped(good, "scenario")
    drawn = [_explorer("all", "All points", good, rows, colours)] if len(scenarios) > 1 else []
    return drawn + [_explorer(f"scenario-{place}", name, own, rows, colours)
                    for place, ((name,), own) in enumerate(scenarios.items())]


def _quantities(rows: Sequence[Row], place_of_none: float) -> tuple[list[Quantity], list[Quantity]]:
    """Quantities (for the x axis, for the y axis) that the rows have; for x only those that differ
    between rows."""
    def of(name: str, scale: float = 1.0) -> Callable[[Row], float | None]:
        def value(row: Row) -> float | None:
            found = number_of(row, name)
            return None if found is None or not math.isfinite(found) else found * scale
        return value

    def bound(row: Row) -> float | None:
        return place_of_none if math.isinf(bound_of(row)) else bound_of(row)

    across = [Quantity("latency limit, seconds", bound),
              Quantity("expected latency, seconds", of("latency_s")),
              Quantity("requests/s that arrive", of("rate")),
              Quantity("scale of the limits", of("scale")),
              Quantity("devices", of("gpus")), Quantity("replicas", of("replicas")),
              Quantity("time of the job, seconds", of("makespan_s")),
              Quantity("device-seconds per request", of("gpu_s_per_query"))]
    up = [Quantity("share within all limits", of("attainment")),
          Quantity("capacity, requests/s", of("capacity_qps")),
          Quantity("TTFT P90, seconds", of("ttft_p90_s")),
          Quantity("TPOT P99, seconds", of("tpot_p99_s")),
          Quantity("requests/s of the job", of("job_throughput_qps")),
          Quantity("steady requests/s", of("throughput_qps")),
          Quantity("steady output tokens/s", of("output_tokens_per_s")),
          Quantity("device-seconds per request", of("gpu_s_per_query")),
          Quantity("time of the job, seconds", of("makespan_s")),
          Quantity("memory of the fullest rank, GiB", of("memory_bytes", 1 / GIB)),
          Quantity("expected latency, seconds", of("latency_s")),
          Quantity("requests/s, measured", of("measured_qps")),
          Quantity("latency P99, seconds, measured", of("measured_latency_p99_s"))]
    differ = [q for q in across if len({q.of(row) for row in rows} - {None}) > 1]
    return differ or across[:1], [q for q in up if any(q.of(row) is not None for row in rows)]


def _explorer(name: str, title: str, rows: Sequence[Row], everything: Sequence[Row],
              colours: dict[str, str]) -> Chart:
    """A chart with a line for each policy and number of replicas asked for (points, if there are
    several scenarios), with choices for the axes."""
    finite = [bound_of(row) for row in rows if math.isfinite(bound_of(row))]
    end_s = NO_BOUND_AT * max(finite, default=1.0)
    across, up = _quantities(rows, end_s)
    is_one = len({row.get("scenario") for row in rows}) == 1
    series = []
    for line, colour in colours.items():
        points = sorted((row for row in rows if line_of(row) == line), key=lambda row: (
            bound_of(row), *(number_of(row, axis) or 0.0 for axis in service.LINES)))
        bounded = sum(math.isfinite(bound_of(row)) for row in points)
        own: list[Row | None] = [*points]
        if is_one and 0 < bounded < len(own):
            own.insert(bounded, None)  # no line leads to points without a limit
        if own:
            columns = {q.label: [None if row is None else q.of(row) for row in own]
                       for q in (*across, *up)}
            series.append(Series(
                label=line, kind="line+dots" if is_one else "dots", colour=colour,
                x=columns[across[0].label], y=columns[up[0].label], columns=columns,
                notes=["" if row is None else _note(row, is_one) for row in own]))
    has_none = across[0].label.startswith("latency limit") and bool(finite) and any(
        math.isinf(bound_of(row)) for row in rows)
    missing = len({(line_of(row), row.get("bound")) for row in everything
                   if row.get("scenario") == rows[0].get("scenario")}) - len(rows) if is_one else 0
    return Chart(
        name=name, title=title, series=series, is_wide=not is_one, height=340,
        x=Axis(label=across[0].label, from_zero=True, ticks=_ticks(finite) if has_none else ()),
        y=Axis(label=up[0].label, from_zero=True),
        marks=[Mark(label="no limit", at=end_s)] if has_none else [],
        x_choices=[q.label for q in across], y_choices=[q.label for q in up],
        caption=f"{missing} of its points have no schedule; the last table says why."
        if missing > 0 else "")


def _ticks(bounds: Sequence[float]) -> list[float]:
    """The limits to number on the axis, without those too close to others."""
    found = [0.0]
    for bound_s in sorted(set(bounds), reverse=True):
        if all(abs(bound_s - other) > _BETWEEN * max(bounds) for other in found):
            found.append(bound_s)
    return sorted(found)


def _note(row: Row, is_one: bool) -> str:
    """Words for a point: its schedule, limit, latency and memory."""
    words = [] if is_one else [str(row.get("scenario"))]
    words.append(str(row.get("controls") or row.get("chosen") or ""))
    bound_s = bound_of(row)
    words.append("no limit" if math.isinf(bound_s) else f"limit {format_seconds(bound_s)}")
    if (latency_s := number_of(row, "latency_s")) is not None:
        words.append(f"latency {format_seconds(latency_s)}")
    if (held := number_of(row, "memory_bytes")) is not None:
        words.append(f"{format_bytes(held)} on the fullest rank")
    return "; ".join(word for word in words if word)
