"""Sensitivity of a schedule to output lengths other than planned (paper section 7.6, Figure 11):
mean, standard deviation or skewness change while the other two stay.

The unchanged schedule is replayed on requests of the changed distribution, and so is the best
schedule for that distribution. As in the paper two latencies are compared with the limit.
`queries_s` is the constraint's quantile over all requests. `sequence_s` is the mean latency of a
request of the length that was planned at that quantile. All replays use the same random numbers."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import numpy as np

from xgpt.core.errors import InfeasibleError
from xgpt.core.lengths import JointLengths, with_output_moments
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate
from xprofiler.timing import TimingSource
from xsimulator.replay.prediction import (
    CHECKED_QUERIES,
    CHECKED_ROUNDS,
    MOST_CHECKED,
    steady_queries,
)
from xsimulator.replay.replicas import replay_steady
from xsimulator.replay.steady_state import combine_unlike, enough_queries, steady_figures

Statistic = Literal["mean", "std", "skewness"]
FACTORS = (0.7, 0.85, 1.0, 1.15, 1.3)  # chosen
SKEWNESS_CHANGES = (-0.4, -0.2, 0.0, 0.2, 0.4)  # chosen
SEED = 0
TOLERANCE = 0.02  # chosen: share of the limit, for the scatter of a replay's figures


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftFigures:
    """Steady-state figures of one schedule in a replay; nan for a length that hardly occurs."""

    throughput_qps: float
    queries_s: float
    sequence_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftRow:
    """Figures for one changed distribution, of the unchanged schedule (`kept`) and of the best one
    (`best`; None if none keeps the limit). change: factor on mean or std, or added to skewness."""

    statistic: Statistic
    change: float
    kept: DriftFigures
    best: DriftFigures | None
    queries_ratio: float  # kept.queries_s over that of the unchanged distribution
    sequence_ratio: float
    keeps_queries: bool
    keeps_sequence: bool | None  # None: the length hardly occurs


def drift_rows(problem: Problem, timing: TimingSource, estimate: Estimate, *,
               search: Callable[[Problem], Estimate],
               least_queries: int = CHECKED_QUERIES) -> tuple[DriftRow, ...]:
    """Rows for the FACTORS of mean and of std and the SKEWNESS_CHANGES, in this order.

    search: returns the best estimate for a problem with other lengths; raises InfeasibleError. It
    takes the limit's request length from the changed distribution."""

    @cache
    def figures(lengths: JointLengths, estimate: Estimate) -> DriftFigures | None:
        """Figures of the schedule on these lengths; None if the replay has no steady state."""
        known = problem.queries and replace(problem.queries, outputs=None)
        changed, constraint = replace(problem, lengths=lengths, queries=known), problem.constraint
        count = enough_queries(estimate, least=least_queries, rounds=CHECKED_ROUNDS,
                               most=MOST_CHECKED)
        results, _ = replay_steady(changed, timing, estimate, steady_queries(
            changed, estimate, count, np.random.default_rng(SEED)))
        of_all, of_one = (combine_unlike([steady_figures(
            result, constraint.with_latency(kind=kind), problem.lengths.outputs)
            for result in results]) for kind in ("queries", "sequence"))
        if of_all is None or of_one is None:
            return None
        # of equal replicas only one was replayed
        copies = 1 if estimate.others else estimate.deployment.replicas
        return DriftFigures(throughput_qps=copies * of_all.throughput_qps,
                            queries_s=of_all.latency_s, sequence_s=of_one.latency_s)

    @cache
    def best(lengths: JointLengths) -> DriftFigures | None:
        try:
            schedule = search(replace(problem, lengths=lengths))
        except InfeasibleError:
            return None
        return figures(lengths, schedule)

    usual = figures(problem.lengths, estimate)
    assert usual is not None, "no steady state on the planned lengths"
    return tuple(_row(problem, statistic, change, usual, kept, best(lengths))
                 for statistic, change, lengths in changed_lengths(problem.lengths)
                 if (kept := figures(lengths, estimate)) is not None)


def changed_lengths(lengths: JointLengths) -> list[tuple[Statistic, float, JointLengths]]:
    """(statistic, change, distribution) of every row; without change it is `lengths` itself."""
    ways: tuple[tuple[Statistic, Sequence[float], float, Callable[[float], JointLengths]], ...] = (
        ("mean", FACTORS, 1.0, lambda by: with_output_moments(lengths, mean_factor=by)),
        ("std", FACTORS, 1.0, lambda by: with_output_moments(lengths, std_factor=by)),
        ("skewness", SKEWNESS_CHANGES, 0.0,
         lambda by: with_output_moments(lengths, skewness_change=by)))
    return [(statistic, change, lengths if change == usual else changed(change))
            for statistic, changes, usual, changed in ways for change in changes]


def _row(problem: Problem, statistic: Statistic, change: float, usual: DriftFigures,
         kept: DriftFigures, best: DriftFigures | None) -> DriftRow:
    most_s = problem.constraint.latency_s * (1 + TOLERANCE)
    return DriftRow(statistic=statistic, change=change, kept=kept, best=best,
                    queries_ratio=kept.queries_s / usual.queries_s,
                    sequence_ratio=kept.sequence_s / usual.sequence_s,
                    keeps_queries=kept.queries_s <= most_s, keeps_sequence=None
                    if math.isnan(kept.sequence_s) else kept.sequence_s <= most_s)
