"""Figures of a schedule on its own stages, by the rough formula or by replay, and the prediction
for a finite job."""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from xgpt.core.constraint import Metric
from xgpt.core.controls import forecasting_of
from xgpt.core.errors import XgptError
from xgpt.core.lengths import FloatArray, IntArray, synthetic_lengths
from xgpt.core.problem import Problem, QueryLengths
from xgpt.core.schedule import Estimate
from xprofiler.timing import TimingSource
from xrunner.rules.forecast import with_forecasts
from xrunner.rules.order import run_order, window_of
from xrunner.rules.steps import rules_for
from xscheduler.replays import Replays
from xscheduler.replicas import problem_of_replica
from xsimulator.layer_times import LayerTimes
from xsimulator.memory import least_weight_bytes
from xsimulator.plans import PlanCache
from xsimulator.replay.placed_times import PlacedTimes
from xsimulator.replay.prediction import (
    MOST_PREDICTED,
    JobPrediction,
    job_replays,
    mean_prediction,
    num_checked_queries,
)
from xsimulator.replay.records import ReplayResult
from xsimulator.replay.replicas import replayer_of
from xsimulator.replay.step_clock import StepClocks
from xsimulator.rough.formulas import Formulas
from xsimulator.sharing import stretches

_TOGETHER = 256  # chosen: requests in a row, depth first, of a part that shows a forest
MOST_REPLAYS, MOST_REPLAYED = 5, 1500  # chosen: replays of a job; requests of these together


class _Part(NamedTuple):
    problem: Problem
    formulas: Formulas
    replays: Replays


class Evaluator:
    """Figures of schedules of one problem, by formula or replay; each is computed once."""

    def __init__(self, problem: Problem, timing: TimingSource,
                 plans: PlanCache | None = None) -> None:
        """plans: stage plans of other problems with the same times."""
        self.problem, self.timing, self._plans = problem, timing, plans or PlanCache(timing)
        self._parts: dict[tuple[int, int], _Part] = {}  # by replicas, and devices of each
        self._rough: dict[Estimate, dict[str, float]] = {}
        self._shown: dict[Estimate, Estimate] = {}
        self._jobs: dict[tuple[Estimate, int], JobPrediction | None] = {}

    @cached_property
    def clocks(self) -> StepClocks:
        """Tables of step times, shared by all replays."""
        return StepClocks(self.problem, self.timing)

    def seconds(self, estimate: Estimate, metric: Metric) -> float:
        """The metric in seconds by the rough formula; for the makespan and deadlines, the seconds
        that one more request adds. Margins are ratios of these under other times and lengths. With
        a placement it is the time of one request's block by its steps."""
        if estimate.deployment.decoding.placement is not None:
            return placed_seconds(self._part(estimate).problem, self.timing, estimate, metric)
        if estimate not in self._rough:
            self._rough[estimate] = self._part(estimate).formulas.of(estimate.policy, getattr(
                estimate.controls, "admission", None)).of_estimate(estimate.one_copy)
        found = self._rough[estimate]
        if metric in ("makespan", "deadline"):
            return 1 / max(estimate.deployment.replicas * found["throughput_qps"], 1e-300)
        if metric == "tpot":
            outputs = self.problem.lengths.outputs.quantile(self.problem.constraint.quantile)
            return max(found["latency_s"] - found["ttft_s"], 0.0) / max(outputs - 1, 1)
        return found[f"{metric}_s"]

    def shown(self, estimate: Estimate) -> Estimate:
        """The estimate with a replay's figures; unchanged if it has no steady state."""
        if estimate not in self._shown:
            part, alone = self._part(estimate), estimate.one_copy
            found = part.replays.of(alone, num_checked_queries(part.problem, alone))
            self._shown[estimate] = found.shown(part.problem).in_copies(
                estimate.deployment.replicas)
        return self._shown[estimate]

    def _part(self, estimate: Estimate) -> _Part:
        deployment = estimate.deployment
        key = deployment.replicas, deployment.devices_per_replica
        if key not in self._parts:
            part = problem_of_replica(self.problem, estimate)
            self._parts[key] = _Part(
                part, Formulas(part, self.timing, plans=self._plans.of(part)),
                Replays(part, self.timing))
        return self._parts[key]

    def job(self, estimate: Estimate, replays: int | None = None) -> JobPrediction | None:
        """Expected figures of the problem's own requests, means of `replays` replays (None: fewer
        for a longer job). None without known times or without requests that can run."""
        if replays is None:
            replays = min(max(MOST_REPLAYED // (self.problem.num_queries or 1), 1), MOST_REPLAYS)
        key = estimate, replays
        if key not in self._jobs:
            try:
                self._jobs[key] = predict(self.problem, self.timing, estimate, replays=replays,
                                          clocks=self.clocks)
            except XgptError:  # times that the profile refuses
                self._jobs[key] = None
        return self._jobs[key]


def placed_seconds(problem: Problem, timing: TimingSource, estimate: Estimate,
                   metric: Metric) -> float:
    """The metric in seconds of a request of the quantile's output (makespan, deadline: of a mean
    one), from the steps of a placed pool alone: its group is encoded, then decoded to its end."""
    pool, lengths, figures = estimate.deployment.decoding, problem.lengths, estimate.figures
    assert pool.placement is not None
    slots = max(rule.group_max_active for rule in rules_for(estimate))
    times = PlacedTimes(problem, LayerTimes.of(problem, timing), pool.stages, pool.placement, slots)
    batch = np.array(figures.encode_batch / pool.num_groups)
    is_mean = metric in ("makespan", "deadline")
    outputs = lengths.outputs.mean if is_mean else lengths.outputs.quantile(
        problem.constraint.quantile)
    encode_s = float(times.encode_rows_s(batch * lengths.inputs.mean).sum() + times.ends_s(batch))
    decode_s = float(times.decode_s(np.array(figures.decode_batch / pool.num_groups),
                                    lengths.inputs.mean + outputs / 2).sum())
    found = {"ttft": encode_s, "tpot": decode_s}
    return found.get(metric, encode_s + max(outputs - 1, 0) * decode_s)


def predict(problem: Problem, timing: TimingSource, estimate: Estimate, *, replays: int = 5,
            clocks: StepClocks | None = None) -> JobPrediction | None:
    """Expected figures of the whole job, ramp-up and drain included. They are means of `replays`
    replays if lengths are not all known; None without requests."""
    replayed = replays_of(problem, timing, estimate, replays=replays, clocks=clocks,
                          has_steps=False)
    return None if replayed is None else mean_prediction(
        replayed.results, replayed.num_queries, replayed.deadlines_s, replayed.load_s,
        None if estimate.others else estimate.variables.get("max_active"))


class JobReplays(NamedTuple):
    """Replays of a job of `num_queries` requests. is_whole: each replays all of them.
    deadlines_s: of those replayed, [requests]; None without any. load_s: until the replicas of
    another engine are ready, if known. They load together, and a node reads the weights once."""

    results: Iterator[ReplayResult]
    num_queries: int
    is_whole: bool
    deadlines_s: FloatArray | None = None
    load_s: float | None = None


def replays_of(problem: Problem, timing: TimingSource, estimate: Estimate, *, replays: int = 5,
               clocks: StepClocks | None = None, has_steps: bool = True) -> JobReplays | None:
    """Replays of the problem's own requests, at most MOST_PREDICTED of them; None without requests.
    has_steps: as of xsimulator.replay.job.Replayer; of shared prefixes there are always steps, in
    which encoded tokens are counted."""
    if problem.num_queries is None:
        return None
    lengths = job_lengths(problem, estimate)
    total = problem.num_queries if lengths is None else len(lengths.inputs)
    count = min(total, MOST_PREDICTED)
    if not total:
        return None
    order = None
    if lengths is not None and lengths.prefixes is not None and count < total:
        rows = in_run_order(problem, estimate, lengths)[stretches(total, count)]
        lengths, order = lengths.take(rows), np.arange(count)
    known = None if lengths is None else evenly_spread(problem, lengths, count)
    count = count if known is None else len(known.inputs)
    has_steps |= known is not None and known.prefixes is not None
    replayer = replayer_of(problem, timing, estimate, clocks, has_steps=has_steps)
    if known is not None and order is None:
        order = in_run_order(problem, estimate, known)
    results = job_replays(replayer, count, np.random.default_rng(problem.seed), known=known,
                          order=order, replays=replays)
    limit_s, deadlines_s = problem.constraint.limit_s("deadline"), None
    if known is not None and known.deadlines_s is not None:
        deadlines_s = known.deadlines_s[order]
    elif math.isfinite(limit_s):
        deadlines_s = np.full(count, limit_s)
    start_s = timing.facts.start_s.get(estimate.deployment.tp_degree)
    read_s = least_weight_bytes(problem) / problem.cluster.ssd_bytes_per_s
    return JobReplays(results, total, count == total, deadlines_s,
                      None if start_s is None else start_s + read_s)


def evenly_spread(problem: Problem, lengths: QueryLengths, count: int) -> QueryLengths:
    """Lengths of about `count` of a job's requests, as they are replayed. With shared prefixes they
    are taken _TOGETHER at a time, those of a prefix together."""
    total = len(lengths.inputs)
    if count == total:
        known = lengths
    elif lengths.prefixes is None:
        known = lengths.take(np.linspace(0, total - 1, count).astype(np.int64))
    else:
        is_taken = np.arange(total) // _TOGETHER % -(-total // count) == 0
        known = lengths.take(np.sort(run_order("prefix", 0, lengths, problem.seed)[is_taken]))
    # each to its own cap: a sampled longer output would be cut
    return replace(known, outputs=known.most_outputs) if problem.observes else known


def job_lengths(problem: Problem, estimate: Estimate) -> QueryLengths | None:
    """Lengths of the requests that the schedule can run, in the input's order; the others become
    error records. None if the lengths are unknown before tokenising."""
    known = problem.queries
    if problem.is_synthetic and problem.num_queries is not None:
        inputs, outputs = synthetic_lengths(problem.lengths, problem.num_queries, problem.seed)
        known = QueryLengths(inputs=inputs, most_outputs=outputs, outputs=outputs)
    if known is None:
        return None
    for forecasting in (forecasting_of(estimate.controls), problem.adjustment.admission.forecast):
        known = with_forecasts(known, problem, forecasting)  # the second for the order alone
    runs = known.reserves <= estimate.longest_query
    runs &= known.most_outputs >= 1
    runs &= known.inputs <= (estimate.longest_input or np.inf)
    return known if runs.all() else known.take(np.flatnonzero(runs))


def in_run_order(problem: Problem, estimate: Estimate, lengths: QueryLengths) -> IntArray:
    """Indices of requests of these lengths in the order of a run. Where the problem leaves the
    order open, it is the input's."""
    asked = problem.adjustment
    if asked.order == "auto":
        return np.arange(len(lengths.inputs))
    window = window_of(asked, estimate.figures.encode_batch, lengths.prefixes)
    return run_order(asked.order, window, lengths, problem.seed)
