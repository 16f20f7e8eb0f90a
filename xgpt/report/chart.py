"""Plots as data: series, axes with units, and a note for each point.

One description serves all: html_page makes it interactive, `write_image` draws it with matplotlib
(imported only there), and `rows` yields its table. Colours are names of the page's variables
(style.html.j2)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from xgpt.core.errors import MissingExtraError

Kind = Literal["line", "steps", "dots", "line+dots", "bars", "boxes"]
Value = float | str | None  # None breaks a line
if TYPE_CHECKING:
    from matplotlib.axes import Axes

PALETTE = ("decode", "encode", "good", "bad", "violet", "teal", "muted", "fair", "ink")
KIND_COLOURS = {"encode": "encode", "decode": "decode", "mixed": "violet"}  # by kind of step
SUFFIXES = (".svg", ".png", ".pdf")
_MARKERS = ("o", "s", "D", "^", "P", "X", "*")
_PIXELS = 100  # an inch
_NARROW, _WIDE = 620, 1060  # pixels
# the page's light mode (style.html.j2)
COLOURS = {"ink": "#1d2126", "muted": "#626a74", "line": "#e2e4e6", "surface": "#ffffff",
           "encode": "#d9822b", "decode": "#3b6fb6", "good": "#1d7d53", "bad": "#b83227",
           "violet": "#7a4fa3", "teal": "#1f8a8c", "fair": "#94660a"}
# Any: matplotlib types its keys as a Literal of all names, which differs between releases.
_STYLE: Any = {
    "svg.hashsalt": "xgpt",  # equal figures give equal bytes
    "svg.fonttype": "none", "font.size": 9.5, "font.family": "sans-serif",
    "text.color": COLOURS["ink"], "axes.labelcolor": COLOURS["muted"],
    "axes.edgecolor": COLOURS["line"], "xtick.color": COLOURS["line"],
    "ytick.color": COLOURS["line"], "xtick.labelcolor": COLOURS["muted"],
    "ytick.labelcolor": COLOURS["muted"], "grid.color": COLOURS["line"],
    "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False,
    "axes.grid": True, "axes.axisbelow": True, "legend.frameon": False,
    "axes.titlesize": 10.5, "axes.titlelocation": "left", "axes.titleweight": "bold"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """An axis of a plot. `label`: quantity and unit. `names`: names on the axis instead of numbers,
    top or left first. `from_zero`: whether it begins at 0. `ticks`: positions of numbers, for an
    axis with other positions, too."""

    label: str
    is_log: bool = False
    from_zero: bool = False
    names: Sequence[str] = ()
    as_percent: bool = False
    ticks: Sequence[float] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A set of points. Boxes lie on the names of the y axis, begin at `base` and are `x` long.
    `notes`: a text for each point. `columns`: further quantities of its points, by name, which the
    page offers for either axis."""

    label: str
    x: Sequence[Value]
    y: Sequence[Value]
    kind: Kind = "line"
    colour: str = "decode"
    is_dashed: bool = False
    base: Sequence[float] = ()
    notes: Sequence[str] = ()
    inside: Sequence[str] = ()  # short texts in the boxes, on the page
    columns: Mapping[str, Sequence[Value]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A line across the plot, at x or at y."""

    label: str
    at: float
    axis: Literal["x", "y"] = "x"
    colour: str = "muted"
    is_dashed: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A plot. `name`: its id and its file's name. `view`: part of the x axis shown at first."""

    name: str
    title: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    marks: Sequence[Mark] = ()
    caption: str = ""
    view: tuple[float, float] | None = None
    is_wide: bool = False
    height: int = 300  # pixels
    x_choices: Sequence[str] = ()  # names of the series' columns; the first is drawn
    y_choices: Sequence[str] = ()

    def header(self) -> tuple[str, ...]:
        """The header of the table that `rows` yields."""
        columns = self._columns()
        if any(series.base for series in self.series):
            return ("series", self.y.label or "name", f"from, {self.x.label}", "length", "note")
        return ("series", *(columns or (self.x.label, self.y.label)), "note")

    def rows(self) -> Iterator[tuple[str, ...]]:
        """Yields the points as rows of a table."""
        columns = self._columns()
        for series in self.series:
            for i, (x, y) in enumerate(zip(series.x, series.y, strict=True)):
                if y is None:
                    continue
                note = series.notes[i] if series.notes else ""
                if series.base:
                    yield series.label, _cell(y), _cell(series.base[i]), _cell(x), note
                else:
                    values = [series.columns[name][i] for name in columns] if columns else (x, y)
                    yield series.label, *map(_cell, values), note

    def _columns(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.x_choices, *self.y_choices)))


def _cell(value: Value) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else f"{value:.6g}"


def can_draw() -> bool:
    """Whether matplotlib is installed, without importing it."""
    return find_spec("matplotlib") is not None


def write_image(chart: Chart, path: Path) -> None:
    """Writes the chart as a picture to `path`, whose suffix is .svg, .png or .pdf. Raises
    MissingExtraError without matplotlib."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError("matplotlib", "report", f"drawing a {path.suffix}") from None
    dates = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    width = _WIDE if chart.is_wide else _NARROW
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width / _PIXELS, chart.height / _PIXELS), layout="constrained")
        _draw(chart, figure.subplots())
        figure.savefig(path, dpi=150, metadata=dates.get(path.suffix))


def _draw(chart: Chart, axes: Axes) -> None:
    has_boxes = any(series.kind == "boxes" for series in chart.series)
    axes.set_title(chart.title, pad=24 if has_boxes else 6)
    bars = [series for series in chart.series if series.kind == "bars"]
    for place, series in enumerate(chart.series):
        if series.kind == "boxes":
            _boxes(axes, chart, series)
        elif series.kind == "bars":
            _bars(axes, chart, series, bars.index(series), len(bars))
        else:
            _line(axes, chart, series, place)
    for letter, axis in (("x", chart.x), ("y", chart.y)):
        _scale(axes, letter, axis)
    if has_boxes:
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
    for mark in chart.marks:
        _mark(axes, mark)
    if chart.x.from_zero and not chart.x.is_log:
        axes.set_xlim(left=0)
    if chart.y.from_zero and not chart.y.is_log:
        axes.set_ylim(bottom=0)
    if chart.view is not None:
        axes.set_xlim(*chart.view)
    if len(chart.series) > 1 and has_boxes:  # above the boxes, where none can be
        axes.legend(fontsize=8.5, loc="lower left", bbox_to_anchor=(0, 1), ncols=4,
                    borderaxespad=0.2)
    elif len(chart.series) > 1:
        axes.legend(fontsize=8.5)


def _line(axes: Axes, chart: Chart, series: Series, place: int) -> None:
    x, y = _placed(chart.x, series.x), _placed(chart.y, series.y)
    has_markers = "dots" in series.kind
    axes.plot(x, y, color=COLOURS[series.colour], label=series.label,
              linestyle="none" if series.kind == "dots" else "--" if series.is_dashed else "-",
              drawstyle="steps-post" if series.kind == "steps" else "default", linewidth=1.6,
              marker=_MARKERS[place % len(_MARKERS)] if has_markers else "none", markersize=5)


def _bars(axes: Axes, chart: Chart, series: Series, place: int, of: int) -> None:
    x, y = _placed(chart.x, series.x), [float(v or 0) for v in series.y]
    width = 0.84 * (float(np.diff(x).min()) if len(x) > 1 else 1.0) / of
    axes.bar([at + (place - (of - 1) / 2) * width for at in x], y, width, label=series.label,
             color=COLOURS[series.colour])


def _boxes(axes: Axes, chart: Chart, series: Series) -> None:
    """Draws boxes side by side on their lanes."""
    lanes: dict[Any, list[tuple[float, float]]] = {}
    for lane, start, length in zip(series.y, series.base, series.x, strict=True):
        assert isinstance(length, (int, float)), f"{length = }"
        lanes.setdefault(lane, []).append((start, length))
    names, label = list(chart.y.names), series.label
    for lane, boxes in lanes.items():
        axes.broken_barh(boxes, (names.index(str(lane)) - 0.4, 0.8), color=COLOURS[series.colour],
                         edgecolor=COLOURS["surface"], linewidth=0.4, label=label)
        label = ""  # one entry of the legend


def _mark(axes: Axes, mark: Mark) -> None:
    draw = axes.axvline if mark.axis == "x" else axes.axhline
    draw(mark.at, color=COLOURS[mark.colour], linewidth=1.3,
         linestyle="--" if mark.is_dashed else "-")
    where = ((mark.at, 0.99), axes.get_xaxis_transform()) if mark.axis == "x" else (
        (0.99, mark.at), axes.get_yaxis_transform())
    axes.text(*where[0], f" {mark.label}", transform=where[1], fontsize=8, va="top" if
              mark.axis == "x" else "bottom", ha="left" if mark.axis == "x" else "right",
              rotation=90 if mark.axis == "x" else 0, color=COLOURS[mark.colour], clip_on=True)


def _scale(axes: Axes, letter: str, axis: Axis) -> None:
    own: Any = axes.xaxis if letter == "x" else axes.yaxis
    setter = axes.set_xscale if letter == "x" else axes.set_yscale
    (axes.set_xlabel if letter == "x" else axes.set_ylabel)(axis.label)
    if axis.names:
        own.set_ticks(range(len(axis.names)), labels=list(axis.names))
        return
    if axis.is_log:
        setter("log")
    if axis.ticks:
        own.set_ticks(list(axis.ticks), labels=[f"{value:g}" for value in axis.ticks])
    if axis.as_percent:
        own.set_major_formatter(lambda value, _: f"{100 * value:g} %")


def _placed(axis: Axis, values: Sequence[Any]) -> list[float]:
    """`values` as numbers: names become positions on the axis, None becomes NaN."""
    places = {name: i for i, name in enumerate(axis.names)}
    return [float(places[value]) if isinstance(value, str) else
            math.nan if value is None else float(value) for value in values]
