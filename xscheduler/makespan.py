"""The schedule with the shortest makespan, for a job of few requests.

The search maximises throughput in steady state. A short job (less than SHORT times the requests in
the system) spends much of its time in ramp-up and drain. So another schedule may finish earlier:
fewer, even batches, or a single one. Promising configurations that keep the limit are therefore
replayed with the job's own requests. The quickest that keeps the limit with its own margin is
chosen. Nothing is proved about makespans; the upper bound on steady-state throughput stays."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

import numpy as np

from xgpt.core.policies import policy
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate, Rejected, Schedule, Status
from xgpt.core.units import format_seconds
from xscheduler.cache_sizing import with_room
from xscheduler.evaluator import Evaluator, job_lengths
from xscheduler.margin import MarginParts, Margins
from xscheduler.prospects import keeps_pace_limits
from xscheduler.space import LEAST_GAIN, OPTIMISM, Cell, Limits, Point

SHORT = 10  # chosen: a job with more requests, as a multiple of those in the system, is not short
MOST_CONFIGS, MOST_REPLAYED = 100, 15_000  # chosen: configurations and requests of the first round
FINALISTS = 5  # chosen: configurations of the second round
ROUGHLY = 3  # chosen: for a rough comparison one configuration in so many is replayed
_NO_MARGIN = MarginParts(factor=1.0, sentence="planned without a margin")


class Entry(NamedTuple):
    """A configuration, with its throughput and latency by the rough formula."""

    throughput_qps: float
    latency_s: float
    cell: Cell
    point: Point

    @property
    def estimate(self) -> Estimate:
        return self.cell.formula.estimate(self.cell.plan, self.point).in_copies(self.cell.copies)


def best_for_job(problem: Problem, evaluator: Evaluator, schedule: Schedule,
                cells: Sequence[Cell], *,
                has_margin: bool = True, is_rough: bool = False,
                cuts: Callable[[], bool] = lambda: False) -> Schedule:
    """`schedule`, or one that finishes the problem's own requests at least LEAST_GAIN sooner.

    `cells`: configurations to choose from. `has_margin`: the limit holds with its confidence.
    `is_rough`: fewer replays, for a comparison. `cuts`: returns true once replays must end."""
    own, count = schedule.estimate, problem.num_queries
    if not count or not is_short(problem, schedule):
        return schedule
    clock = JobClock(problem, evaluator, schedule)
    margins = Margins(problem, evaluator) if has_margin else None
    limit_s = schedule.bound.limit_s
    constraint = problem.constraint
    # until the final round the margin of the chosen schedule stands for all
    factor = 1.0 if margins is None else margins.margin(own).factor
    entries = entries_within(cells, Limits(
        latency_s=limit_s / (1.0 if math.isinf(factor) else factor),
        ttft_s=constraint.limit_s("ttft"), tpot_s=constraint.limit_s("tpot")))
    entries = entries[:min(max(MOST_REPLAYED // count, FINALISTS), MOST_CONFIGS)]
    first = _first_round(entries[::ROUGHLY if is_rough else 1], clock, count, clock(own, 1), cuts)
    replays = 1 if is_rough or cuts() else None
    steady_s = clock(own, replays)
    # only those that keep the limit with their own margins
    safe = (one for one in map(evaluator.shown, first) if one.figures.latency_s * (
        1.0 if margins is None else margins.margin(one).factor) <= limit_s)
    final = sorted(((clock(estimate, replays), estimate) for estimate in islice(safe, FINALISTS)),
                   key=lambda pair: rounded(pair[0]))
    for wall_s, estimate in final:
        if wall_s > (1 - LEAST_GAIN) * steady_s:
            break
        margin = _NO_MARGIN if margins is None else margins.margin(estimate)
        if margins is None or keeps_pace_limits(margins, estimate):
            return _chosen(schedule, estimate, margin, count, wall_s, steady_s, len(clock.asked))
    return schedule


def is_short(problem: Problem, schedule: Schedule) -> bool:
    """Whether ramp-up and drain take a large part of the job. False while lengths are observed,
    since a makespan at the caps is too long, and where requests arrive over time."""
    count, estimate = problem.num_queries, schedule.estimate
    return bool(count) and not problem.observes and problem.arrivals is None and (
        count or 0) < SHORT * estimate.deployment.replicas * estimate.most_in_system


def rounded(figure: float) -> float:
    """`figure` to ten digits (chosen), so that equal figures compare as equal."""
    return float(f"{figure:.10g}")


class JobClock:
    """Makespan of the job under an estimate. asked: the estimates evaluated so far."""

    def __init__(self, problem: Problem, evaluator: Evaluator, schedule: Schedule) -> None:
        self._problem, self._evaluator, self._schedule = problem, evaluator, schedule
        self.asked = set[Estimate]()
        self._most = self._num_runnable(self.roomy(schedule.estimate))

    def __call__(self, estimate: Estimate, replays: int | None) -> float:
        """Makespan in seconds, the mean of `replays` replays (see Evaluator.job); infinite if the
        estimate cannot run all requests that `schedule` can."""
        self.asked.add(estimate)
        estimate = self.roomy(estimate)
        if self._num_runnable(estimate) < self._most:
            return math.inf
        prediction = self._evaluator.job(estimate, replays)
        return math.inf if prediction is None else prediction.wall_s

    def roomy(self, estimate: Estimate) -> Estimate:
        """The estimate with KV cache for the longest request, if memory allows it."""
        return with_room(replace(self._schedule, estimate=estimate), self._problem).estimate

    def _num_runnable(self, estimate: Estimate) -> int:
        known = job_lengths(self._problem, estimate)
        return 0 if known is None else len(known.inputs)


def entries_within(cells: Sequence[Cell], limits: Limits) -> list[Entry]:
    """Points within the limits by the rough formula, those of highest throughput first."""
    entries = []
    for cell in cells:
        rough, outputs = cell.rough, cell.problem.lengths.outputs
        after = max(outputs.quantile(cell.problem.constraint.quantile) - 1, 1)
        is_kept = ((rough.latency_s <= limits.latency_s) & (rough.ttft_s <= limits.ttft_s)
                   & (rough.latency_s - rough.ttft_s <= after * limits.tpot_s))
        entries += [Entry(cell.copies * float(rough.throughput_qps[row]),
                          float(rough.latency_s[row]), cell, tuple(cell.points[row].tolist()))
                    for row in np.flatnonzero(is_kept).tolist()]
    return sorted(entries, key=lambda entry: -rounded(entry.throughput_qps))


def _first_round(entries: Sequence[Entry], clock: JobClock, count: int,
                 steady_s: float, cuts: Callable[[], bool]) -> list[Estimate]:
    """The entries that may beat the shortest makespan, each replayed once, the shortest first."""
    timed: list[tuple[float, Estimate]] = []
    least_s = steady_s
    for entry in entries:
        if count / ((1 + OPTIMISM) * entry.throughput_qps) > least_s or cuts():
            break
        estimate = entry.estimate
        timed.append((clock(estimate, 1), estimate))
        least_s = min(least_s, timed[-1][0])
    timed.sort(key=lambda pair: rounded(pair[0]))
    return [estimate for _, estimate in timed]


def _chosen(schedule: Schedule, estimate: Estimate, margin: MarginParts, count: int, wall_s: float,
           steady_s: float, replayed: int) -> Schedule:
    before, words = schedule.figures, words_of(schedule.estimate)
    # infinite if its replay meets sizes too far beyond those measured
    is_known = math.isfinite(steady_s)
    other = (f"would take {format_seconds(steady_s)}: this job is too short to reach steady state"
             if is_known else "would need step times of sizes that were not measured")
    note = (f"Estimated run time {format_seconds(wall_s)} for this job's {count} requests, the "
            f"shortest of {replayed} simulated schedules. The schedule with the highest "
            f"steady-state throughput ({before.throughput_qps:.4g} requests/s by {words}) {other}.")
    row = Rejected(kind="highest in steady state", words=words, latency_s=before.latency_s,
                   throughput_qps=before.throughput_qps,
                   reason=f"takes {steady_s / wall_s - 1:.0%} longer for {count} requests"
                   if is_known else "needs step times of sizes that were not measured")
    gap = schedule.proof.bound_qps / estimate.figures.throughput_qps - 1
    return schedule.changed(estimate=estimate, gap=gap, status=Status.JOB, explanation=(note,),
                            rejected=(row, *schedule.rejected), margin=margin.kept())


def words_of(estimate: Estimate) -> str:
    """Number of replicas, policy and its two main control variables, in words."""
    names = policy(estimate.policy).variable_names[:2]
    values = [f"{name} {value}" for name in names if (value := estimate.variables.get(name))]
    copies = estimate.deployment.replicas
    return ", ".join([*([f"{copies} replicas"] if copies > 1 else []), estimate.policy, *values])
