"""The schedule that answers a job of few queries soonest.

The search maximises the steady state, that of a job without end. A job that is not many times
what is in the system at once is ramp and drain for a good part, and another schedule may be done
earlier: fewer, even batches, or one. So configurations over the whole space that keep the bound
are replayed (xsimulator.replay) with the job's queries, the same for each; the quickest that keeps
its bound with its own margin is taken. No bound is proved for that; what is proved of the steady
state stays."""

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
from xscheduler.evaluator import Evaluator, job_lengths
from xscheduler.margin import MarginParts, Margins
from xscheduler.prospects import keeps_pace
from xscheduler.room import with_room
from xscheduler.space import Cell, Limits, Point

SHORT = 10  # chosen: times what is in the system: of a longer job less is ramp and drain
WORTH = 0.02  # chosen: of the job's time: what another schedule must save to be taken
NEARLY = 0.9  # chosen: of what its steady state would take: no more is hoped for from a replay
MOST_CONFIGS, MOST_REPLAYED = 100, 15_000  # of the first round, and queries over its replays
FINALISTS, MOST_REPLAYS, MOST_AGAIN = 5, 5, 1500  # of the second; so often, or so many queries
MOST_OF_MARGIN = 0.75  # chosen: of its logarithm: of what needs more, no replay is made
ROUGHLY = 3  # chosen: one in so many configurations is replayed for a comparison
_NO_MARGIN = MarginParts(factor=1.0, sentence="planned without a margin")


class _Entry(NamedTuple):
    throughput_qps: float  # of all copies, roughly
    cell: Cell
    point: Point


def for_the_job(problem: Problem, evaluator: Evaluator, schedule: Schedule,
                cells: Sequence[Cell], *,
                has_margin: bool = True, is_rough: bool = False,
                cuts: Callable[[], bool] = lambda: False) -> Schedule:
    """`schedule`, or the one that answers the problem's own queries sooner. evaluator: of the
    problem, under this bound or another. cells: whose points are looked at.
    has_margin: it keeps the bound with the constraint's confidence. is_rough: as few replays as
    tell how it compares with a schedule elsewhere. cuts: whether no more is to be replayed."""
    own, count = schedule.estimate, problem.num_queries
    if not count or not is_short(problem, schedule):
        return schedule
    clock = _JobTime(problem, evaluator, schedule)
    doubts = Margins(problem, evaluator) if has_margin else None
    limit_s = schedule.bound.limit_s
    constraint = problem.constraint
    entries = _entries(cells, Limits(
        latency_s=limit_s / (1.0 if doubts is None else _least_margin(doubts, own)),
        ttft_s=constraint.limit_s("ttft"), tpot_s=constraint.limit_s("tpot")))
    entries = entries[:min(max(MOST_REPLAYED // count, FINALISTS), MOST_CONFIGS)]
    first = _first_round(entries[::ROUGHLY if is_rough else 1], clock, count, clock(own, 1), cuts)
    replays = 1 if is_rough or cuts() else min(max(MOST_AGAIN // count, 1), MOST_REPLAYS)
    steady_s = clock(own, replays)
    # those alone that keep the bound with their own margins
    safe = (one for one in map(evaluator.shown, first) if one.figures.latency_s * (
        1.0 if doubts is None else doubts.margin(one).factor) <= limit_s)
    final = sorted(((clock(estimate, replays), estimate) for estimate in islice(safe, FINALISTS)),
                   key=lambda pair: told(pair[0]))
    for wall_s, estimate in final:
        if wall_s > (1 - WORTH) * steady_s:
            break
        margin = _NO_MARGIN if doubts is None else doubts.margin(estimate)
        if doubts is None or keeps_pace(doubts, estimate):
            return _taken(schedule, estimate, margin, count, wall_s, steady_s, len(clock.asked))
    return schedule


def _least_margin(doubts: Margins, own: Estimate) -> float:
    """A factor that hardly any margin is below: most of the steady state's own. (Margins differ
    from one schedule to the next by what lengths do to each.)"""
    factor = doubts.margin(own).factor
    return 1.0 if math.isinf(factor) else max(factor**MOST_OF_MARGIN, doubts.least_factor)


def is_short(problem: Problem, schedule: Schedule) -> bool:
    """Whether the problem's own queries are mostly ramp and drain. What every query at its cap
    would take says nothing."""
    count, estimate = problem.num_queries, schedule.estimate
    return bool(count) and not problem.observes and (
        count or 0) < SHORT * estimate.deployment.replicas * estimate.most_in_system


def told(figure: float) -> float:
    """A figure to its tenth digit (chosen): in those beyond, equals differ by rounding."""
    return float(f"{figure:.10g}")


class _JobTime:
    """What the job takes by an estimate; keeps the estimates `asked` about."""

    def __init__(self, problem: Problem, evaluator: Evaluator, schedule: Schedule) -> None:
        self._problem, self._evaluator, self._schedule = problem, evaluator, schedule
        self.asked = set[Estimate]()
        self._most = self._num_runnable(self._roomy(schedule.estimate))

    def __call__(self, estimate: Estimate, replays: int) -> float:
        """Seconds, the mean of so many replays; infinite where it cannot run all the queries that
        `schedule` can."""
        self.asked.add(estimate)
        estimate = self._roomy(estimate)
        if self._num_runnable(estimate) < self._most:
            return math.inf
        prediction = self._evaluator.job(estimate, replays)
        return math.inf if prediction is None else prediction.wall_s

    def _roomy(self, estimate: Estimate) -> Estimate:
        return with_room(replace(self._schedule, estimate=estimate), self._problem).estimate

    def _num_runnable(self, estimate: Estimate) -> int:
        """Requests that it has room for; 0 where their lengths are not known."""
        known = job_lengths(self._problem, estimate)
        return 0 if known is None else len(known.inputs)


def _entries(cells: Sequence[Cell], limits: Limits) -> list[_Entry]:
    """Points that keep the limits in their steady state by the rough formula, quickest first."""
    entries = []
    for cell in cells:
        rough, outputs = cell.rough, cell.problem.lengths.outputs
        after = max(outputs.quantile(cell.problem.constraint.quantile) - 1, 1)
        is_kept = ((rough.latency_s <= limits.latency_s) & (rough.ttft_s <= limits.ttft_s)
                   & (rough.latency_s - rough.ttft_s <= after * limits.tpot_s))
        entries += [_Entry(cell.copies * float(rough.throughput_qps[row]), cell,
                           tuple(cell.points[row].tolist()))
                    for row in np.flatnonzero(is_kept).tolist()]
    return sorted(entries, key=lambda entry: -told(entry.throughput_qps))


def _first_round(entries: Sequence[_Entry], clock: _JobTime, count: int,
                 steady_s: float, cuts: Callable[[], bool]) -> list[Estimate]:
    """By one replay each, of all that may be quicker than what was seen, the quickest first."""
    timed: list[tuple[float, Estimate]] = []
    least_s = steady_s
    for entry in entries:
        if NEARLY * count / entry.throughput_qps > least_s or cuts():
            break
        cell = entry.cell
        estimate = cell.formula.estimate(cell.plan, entry.point).in_copies(cell.copies)
        timed.append((clock(estimate, 1), estimate))
        least_s = min(least_s, timed[-1][0])
    timed.sort(key=lambda pair: told(pair[0]))
    return [estimate for _, estimate in timed]


def _taken(schedule: Schedule, estimate: Estimate, margin: MarginParts, count: int, wall_s: float,
           steady_s: float, replayed: int) -> Schedule:
    before, words = schedule.figures, words_of(schedule.estimate)
    # infinite where its replay meets sizes that lie too far beyond those measured
    is_told = math.isfinite(steady_s)
    of_it = (f"would take {format_seconds(steady_s)} for them" if is_told else
             "comes, with them, to sizes that the times say nothing of")
    note = (f"Chosen for this job's {count} queries: they should take {format_seconds(wall_s)} "
            f"from the first to the last, the least of {replayed} schedules that were simulated. "
            f"What is fastest in a job without end ({before.throughput_qps:.4g} queries/s by "
            f"{words}) {of_it}.")
    row = Rejected(label=f"highest in steady state: {words}", latency_s=before.latency_s,
                   throughput_qps=before.throughput_qps,
                   reason=f"takes {steady_s / wall_s - 1:.0%} longer for {count} queries"
                   if is_told else of_it.replace("them", f"{count} queries"))
    gap = schedule.proof.bound_qps / estimate.figures.throughput_qps - 1
    return schedule.changed(estimate=estimate, gap=gap, status=Status.JOB, explanation=(note,),
                            rejected=(row, *schedule.rejected), margin=margin.kept())


def words_of(estimate: Estimate) -> str:
    """Copies, policy and the first two of its control variables, which tell most."""
    names = policy(estimate.policy).variable_names[:2]
    values = [f"{name} {value}" for name in names if (value := estimate.variables.get(name))]
    copies = estimate.deployment.replicas
    return ", ".join([*([f"{copies} copies"] if copies > 1 else []), estimate.policy, *values])
