"""What each rank tells of itself while it runs, for `xgpt top`: a small file a rank, replaced about
once a second. Nothing of a run depends on it."""

import json
import math
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from xgpt.core.whole_file import write_atomically

BEATS = "ranks"  # the folder, in the output folder
_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """A rank `elapsed_s` after the run's common start. `busy_s`: of these at work on steps;
    `recent_share`: of the last second or so. `queries`: that have a place in its stage's caches."""

    rank: int
    stage: int
    pool: str
    elapsed_s: float
    busy_s: float
    recent_share: float
    queries: int
    replica: int = 0


class Beat:
    """One rank's file. It is called after every step, and writes now and then."""

    def __init__(self, output: Path, *, rank: int, stage: int, pool: str,
                 replica: int = 0) -> None:
        self._path = output / BEATS / f"{rank}.json"
        self._rank, self._stage, self._pool, self._replica = rank, stage, pool, replica
        self._written_s, self._busy_s = -math.inf, 0.0

    def __call__(self, now_s: float, busy_s: float, queries: int) -> None:
        """now_s: since the run's start."""
        passed_s = now_s - self._written_s
        if 0 <= passed_s < _INTERVAL_S:
            return
        is_first = not 0 <= passed_s < math.inf  # or the clock was restarted
        share = (busy_s / now_s if now_s > 0 else 0.0) if is_first else (
            (busy_s - self._busy_s) / passed_s)
        self._written_s, self._busy_s = now_s, busy_s
        with suppress(OSError):  # a full disk is told of where results are written
            self._path.parent.mkdir(exist_ok=True)
            write_atomically(self._path, json.dumps(asdict(RankState(
                rank=self._rank, stage=self._stage, pool=self._pool, elapsed_s=now_s,
                busy_s=busy_s, recent_share=min(max(share, 0.0), 1.0), queries=queries,
                replica=self._replica))) + "\n")


def read_beats(output: Path) -> list[RankState]:
    """The last state of each rank, in their order; none of a run that has none."""
    states = []
    for path in (output / BEATS).glob("*.json"):
        try:
            states.append(RankState(**json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError, TypeError):
            continue
    return sorted(states, key=lambda state: state.rank)
