"""The report's plots. Each returns inline SVG, or None where there is nothing to draw."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from xgpt.core.lengths import Lengths
from xgpt.core.units import format_seconds
from xgpt.report.lanes import KINDS, Lane, draw_lanes, stage_label
from xgpt.report.output import ALONE, LoggedStep, QueryFigures
from xgpt.report.svg import BAD, DECODE, ENCODE, INK, MUTED, SURFACE, drawing, to_inline_svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH_IN, _HEIGHT_IN = 4.4, 2.6
_MAX_BINS = 40


def can_plot() -> bool:
    """Whether matplotlib is installed (it is not imported for the answer)."""
    return importlib.util.find_spec("matplotlib") is not None


def latency_histogram(queries: Sequence[QueryFigures], bound_s: float | None,
                      p50_s: float | None = None, p99_s: float | None = None) -> str | None:
    """How many queries took how long, with P50, P99 and the bound as lines. The percentiles are
    the run's own figures where it wrote them, so that page and metrics never differ."""
    if not queries:
        return None
    latencies = np.array([q.latency_s for q in queries])
    p50_s = float(np.quantile(latencies, 0.5)) if p50_s is None else p50_s
    p99_s = float(np.quantile(latencies, 0.99)) if p99_s is None else p99_s
    longest_s = max(float(latencies.max()), p99_s, 1e-9)
    # a bound far off would squeeze the histogram into a corner: then it is only written
    is_far = bound_s is not None and not bound_s <= 3 * longest_s
    right_s = 1.06 * (longest_s if bound_s is None or is_far else max(longest_s, bound_s))
    with drawing(_WIDTH_IN, _HEIGHT_IN) as (figure, axes):
        # about sqrt(n) bins: few enough that each bar stands for several queries
        bins = max(6, min(_MAX_BINS, round(2 * math.sqrt(len(latencies)))))
        counts, _, _ = axes.hist(latencies, bins=bins, color=DECODE, edgecolor=SURFACE,
                                 linewidth=0.6)
        top = float(np.max(counts))
        axes.set_ylim(0, top * 1.42)
        axes.set_xlim(0, right_s)
        # three heights, so that labels of near values do not overlap
        _mark(axes, p50_s, "P50", INK, top * 1.26, dashes=(2, 2))
        _mark(axes, p99_s, "P99", INK, top * 1.13, dashes=(2, 2))
        if bound_s is not None and not is_far:
            _mark(axes, bound_s, "bound", BAD, top * 1.39)
        elif bound_s is not None and math.isfinite(bound_s):
            axes.text(0.99, 0.99, f"bound {format_seconds(bound_s)}, far to the right",
                      transform=axes.transAxes, ha="right", va="top", color=BAD)
        axes.set_xlabel("latency of a query, seconds")
        _count_axis(axes)
        return to_inline_svg(figure, "latency", f"Histogram of {len(queries)} latencies: P50 "
                             f"{format_seconds(p50_s)}, P99 {format_seconds(p99_s)}")


def done_curve(queries: Sequence[QueryFigures], expected_qps: float | None) -> str | None:
    """Queries done over time, beside the pace the schedule promised."""
    if len(queries) < 2:
        return None
    origin_s = min(q.encode_start_s for q in queries)
    ends_s = np.sort([q.end_s - origin_s for q in queries])
    done = np.arange(1, len(ends_s) + 1)
    shown = np.unique(np.linspace(0, len(done) - 1, min(len(done), 600)).astype(np.int64))
    with drawing(_WIDTH_IN, _HEIGHT_IN) as (figure, axes):
        if expected_qps:
            # through the middle of the run: the fill at its start is no matter of pace
            middle = len(ends_s) // 2
            start_s = ends_s[middle] - done[middle] / expected_qps
            last_s = start_s + len(ends_s) / expected_qps
            axes.plot([max(start_s, 0.0), last_s],
                      [max(0.0, -start_s * expected_qps), len(ends_s)], color=MUTED,
                      linewidth=1.2, dashes=(4, 3), label=f"predicted pace, {expected_qps:.3g}/s")
        axes.step(ends_s[shown], done[shown], where="post", color=DECODE, linewidth=2,
                  label="measured")
        axes.set_xlim(left=0)
        axes.set_ylim(0, len(ends_s) * 1.05)
        axes.set_xlabel("seconds since the first encoding")
        axes.set_ylabel("queries done")
        axes.legend(loc="lower right")
        return to_inline_svg(figure, "done", f"{len(ends_s)} queries done over "
                             f"{format_seconds(float(ends_s[-1]))}")


def output_lengths(queries: Sequence[QueryFigures], expected: Lengths | None) -> str | None:
    """Observed output lengths, and the distribution the schedule was computed for."""
    if not queries:
        return None
    lengths = np.array([q.output_tokens for q in queries])
    highest = max(int(lengths.max()), expected.max if expected else 1)
    width = max(1, math.ceil(highest / 24))
    edges = np.arange(0, highest + width, width) + 0.5  # bins of whole lengths: (0, width], ...
    with drawing(_WIDTH_IN, _HEIGHT_IN) as (figure, axes):
        axes.hist(lengths, bins=list(edges), color=DECODE, edgecolor=SURFACE, linewidth=0.6,
                  label="observed")
        if expected is not None:
            cumulative = np.concatenate([[0.0], np.cumsum(expected.pmf)])
            at = np.minimum(edges - 0.5, expected.max).astype(np.int64)
            share = np.diff(cumulative[at]) * len(lengths)
            axes.plot((edges[:-1] + edges[1:]) / 2, share, color=ENCODE, linewidth=2,
                      marker="o", markersize=3, label="expected")
            axes.legend(loc="upper right")
        axes.set_xlim(0, edges[-1])
        axes.set_xlabel("output tokens of a query")
        _count_axis(axes)
        return to_inline_svg(figure, "lengths", f"Output lengths of {len(lengths)} queries, mean "
                             f"{lengths.mean():.0f}, longest {lengths.max()}")


def timeline(steps: Sequence[LoggedStep], start_s: float, end_s: float,
             origin_s: float) -> str | None:
    """What each stage did between `start_s` and `end_s`; gaps are waiting."""
    shown = [s for s in sorted(steps, key=lambda s: s.start_s)
             if s.end_s > start_s and s.start_s < end_s and s.kind in KINDS]
    if not shown:
        return None
    lanes = []
    for stage in sorted({s.stage for s in steps}):
        mine = [s for s in shown if s.stage == stage]
        pool = mine[0].pool if mine else ALONE
        lanes.append(Lane(label=stage_label(stage, pool), pool=pool, kinds=[s.kind for s in mine],
                          start_s=np.array([s.start_s for s in mine], dtype=np.float64),
                          end_s=np.array([s.end_s for s in mine], dtype=np.float64)))
    return draw_lanes(lanes, start_s, end_s, origin_s=origin_s, since="the first step").inline()


def _mark(axes: Axes, x: float, label: str, color: str, height: float,
          dashes: tuple[int, int] | None = None) -> None:
    axes.plot([x, x], [0, height], color=color, linewidth=1.4,
              linestyle=(0, dashes) if dashes else "-")
    is_right_half = x > 0.6 * axes.get_xlim()[1]
    axes.annotate(f"{label} {format_seconds(x)}", (x, height), textcoords="offset points",
                  xytext=(-3 if is_right_half else 3, 1), ha="right" if is_right_half else "left",
                  va="top", color=color)


def _count_axis(axes: Axes) -> None:
    """Whole numbers of queries on the left."""
    axes.locator_params(axis="y", integer=True, nbins=6)
    axes.set_ylabel("queries")
