"""Timing one piece of work: warm-up, then repetitions until the sample is long enough."""

from __future__ import annotations

import time
from collections.abc import Callable

_MIN_SAMPLE_S = 2e-3  # one raw sample lasts at least this long: far above the clock's grain
_MIN_TOTAL_S = 0.03
_MIN_SAMPLES, _MAX_SAMPLES = 3, 30


def time_samples(work: Callable[[], object], share: int = 1, *,
                 min_total_s: float = _MIN_TOTAL_S) -> tuple[float, ...]:
    """Seconds of one call of `work` over `share` (the layers one call goes through), sampled: each
    sample is the mean of a calibrated number of calls; the first call is a warm-up and dropped."""
    work()
    start = time.perf_counter()
    work()
    once_s = max(time.perf_counter() - start, 1e-9)
    calls = max(1, round(_MIN_SAMPLE_S / once_s))
    samples: list[float] = []
    spent_s = 0.0
    while len(samples) < _MIN_SAMPLES or (spent_s < min_total_s and len(samples) < _MAX_SAMPLES):
        start = time.perf_counter()
        for _ in range(calls):
            work()
        took_s = time.perf_counter() - start
        samples.append(took_s / calls / share)
        spent_s += took_s
    return tuple(samples)
