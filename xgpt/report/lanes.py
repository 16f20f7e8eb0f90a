"""A lane per stage with a box per step, as the paper's Figures 1, 3 and 4; gaps are bubbles.

SVG is written directly: one path a lane and colour stays small for thousands of boxes, and no extra
need be installed."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xgpt.core.lengths import FloatArray, IntArray
from xgpt.core.units import format_seconds
from xgpt.report.canvas import (
    AXIS_HEIGHT,
    FONT,
    LEGEND_HEIGHT,
    WIDTH,
    Drawing,
    TimeAxis,
    grid,
    line,
    number,
    text_at,
)

ENCODE, DECODE, MIXED = "encode", "decode", "mixed"
KINDS = (ENCODE, DECODE, MIXED)
_SHARE_WIDTH = 52.0
_CHARACTER = 0.56 * FONT  # mean width
_LONGEST_LABEL = 36
_THIN = 0.3  # boxes narrower than this are drawn together, one a unit of width
_MIN_SEPARATED = 5.0  # a kind whose boxes are mostly this wide has them set apart
_MAX_ARROWS = 60  # more than this lose their heads


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lane:
    """What one stage did: boxes that do not overlap, in order of time."""

    label: str
    kinds: Sequence[str]
    start_s: FloatArray
    end_s: FloatArray
    groups: Sequence[int] | None = None  # micro-batch of each box
    pool: str = ""


def stage_label(stage: int, pool: str) -> str:
    """'stage 3 · decode', without the pool where there is one alone."""
    return f"stage {stage}" if pool == "both" else f"stage {stage} · {pool}"


def draw_lanes(lanes: Sequence[Lane], start_s: float, end_s: float, *, origin_s: float = 0.0,
               since: str, arrows: Sequence[tuple[float, float]] = ()) -> Drawing:
    """The lanes between two times; the axis counts from `origin_s`, which `since` describes.

    `arrows` are (start, end) of what goes from the first pool to the next."""
    assert lanes and end_s > start_s, f"{len(lanes) = }, {start_s = }, {end_s = }"
    left = 14 + _CHARACTER * min(max(len(lane.label) for lane in lanes), _LONGEST_LABEL)
    time = TimeAxis(start_s=start_s, end_s=end_s, left=left, right=WIDTH - _SHARE_WIDTH)
    tops, pitch = _rows(lanes, 16.0 if arrows else 6.0)
    height = 0.8 * pitch
    bottom = tops[-1] + pitch
    parts = [*grid(time, bottom, origin_s, since)]
    has_ids = False
    for lane, top in zip(lanes, tops, strict=True):
        boxes = _shown(lane, time)
        ids = _ids(boxes, height)
        has_ids |= bool(ids)
        parts += [f'<g transform="translate(0 {number(top)})">',
                  *_lane(lane, boxes, time, height), *ids, "</g>"]
    parts += _arrows(arrows, lanes, tops, height, time)
    kinds = {kind for lane in lanes for kind in lane.kinds}
    parts += _legend(kinds, has_ids, bool(arrows), time)
    return Drawing(height=bottom + AXIS_HEIGHT, body="\n".join(parts), description=(
        f"Steps of {len(lanes)} stages over {format_seconds(end_s - start_s)}"))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _DrawnSteps:
    """Boxes of a lane as drawn: horizontal extents, in the picture's units, and kinds."""

    left: FloatArray
    right: FloatArray
    kinds: IntArray  # index into KINDS
    groups: Sequence[int] | None
    share: float  # of the window at work


def _rows(lanes: Sequence[Lane], pool_gap: float) -> tuple[list[float], float]:
    """Top of each lane, and the distance of two: from 34 for a few to 13 for dozens."""
    pitch = min(34.0, max(13.0, 420.0 / len(lanes)))
    tops, y, pool = [], LEGEND_HEIGHT, lanes[0].pool
    for lane in lanes:
        y += pool_gap if lane.pool != pool else 0.0
        pool = lane.pool
        tops.append(y)
        y += pitch
    return tops, pitch


def _shown(lane: Lane, time: TimeAxis) -> _DrawnSteps:
    """The lane's boxes in the window; thin ones together, so that the share at work still shows."""
    left, right = time.x(lane.start_s), time.x(lane.end_s)
    kinds = np.array([KINDS.index(kind) for kind in lane.kinds], dtype=np.int64)
    share = float((right - left).sum()) / (time.right - time.left)
    inside, thin = right > left, right - left < _THIN
    wide = np.flatnonzero(inside & ~thin)
    groups = None if lane.groups is None else [lane.groups[i] for i in wide.tolist()]
    merged = _merged(left[inside & thin], right[inside & thin], kinds[inside & thin])
    return _DrawnSteps(left=np.concatenate([left[wide], merged[0]]),
                       right=np.concatenate([right[wide], merged[1]]),
                       kinds=np.concatenate([kinds[wide], merged[2]]), groups=groups, share=share)


def _merged(left: FloatArray, right: FloatArray, kinds: IntArray,
            ) -> tuple[FloatArray, FloatArray, IntArray]:
    """Per unit of width, one box a kind, side by side, as wide as what it stands for."""
    unit = left.astype(np.int64)
    units, first, place = np.unique(unit, return_index=True, return_inverse=True)
    widths = np.zeros((len(units), len(KINDS)))
    np.add.at(widths, (place, kinds), right - left)
    ends = left[first][:, None] + np.cumsum(widths, axis=1)
    where = widths > 0
    return (ends - widths)[where], ends[where], np.nonzero(where)[1].astype(np.int64)


def _lane(lane: Lane, boxes: _DrawnSteps, time: TimeAxis, height: float) -> Iterator[str]:
    font = min(FONT, height + 1)
    middle = height / 2 + 0.35 * font
    is_short = len(lane.label) <= _LONGEST_LABEL
    label = lane.label if is_short else lane.label[:_LONGEST_LABEL - 1] + "…"
    yield text_at(time.left - 8, middle, label, "end", "ink", font)
    yield (f'<rect x="{number(time.left)}" width="{number(time.right - time.left)}" '
           f'height="{number(height)}" fill="var(--line)"/>')
    half = height / 2
    for colour, top, alone in ((ENCODE, 0.0, 0), (DECODE, half, 1)):
        full = _rectangles(boxes, boxes.kinds == alone, 0.0, height)
        part = _rectangles(boxes, boxes.kinds == KINDS.index(MIXED), top, half)
        if full or part:
            yield f'<path fill="var(--{colour})" d="{full}{part}"/>'
    if edges := "".join(f"M{number(x)} 0v{number(height)}" for x in _edges(boxes)):
        yield f'<path stroke="var(--surface)" stroke-width="0.8" d="{edges}"/>'
    yield text_at(time.right + 8, middle, f"{100 * boxes.share:.0f} %", "start", "ink", font)


def _edges(boxes: _DrawnSteps) -> list[float]:
    """Right edges, of all boxes of a kind or of none: an odd line would look like waiting."""
    widths = boxes.right - boxes.left
    apart = np.zeros(len(widths), dtype=bool)
    for kind in np.unique(boxes.kinds):
        same = boxes.kinds == kind
        apart |= same & bool(np.median(widths[same]) >= _MIN_SEPARATED)
    edges: list[float] = boxes.right[apart].tolist()
    return edges


def _rectangles(boxes: _DrawnSteps, chosen: NDArray[np.bool_], top: float, height: float) -> str:
    h, y = number(height), number(top)
    return "".join(f"M{number(a)} {y}h{(w := number(b - a))}v{h}h-{w}z" for a, b in
                   zip(boxes.left[chosen].tolist(), boxes.right[chosen].tolist(), strict=True))


def _ids(boxes: _DrawnSteps, height: float) -> list[str]:
    """Micro-batches of the boxes that are wide enough, as one text."""
    font = min(11.0, height - 1.0)
    if boxes.groups is None or font < 8.5:
        return []
    places = [(a, b, str(group)) for a, b, group in
              zip(boxes.left.tolist(), boxes.right.tolist(), boxes.groups, strict=False)
              if b - a >= 4 + 0.65 * font * len(str(group))]
    if not places:
        return []
    spans = "".join(f'<tspan x="{number((a + b) / 2)}">{group}</tspan>' for a, b, group in places)
    # pages draw an outline around text, which is too much inside a box
    return [f'<text y="{number(height / 2 + 0.36 * font)}" text-anchor="middle" '
            f'font-size="{number(font)}" font-weight="600" fill="var(--surface)" '
            f'style="stroke:none">{spans}</text>']


def _arrows(arrows: Sequence[tuple[float, float]], lanes: Sequence[Lane], tops: Sequence[float],
            height: float, time: TimeAxis) -> list[str]:
    """Draws arrows from the lower edge of the first pool's last lane to the upper edge of the next
    pool."""
    to = next((i for i, lane in enumerate(lanes) if lane.pool != lanes[0].pool), None)
    if not arrows or to is None:
        return []
    above, below = tops[to - 1] + height, tops[to]
    xs = [(float(a), float(b)) for a, b in time.x(np.array(arrows)).tolist()]
    xs = [*{round(a): (a, b) for a, b in xs}.values()]  # one a unit of width shows as much
    lines = "".join(f"M{number(a)} {number(above)}L{number(b)} {number(below)}" for a, b in xs)
    parts = [f'<path stroke="var(--ink)" stroke-width="0.9" fill="none" d="{lines}"/>']
    if len(xs) <= _MAX_ARROWS:
        heads = "".join(_head(a, above, b, below) for a, b in xs)
        parts.append(f'<path fill="var(--ink)" d="{heads}"/>')
    return parts


def _head(x0: float, y0: float, x1: float, y1: float) -> str:
    length = math.hypot(x1 - x0, y1 - y0) or 1.0
    dx, dy = (x1 - x0) / length, (y1 - y0) / length
    back_x, back_y = x1 - 6 * dx, y1 - 6 * dy
    return (f"M{number(x1)} {number(y1)}L{number(back_x - 2.4 * dy)} {number(back_y + 2.4 * dx)}"
            f"L{number(back_x + 2.4 * dy)} {number(back_y - 2.4 * dx)}z")


def _legend(kinds: Iterable[str], has_ids: bool, has_arrows: bool, time: TimeAxis) -> Iterator[str]:
    x, y = time.left, 15.0
    entries = [kind for kind in KINDS if kind in set(kinds)] + ["waiting"]
    for entry in entries:
        colours = {MIXED: (ENCODE, DECODE), "waiting": ("line",)}.get(entry, (entry,))
        side = 11 / len(colours)
        for place, colour in enumerate(colours):
            yield (f'<rect x="{number(x)}" y="{number(y - 10 + side * place)}" width="11" '
                   f'height="{number(side)}" fill="var(--{colour})"/>')
        yield text_at(x + 17, y, text := {MIXED: "both in one step"}.get(entry, entry))
        x += 17 + _CHARACTER * len(text) + 20
    if has_ids:
        yield text_at(x, y, text := "number: micro-batch", colour="muted")
        x += _CHARACTER * len(text) + 20
    if has_arrows:
        yield line(x, y - 4, x + 10, y - 4, "ink")
        yield f'<path fill="var(--ink)" d="{_head(x, y - 4, x + 16, y - 4)}"/>'
        yield text_at(x + 22, y, "KV entries handed over")
    yield text_at(time.right + 8, y, "works")
