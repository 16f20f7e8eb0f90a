"""The plots of one run. Each function returns a Chart, or None where there is nothing to draw.
And a picture of a replay: what its stages did."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import numpy as np

from xgpt.core.deployment import Pool
from xgpt.core.lengths import FloatArray, Lengths
from xgpt.core.schedule import Schedule
from xgpt.core.units import GIB, format_bytes, format_seconds
from xgpt.report.chart import Axis, Chart, Mark, Series
from xgpt.report.figures import middle_window
from xgpt.report.lanes import KINDS, Lane, lanes_chart, stage_label, thinned
from xgpt.report.output import Output, QueryColumns, ends_since_first, number
from xgpt.report.words import counted, ranges
from xsimulator.replay.records import PoolRecords, ReplayResult

_CURVE = 200  # points of a curve
# what xrunner.devices.peak_memory_bytes counts: no measurement of what was predicted
_PEAK = (" Measured: the most that its process held since loading began. On a GPU that is what "
         "torch took; on a CPU it is the whole process, with the interpreter, torch and the pages "
         "of files that were read, none of which the prediction counts.")
_FAR = 3.0  # a bound further off than so many times what is drawn is only said


def latencies(output: Output, expected: FloatArray | None = None) -> Chart | None:
    """The distribution of the queries' latencies, with the bound."""
    return distribution(
        "latency", "Latency", "seconds from a query's encoding to its last token",
        output.queries.times("latency_s"), expected,
        output.schedule.bound.limit_s if output.schedule else None,
        whose=of_all_runs(output))


def of_all_runs(output: Output) -> str:
    """Whose queries are counted, where that is not plain."""
    return " of all runs of this job" if output.queries_before else ""


def distribution(name: str, title: str, label: str, measured: FloatArray,
                 expected: FloatArray | None, bound_s: float | None = None, *,
                 whose: str = "") -> Chart | None:
    """The share of the queries that took at most so long, as measured and as expected (quantiles
    from 0 to 1), with the bound. `whose`: the queries' runs."""
    if not len(measured):
        return None
    shares = np.linspace(0, 1, _CURVE + 1)
    known_s = np.quantile(measured, shares)
    series = [Series(label="measured", kind="steps", x=known_s.tolist(), y=shares.tolist())]
    longest_s = float(known_s[-1])
    if expected is not None and len(expected) > 1:
        series.append(Series(label="expected", x=expected.tolist(), colour="encode", is_dashed=True,
                             y=np.linspace(0, 1, len(expected)).tolist()))
        longest_s = max(longest_s, float(expected[-1]))
    marks, caption = [Mark(label=f"P99 {format_seconds(float(np.quantile(measured, 0.99)))}",
                           at=float(np.quantile(measured, 0.99)))], ""
    if bound_s is not None and math.isfinite(bound_s):
        if bound_s <= _FAR * longest_s:
            marks.append(Mark(label=f"bound {format_seconds(bound_s)}", at=bound_s, colour="bad",
                              is_dashed=False))
        else:
            caption = f" The bound of {format_seconds(bound_s)} lies far to the right."
    return Chart(
        name=name, title=title, series=series, marks=marks, x=Axis(label=label, from_zero=True),
        y=Axis(label="share of the queries", as_percent=True, from_zero=True),
        caption=f"P50 {format_seconds(float(np.quantile(measured, 0.5)))} measured, over "
                f"{len(measured):,} queries{whose}.{caption}")


def done_curve(queries: QueryColumns, expected: Sequence[tuple[float, float]]) -> Chart | None:
    """Queries done over time, beside what the replay of the job expected."""
    if len(queries) < 2:
        return None
    ends_s = ends_since_first(queries)
    shown = np.unique(np.linspace(0, len(ends_s) - 1, 600).astype(np.int64))
    series = [Series(label="measured", kind="steps", x=[0.0, *ends_s[shown].tolist()],
                     y=[0.0, *(shown + 1.0).tolist()])]
    if expected:
        series.append(Series(label="predicted", kind="steps", colour="encode", is_dashed=True,
                             x=[0.0, *(at_s for at_s, _ in expected)],
                             y=[0.0, *(count for _, count in expected)]))
    return Chart(name="done", title="Queries done", series=series,
                 x=Axis(label="seconds since the first encoding", from_zero=True),
                 y=Axis(label="queries done", from_zero=True),
                 caption="Predicted: a replay of this job, filling up and running empty included."
                 if expected else "")


def output_lengths(queries: QueryColumns, expected: Lengths | None) -> Chart | None:
    """Observed output lengths, and the distribution the schedule was computed for."""
    if not queries:
        return None
    lengths = queries.counts("output_tokens")
    highest = max(int(lengths.max()), expected.max if expected else 1)
    width = max(1, math.ceil(highest / 24))
    edges = np.arange(0, highest + width, width)  # bins of whole lengths: (0, width], ...
    counts, _ = np.histogram(lengths, edges + 0.5)
    middles = ((edges[:-1] + edges[1:] + 1) / 2).tolist()
    series = [Series(label="observed", kind="bars", x=middles, y=counts.tolist(), notes=[
        f"{a + 1} to {b} tokens" for a, b in zip(edges[:-1], edges[1:], strict=True)])]
    if expected is not None:
        cumulative = np.concatenate([[0.0], np.cumsum(expected.pmf)])
        share = np.diff(cumulative[np.minimum(edges, expected.max)])
        series.append(Series(label="expected", kind="line+dots", x=middles, colour="encode",
                             y=(share * len(lengths)).tolist()))
    note = "" if expected is None else f" Expected: {expected.note}."
    return Chart(name="lengths", title="Output lengths", series=series,
                 x=Axis(label="output tokens of a query", from_zero=True),
                 y=Axis(label="queries", from_zero=True),
                 caption=f"Tokens the model wrote per query, {lengths.mean():.0f} in the mean."
                         f"{note}")


def memory(schedule: Schedule, metrics: Mapping[str, Any]) -> Chart | None:
    """What each rank is expected to hold, and did where the run says so (the paper's Figure 9)."""
    room = schedule.figures.memory_capacity_bytes
    used = sum((shape.figures.memory_bytes * shape.deployment.replicas
                for shape in schedule.estimate.shapes), ())
    if not used:
        return None
    ranks = [f"rank {i}" for i in range(len(used))]
    series = [Series(label="predicted", kind="bars", x=ranks, y=[value / GIB for value in used],
                     notes=[f"{value / room:.1%} of {format_bytes(room)}" if room else ""
                            for value in used])]
    if peaks := _peaks(metrics):
        series.append(Series(label="measured (peak)", kind="bars", colour="encode", x=ranks,
                             y=[peaks.get(i) for i in range(len(used))]))
    # far more room than is used would press the bars flat: then it is only said
    is_near = room and room <= 4 * max(used)
    marks = [Mark(label=f"room: {format_bytes(room)}", at=room / GIB, axis="y",
                  colour="bad")] if is_near else []
    return Chart(name="memory", title="Memory of each rank", series=series, marks=marks,
                 x=Axis(label="", names=ranks), y=Axis(label="GiB", from_zero=True),
                 caption=f"Predicted: weights, KV entries and working memory, of "
                         f"{format_bytes(room)} for each.{_PEAK if peaks else ''}")


def _peaks(metrics: Mapping[str, Any]) -> dict[int, float]:
    """The most that a rank's stage held, in GiB, where the run wrote it down."""
    stages = metrics.get("stages")
    found = {}
    for stage in stages if isinstance(stages, list) else ():
        peak, ranks = number(stage, "peak_memory_bytes"), stage.get("ranks") if isinstance(
            stage, Mapping) else None
        if peak and math.isfinite(peak) and isinstance(ranks, list):
            found.update({rank: peak / GIB for rank in ranks if isinstance(rank, int)})
    return found


def timeline(output: Output, expected: Sequence[Lane]) -> Chart | None:
    """What the stages did and what was expected of them, on one clock; the part from the middle
    of the run shows at first."""
    lanes = output.lanes
    if not any(len(lane.kinds) for lane in (*lanes, *expected)):
        return None
    period_s = output.schedule.figures.period_s if output.schedule else None
    view = middle_window(lanes, 3 * period_s if period_s else None)
    words = "" if view is None else (
        f"At first {format_seconds(view[1] - view[0])} from the middle show. ")
    both = [replace(lane, label=f"{lane.label} {kind}")  # the expected lane under the measured one
            for pair in zip_longest(lanes, expected)
            for lane, kind in zip(pair, ("measured", "expected"), strict=True) if lane is not None]
    return lanes_chart(
        thinned(both, exact=view), name="timeline", title="What the stages did", view=view,
        since="the first step", caption=f"{words}Gaps are waiting. Drag to zoom, double-click for "
        "the whole run.")


def stage_names(pools: Sequence[Pool], device: str = "GPU") -> list[str]:
    """'stage 0 · GPU 0-3 · encode', one name for each stage of all pools, numbered over all of
    them."""
    stages = [(pool, stage) for pool in pools for stage in pool.stages]
    return [" · ".join([f"stage {place}", f"{device} {ranges(stage.ranks)}",
                        *([pool.role] if pool.role != "both" else [])])
            for place, (pool, stage) in enumerate(stages)]


def draw(result: ReplayResult, start_s: float, end_s: float,
         names: Sequence[str] | None = None) -> Chart:
    """What every stage does between `start_s` and `end_s`. `names`: see `stage_names`."""
    lanes = [_within(lane, start_s, end_s) for lane in replay_lanes(result, names)]
    return lanes_chart(
        thinned(lanes), name="timeline", title=f"Steps of {counted(len(lanes), 'stage')} over "
        f"{format_seconds(end_s - start_s)}", since="the start of the job",
        view=(start_s, end_s))


def replay_lanes(result: ReplayResult, names: Sequence[str] | None = None) -> list[Lane]:
    """All steps of every stage."""
    return [_replay_lane(pool, column, names)
            for pool in result.pools for column in range(len(pool.stages))]


def _replay_lane(pool: PoolRecords, column: int, names: Sequence[str] | None) -> Lane:
    stage = pool.stages[column]
    return Lane(label=names[stage] if names else stage_label(stage, pool.name), pool=pool.name,
                kinds=np.array([KINDS.index(step.kind.value) for step in pool.steps], np.int64),
                groups=np.array([step.group for step in pool.steps], np.int64),
                start_s=pool.start_s[:, column], end_s=pool.end_s[:, column])


def _within(lane: Lane, start_s: float, end_s: float) -> Lane:
    """The lane's boxes cut at the window."""
    inside = lane.take(np.flatnonzero((lane.end_s > start_s) & (lane.start_s < end_s)))
    return replace(inside, start_s=np.maximum(inside.start_s, start_s),
                   end_s=np.minimum(inside.end_s, end_s))
