"""Figures of a schedule, by closed form or by replay, on the stages that it has."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np

from xgpt.core.errors import XgptError
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate
from xprofiler.timing import TimingSource
from xscheduler.live.pinned import pinned_policy
from xscheduler.prediction import predict
from xsimulator.policies import make_config
from xsimulator.replay.job import planned_queries, replay_job
from xsimulator.replay.predict import JobPrediction, replay_latency_s
from xsimulator.replay.records import ReplayResult

_SEED = 20240427


class Evaluator:
    """Evaluates schedules of one problem under any latency bound, and keeps what it was asked."""

    def __init__(self, problem: Problem, timing: TimingSource) -> None:
        self.problem, self.timing = problem, timing
        self._forms: dict[Hashable, Any] = {}
        self._replayed_s: dict[Estimate, float] = {}
        self._jobs: dict[tuple[Estimate, int], JobPrediction | None] = {}

    def latency_s(self, estimate: Estimate) -> float:
        """The constraint's latency by the closed form."""
        found = self.form(estimate).evaluate([config_of(estimate)])
        return float(found.latency_s[0])

    def estimate(self, estimate: Estimate) -> Estimate:
        """The closed form's figures of a schedule that may have been found for another problem."""
        own: Estimate = self.form(estimate).estimate(config_of(estimate))
        return own

    def form(self, estimate: Estimate) -> Any:
        """The closed form of its policy on its stages (a baseline's: on its own)."""
        key = estimate.policy, estimate.deployment.stages
        if key not in self._forms:
            self._forms[key] = pinned_policy(estimate, self.problem, self.timing)
        return self._forms[key]

    def replayed_latency_s(self, estimate: Estimate) -> float:
        """The constraint's latency in the steady state of a replay; nan where no query is long
        enough to count."""
        if estimate not in self._replayed_s:
            self._replayed_s[estimate] = replay_latency_s(
                self.problem, self.timing, estimate, _SEED)
        return self._replayed_s[estimate]

    def replay(self, estimate: Estimate, num_queries: int, seed: int) -> ReplayResult:
        """A replay of so many queries, drawn from the problem's lengths."""
        queries = planned_queries(self.problem, *self.problem.lengths.sample(
            num_queries, np.random.default_rng(seed)))
        return replay_job(self.problem, self.timing, estimate, queries)

    def job(self, estimate: Estimate, replays: int) -> JobPrediction | None:
        """What the problem's own queries take, the mean of so many replays; None where it cannot
        be said, or run."""
        key = estimate, replays
        if key not in self._jobs:
            try:
                self._jobs[key] = predict(self.problem, self.timing, estimate, replays=replays)
            except XgptError:  # times that the profile refuses
                self._jobs[key] = None
        return self._jobs[key]


def config_of(estimate: Estimate) -> Any:
    """The configuration that a closed form evaluates."""
    config, missing = make_config(estimate.policy, estimate)
    assert not missing, f"{missing = }"
    return config
