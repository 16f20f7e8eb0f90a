"""Charts of one run; each function returns None if there is nothing to draw. And `draw`, a timeline
of a simulation."""

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
from xgpt.report.figures import middle_window, percent
from xgpt.report.lanes import KINDS, Lane, lanes_chart, stage_label, thinned
from xgpt.report.output import Output, QueryColumns, ends_since_first, number, recorded
from xgpt.report.service_run import constraint_of, times_of
from xgpt.report.words import counted, ranges
from xsimulator.replay.records import PoolRecords, ReplayResult
from xsimulator.replay.service import limits_of, seconds_by_metric

_CURVE, _PARTS = 200, 40  # chosen: points of a curve, and most of one over arrivals
_LEAST_OF_PART = 10  # chosen: requests of such a point
# the count of xrunner.devices.peak_memory_bytes, which differs from the prediction's
_PEAK = (" Measured: the peak of its process since loading began. On a GPU it counts torch's "
         "memory; on a CPU the whole process, with the interpreter, torch and pages of files that "
         "were read, which the prediction leaves out.")
_FAR = 3.0  # chosen: a limit further off than so many times the data is not drawn


def latencies(output: Output, expected: FloatArray | None = None) -> Chart | None:
    """Chart of the requests' latencies, with the limit."""
    return distribution(
        "latency", "Latency",
        f"seconds from a request's {_since(output, 'prefill')} to its last token",
        output.queries.times("latency_s"), expected,
        output.schedule.bound.limit_s if output.schedule else None,
        whose=of_all_runs(output))


def first_tokens(output: Output, expected: FloatArray | None = None) -> Chart | None:
    """Chart of the requests' TTFT."""
    return distribution(
        "ttft", "TTFT", f"seconds from the {_since(output, 'start')} to a request's first token",
        recorded(output.queries.times("ttft_s")), expected, whose=of_all_runs(output))


def _since(output: Output, otherwise: str) -> str:
    return "arrival" if output.schedule is not None and output.schedule.served else otherwise


def of_all_runs(output: Output) -> str:
    """Words to add if requests of earlier runs are counted, too; else ""."""
    return " of all runs of this job" if output.queries_before else ""


def distribution(name: str, title: str, label: str, measured: FloatArray,
                 expected: FloatArray | None, bound_s: float | None = None, *,
                 whose: str = "") -> Chart | None:
    """Chart of the share of requests over seconds, measured and expected (quantiles from 0 to 1),
    with the limit. `whose`: words for the requests' runs."""
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
            marks.append(Mark(label=f"limit {format_seconds(bound_s)}", at=bound_s, colour="bad",
                              is_dashed=False))
        else:
            caption = f" The limit of {format_seconds(bound_s)} lies far to the right."
    return Chart(
        name=name, title=title, series=series, marks=marks, x=Axis(label=label, from_zero=True),
        y=Axis(label="share of the requests", as_percent=True, from_zero=True),
        caption=f"P50 {format_seconds(float(np.quantile(measured, 0.5)))} measured, over "
                f"{len(measured):,} requests{whose}.{caption}")


def done_curve(queries: QueryColumns, expected: Sequence[tuple[float, float]]) -> Chart | None:
    """Chart of requests done over time, beside the prediction by a simulation."""
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
    return Chart(name="done", title="Requests done", series=series,
                 x=Axis(label="seconds since the first prefill", from_zero=True),
                 y=Axis(label="requests done", from_zero=True),
                 caption="Predicted: a simulation of this job, with ramp-up and drain."
                 if expected else "")


def output_lengths(queries: QueryColumns, expected: Lengths | None) -> Chart | None:
    """Chart of observed output lengths, and of the distribution that was planned for."""
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
                 x=Axis(label="output tokens of a request", from_zero=True),
                 y=Axis(label="requests", from_zero=True),
                 caption=f"Output tokens per request, {lengths.mean():.0f} in the mean."
                         f"{note}")


def service(output: Output) -> list[Chart]:
    """Charts of attainment and of waiting requests over time; none of a batch job."""
    if output.schedule is None or not (own := output.schedule.served) or len(output.queries) < 2:
        return []
    times = times_of(output.queries)
    since_s = times.arrival_s - times.arrival_s.min()
    seconds = seconds_by_metric(times, output.queries.counts("output_tokens"))
    is_late = np.logical_or.reduce([
        seconds[metric] > bound.limit_s for metric, bound in limits_of(
            constraint_of(output.schedule))])
    parts = np.array_split(np.argsort(since_s), max(min(_PARTS, len(since_s) // _LEAST_OF_PART), 1))
    moments_s = np.sort(since_s), np.sort(since_s + seconds["queueing"])
    at_s = np.linspace(0, moments_s[1][-1], 600)
    arrived, begun = (np.searchsorted(one, at_s, "right") for one in moments_s)
    x = Axis(label="seconds since the first arrival", from_zero=True)
    return [
        Chart(name="attainment", title="Attainment", x=x, y=Axis(
            label="share that keeps all limits", as_percent=True, from_zero=True), series=[Series(
                label="measured", x=[float(since_s[part].mean()) for part in parts],
                y=[float(1 - is_late[part].mean()) for part in parts])],
              marks=[Mark(label=f"predicted {percent(own.attainment)}", at=own.attainment,
                          axis="y")] if own.attainment is not None else []),
        Chart(name="waiting", title="Waiting requests", x=x, y=Axis(
            label="arrived, prefill not begun", from_zero=True), series=[Series(
                label="measured", kind="steps", x=at_s.tolist(), y=(arrived - begun).tolist())])]


def memory(schedule: Schedule, metrics: Mapping[str, Any]) -> Chart | None:
    """Chart of each rank's memory, predicted and, if recorded, measured (the paper's Figure 9)."""
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
    # a line far above the bars would press them flat: then only the caption tells
    is_near = room and room <= 4 * max(used)
    marks = [Mark(label=f"room: {format_bytes(room)}", at=room / GIB, axis="y",
                  colour="bad")] if is_near else []
    return Chart(name="memory", title="Memory of each rank", series=series, marks=marks,
                 x=Axis(label="", names=ranks), y=Axis(label="GiB", from_zero=True),
                 caption="Predicted: weights, KV cache and working memory, of "
                         f"{format_bytes(room)} for each.{_PEAK if peaks else ''}")


def _peaks(metrics: Mapping[str, Any]) -> dict[int, float]:
    """Peak memory by rank in GiB, where the run recorded it."""
    stages = metrics.get("stages")
    found = {}
    for stage in stages if isinstance(stages, list) else ():
        peak, ranks = number(stage, "peak_memory_bytes"), stage.get("ranks") if isinstance(
            stage, Mapping) else None
        if peak and math.isfinite(peak) and isinstance(ranks, list):
            found.update({rank: peak / GIB for rank in ranks if isinstance(rank, int)})
    return found


def timeline(output: Output, expected: Sequence[Lane]) -> Chart | None:
    """Timeline of the stages' steps, measured and expected, on one clock; shows a part from the
    middle of the run at first."""
    lanes = output.lanes
    if not any(len(lane.kinds) for lane in (*lanes, *expected)):
        return None
    period_s = output.schedule.figures.period_s if output.schedule else None
    view = middle_window(lanes, 3 * period_s if period_s else None)
    words = "" if view is None else (
        f"The chart opens at {format_seconds(view[1] - view[0])} from the middle of the run. ")
    both = [replace(lane, label=f"{lane.label} {kind}")  # the expected lane under the measured one
            for pair in zip_longest(lanes, expected)
            for lane, kind in zip(pair, ("measured", "expected"), strict=True) if lane is not None]
    return lanes_chart(
        thinned(both, exact=view), name="timeline", title="What the stages did", view=view,
        since="the first step", caption=f"{words}Gaps are waiting. Drag to zoom, double-click for "
        "the whole run.")


def stage_names(pools: Sequence[Pool], device: str = "GPU") -> list[str]:
    """Names of the stages of all pools, numbered through: 'stage 0 · GPU 0-3 · encode'."""
    stages = [(pool, stage) for pool in pools for stage in pool.stages]
    return [" · ".join([f"stage {place}", f"{device} {ranges(stage.ranks)}",
                        *([pool.role] if pool.role != "both" else [])])
            for place, (pool, stage) in enumerate(stages)]


def draw(result: ReplayResult, start_s: float, end_s: float,
         names: Sequence[str] | None = None) -> Chart:
    """Timeline of a simulation between `start_s` and `end_s`. `names`: see `stage_names`."""
    lanes = [_within(lane, start_s, end_s) for lane in replay_lanes(result, names)]
    return lanes_chart(
        thinned(lanes), name="timeline", title=f"Steps of {counted(len(lanes), 'stage')} over "
        f"{format_seconds(end_s - start_s)}", since="the start of the job",
        view=(start_s, end_s))


def replay_lanes(result: ReplayResult, names: Sequence[str] | None = None) -> list[Lane]:
    """Lanes with all steps of every stage of a simulation."""
    return [_replay_lane(pool, column, names)
            for pool in result.pools for column in range(len(pool.stages))]


def _replay_lane(pool: PoolRecords, column: int, names: Sequence[str] | None) -> Lane:
    stage = pool.stages[column]
    return Lane(label=names[stage] if names else stage_label(stage, pool.name), pool=pool.name,
                kinds=np.array([KINDS.index(step.kind.value) for step in pool.steps], np.int64),
                groups=np.array([step.group for step in pool.steps], np.int64),
                start_s=pool.start_s[:, column], end_s=pool.end_s[:, column])


def _within(lane: Lane, start_s: float, end_s: float) -> Lane:
    """The lane with its boxes cut to the window."""
    inside = lane.take(np.flatnonzero((lane.end_s > start_s) & (lane.start_s < end_s)))
    return replace(inside, start_s=np.maximum(inside.start_s, start_s),
                   end_s=np.minimum(inside.end_s, end_s))
