"""Timelines with a lane per stage and a box per step, as in the paper's Figures 1, 3 and 4; gaps
are waiting. And expected.json: the run as a simulation of the job predicts it, on the run's clock,
which the report draws beside the measured one."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from xgpt.core.lengths import FloatArray, IntArray
from xgpt.core.problem import QueryTimes
from xgpt.core.schedule_file import write_json
from xgpt.report.chart import KIND_COLOURS, Axis, Chart, Series

ENCODE, DECODE, MIXED = "encode", "decode", "mixed"
KINDS = (ENCODE, DECODE, MIXED)
WORDS = {ENCODE: "encode", DECODE: "decode", MIXED: "both in one step"}
MOST_BOXES = 4000  # chosen: in one chart; more are slow to draw, and hard to tell apart
TOGETHER = -1  # micro-batch of a box that stands for several steps


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lane:
    """Steps of one stage: boxes that do not overlap, in order of time. Arrays are [boxes]; `kinds`
    are indices in KINDS, `groups` micro-batches."""

    label: str
    pool: str = ""
    kinds: IntArray
    start_s: FloatArray
    end_s: FloatArray
    groups: IntArray

    def take(self, rows: IntArray) -> "Lane":
        return replace(self, kinds=self.kinds[rows], start_s=self.start_s[rows],
                       end_s=self.end_s[rows], groups=self.groups[rows])


def stage_label(stage: int, pool: str) -> str:
    """Name of a stage: 'stage 3 · decode', without the pool if there is only one."""
    return f"stage {stage}" if pool in ("both", "all") else f"stage {stage} · {pool}"


def thinned(lanes: Sequence[Lane], most: int = MOST_BOXES,
            exact: tuple[float, float] | None = None) -> list[Lane]:
    """The lanes cut to about `most` boxes in all. Short steps outside the time window `exact` are
    merged by kind, so that the share of time at work still shows."""
    if sum(len(lane.kinds) for lane in lanes) <= most:
        return list(lanes)
    start_s = min(float(lane.start_s[0]) for lane in lanes if len(lane.kinds))
    end_s = max(float(lane.end_s[-1]) for lane in lanes if len(lane.kinds))
    unit_s = 4 * len(lanes) * (end_s - start_s) / most
    return [_thinned(lane, unit_s, exact or (np.inf, -np.inf)) for lane in lanes]


def _thinned(lane: Lane, unit_s: float, exact: tuple[float, float]) -> Lane:
    is_kept = ((lane.end_s - lane.start_s >= unit_s)
               | ((lane.start_s >= exact[0]) & (lane.end_s <= exact[1])))
    short, kept = lane.take(np.flatnonzero(~is_kept)), lane.take(np.flatnonzero(is_kept))
    units, first, place = np.unique((short.start_s / unit_s).astype(np.int64), return_index=True,
                                    return_inverse=True)
    lengths_s = np.zeros((len(units), len(KINDS)))
    np.add.at(lengths_s, (place, short.kinds), short.end_s - short.start_s)
    ends_s = short.start_s[first][:, None] + np.cumsum(lengths_s, axis=1)
    there = lengths_s > 0
    kinds = np.concatenate([kept.kinds, np.nonzero(there)[1]])
    start_s = np.concatenate([kept.start_s, (ends_s - lengths_s)[there]])
    groups = np.concatenate([kept.groups, np.full(int(there.sum()), TOGETHER)])
    return replace(lane, kinds=kinds, start_s=start_s, groups=groups,
                   end_s=np.concatenate([kept.end_s, ends_s[there]])).take(np.argsort(start_s))


def lanes_chart(lanes: Sequence[Lane], *, name: str, title: str, caption: str = "",
                since: str, view: tuple[float, float] | None = None) -> Chart:
    """A Chart of the lanes over seconds `since` an event, named in words."""
    has_ids = sum(len(lane.kinds) for lane in lanes) <= MOST_BOXES
    series = [made for place, kind in enumerate(KINDS)
              if (made := _of_kind(lanes, place, kind, has_ids)) is not None]
    return Chart(name=name, title=title, caption=caption, series=series, view=view, is_wide=True,
                 x=Axis(label=f"seconds since {since}"),
                 y=Axis(label="", names=[lane.label for lane in lanes]),
                 height=110 + round(min(44.0, max(16.0, 560 / len(lanes))) * len(lanes)))


def _of_kind(lanes: Sequence[Lane], place: int, kind: str, has_ids: bool) -> Series | None:
    own = [(lane.label, lane.take(np.flatnonzero(lane.kinds == place))) for lane in lanes]
    labels = [label for label, lane in own for _ in lane.kinds]
    if not labels:
        return None
    start_s = np.concatenate([lane.start_s for _, lane in own])
    lengths_s = np.concatenate([lane.end_s - lane.start_s for _, lane in own])
    groups = np.concatenate([lane.groups for _, lane in own]).tolist()
    notes = ["several steps" if group == TOGETHER else f"micro-batch {group}" for group in groups]
    inside = ["" if group == TOGETHER else str(group) for group in groups] if has_ids and max(
        groups) > 0 else []
    return Series(label=WORDS[kind], kind="boxes", x=lengths_s.tolist(), y=labels, inside=inside,
                  base=start_s.tolist(), notes=notes, colour=KIND_COLOURS[kind])


EXPECTED_FILE = "expected.json"
VERSION = 1
_POINTS = 200  # chosen: of each curve


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Expected:
    """A predicted run, in seconds since the start of the job. `done`: pairs (second, requests done
    until then). `latency_s`, `ttft_s`: quantiles 0, 1/n, ... 1 over all requests."""

    lanes: Sequence[Lane]
    done: Sequence[tuple[float, float]]
    latency_s: FloatArray
    ttft_s: FloatArray


def write_expected(path: Path, lanes: Sequence[Lane], times: QueryTimes) -> None:
    """Writes expected.json from a simulation of the whole job."""
    ends_s = np.sort(times.last_token_s)
    shown = np.unique(np.linspace(0, len(ends_s) - 1, _POINTS).astype(np.int64))
    quantiles = np.linspace(0, 1, _POINTS + 1)
    write_json(path, {
        "version": VERSION,
        "stages": [{"label": lane.label, "pool": lane.pool,
                    "steps": [[KINDS[kind], _rounded(start_s), _rounded(end_s), group]
                              for kind, start_s, end_s, group in zip(
                                  lane.kinds.tolist(), lane.start_s.tolist(), lane.end_s.tolist(),
                                  lane.groups.tolist(), strict=True)]}
                   for lane in thinned(lanes)],
        "done": [[_rounded(float(ends_s[i])), int(i) + 1] for i in shown],
        "latency_s": [_rounded(v) for v in np.quantile(times.latency_s, quantiles).tolist()],
        "ttft_s": [_rounded(v) for v in np.quantile(times.ttft_s, quantiles).tolist()]})


def read_expected(path: Path) -> Expected | None:
    """The Expected of expected.json; None if it is missing or damaged."""
    try:
        raw = json.loads(path.read_bytes())
        if raw["version"] != VERSION:
            return None
        return Expected(
            lanes=[_lane(stage) for stage in raw["stages"]], latency_s=_numbers(raw["latency_s"]),
            done=[(float(at_s), float(count)) for at_s, count in raw["done"]],
            ttft_s=_numbers(raw["ttft_s"]))
    except (OSError, ValueError, TypeError, LookupError, RecursionError, OverflowError):
        return None


def _lane(raw: Any) -> Lane:
    kinds, starts_s, ends_s, groups = zip(*raw["steps"], strict=True) if raw["steps"] else [()] * 4
    lane = Lane(label=str(raw["label"]), pool=str(raw["pool"]), start_s=_numbers(starts_s),
                end_s=_numbers(ends_s), groups=np.array(groups, np.int64),
                kinds=np.array([KINDS.index(kind) for kind in kinds], np.int64))
    if any(a > b for a, b in pairwise(starts_s)):
        raise ValueError("steps out of order")
    return lane


def _numbers(raw: Sequence[float]) -> FloatArray:
    made = np.array([float(value) for value in raw])
    if not np.isfinite(made).all():
        raise ValueError("not finite")
    return made


def _rounded(value: float) -> float:
    """`value` rounded to ten microseconds, or below a second to six digits."""
    return round(value, 5) if abs(value) >= 1 or not value else float(f"{value:.6g}")
