"""A replay by csrc beside that of the rules themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from xgpt.core.errors import XgptError
from xgpt.core.problem import Problem
from xgpt.core.queries import QueryLengths
from xgpt.core.schedule import Estimate
from xprofiler.timing import TimingSource
from xsimulator.replay import native_replay
from xsimulator.replay.job import replay_job
from xsimulator.replay.records import ReplayResult

Job = tuple[Problem, TimingSource, Estimate, QueryLengths]

_POOL = ("decoded", "encoded", "tokens", "context", "memory_tokens", "memory_s", "start_s", "end_s")
_TIMES = ("arrival_s", "start_s", "first_token_s", "last_token_s")


def same_both_ways(monkeypatch: pytest.MonkeyPatch,
                   replayed: Callable[[], ReplayResult]) -> ReplayResult:
    """What both find, equal to the bit."""
    quick = replayed()
    with monkeypatch.context() as patched:
        patched.setattr(native_replay, "native", lambda: None)
        by_rule = replayed()
    for result, is_by_rule in ((quick, False), (by_rule, True)):
        assert isinstance(result.pools[0].steps, list) == is_by_rule, "else both are the same"
    assert len(quick.pools) == len(by_rule.pools)
    for pool, other in zip(quick.pools, by_rule.pools, strict=True):
        assert pool.name == other.name and pool.steps == list(other.steps)
        for name in _POOL:
            np.testing.assert_array_equal(getattr(pool, name), getattr(other, name), name)
    for link, other_link in zip(quick.handovers, by_rule.handovers, strict=True):
        for name in ("step", "start_s", "end_s"):
            np.testing.assert_array_equal(getattr(link, name), getattr(other_link, name), name)
    for name in _TIMES:
        np.testing.assert_array_equal(
            getattr(quick.times, name), getattr(by_rule.times, name), name)
    assert quick.preemptions == by_rule.preemptions
    return quick


def assert_names_one_that_never_fits(monkeypatch: pytest.MonkeyPatch, job: Job) -> None:
    """In the same words both ways."""
    problem, timing, estimate, queries = job
    inputs = queries.inputs.copy()
    inputs[3] = estimate.deployment.kv_tokens + 1
    words = []
    for library in (native_replay.native(), None):
        monkeypatch.setattr(native_replay, "native", lambda library=library: library)
        with pytest.raises(XgptError, match="query 3 reserves") as refusal:
            replay_job(problem, timing, estimate, replace(queries, inputs=inputs))
        words.append(str(refusal.value))
    assert words[0] == words[1]
