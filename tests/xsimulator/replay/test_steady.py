"""The steady state within a replay."""

from __future__ import annotations

import math

import numpy as np
import pytest

from xgpt.core.constraint import latency_constraint
from xgpt.core.lengths import truncated_normal
from xgpt.core.problem import QueryTimes
from xsimulator.replay.records import PoolRecords, ReplayResult
from xsimulator.replay.steady import steady_figures


@pytest.mark.parametrize("kind", ["sequence", "queries"])
def test_those_that_begin_before_the_drain_and_end_in_it_tell_no_latency(kind) -> None:
    """A query a second, each at work for 40 s; once none comes any more, steps are twice as
    quick."""
    start_s = np.arange(400.0)
    in_drain_s = np.maximum(start_s + 40 - 400, 0.0)
    zeros, last_s = np.zeros(400), start_s + 40 - in_drain_s / 2
    none, numbers = np.zeros((0, 1)), np.zeros(0, np.int64)
    idle = PoolRecords(
        name="all", role="both", stages=(0,), steps=(), decoded=numbers, encoded=numbers,
        tokens=numbers, context=np.zeros(0), start_s=none, end_s=none, memory_s=np.zeros(0),
        memory_tokens=numbers, kv_tokens=1)
    result = ReplayResult(
        pools=(idle,), handovers=(), output_tokens=np.full(400, 20), preemptions=0,
        times=QueryTimes(arrival_s=zeros, start_s=start_s, first_token_s=start_s + 1,
                         last_token_s=last_s))
    figures = steady_figures(result, latency_constraint(
        latency_s=math.inf, kind=kind, quantile=0.9), truncated_normal(18, 3, 20))
    assert figures is not None
    assert figures.latency_s == pytest.approx(40.0, rel=1e-6)
    assert figures.throughput_qps == pytest.approx(1.0, rel=0.02)
