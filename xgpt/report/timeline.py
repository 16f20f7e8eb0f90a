"""Pictures of a replay: what its stages did, and the KV memory it held.

A replay is taken by its shape (Protocols), since the report does not import the simulator.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

import numpy as np

from xgpt.core.lengths import FloatArray, IntArray
from xgpt.core.schedule import StageAssignment
from xgpt.core.units import format_seconds
from xgpt.report.canvas import (
    AXIS_HEIGHT,
    WIDTH,
    Drawing,
    TimeAxis,
    grid,
    line,
    nice_step,
    number,
    text_at,
)
from xgpt.report.lanes import DECODE, ENCODE, Lane, draw_lanes


class StepLike(Protocol):
    """As xrunner.rules.steps.Step."""

    @property
    def kind(self) -> Enum: ...
    @property
    def group(self) -> int: ...
    @property
    def phase(self) -> int: ...


class PoolLike(Protocol):
    """As xsimulator.replay.records.PoolRecords; `start_s` and `end_s` are [steps, stages]."""

    @property
    def name(self) -> str: ...
    @property
    def stages(self) -> tuple[int, ...]: ...
    @property
    def steps(self) -> Sequence[StepLike]: ...
    @property
    def start_s(self) -> FloatArray: ...
    @property
    def end_s(self) -> FloatArray: ...
    @property
    def memory_s(self) -> FloatArray: ...
    @property
    def memory_tokens(self) -> IntArray: ...
    @property
    def kv_tokens(self) -> int: ...


class HandoversLike(Protocol):
    """As xsimulator.replay.records.HandoverRecords."""

    @property
    def start_s(self) -> FloatArray: ...
    @property
    def end_s(self) -> FloatArray: ...


class ReplayLike(Protocol):
    """As xsimulator.replay.records.ReplayResult."""

    @property
    def pools(self) -> Sequence[PoolLike]: ...
    @property
    def handovers(self) -> Sequence[HandoversLike]: ...
    @property
    def makespan_s(self) -> float: ...


def stage_names(stages: Sequence[StageAssignment], device: str = "GPU") -> list[str]:
    """'stage 0 · GPU 0-3 · encode', indexed like `stages`."""
    return [" · ".join([f"stage {stage.index}", f"{device} {_ranges(stage.ranks)}",
                        *([stage.role] if stage.role != "both" else [])]) for stage in stages]


def steady_window(result: ReplayLike, periods: float = 3.0, min_steps: int = 6,
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


def draw(result: ReplayLike, start_s: float, end_s: float,
         names: Sequence[str] | None = None) -> Drawing:
    """What every stage does between `start_s` and `end_s`. `names`: see `stage_names`."""
    lanes = [_replay_lane(pool, column, names, start_s, end_s)
             for pool in result.pools for column in range(len(pool.stages))]
    arrows = [(begin_s, done_s) for handover in result.handovers for begin_s, done_s in zip(
        handover.start_s.tolist(), handover.end_s.tolist(), strict=True)
        if begin_s >= start_s and done_s <= end_s]
    return draw_lanes(lanes, start_s, end_s, since="the start of the job", arrows=arrows)


def memory_plot(result: ReplayLike) -> Drawing:
    """Tokens of KV held over time, with each pool's budget as a dashed line."""
    pools = sorted((pool for pool in result.pools if len(pool.memory_s)),
                   key=lambda pool: -pool.kv_tokens)  # the smaller ones in front
    top, bottom = 16.0, 176.0
    end_s = result.makespan_s if result.makespan_s > 0 else 1.0
    time = TimeAxis(start_s=0.0, end_s=end_s, left=78.0, right=WIDTH - 12)
    most = 1.12 * max([1, *(max(pool.kv_tokens, int(pool.memory_tokens.max())) for pool in pools)])
    parts = [*grid(time, bottom, 0.0, "the start of the job", top)]
    step = nice_step(most / 5)
    for tokens in np.arange(0, most, step).tolist():
        y = bottom - (bottom - top) * tokens / most
        parts += [line(time.left, y, time.right, y, "line"),
                  text_at(time.left - 8, y + 4, f"{tokens:,.0f}", "end")]
    for pool in pools:
        colour = ENCODE if pool.name == ENCODE else DECODE
        height = (bottom - top) / most
        parts += [_curve(pool, time, bottom, height, colour),
                  line(time.left, y := bottom - height * pool.kv_tokens, time.right, y, "bad",
                       'stroke-dasharray="5 4"'),
                  text_at(time.right, y - 5, _budget(pool), "end", "bad")]
    return Drawing(height=bottom + AXIS_HEIGHT, body="\n".join(parts), description=(
        f"KV tokens held over {format_seconds(result.makespan_s)}: "
        + ", ".join(f"at most {int(p.memory_tokens.max()):,} of {p.kv_tokens:,}" for p in pools)))


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


def _replay_lane(pool: PoolLike, column: int, names: Sequence[str] | None, start_s: float,
                 end_s: float) -> Lane:
    starts, ends = pool.start_s[:, column], pool.end_s[:, column]
    inside = np.flatnonzero((ends > start_s) & (starts < end_s))
    steps = [pool.steps[index] for index in inside.tolist()]
    stage = pool.stages[column]
    role = "" if pool.name == "both" else f" · {pool.name}"
    return Lane(label=names[stage] if names else f"stage {stage}{role}", pool=pool.name,
                kinds=[str(step.kind.value) for step in steps],
                groups=[step.group for step in steps], start_s=starts[inside], end_s=ends[inside])


def _curve(pool: PoolLike, time: TimeAxis, bottom: float, height: float, colour: str) -> str:
    """Steps of what is held; where many changes share half a unit of width, the most and the
    last."""
    times = np.append(pool.memory_s, time.end_s)
    held = np.append(pool.memory_tokens, pool.memory_tokens[-1]).astype(np.float64)
    x = time.x(times)
    units, first = np.unique((2 * x).astype(np.int64), return_index=True)
    peaks, lasts = np.maximum.reduceat(held, first), held[np.append(first[1:], len(held)) - 1]
    points = [f"M{number(float(x[0]))} {number(bottom)}"]
    for at, *levels in zip((units / 2).tolist(), peaks.tolist(), lasts.tolist(), strict=True):
        points.append(f"H{number(max(at, time.left))}")
        points += [f"V{number(bottom - height * tokens)}" for tokens in dict.fromkeys(levels)]
    outline = "".join(points)
    return (f'<path fill="var(--{colour})" fill-opacity="0.18" d="{outline}V{number(bottom)}z"/>'
            f'<path fill="none" stroke="var(--{colour})" stroke-width="1.3" d="{outline}"/>')


def _budget(pool: PoolLike) -> str:
    whose = "budget" if pool.name == "both" else f"budget of the {pool.name} pool"
    return f"{whose}: {pool.kv_tokens:,} tokens"


def _ranges(ranks: Sequence[int]) -> str:
    """(0, 1, 2, 5) -> '0-2, 5'."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


