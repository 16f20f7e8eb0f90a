"""Schedules as the commands show them: searched, within the confidence, explained."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from xgpt.core.job import FixedSchedule
from xgpt.core.lengths import JointLengths
from xgpt.core.problem import Problem
from xgpt.core.schedule import Margin as KeptMargin
from xgpt.core.schedule import Rejected, Schedule
from xprofiler.timing import TimingSource
from xscheduler.branch_and_bound import Status
from xscheduler.explanation import FREE_ROW, explain_choice
from xscheduler.search import GAP, Scheduler
from xscheduler.uncertainty import PlannedWithin, plan_within


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """`gap`: share by which a schedule may be better than the one found. `max_nodes`: boxes of
    configurations that each policy's search may look at; None: as many as it takes."""

    gap: float = GAP
    max_nodes: int | None = None


class Planner:
    """Schedules of one problem under one latency bound after the other: what was evaluated for one
    serves the next."""

    def __init__(self, problem: Problem, timing: TimingSource, limits: Limits | None = None, *,
                 asked: FixedSchedule | None = None) -> None:
        """asked: what the job fixes, where `problem` fixes more."""
        self.problem, self.timing = problem, timing
        self.limits = limits or Limits()
        self._explained = problem if asked is None else replace(problem, fixed=asked)
        self._own = self._search_of(problem)

    def find(self, latency_bound_s: float | None = None) -> Schedule:
        """The best schedule that keeps the bound (by default the problem's) with the constraint's
        confidence. Raises InfeasibleError."""
        began, before = time.monotonic(), self._own.nodes
        problem = _bounded(self.problem, latency_bound_s)
        bound_s = problem.constraint.latency_s
        longer: list[_Search] = []

        def of_problem(other: Problem) -> Schedule:
            if not longer or longer[-1].lengths is not other.lengths:
                longer.append(self._search_of(other))
            return longer[-1].find(other.constraint.latency_s)

        planned = plan_within(problem, self.timing, self._own.find,
                              search_problem=of_problem, replays=True)
        schedule = _compared(planned, [found for search in (self._own, *longer)
                                       for found in search.found])
        # what does not keep its margin is explained by what it does use
        limit_s = max(bound_s / planned.margin.factor, min(schedule.estimate.figures.latency_s, bound_s))
        explanation = explain_choice(schedule, _bounded(self._explained, bound_s), self.timing,
                                     latency_limit_s=limit_s)
        return schedule.changed(margin=KeptMargin(     factor=planned.margin.factor, cost=max(planned.cost, 0.0),     note=planned.margin.sentence),
            explanation=tuple(sentence[:1].upper() + sentence[1:] for sentence in explanation),
            nodes=self._own.nodes - before + sum(search.nodes for search in longer),
            seconds=time.monotonic() - began)

    def of(self, problem: Problem, timing: TimingSource) -> Schedule:
        """The same of a problem like this one: what other parts search with."""
        return Planner(problem, timing, self.limits).find()

    def without_margin(self, problem: Problem) -> Schedule:
        """The best schedule of a problem like this one, all taken as certain. Raises
        InfeasibleError."""
        return self._search_of(problem).find(problem.constraint.latency_s)

    def _search_of(self, problem: Problem) -> _Search:
        return _Search(problem.lengths, Scheduler(
            problem, self.timing, gap=self.limits.gap, max_nodes=self.limits.max_nodes))


class _Search:
    """One Scheduler, and what it found."""

    def __init__(self, lengths: JointLengths, scheduler: Scheduler) -> None:
        self.lengths = lengths
        self.found: list[Schedule] = []
        self._scheduler = scheduler

    @property
    def nodes(self) -> int:
        """Configurations evaluated up to the last schedule found."""
        return self.found[-1].proof.nodes if self.found else 0

    def find(self, latency_bound_s: float) -> Schedule:
        self.found.append(self._scheduler.find(latency_bound_s))
        return self.found[-1]


def _bounded(problem: Problem, latency_bound_s: float | None) -> Problem:
    if latency_bound_s is None:
        return problem
    return replace(problem, constraint=problem.constraint.with_latency(limit_s=latency_bound_s))


def _compared(planned: PlannedWithin, searched: list[Schedule]) -> Schedule:
    """The schedule planned, its alternatives beside it in the same currency: a schedule found under
    a margin was searched for longer outputs, and so were they."""
    schedule = planned.schedule
    free = next(found for found in searched if found.bound.limit_s == schedule.bound.limit_s
                and found.proof.bound_qps == schedule.proof.bound_qps)
    if schedule.estimate == free.estimate:
        return schedule
    origin = next(found for found in searched if found.rejected is schedule.rejected)
    rows = [row for row in origin.rejected if not row.label.startswith(FREE_ROW)]
    if schedule.estimate != origin.estimate:
        rows = [in_the_same_lengths(row, schedule, origin) for row in rows]
    rows += [row for row in free.rejected if row.label.startswith(FREE_ROW)]
    rows.append(Rejected(
        label=f"without a margin: {free.estimate.policy}", latency_s=free.estimate.figures.latency_s,
        throughput_qps=free.estimate.figures.throughput_qps,
        reason="keeps the bound only if all is as expected"))
    status = schedule.proof.status if schedule.proof.status == Status.LIMIT.value else Status.WITHIN_GAP.value
    return schedule.changed(rejected=tuple(rows), status=status)


def in_the_same_lengths(row: Rejected, schedule: Schedule, origin: Schedule) -> Rejected:
    """An alternative to `origin`, which was searched for longer outputs, beside `schedule`, which
    is the same with the problem's own: with the share that it loses there."""
    if row.throughput_qps is None:
        return row
    share = row.throughput_qps / origin.estimate.figures.throughput_qps
    return replace(row, throughput_qps=share * schedule.estimate.figures.throughput_qps, latency_s=None,
                   reason="no better, with the margin" if share >= 1 else
                   f"lower throughput by {1 - share:.1%}, with the margin")
