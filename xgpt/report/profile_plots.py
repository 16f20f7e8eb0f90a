"""Plots of a Profile: an SVG for each operator and message, and a page with all of them.

Time over x beside the share of the roofline (messages: bytes a second), a colour for each degree
or link; a table of two dimensions has a row for each degree and a shade for each y."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from xgpt.core.errors import MissingExtraError
from xgpt.core.units import format_bytes, format_seconds
from xgpt.core.whole_file import write_atomically
from xgpt.report import profile_table, words
from xgpt.report.canvas import COLOURS
from xgpt.report.page import templates
from xgpt.report.plots import can_plot
from xgpt.report.profile_table import RatedPoint, points_of, profile_facts, shown_keys, shown_lines
from xgpt.report.svg import BAD, DECODE, ENCODE, GOOD, INK, MUTED, SURFACE, drawing, to_inline_svg
from xprofiler.profile import STEP_OVERHEAD, Profile, TableKey
from xprofiler.profile_file import AXES
from xprofiler.verdict import SPREAD_LIMIT, judge

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAGE_NAME = "profile.html"
_WIDTH_IN, _ROW_IN = 9.6, 3.0
_MAX_SHADES = 6
# Degrees and links: colours that differ in lightness too, and a marker each for print.
_COLORS, _MARKERS = (DECODE, ENCODE, GOOD, BAD, INK), ("o", "s", "^", "D", "v")
_NAMESPACES = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'


class _Series(NamedTuple):
    """One line of a panel. `size`: of its markers, so that lines on top of each other both show."""

    label: str
    points: list[RatedPoint]
    color: str
    marker: str
    alpha: float = 1.0
    size: float = 4.5


class _Panel(NamedTuple):
    """One row: its lines, what they differ by, and a heading where there are several rows."""

    series: list[_Series]
    legend: str = ""
    heading: str = ""


def write_profile_plots(profile: Profile, folder: Path) -> list[Path]:
    """Write `NAME.svg` for every operator and message of `profile`, and `profile.html`, into
    `folder`; the paths, the page last. Raises MissingExtraError without matplotlib or jinja2."""
    if not can_plot():
        raise MissingExtraError("matplotlib", "report", "drawing a profile")
    page = templates(PAGE_NAME).get_template("profile.html.j2")
    folder.mkdir(parents=True, exist_ok=True)
    texts, figures = {}, []  # texts: by the file's name
    for name in dict.fromkeys(key.name for key in shown_keys(profile)
                              if key.name != STEP_OVERHEAD):
        panels, left_out = _panels(profile, name)
        if panels:
            svg = _draw(name, panels)
            texts[f"{name}.svg"] = _standalone(svg)
            figures.append({"title": name.replace("_", " "), "svg": svg,
                            "caption": _caption(name, panels, left_out)})
    texts[PAGE_NAME] = page.render(
        name=words.clean(profile.metadata.model or "profile"), facts=profile_facts(profile),
        verdict=judge(profile), figures=figures, no_floor=profile_table.no_floor_reason(profile),
        overhead=[format_seconds(p.median_s) for p in profile.table(STEP_OVERHEAD)])
    for file, text in texts.items():
        write_atomically(folder / file, text)
    return [folder / file for file in texts]


def _panels(profile: Profile, name: str) -> tuple[list[_Panel], int]:
    """The rows of a figure, and how many values of y no row has a line for."""
    tables = {key: [p for p in points_of(profile, key) if p.sample.x > 0 and p.sample.median_s > 0]
              for key in shown_keys(profile) if key.name == name}
    tables = {key: points for key, points in tables.items() if points}
    colors = [_COLORS[i % len(_COLORS)] for i in range(len(tables))]
    if not any(p.sample.y for points in tables.values() for p in points):
        series = [_Series(_label(key), points, color, _MARKERS[i % len(_MARKERS)])
                  for i, ((key, points), color) in enumerate(zip(tables.items(), colors,
                                                                 strict=True))]
        return [_Panel(series)] if series else [], 0
    panels, left_out = [], 0
    for (key, points), color in zip(tables.items(), colors, strict=True):
        lines = shown_lines(points, _MAX_SHADES)
        left_out = max(left_out, len({p.sample.y for p in points}) - len(lines))
        shades = np.linspace(0.45, 1.0, len(lines)) if len(lines) > 1 else [1.0]
        series = [_Series(f"{y:,g}", lines[y], color, _MARKERS[j % len(_MARKERS)], float(alpha),
                          size=4.5 + 0.8 * (len(lines) - 1 - j))
                  for j, (y, alpha) in enumerate(zip(lines, shades, strict=True))]
        panels.append(_Panel(series, legend=AXES[name][1], heading=_label(key)))
    return panels, left_out


def _label(key: TableKey) -> str:
    degree = f"degree {key.tp_degree}" if key.tp_degree > 1 or not key.link else ""
    return words.clean(", ".join(part for part in (degree, key.link) if part))


def _draw(name: str, panels: Sequence[_Panel]) -> str:
    is_message = AXES[name][0] == "bytes"
    has_share = any(p.floor_s is not None for s in panels[0].series for p in s.points)
    columns = 2 if is_message or has_share else 1
    width_in = _WIDTH_IN if columns == 2 else 0.55 * _WIDTH_IN
    with drawing(width_in, _ROW_IN * len(panels)) as (figure, only):
        only.remove()
        rows = figure.subplots(len(panels), columns, squeeze=False, sharex=True)
        for panel, row in zip(panels, rows, strict=True):
            _times(row[0], panel, with_floor=not panel.legend)
            if is_message:
                _rates(row[1], panel)
            elif has_share:
                _shares(row[1], panel)
            for axes in row:
                _x_axis(axes, AXES[name][0], is_last=panel is panels[-1])
        highest = max(s.points[-1].sample.x for panel in panels for s in panel.series)
        title = profile_table.title_of(TableKey(name))
        return to_inline_svg(figure, name.replace("_", "-"),
                             f"Time of {title} up to {highest:,.0f} {AXES[name][0]}")


def _times(axes: Axes, panel: _Panel, *, with_floor: bool) -> None:
    for series in panel.series:
        _line(axes, series, lambda p: p.sample.median_s)
        _quartiles(axes, series)
        floors = [(p.sample.x, p.floor_s) for p in series.points if p.floor_s]
        if with_floor and floors:
            is_last = series is panel.series[-1]
            axes.plot(*zip(*floors, strict=True), color=series.color, linewidth=1,
                      linestyle=(0, (4, 3)), label="floor" if is_last else None)
    axes.set_yscale("log")
    _log_ticks(axes.yaxis, axes.get_ylim(), format_seconds)
    axes.set_ylabel("time (median)")
    _legend(axes, panel)


def _legend(axes: Axes, panel: _Panel) -> None:
    """Above the panel, where no line can be."""
    columns = 2 if max(len(s.label) for s in panel.series) > 12 else 6
    title = f"{panel.heading}, by {panel.legend}" if panel.heading else None
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, title=title,
                alignment="left", borderaxespad=0.1, borderpad=0.2, fontsize=8.5,
                title_fontsize=9.5, handlelength=1.6, columnspacing=1.2, handletextpad=0.5)


def _shares(axes: Axes, panel: _Panel) -> None:
    _from_zero(axes, panel, lambda p: 100 * (p.share or 0.0), least_top=100)
    axes.axhline(100, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
    axes.text(0.005, 100, "roofline", transform=axes.get_yaxis_transform(), fontsize=8,
              color=MUTED, va="bottom")
    axes.set_ylabel("share of the roofline, %")


def _rates(axes: Axes, panel: _Panel) -> None:
    _from_zero(axes, panel, lambda p: p.gigabytes_per_s)
    axes.set_ylabel("bytes over time, GB/s")


def _from_zero(axes: Axes, panel: _Panel, value: Callable[[RatedPoint], float],
               least_top: float = 0.0) -> None:
    """The panel's lines, within limits with room for a marker at either end."""
    for series in panel.series:
        _line(axes, series, value)
    top = max([least_top, *(value(p) for s in panel.series for p in s.points)])
    axes.set_ylim(-0.03 * top, 1.1 * top)


def _line(axes: Axes, series: _Series, value: Callable[[RatedPoint], float]) -> None:
    """Points joined by a line; noisy ones are open."""
    values = [(p.sample.x, value(p)) for p in series.points]
    common: dict[str, Any] = {"color": series.color, "alpha": series.alpha, "linewidth": 1.6,
                              "marker": series.marker, "markersize": series.size}
    solid = [i for i, p in enumerate(series.points) if not p.is_noisy]
    axes.plot(*zip(*values, strict=True), markevery=solid, label=series.label, **common)
    noisy = [v for v, p in zip(values, series.points, strict=True) if p.is_noisy]
    if noisy:
        axes.plot(*zip(*noisy, strict=True), markerfacecolor=SURFACE, markeredgewidth=1.4,
                  **{**common, "linewidth": 0, "alpha": 1.0}, zorder=3)


def _quartiles(axes: Axes, series: _Series) -> None:
    """Bars between the quartiles of the noisy points."""
    for point in series.points:
        if point.is_noisy:
            low, high = np.quantile(point.sample.samples_s, (0.25, 0.75))
            axes.plot([point.sample.x] * 2, [low, high], color=series.color, linewidth=1.2,
                      marker="_", markersize=6)


def _x_axis(axes: Axes, label: str, *, is_last: bool) -> None:
    is_bytes = label == "bytes"
    axes.set_xscale("log", base=2 if is_bytes else 10)
    axes.grid(visible=True, axis="both")
    if is_last:
        axes.set_xlabel("bytes of a message" if is_bytes else label)
    text = format_bytes if is_bytes else "{:,g}".format
    _log_ticks(axes.xaxis, axes.get_xlim(), text, is_bytes=is_bytes)


def _log_ticks(axis: Any, limits: tuple[float, float], text: Callable[[float], str], *,
               is_bytes: bool = False) -> None:
    """Labels at every decade; below two and a half decades at 1, 2 and 5 of each; of bytes, at
    every power of 2 or of 16."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    low, high = limits
    axis.set_major_locator(LogLocator(base=16 if high > 500 * low else 2) if is_bytes else
                           LogLocator(subs=(1, 2, 5) if high < 300 * low else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))
    axis.set_minor_locator(NullLocator())


def _caption(name: str, panels: Sequence[_Panel], left_out: int) -> str:
    points = [p for panel in panels for s in panel.series for p in s.points]
    parts = []
    if noisy := sum(p.is_noisy for p in points):
        parts.append(f"Open markers: {words.counted(noisy, 'point')} whose quartiles lie more than "
                     f"{SPREAD_LIMIT:.0%} of the median apart, with bars between them")
    if left_out:
        parts.append(f"Not drawn: {words.counted(left_out, 'more value')} of {AXES[name][1]}")
    if any((p.share or 0) > 1 for p in points):
        parts.append("Over 100 %: what a cache still held was not read from memory")
    return ". ".join(parts) + ("." if parts else "")


def _standalone(svg: str) -> str:
    """An inline drawing as a file of its own, in the colours of light mode and print."""
    for name, color in COLOURS.items():
        svg = svg.replace(f"var(--{name})", color)
    box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    assert box is not None, f"no viewBox: {svg[:200]}"
    width, height = box.groups()
    style = ("<style>*{stroke-linejoin:round;stroke-linecap:butt}"
             "text{font-family:sans-serif!important}</style>"
             f'<rect width="{width}" height="{height}" fill="{COLOURS["surface"]}"/>')
    svg = svg.replace("<svg", f'<svg {_NAMESPACES} width="{width}pt" height="{height}pt"', 1)
    start = svg.index(">", svg.index("<svg")) + 1
    return svg[:start] + style + svg[start:] + "\n"
