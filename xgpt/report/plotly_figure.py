"""Charts as plotly figures, for a page that carries plotly.js (vendor/) and fetches nothing."""

import html
import json
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from xgpt.report.chart import Axis, Chart, Mark, Series, Value
from xgpt.report.words import clean

LIBRARY = Path(__file__).parent / "vendor" / "plotly-basic.min.js"
_MODES = {"line": "lines", "steps": "lines", "dots": "markers", "line+dots": "lines+markers"}
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star")
_MOST_INSIDE = 400  # texts inside boxes; more are drawn too slowly
_FEW = 8  # boxes have their texts beside them where they are too narrow


@cache
def library() -> str:
    """plotly.js, basic bundle."""
    return LIBRARY.read_text(encoding="utf-8")


def figures_json(charts: Sequence[Chart]) -> str:
    """The figures by their charts' names, as JSON that may stand inside a script element."""
    text = json.dumps({chart.name: figure(chart) for chart in charts}, separators=(",", ":"),
                      allow_nan=False)
    # the only ways out of a script element, and what JavaScript would take for a line's end
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def figure(chart: Chart) -> dict[str, Any]:
    """Data and layout, and what the page lets choose. Colours are names of its CSS variables, which
    its script puts in."""
    traces = [_trace(chart, series, place) for place, series in enumerate(chart.series)]
    choices = {axis: list(names) for axis, names in (("x", chart.x_choices), ("y", chart.y_choices))
               if len(names) > 1}
    columns = [{name: _values(values) for name, values in series.columns.items()}
               for series in chart.series] if choices else []
    return {"data": traces, "layout": _layout(chart), "choices": choices, "columns": columns}


def _trace(chart: Chart, series: Series, place: int) -> dict[str, Any]:
    colour = f"--{series.colour}"
    trace: dict[str, Any] = {
        "name": _shown(series.label), "x": _values(series.x), "y": _values(series.y),
        "hovertemplate": _hover(chart, series)}
    if series.notes:
        trace["customdata"] = [_shown(note) for note in series.notes]
    if series.kind in ("bars", "boxes"):
        trace |= {"type": "bar", "marker": {"color": colour}}
        if series.kind == "boxes":
            trace |= {"orientation": "h", "base": _values(series.base)}
            trace["marker"]["line"] = {"color": "--surface", "width": 0.5}
        if 0 < len(series.inside) <= _MOST_INSIDE:
            trace |= {"text": [_shown(text) for text in series.inside], "textangle": 0,
                      "textposition": "auto" if len(series.inside) <= _FEW else "inside",
                      "insidetextanchor": "middle", "cliponaxis": False,
                      "insidetextfont": {"color": "--surface"}}
        return trace
    trace |= {"type": "scatter", "mode": _MODES[series.kind],
              "line": {"color": colour, "width": 2, "shape": "hv" if series.kind == "steps" else
                       "linear", "dash": "dash" if series.is_dashed else "solid"},
              "marker": {"color": colour, "size": 8, "symbol": _SYMBOLS[place % len(_SYMBOLS)]}}
    if series.inside:
        trace |= {"text": [_shown(text) for text in series.inside], "mode": trace["mode"] + "+text",
                  "textposition": "top center", "textfont": {"size": 11, "color": "--muted"}}
    return trace


def _hover(chart: Chart, series: Series) -> str:
    more = "<br>%{customdata}" if series.notes else ""
    name = f"<extra>{_shown(series.label)}</extra>" if len(chart.series) > 1 else "<extra></extra>"
    if series.kind == "boxes":
        return f"from %{{base:.4~g}} s, %{{x:.3~s}}s long{more}{name}"
    if chart.x_choices or chart.y_choices:
        return f"%{{x}}, %{{y}}{more}{name}"  # the axes say what they are
    x, y = (f"%{{{letter}}}" if axis.names else
            f"%{{{letter}:{'.1%' if axis.as_percent else '.4~g'}}}"
            for letter, axis in (("x", chart.x), ("y", chart.y)))
    return f"{_shown(chart.x.label)}: {x}<br>{_shown(chart.y.label)}: {y}{more}{name}"


def _layout(chart: Chart) -> dict[str, Any]:
    layout: dict[str, Any] = {
        "height": chart.height, "xaxis": _axis(chart.x), "yaxis": _axis(chart.y),
        "showlegend": len(chart.series) > 1, "barmode": "stack" if chart.are_stacked else "group",
        "shapes": [_line(mark) for mark in chart.marks],
        "annotations": [_label(chart, place) for place in range(len(chart.marks))]}
    if any(series.kind == "boxes" for series in chart.series):
        layout |= {"barmode": "overlay", "bargap": 0.22,
                   "uniformtext": {"minsize": 9, "mode": "hide"}}
        layout["yaxis"] |= {"autorange": "reversed", "fixedrange": True, "showgrid": False}
    if chart.view is not None:
        layout["xaxis"]["range"] = list(chart.view)
    return layout


def _axis(axis: Axis) -> dict[str, Any]:
    # a title of more words than a phone is wide is broken by the page's script
    made: dict[str, Any] = {"title": {"text": _shown(axis.label)}, "automargin": True}
    if axis.names:
        return made | {"type": "category", "categoryarray": [_shown(name) for name in axis.names],
                       "categoryorder": "array"}
    made["type"] = "log" if axis.is_log else "linear"
    if axis.from_zero and not axis.is_log:
        made["rangemode"] = "tozero"
    if axis.as_percent:
        made["tickformat"] = ".0%"
    if axis.ticks:
        made["tickvals"] = list(axis.ticks)
    if axis.is_log:
        made |= {"dtick": "D2", "tickformat": "~s"}
    return made


def _line(mark: Mark) -> dict[str, Any]:
    axis, across = ("x", "y") if mark.axis == "x" else ("y", "x")
    return {"type": "line", f"{axis}0": mark.at, f"{axis}1": mark.at, f"{axis}ref": axis,
            f"{across}0": 0, f"{across}1": 1, f"{across}ref": f"{across} domain",
            "line": {"color": f"--{mark.colour}", "width": 1.4,
                     "dash": "dash" if mark.is_dashed else "solid"}}


def _label(chart: Chart, place: int) -> dict[str, Any]:
    """A mark's words at its end; of several they stand below one another."""
    mark = chart.marks[place]
    scaled = chart.x if mark.axis == "x" else chart.y
    at = math.log10(mark.at) if scaled.is_log and mark.at > 0 else mark.at
    words = {"text": _shown(mark.label), "showarrow": False,
             "font": {"color": f"--{mark.colour}", "size": 11}, "bgcolor": "--surface"}
    if mark.axis == "y":
        return words | {"x": 1, "xref": "x domain", "xanchor": "right", "y": at, "yref": "y",
                        "yanchor": "bottom"}
    return words | {"x": at, "xref": "x", "xanchor": "left", "y": 1 - 0.1 * place,
                    "yref": "y domain", "yanchor": "top"}


def _values(values: Sequence[Value]) -> list[Value]:
    """As JSON holds them, to six digits: no screen shows more."""
    return [_shown(value) if isinstance(value, str) else
            None if value is None or not math.isfinite(value) else float(f"{value:.6g}")
            for value in values]


def _shown(text: str) -> str:
    """plotly takes tags for markup, and shows entities as what they stand for."""
    return html.escape(clean(text), quote=False)
