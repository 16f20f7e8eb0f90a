"""A picture of a replay: what its stages did."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from xgpt.core.deployment import Pool
from xgpt.core.units import format_seconds
from xgpt.report.chart import Chart
from xgpt.report.lanes import DECODE, KINDS, Lane, lanes_chart, stage_label, thinned
from xgpt.report.words import counted, ranges
from xsimulator.replay.records import PoolRecords, ReplayResult


def stage_names(pools: Sequence[Pool], device: str = "GPU") -> list[str]:
    """'stage 0 · GPU 0-3 · encode', one name for each stage of all pools, numbered over all of
    them."""
    stages = [(pool, stage) for pool in pools for stage in pool.stages]
    return [" · ".join([f"stage {place}", f"{device} {ranges(stage.ranks)}",
                        *([pool.role] if pool.role != "both" else [])])
            for place, (pool, stage) in enumerate(stages)]


def steady_window(result: ReplayResult, periods: float = 3.0, min_steps: int = 6,
                  ) -> tuple[float, float]:
    """(start_s, end_s) in the middle of the encodings, which is where fill and drain are furthest.

    `periods` times the usual time between two phases' first encodings of the same group, and
    `min_steps` steps of every pool at least; the whole job where it is no longer.
    """
    encodes = sorted((float(pool.start_s[index, 0]), step.group, step.phase)
                     for pool in result.pools for index, step in enumerate(pool.steps)
                     if step.kind.value != DECODE)
    period_s = _period_s(encodes)
    if period_s is None:
        return 0.0, result.makespan_s
    paces_s = [float(np.diff(pool.start_s[:, 0]).mean())
               for pool in result.pools if len(pool.steps) > 1]
    length_s = max([periods * period_s, *(min_steps * pace_s for pace_s in paces_s)])
    if length_s >= result.makespan_s:
        return 0.0, result.makespan_s
    wanted_s = encodes[len(encodes) // 2][0] - length_s / 2
    first_group = encodes[0][1]
    start_s = min((start for start, group, _ in encodes if group == first_group),
                  key=lambda start: abs(start - wanted_s))
    start_s = max(0.0, min(start_s, result.makespan_s - length_s))
    return start_s, start_s + length_s


def draw(result: ReplayResult, start_s: float, end_s: float,
         names: Sequence[str] | None = None) -> Chart:
    """What every stage does between `start_s` and `end_s`. `names`: see `stage_names`."""
    lanes = [_within(lane, start_s, end_s) for lane in replay_lanes(result, names)]
    arrows = [(begin_s, done_s) for handover in result.handovers for begin_s, done_s in zip(
        handover.start_s.tolist(), handover.end_s.tolist(), strict=True)
        if begin_s >= start_s and done_s <= end_s]
    return lanes_chart(
        thinned(lanes), name="timeline", title=f"Steps of {counted(len(lanes), 'stage')} over "
        f"{format_seconds(end_s - start_s)}", since="the start of the job", arrows=arrows,
        view=(start_s, end_s))


def replay_lanes(result: ReplayResult, names: Sequence[str] | None = None) -> list[Lane]:
    """All steps of every stage."""
    return [_replay_lane(pool, column, names)
            for pool in result.pools for column in range(len(pool.stages))]


def _period_s(encodes: Sequence[tuple[float, int, int]]) -> float | None:
    """Median time between the same group's encodings in different phases, or in one phase where
    no phases are told apart."""
    gaps: dict[bool, list[float]] = {True: [], False: []}
    last: dict[int, tuple[float, int]] = {}
    first_of_phase: dict[int, float] = {}
    for start_s, group, phase in encodes:
        if group in last:
            gaps[False].append(start_s - last[group][0])
        if group not in last or last[group][1] != phase:
            if group in first_of_phase:
                gaps[True].append(start_s - first_of_phase[group])
            first_of_phase[group] = start_s
        last[group] = (start_s, phase)
    between = gaps[True] or gaps[False]
    return float(np.median(between)) if between else None


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
