"""Renders a self-contained page from a template. Charts are plotly figures, and tables that can be
read without scripts; plotly.js (vendor/) is included.

Nothing is fetched. The Content-Security-Policy names each script by its hash and forbids `eval`;
values are escaped in templates."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
from collections.abc import Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xgpt.core.errors import MissingExtraError
from xgpt.core.system.whole_file import write_atomically
from xgpt.core.units import format_seconds
from xgpt.report import words
from xgpt.report.chart import Axis, Chart, Mark, Series, Value
from xgpt.report.words import clean

if TYPE_CHECKING:
    import jinja2

_FOLDER = Path(__file__).parent
LIBRARY = _FOLDER / "vendor" / "plotly-basic.min.js"
_MODES = {"line": "lines", "steps": "lines", "dots": "markers", "line+dots": "lines+markers"}
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star")
_MOST_INSIDE = 400  # chosen: texts inside boxes; more are drawn too slowly
MOST_ROWS = 2000  # chosen: of a table of a chart's data


def render_page(template: str, page: str, drawn: Sequence[Chart], **context: Any) -> str:
    """The HTML of `template` with the charts `drawn`. `page`: the file's name, for messages. Raises
    MissingExtraError without jinja2."""
    own = (_FOLDER / "page_script.js").read_text(encoding="utf-8")
    scripts = [library(), own] if drawn else [own]
    return _templates(page).get_template(template).render(
        scripts=scripts, script_hashes=[_hash(script) for script in scripts],
        figures_json=figures_json(drawn), **context)


def write_chart_page(charts: Sequence[Chart], path: Path, name: str) -> None:
    """Writes a page of charts alone. Raises MissingExtraError without jinja2."""
    write_atomically(path, render_page("charts.html.j2", path.name, charts, name=name,
                                       charts=charts))


def _templates(page: str) -> jinja2.Environment:
    try:
        import jinja2
    except ImportError:
        raise MissingExtraError("jinja2", "run", f"writing {page}") from None
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER), autoescape=True,
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(clean=lambda text: clean(str(text)), tight=words.tight,
                               seconds=format_seconds, data_table=data_table)
    return environment


def _hash(script: str) -> str:
    """The quoted hash that names an inline script in a Content-Security-Policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


@cache
def library() -> str:
    """The source of plotly.js, basic bundle."""
    return LIBRARY.read_text(encoding="utf-8")


def figures_json(charts: Sequence[Chart]) -> str:
    """The charts' figures by name, as JSON that is safe inside a script element."""
    text = json.dumps({chart.name: figure(chart) for chart in charts}, separators=(",", ":"),
                      allow_nan=False)
    # the only way out of a script element, and characters that end lines in JavaScript
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def figure(chart: Chart) -> dict[str, Any]:
    """A chart as a plotly figure: data, layout, and choices for the axes. Colours are names of CSS
    variables, which the page's script replaces."""
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
                      "textposition": "inside", "insidetextanchor": "middle",
                      "insidetextfont": {"color": "--surface"}}
        return trace
    trace |= {"type": "scatter", "mode": _MODES[series.kind],
              "line": {"color": colour, "width": 2, "shape": "hv" if series.kind == "steps" else
                       "linear", "dash": "dash" if series.is_dashed else "solid"},
              "marker": {"color": colour, "size": 8, "symbol": _SYMBOLS[place % len(_SYMBOLS)]}}
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
        "showlegend": len(chart.series) > 1, "barmode": "group",
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
    # the page's script breaks titles that are too wide for a phone
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
    """The annotation of a mark, at its end; those of several marks stand below one another."""
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
    """`values` for JSON, rounded to six digits: no screen shows more."""
    return [_shown(value) if isinstance(value, str) else
            None if value is None or not math.isfinite(value) else float(f"{value:.6g}")
            for value in values]


def _shown(text: str) -> str:
    """`text` escaped for plotly, which takes tags for markup and decodes entities."""
    return html.escape(clean(text), quote=False)


def data_table(chart: Chart) -> str:
    """HTML `<details>` with a table of the chart's data, of at most `MOST_ROWS` rows."""
    rows = list(islice(chart.rows(), MOST_ROWS + 1))
    has_notes = any(row[-1] for row in rows)
    shown = [row if has_notes else row[:-1] for row in rows[:MOST_ROWS]]
    header = chart.header() if has_notes else chart.header()[:-1]
    head = "".join(f'<th scope="col">{_cell(cell)}</th>' for cell in header)
    body = "\n".join("<tr>" + "".join(f"<td>{_cell(cell)}</td>" for cell in row) + "</tr>"
                     for row in shown)
    more = (f'<p class="quiet">The first {MOST_ROWS:,} rows.</p>' if len(rows) > MOST_ROWS else "")
    return (f'<details class="data"><summary>Data</summary><div class="scroll"><table>'
            f"<thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>{more}"
            f"</details>")


def _cell(text: str) -> str:
    return html.escape(clean(text))
