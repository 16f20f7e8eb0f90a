"""Plots of a Profile: a picture for each operator and message, and a page with all of them.

Time over x beside the share of the roofline (messages: bytes a second), a line for each degree or
link; a table of two dimensions has a pair of plots for each degree and a line for each y."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from xgpt.core.errors import MissingExtraError
from xgpt.core.units import format_seconds
from xgpt.core.whole_file import write_atomically
from xgpt.report import profile_table, words
from xgpt.report.chart import PALETTE, Axis, Chart, Mark, Series
from xgpt.report.html_page import render_page
from xgpt.report.image import can_draw, write_image
from xgpt.report.profile_table import RatedPoint, points_of, profile_facts, shown_keys, shown_lines
from xprofiler.profile import STEP_OVERHEAD, Profile, TableKey
from xprofiler.profile_file import AXES
from xprofiler.verdict import SPREAD_LIMIT, judge

PAGE_NAME = "profile.html"
_MOST_LINES = 6


class _Panel(NamedTuple):
    """The lines of one plot: those of all degrees, or all y of one degree (`heading`)."""

    lines: dict[str, list[RatedPoint]]
    heading: str = ""
    left_out: int = 0  # values of y


def write_profile_plots(profile: Profile, folder: Path) -> list[Path]:
    """Write `NAME.svg` for every operator and message of `profile`, and `profile.html`, into
    `folder`; the paths, the page last. Raises MissingExtraError without matplotlib or jinja2."""
    if not can_draw():
        raise MissingExtraError("matplotlib", "report", "drawing a profile")
    by_name = profile_charts(profile)
    drawn = [chart for charts in by_name.values() for chart in charts]
    page = render_page(
        "profile.html.j2", PAGE_NAME, drawn, charts=drawn, facts=profile_facts(profile),
        name=profile.metadata.model or "profile", verdict=judge(profile),
        no_floor=profile_table.no_floor_reason(profile),
        overhead=[format_seconds(p.median_s) for p in profile.table(STEP_OVERHEAD)])
    folder.mkdir(parents=True, exist_ok=True)
    for name, charts in by_name.items():
        write_image(charts, folder / f"{name}.svg", columns=2 if len(charts) > 1 else 1)
    write_atomically(folder / PAGE_NAME, page)
    return [*(folder / f"{name}.svg" for name in by_name), folder / PAGE_NAME]


def profile_charts(profile: Profile) -> dict[str, list[Chart]]:
    """The plots by the names of their operators and messages."""
    names = dict.fromkeys(key.name for key in shown_keys(profile) if key.name != STEP_OVERHEAD)
    made = {name: [chart for place, panel in enumerate(_panels(profile, name))
                   for chart in _charts(name, place, panel)] for name in names}
    return {name: charts for name, charts in made.items() if charts}


def _panels(profile: Profile, name: str) -> list[_Panel]:
    tables = {key: [p for p in points_of(profile, key) if p.sample.x > 0 and p.sample.median_s > 0]
              for key in shown_keys(profile) if key.name == name}
    tables = {key: points for key, points in tables.items() if points}
    if not tables:
        return []
    if not any(p.sample.y for points in tables.values() for p in points):
        return [_Panel({_label(key) or "time": points for key, points in tables.items()})]
    panels = []
    for key, points in tables.items():
        lines = shown_lines(points, _MOST_LINES)
        panels.append(_Panel(
            {f"{y:,g} {AXES[name][1]}": line for y, line in lines.items()}, heading=_label(key),
            left_out=len({p.sample.y for p in points}) - len(lines)))
    return panels


def _label(key: TableKey) -> str:
    degree = f"degree {key.tp_degree}" if key.tp_degree > 1 or not key.link else ""
    return ", ".join(part for part in (degree, key.link) if part)


def _charts(name: str, place: int, panel: _Panel) -> list[Chart]:
    """The plot of times, and that of shares of the roofline or of rates."""
    across = AXES[name][0]
    x = Axis(label="bytes of a message" if across == "bytes" else across, is_log=True)
    title = name.replace("_", " ") + (f", {panel.heading}" if panel.heading else "")
    times = Chart(
        name=f"{name}-{place}-time", title=title, x=x, caption=_caption(name, panel),
        y=Axis(label="time (median), seconds", is_log=True),
        series=[*_lines(panel, [[p.sample.median_s for p in points]
                                for points in panel.lines.values()]),
                *_floors(panel), *_noisy(panel)])
    if across == "bytes":
        return [times, Chart(
            name=f"{name}-{place}-rate", title=f"{title}: rate", x=x,
            y=Axis(label="bytes over time, GB/s", from_zero=True),
            series=_lines(panel, [[p.gigabytes_per_s for p in points]
                                  for points in panel.lines.values()]))]
    if not any(p.floor_s is not None for points in panel.lines.values() for p in points):
        return [times]
    return [times, Chart(
        name=f"{name}-{place}-share", title=f"{title}: share of the roofline", x=x,
        y=Axis(label="share of the roofline", as_percent=True, from_zero=True),
        marks=[Mark(label="roofline", at=1.0, axis="y")],
        series=_lines(panel, [[p.share or 0.0 for p in points]
                              for points in panel.lines.values()]))]


def _lines(panel: _Panel, values: Sequence[Sequence[float]]) -> list[Series]:
    return [Series(label=label, kind="line+dots", x=[p.sample.x for p in points], y=list(own),
                   colour=PALETTE[place % len(PALETTE)],
                   notes=[f"quartiles {p.sample.spread:.0%} of the median apart" for p in points])
            for place, ((label, points), own) in enumerate(
                zip(panel.lines.items(), values, strict=True))]


def _floors(panel: _Panel) -> list[Series]:
    """The least times, where there is one line a degree."""
    if panel.heading:
        return []
    return [Series(label=f"floor, {label}", x=[p.sample.x for p in points], is_dashed=True,
                   y=[p.floor_s for p in points], colour=PALETTE[place % len(PALETTE)])
            for place, (label, points) in enumerate(panel.lines.items())
            if any(p.floor_s for p in points)]


def _noisy(panel: _Panel) -> list[Series]:
    noisy = [p for points in panel.lines.values() for p in points if p.is_noisy]
    return [Series(label="noisy", kind="dots", colour="bad", x=[p.sample.x for p in noisy],
                   y=[p.sample.median_s for p in noisy],
                   notes=[f"quartiles {p.sample.spread:.0%} apart" for p in noisy])] * bool(noisy)


def _caption(name: str, panel: _Panel) -> str:
    points = [p for line in panel.lines.values() for p in line]
    parts = []
    if noisy := sum(p.is_noisy for p in points):
        parts.append(f"Noisy: {words.counted(noisy, 'point')} whose quartiles lie more than "
                     f"{SPREAD_LIMIT:.0%} of the median apart")
    if panel.left_out:
        parts.append(f"Not drawn: {words.counted(panel.left_out, 'more value')} of {AXES[name][1]}")
    if any((p.share or 0) > 1 for p in points):
        parts.append("Over 100 %: what a cache still held was not read from memory")
    return ". ".join(parts) + ("." if parts else "")
