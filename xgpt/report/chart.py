"""A plot as data: what is drawn, in which unit, with what to say of each point.

One description serves all: `plotly_page` makes it interactive in a page, `image` draws it with
matplotlib, `rows` is its table. Colours are names of the page's variables (style.html.j2)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["line", "steps", "dots", "line+dots", "bars", "boxes"]
Value = float | str | None  # None breaks a line
PALETTE = ("decode", "encode", "good", "bad", "violet", "teal", "muted", "fair", "ink")
KIND_COLOURS = {"encode": "encode", "decode": "decode", "mixed": "violet"}  # of a step


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """`label` names the quantity and its unit. `names`: the axis has these names, top or left
    first, instead of numbers. `from_zero`: it begins at 0. `ticks`: where numbers stand, of an
    axis that has places which are none."""

    label: str
    is_log: bool = False
    from_zero: bool = False
    names: Sequence[str] = ()
    as_percent: bool = False
    ticks: Sequence[float] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One set of points. Boxes lie on the names of the y axis, from `base` on, `x` long. `notes`:
    what else to say of each point. `columns`: further quantities of its points, by name, which
    the page offers for either axis."""

    label: str
    x: Sequence[Value]
    y: Sequence[Value]
    kind: Kind = "line"
    colour: str = "decode"
    is_dashed: bool = False
    base: Sequence[float] = ()
    notes: Sequence[str] = ()
    inside: Sequence[str] = ()  # short texts in the boxes, or at the points
    columns: Mapping[str, Sequence[Value]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A line across the plot: at x, or at y."""

    label: str
    at: float
    axis: Literal["x", "y"] = "x"
    colour: str = "muted"
    is_dashed: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """`name` is its id and its file's name. `view`: the part of the x axis that shows at first.
    `are_stacked`: bars lie on one another and not side by side."""

    name: str
    title: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    marks: Sequence[Mark] = ()
    caption: str = ""
    view: tuple[float, float] | None = None
    is_wide: bool = False
    are_stacked: bool = False
    height: int = 300  # pixels
    x_choices: Sequence[str] = ()  # of the series' columns; the first is drawn
    y_choices: Sequence[str] = ()

    def header(self) -> tuple[str, ...]:
        columns = self._columns()
        if any(series.base for series in self.series):
            return ("series", self.y.label or "name", f"from, {self.x.label}", "length", "note")
        return ("series", *(columns or (self.x.label, self.y.label)), "note")

    def rows(self) -> Iterator[tuple[str, ...]]:
        """The points as cells of a table, a row each."""
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
