"""What each rank tells of itself while it runs, for `xgpt top` and for who watches how long steps
take: a small file a rank, replaced about once a second. No token of a run depends on it."""

from __future__ import annotations

import json
import math
from collections import deque
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from xgpt.core.whole_file import write_atomically
from xrunner.step_record import StepRecord

BEATS = "ranks"  # the folder, in the output folder
_INTERVAL_S = 1.0
MOST_STEPS = 24  # of a kind, the latest ones, that a state tells of


class ToldStep(NamedTuple):
    """A step as it is told of: see xrunner.step_record.StepRecord."""

    kind: str
    queries: int
    tokens: int
    decoded: int
    context_tokens: float
    longest_context: int
    input_tokens: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """A rank `elapsed_s` after the run's common start. `busy_s`: of these at work on steps;
    `recent_share`: of the last second or so. `queries`: that have a place in its stage's caches.
    `steps`: the latest of each kind since the state before, MOST_STEPS at most."""

    rank: int
    stage: int
    pool: str
    elapsed_s: float
    busy_s: float
    recent_share: float
    queries: int
    replica: int = 0
    steps: tuple[ToldStep, ...] = ()


class Beat:
    """One rank's file. It is called after every step, and writes now and then."""

    def __init__(self, output: Path, *, rank: int, stage: int, pool: str,
                 replica: int = 0) -> None:
        self._path = output / BEATS / f"{rank}.json"
        self._rank, self._stage, self._pool, self._replica = rank, stage, pool, replica
        self._written_s, self._busy_s = -math.inf, 0.0
        self._steps: dict[str, deque[StepRecord]] = {}  # by kind, since the state written last

    def __call__(self, now_s: float, busy_s: float, queries: int,
                 step: StepRecord | None = None) -> None:
        """now_s: since the run's start. `step`: that has just been taken."""
        if step is not None:
            self._steps.setdefault(step.kind, deque(maxlen=MOST_STEPS)).append(step)
        passed_s = now_s - self._written_s
        if 0 <= passed_s < _INTERVAL_S:
            return
        is_first = not 0 <= passed_s < math.inf  # or the clock was restarted
        share = (busy_s / now_s if now_s > 0 else 0.0) if is_first else (
            (busy_s - self._busy_s) / passed_s)
        self._written_s, self._busy_s = now_s, busy_s
        steps = () if is_first else tuple(map(_told, (
            step for own in self._steps.values() for step in own)))
        self._steps.clear()
        with suppress(OSError):  # a full disk is told of where results are written
            self._path.parent.mkdir(exist_ok=True)
            write_atomically(self._path, json.dumps(asdict(RankState(
                rank=self._rank, stage=self._stage, pool=self._pool, elapsed_s=now_s,
                busy_s=busy_s, recent_share=min(max(share, 0.0), 1.0), queries=queries,
                replica=self._replica, steps=steps))) + "\n")


def _told(step: StepRecord) -> ToldStep:
    return ToldStep(step.kind, step.queries, step.tokens, step.decoded,
                    round(step.context_tokens, 1), step.longest_context,
                    round(step.input_tokens, 1), round(step.seconds, 7))


def read_beats(output: Path) -> list[RankState]:
    """The last state of each rank, in their order; none of a run that has none."""
    states = []
    for path in (output / BEATS).glob("*.json"):
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            states.append(RankState(**{**raw, "steps": tuple(
                ToldStep(*step) for step in raw.get("steps", ()))}))
        except (OSError, ValueError, TypeError, AttributeError):
            continue
    return sorted(states, key=lambda state: state.rank)
