"""Matplotlib figures as inline SVG that takes its colours and fonts from the page.

A figure is drawn in marker colours; `to_inline_svg` puts CSS variables in their place, so that one
drawing serves light mode, dark mode and print."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Marker colours: odd values that no default of matplotlib has.
INK, MUTED, LINE, SURFACE = "#010203", "#010205", "#010207", "#010209"
ENCODE, DECODE, GOOD, BAD = "#01020b", "#01020d", "#01020f", "#010211"
_VARIABLES = {INK: "--ink", MUTED: "--muted", LINE: "--line", SURFACE: "--surface",
              ENCODE: "--encode", DECODE: "--decode", GOOD: "--good", BAD: "--bad"}
# Any: matplotlib types its keys as a Literal of all names, which differs between releases.
_STYLE: Any = {
    "svg.fonttype": "none",  # text stays text: searchable, and in the page's own font
    "svg.hashsalt": "xgpt",  # equal figures give equal bytes
    "font.size": 9.5,
    "text.color": INK, "axes.labelcolor": MUTED, "axes.edgecolor": LINE,
    "xtick.color": LINE, "ytick.color": LINE, "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED, "grid.color": LINE, "grid.linewidth": 0.8,
    "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False,
    "axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True,
    "xtick.major.size": 0, "ytick.major.size": 0, "legend.frameon": False,
}


@contextmanager
def drawing(width_in: float, height_in: float) -> Iterator[tuple[Figure, Axes]]:
    """A figure in the page's style. Raises ImportError where matplotlib is not installed."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width_in, height_in), layout="constrained")
        figure.patch.set_visible(False)
        axes = figure.add_subplot()
        axes.patch.set_visible(False)
        yield figure, axes


def to_inline_svg(figure: Figure, name: str, description: str) -> str:
    """`figure` as an `<svg>` element; `name` makes its ids unique in the page."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    text = buffer.getvalue()
    text = text[text.index("<svg"):]
    text = re.sub(r"<metadata>.*?</metadata>|<style\b.*?</style>|<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", text)  # an HTML parser knows them already
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", text)
    text = re.sub(r"\s*\n\s*", "\n", text)
    for marker, variable in _VARIABLES.items():
        text = text.replace(marker, f"var({variable})")
    size = re.search(r'width="([\d.]+)pt" height="([\d.]+)pt"', text)
    assert size is not None, f"matplotlib wrote no size: {text[:200]}"
    text = text.replace(size.group(0), "", 1)
    label = html.escape(description, quote=True)
    return text.replace("<svg", f'<svg role="img" aria-label="{label}" class="plot"', 1)
