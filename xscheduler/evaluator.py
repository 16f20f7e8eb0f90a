"""Figures of a schedule, by closed form or by replay, on the stages that it has; and what a
problem's finite job is expected to measure, its lengths as far as they are known."""

import math
from collections.abc import Hashable, Iterator
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from xgpt.core.constraint import Metric
from xgpt.core.errors import XgptError
from xgpt.core.lengths import IntArray
from xgpt.core.problem import Problem
from xgpt.core.queries import QueryLengths
from xgpt.core.schedule import Estimate
from xgpt.core.workload import synthetic_lengths
from xprofiler.timing import TimingSource
from xrunner.rules.order import run_order, window_of
from xscheduler.live.pinned import pinned_policy
from xsimulator.policies import ClosedForm, make_config
from xsimulator.policies.figures import EstimateArrays
from xsimulator.replay.copies import replayer_of
from xsimulator.replay.job import planned_queries, replay_job
from xsimulator.replay.predict import (
    MOST_PREDICTED,
    JobPrediction,
    job_replays,
    mean_of,
    replay_checked,
)
from xsimulator.replay.records import ReplayResult
from xsimulator.replay.steady import SteadyFigures
from xsimulator.replay.step_clock import StepClocks

_SEED = 20240427


class Evaluator:
    """Evaluates schedules of one problem under any latency bound, and keeps what it was asked."""

    def __init__(self, problem: Problem, timing: TimingSource) -> None:
        self.problem, self.timing = problem, timing
        self._forms: dict[Hashable, ClosedForm] = {}
        self._figures: dict[Estimate, EstimateArrays] = {}
        self._replayed: dict[Estimate, SteadyFigures | None] = {}
        self._jobs: dict[tuple[Estimate, int], JobPrediction | None] = {}

    @cached_property
    def clocks(self) -> StepClocks:
        """The tables of step times that all its replays share."""
        return StepClocks(self.problem, self.timing)

    def latency_s(self, estimate: Estimate) -> float:
        """The constraint's latency by the closed form."""
        return self.seconds(estimate, "latency")

    def seconds(self, estimate: Estimate, metric: Metric) -> float:
        """What a bound on the metric is of, by the closed form; of a job's makespan, what one query
        more adds to it."""
        figures = self._figures.get(estimate)  # an estimate's hash takes long
        if figures is None:
            figures = self._figures[estimate] = self.form(estimate).evaluate([config_of(estimate)])
        if metric == "makespan":
            qps = estimate.deployment.replicas * float(figures.throughput_qps[0])
            return 1 / qps if qps > 0 else math.inf
        return float(getattr(figures, f"{metric}_s")[0])

    def estimate(self, estimate: Estimate) -> Estimate:
        """The closed form's figures of a schedule that may have been found for another problem."""
        own = self.form(estimate).estimate(config_of(estimate))
        return own.in_copies(estimate.deployment.replicas)

    def form(self, estimate: Estimate) -> ClosedForm:
        """The closed form of its policy on the stages of one of its copies (a baseline's: on its
        own)."""
        deployment = estimate.deployment
        key = estimate.policy, deployment.stages, deployment.replicas
        form = self._forms.get(key)
        if form is None:
            form = self._forms[key] = pinned_policy(estimate, self.problem, self.timing)
        return form

    def replayed_latency_s(self, estimate: Estimate) -> float:
        """The constraint's latency in the steady state of a replay; nan where no query is long
        enough to count."""
        return self.replayed_s(estimate, "latency")

    def replayed_s(self, estimate: Estimate, metric: Metric) -> float:
        """The same of what a bound on the metric, not the makespan, is of."""
        if estimate not in self._replayed:
            self._replayed[estimate] = replay_checked(
                self.problem, self.timing, estimate, _SEED, self.clocks)
        steady = self._replayed[estimate]
        return math.nan if steady is None else float(getattr(steady, f"{metric}_s"))

    def replay(self, estimate: Estimate, num_queries: int, seed: int) -> ReplayResult:
        """A replay of so many queries by one copy, drawn from the problem's lengths."""
        queries = planned_queries(self.problem, *self.problem.lengths.sample(
            num_queries, np.random.default_rng(seed)))
        return replay_job(self.problem, self.timing, estimate, queries, clocks=self.clocks)

    def job(self, estimate: Estimate, replays: int) -> JobPrediction | None:
        """What the problem's own queries take, the mean of so many replays; None where it cannot
        be said, or run."""
        key = estimate, replays
        if key not in self._jobs:
            try:
                self._jobs[key] = predict(self.problem, self.timing, estimate, replays=replays,
                                          clocks=self.clocks)
            except XgptError:  # times that the profile refuses
                self._jobs[key] = None
        return self._jobs[key]


@lru_cache(maxsize=32)
def config_of(estimate: Estimate) -> Any:
    """The configuration that a closed form evaluates: of one schedule under many times, in turn."""
    config, missing = make_config(estimate.policy, estimate)
    assert not missing, f"{missing = }"
    return config


def predict(problem: Problem, timing: TimingSource, estimate: Estimate, *, replays: int = 5,
            clocks: StepClocks | None = None) -> JobPrediction | None:
    """What the job measures with fill and drain, the mean of so many replays where lengths are not
    all known; None without queries."""
    replayed = replays_of(problem, timing, estimate, replays=replays, clocks=clocks,
                          has_steps=False)
    return None if replayed is None else mean_of(replayed.results, replayed.num_queries)


class JobReplays(NamedTuple):
    """What `predict` takes the mean of, of a job of `num_queries`; `is_whole`: each replays them
    all."""

    results: Iterator[ReplayResult]
    num_queries: int
    is_whole: bool


def replays_of(problem: Problem, timing: TimingSource, estimate: Estimate, *, replays: int = 5,
               clocks: StepClocks | None = None, has_steps: bool = True) -> JobReplays | None:
    """The replays of the problem's own queries, of many of some; None without queries. has_steps:
    see xsimulator.replay.job.Replayer."""
    if problem.num_queries is None:
        return None
    found = _runnable(problem, estimate)
    total = problem.num_queries if found is None else len(found[1])
    count, known = min(total, MOST_PREDICTED), None
    if not total:
        return None
    if found is not None:
        lengths, rows = found
        rows = rows if count == total else rows[np.linspace(0, total - 1, count).astype(np.int64)]
        known = lengths.take(rows[in_run_order(problem, estimate, count)])
        if problem.observes:  # each to its own cap: drawn for another, a long one would be cut
            known = replace(known, outputs=known.most_outputs)
    replayer = replayer_of(problem, timing, estimate, clocks, has_steps=has_steps)
    results = job_replays(replayer, count, np.random.default_rng(problem.seed), known=known,
                          replays=replays)
    return JobReplays(results, total, count == total)


def job_lengths(problem: Problem, estimate: Estimate) -> QueryLengths | None:
    """Lengths of the queries that the schedule can run (the others become error records, and take
    no time), in the order in which it takes them up; None where a model's tokenizer would have to
    say how long they are."""
    found = _runnable(problem, estimate)
    return None if found is None else found[0].take(
        found[1][in_run_order(problem, estimate, len(found[1]))])


def _runnable(problem: Problem, estimate: Estimate) -> tuple[QueryLengths, IntArray] | None:
    """(lengths of the problem's queries, which of them the schedule can run); None where nobody
    knows their lengths."""
    known = problem.queries
    if problem.is_synthetic and problem.num_queries is not None:
        inputs, outputs = synthetic_lengths(problem.lengths, problem.num_queries, problem.seed)
        known = QueryLengths(inputs=inputs, most_outputs=outputs, outputs=outputs)
    if known is None:
        return None
    runs = known.reserves <= estimate.longest_query
    runs &= known.most_outputs >= 1
    runs &= known.inputs <= (estimate.longest_input or np.inf)
    return known, np.flatnonzero(runs)


def in_run_order(problem: Problem, estimate: Estimate, count: int) -> list[int]:
    """Places of `count` queries in the order in which a run takes them up."""
    window = window_of(problem.adjustment.shuffle, estimate.figures.encode_batch)
    return run_order(count, window, problem.seed)
