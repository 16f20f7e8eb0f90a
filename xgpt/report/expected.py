"""expected.json: what a replay of the job expects of its run, on the clock of the run: the steps of
every stage, queries done over time, and how long queries take. The report draws it beside what was
measured."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from xgpt.core.lengths import FloatArray
from xgpt.core.problem import QueryTimes
from xgpt.core.schedule_file import write_json
from xgpt.report.lanes import KINDS, Lane, thinned

EXPECTED_FILE = "expected.json"
VERSION = 1
_POINTS = 200  # of each curve


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Expected:
    """Seconds since the start of the job. `done` are (second, queries done until then); the
    others the quantiles 0, 1/n, .. 1 of all queries."""

    lanes: Sequence[Lane]
    done: Sequence[tuple[float, float]]
    latency_s: FloatArray
    ttft_s: FloatArray


def write_expected(path: Path, lanes: Sequence[Lane], times: QueryTimes) -> None:
    """Writes what a replay of the whole job expects."""
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
    """None where there is none, or it is none."""
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
    """To ten microseconds, and to six digits below a second."""
    return round(value, 5) if abs(value) >= 1 or not value else float(f"{value:.6g}")
