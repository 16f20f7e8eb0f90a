"""How long a run still takes: what was expected of it, corrected by how far it is."""

from functools import lru_cache
from pathlib import Path

import numpy as np

from xgpt.core.lengths import FloatArray
from xgpt.report.expected import EXPECTED_FILE, read_expected
from xrunner.io.sink import Progress

_LEAST_S = 0.05  # less is not told: ranks tell how far they are twice a second
PRIOR = 0.1  # share of the expected time that the expected pace counts for, beside the seen one


def time_left_s(progress: Progress, output: Path) -> float | None:
    """Seconds until the run in `output` is done; None where it is not running, nothing is known
    yet, or what was expected is over while some are still to come."""
    if (progress.state != "running" or progress.elapsed_s <= 0
            or progress.done >= progress.total):
        return None
    left_s = _left_s(progress, output)
    return left_s if left_s is not None and left_s >= _LEAST_S else None


def _left_s(progress: Progress, output: Path) -> float | None:
    curve = _expected(output / EXPECTED_FILE)
    is_dated = progress.last_done_s is not None or progress.done == progress.done_before
    if curve is not None and is_dated and curve[1][-1] == progress.total:
        return _by_plan(progress, *curve)
    done_here = progress.done - progress.done_before
    if done_here <= 0:
        return None
    return progress.elapsed_s / done_here * (progress.total - progress.done)


def _by_plan(progress: Progress, at_s: FloatArray, done: FloatArray) -> float:
    """Queries end in bursts, and the first only after a while. So what is compared is not their
    number but the time: when the plan has as many done as there are, and when these were. After
    that the run goes on at this pace, but to no later place than where the plan has one more."""
    before_s = float(np.interp(progress.done_before, done, at_s, left=0.0))  # of an earlier run
    whole_s = float(at_s[-1])
    reached_s = float(np.interp(progress.done, done, at_s, left=0.0))
    next_s = float(np.interp(progress.done + 1, done, at_s))
    seen_s = progress.last_done_s or 0.0
    prior_s = PRIOR * whole_s
    pace = (seen_s + prior_s) / (max(reached_s - before_s, 0.0) + prior_s)
    place_s = min(reached_s + max(progress.elapsed_s - seen_s, 0.0) / pace, next_s)
    late = (progress.elapsed_s + prior_s) / (max(place_s - before_s, 0.0) + prior_s)
    return max(whole_s - place_s, 0.0) * max(pace, late)


def _expected(path: Path) -> tuple[FloatArray, FloatArray] | None:
    """(seconds, queries done until then) of the replay; None where there is none."""
    try:
        return _read(path, path.stat().st_mtime_ns)
    except OSError:
        return None


@lru_cache(maxsize=4)
def _read(path: Path, written_ns: int) -> tuple[FloatArray, FloatArray] | None:
    """Read once for each time that it was written, not at every look."""
    expected = read_expected(path)
    if expected is None or not expected.done:
        return None
    at_s, done = zip(*expected.done, strict=True)
    return np.array(at_s), np.array(done)
