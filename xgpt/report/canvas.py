"""What the plain SVG pictures share: colours, a time axis, text and lines.

Widths are in the picture's own units, one about a pixel."""

import html
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from xgpt.core.lengths import FloatArray

WIDTH, LEGEND_HEIGHT, AXIS_HEIGHT, FONT = 1060.0, 30.0, 40.0, 12.0
# Pages define these variables (style.html.j2); a file of its own gets the light mode's colours.
COLOURS = {"ink": "#1d2126", "muted": "#626a74", "line": "#e2e4e6", "surface": "#ffffff",
           "encode": "#d9822b", "decode": "#3b6fb6", "good": "#1d7d53", "bad": "#b83227"}
_SCALES = (("seconds", 1.0), ("milliseconds", 1e3), ("microseconds", 1e6))


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """A picture whose colours are CSS variables."""

    height: float
    body: str
    description: str

    def inline(self) -> str:
        """The drawing as part of a page that defines the variables."""
        label = html.escape(self.description, quote=True)
        return (f'<svg role="img" aria-label="{label}" class="plot" {self._box} '
                f'font-size="{number(FONT)}">{self.body}</svg>')

    def standalone(self) -> str:
        """An SVG file of its own, in fixed colours."""
        body = re.sub(r"var\(--(\w+)\)", lambda m: COLOURS[m.group(1)], self.body)
        return ('<?xml version="1.0" encoding="UTF-8"?>\n<svg xmlns="http://www.w3.org/2000/svg" '
                f'width="{number(WIDTH)}" height="{number(self.height)}" {self._box} '
                'font-family="system-ui, Helvetica, Arial, sans-serif" '
                f'font-size="{number(FONT)}">\n'
                f"<title>{html.escape(self.description)}</title>\n"
                f'<rect width="100%" height="100%" fill="{COLOURS["surface"]}"/>\n{body}</svg>\n')

    def write(self, path: Path) -> None:
        path.write_text(self.standalone(), encoding="utf-8")

    @property
    def _box(self) -> str:
        return f'viewBox="0 0 {number(WIDTH)} {number(self.height)}"'


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeAxis:
    """The horizontal axis."""

    start_s: float
    end_s: float
    left: float
    right: float

    def x(self, at_s: FloatArray) -> FloatArray:
        share = (at_s - self.start_s) / (self.end_s - self.start_s)
        return np.asarray(self.left + np.clip(share, 0, 1) * (self.right - self.left))


def grid(time: TimeAxis, bottom: float, origin_s: float, since: str,
         top: float = LEGEND_HEIGHT) -> Iterator[str]:
    """Vertical lines, their times below them, and what those count."""
    length_s = time.end_s - time.start_s
    unit, scale = next((s for s in _SCALES if length_s * s[1] >= 2), _SCALES[-1])
    if time.end_s - origin_s > 2000 * length_s:  # long numbers, different in their last digits
        round_s = nice_step(length_s)
        later_s = round_s * math.floor((time.start_s - origin_s) / round_s)
        since = f"{later_s:,.{_decimals(round_s)}f} s after {since}"
        origin_s += later_s
    step = nice_step(length_s * scale / 8)
    first = math.ceil((time.start_s - origin_s) * scale / step - 1e-9)
    last = math.floor((time.end_s - origin_s) * scale / step + 1e-9)
    for place in range(first, last + 1):
        x = float(time.x(np.array([origin_s + place * step / scale]))[0])
        yield line(x, top - 4, x, bottom + 2, "line")
        yield text_at(x, bottom + 16, f"{place * step:,.{_decimals(step)}f}", "middle")
    yield text_at((time.left + time.right) / 2, bottom + 33, f"{unit} since {since}", "middle")


def text_at(x: float, y: float, text: str, anchor: str = "start", colour: str = "muted",
            size: float = FONT) -> str:
    return (f'<text x="{number(x)}" y="{number(y)}" text-anchor="{anchor}" '
            f'font-size="{number(size)}" fill="var(--{colour})">{html.escape(text)}</text>')


def line(x0: float, y0: float, x1: float, y1: float, colour: str, more: str = "") -> str:
    return (f'<path stroke="var(--{colour})" stroke-width="1" fill="none" {more} '
            f'd="M{number(x0)} {number(y0)}L{number(x1)} {number(y1)}"/>')


def nice_step(least: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is not below `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * m for m in (1, 2, 5, 10) if power * m >= least * (1 - 1e-9))


def _decimals(step: float) -> int:
    return max(0, -math.floor(math.log10(step) + 1e-9))


def number(value: float) -> str:
    """Hundredths of a unit are finer than any screen."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
