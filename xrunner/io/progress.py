"""progress.json: what the run has done so far, for the progress bar and `xgpt status`.

The ranks' own output goes through the MPI launcher's pipes, so progress travels by a small file,
replaced at most twice a second.
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from xgpt.core.whole_file import write_atomically

_INTERVAL_S = 0.5
_WINDOW = 1000  # latencies the running percentile is taken over


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """One state of a run. Latencies are over the last queries; None before the first is done."""

    state: str  # "loading" | "running" | "done" | "stopped"
    total: int
    done: int
    output_tokens: int
    elapsed_s: float
    latency_p50_s: float | None
    latency_p99_s: float | None
    done_before: int = 0  # of `done`: by an earlier run, which this one goes on after


class ProgressFile:
    """Counts what finishes and writes the file now and then."""

    def __init__(self, path: Path, *, total: int, done_before: int) -> None:
        self._path, self._total, self._done = path, total, done_before
        self._done_before = done_before
        self._latencies: deque[float] = deque(maxlen=_WINDOW)
        self._last_s = -_INTERVAL_S

    def add(self, latency_s: float) -> None:
        """One more query is done."""
        self._done += 1
        self._latencies.append(latency_s)

    def tick(self, elapsed_s: float, output_tokens: int, state: str = "running") -> None:
        """Writes the file, unless it was written a moment ago."""
        if state == "running" and elapsed_s - self._last_s < _INTERVAL_S:
            return
        self._last_s = elapsed_s
        p50, p99 = (np.quantile(self._latencies, (0.5, 0.99)).tolist() if self._latencies
                    else (None, None))
        write_progress(self._path, Progress(
            state=state, total=self._total, done=self._done, output_tokens=output_tokens,
            elapsed_s=elapsed_s, latency_p50_s=p50, latency_p99_s=p99,
            done_before=self._done_before))


def write_progress(path: Path, progress: Progress) -> None:
    write_atomically(path, json.dumps(asdict(progress)) + "\n")


def read_progress(path: Path) -> Progress | None:
    """Reads the progress that a run wrote last; None where there is none that can be read."""
    try:
        return Progress(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
