"""The planner of one copy of the model: its best schedules, without a margin and with one, under
one latency bound after the other. Their figures are those of all copies that are like it."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property

from xgpt.core.constraint import Constraint
from xgpt.core.errors import BeatenError, InfeasibleError, InputError
from xgpt.core.job import FixedSchedule
from xgpt.core.policies import baselines
from xgpt.core.problem import Problem
from xgpt.core.schedule import Rejected, Schedule, Status
from xprofiler.timing import TimingSource
from xscheduler.alternatives import rows_with_margin
from xscheduler.copies import has_room
from xscheduler.evaluator import Evaluator
from xscheduler.explanation import explain_choice
from xscheduler.prospects import plan_jointly
from xscheduler.search import Scheduler
from xscheduler.spaces.baselines import BaselineSearch
from xscheduler.spaces.space import Effort, Selection
from xscheduler.uncertainty import Doubts
from xscheduler.within import PlannedWithin, plan_within


class ProblemSearch:
    """The search of one copy's problem, and what it found."""

    def __init__(self, problem: Problem, timing: TimingSource, effort: Effort) -> None:
        """Raises InputError for fixed values that the model or the devices cannot hold."""
        self.problem = problem
        self._search = (BaselineSearch(problem, timing) if problem.fixed.policy in baselines()
                        else Scheduler(problem, timing, effort))
        self.found: list[Schedule] = []
        self._known: dict[float, tuple[Schedule | InfeasibleError, float]] = {}
        self._glances: dict[float, Schedule] = {}

    @property
    def nodes(self) -> int:
        """Configurations evaluated, up to the last schedule found."""
        if isinstance(self._search, BaselineSearch):
            return self._search.num_evaluated
        return self.found[-1].proof.nodes if self.found else 0

    def find(self, latency_bound_s: float, floor_qps: float = 0.0) -> Schedule:
        """See Scheduler.find. What was found for a lower floor, or beats its floor, is not looked
        for again."""
        if self._known.get(latency_bound_s, (None, math.inf))[1] > floor_qps:
            self._known[latency_bound_s] = self._found(latency_bound_s, floor_qps)
        found, _ = self._known[latency_bound_s]
        if isinstance(found, InfeasibleError):
            raise found
        return found

    def glance(self, latency_bound_s: float, floor_qps: float) -> Schedule:
        """The best that is seen at first, with an upper bound on all there is; only a policy or two
        are looked at for what is no better than the floor. Raises InfeasibleError, and BeatenError
        where there may be something, but nothing was seen."""
        if isinstance(self._search, BaselineSearch):
            return self.find(latency_bound_s)
        if latency_bound_s not in self._glances:
            seen = self._search.find(latency_bound_s, compares=False, is_glance=True,
                                     floor_qps=floor_qps)
            self._glances[latency_bound_s] = seen
            if seen.proof.status != Status.LIMIT and not floor_qps:  # there is no more to be found
                self._known[latency_bound_s] = seen, 0.0
                self.found.append(seen)
        return self._glances[latency_bound_s]

    def rows_beside(self, found: Schedule) -> tuple[Rejected, ...]:
        """The alternatives to one of those `found`, the paper's own policies looked into."""
        return found.rejected if isinstance(self._search, BaselineSearch) else (
            self._search.rows_beside(found.bound.limit_s))

    def without_bound(self, floor_qps: float) -> Rejected | None:
        """See Scheduler.without_bound; of a baseline nothing is compared with."""
        return None if isinstance(self._search, BaselineSearch) else (
            self._search.without_bound(floor_qps))

    def selections(self, num_queries: int) -> list[Selection]:
        """Configurations all over the space for a job whose copies have so many queries each."""
        return [replace(one, copies=self.problem.copies)
                for one in self._search.selections(num_queries)]

    def _found(self, latency_bound_s: float,
               floor_qps: float) -> tuple[Schedule | InfeasibleError, float]:
        """What is found, and the least floor for which it holds."""
        search = self._search
        try:
            schedule = search.find(latency_bound_s) if isinstance(search, BaselineSearch) else (
                search.find(latency_bound_s, compares=False, floor_qps=floor_qps))
        except BeatenError as beaten:
            return beaten, floor_qps
        except InfeasibleError as refusal:
            return refusal, 0.0
        self.found.append(schedule)
        return schedule, floor_qps * (schedule.figures.throughput_qps <= floor_qps)


class CopyPlanner:
    """Plans one copy's problem."""

    def __init__(self, problem: Problem, timing: TimingSource, effort: Effort) -> None:
        self.problem, self._timing, self._effort = problem, timing, effort
        self._longer: list[ProblemSearch] = []  # for longer outputs, in the order of their use
        self._tighter: list[ProblemSearch] = []  # under tighter bounds besides the latency's

    @cached_property
    def own(self) -> ProblemSearch:
        """Raises InputError for fixed values that the model or the devices cannot hold."""
        return ProblemSearch(self.problem, self._timing, self._effort)

    @property
    def is_able(self) -> bool:
        """Whether the model, with what the job fixes, can be laid out on the devices of a copy."""
        if self.problem.copies > 1 and not has_room(self.problem):
            return False
        try:
            return self.own is not None
        except InputError:
            return False

    @cached_property
    def _evaluator(self) -> Evaluator:
        return Evaluator(self.problem, self._timing)

    @property
    def nodes(self) -> int:
        """Configurations evaluated so far."""
        own = [self.own] if "own" in vars(self) else []
        return sum(search.nodes for search in (*own, *self._longer, *self._tighter))

    def within(self, latency_bound_s: float, floor_qps: float = 0.0) -> PlannedWithin:
        """The best schedule that keeps the bound with the constraint's confidence. Raises
        BeatenError where none is better than `floor_qps`, and InfeasibleError."""

        def find(bound_s: float) -> Schedule:
            return _better(self.own.find(bound_s, floor_qps), floor_qps)

        def of_problem(other: Problem) -> Schedule:
            if not self._longer or self._longer[-1].problem.lengths is not other.lengths:
                self._longer.append(ProblemSearch(other, self._timing, self._effort))
            return self._longer[-1].find(other.constraint.latency_s)

        problem = replace(self.problem, constraint=self.problem.constraint.with_latency(
            limit_s=latency_bound_s))
        doubts = Doubts(problem, self._evaluator, replays=True)
        watch, is_baseline = self._effort.watch, problem.fixed.policy in baselines()
        cuts = watch.cuts if watch is not None else lambda: False

        def of_constraint(constraint: Constraint) -> PlannedWithin:
            if constraint == doubts.problem.constraint:
                return plan_within(doubts, find, cuts=cuts,
                                   search_problem=None if is_baseline else of_problem)
            tighter = ProblemSearch(replace(doubts.problem, constraint=constraint), self._timing,
                                    self._effort)
            self._tighter.append(tighter)
            return plan_within(doubts, tighter.find, cuts=cuts)

        return plan_jointly(doubts, of_constraint)

    def compared(self, planned: PlannedWithin, free: Schedule) -> Schedule:
        """The schedule planned, its alternatives beside it in the same currency: a schedule found
        under a margin was searched for longer outputs, and so were they. `free`: the best without
        a margin, of any number of copies."""
        schedule = self.completed(planned.schedule)
        if schedule.estimate == free.estimate:
            return schedule
        _, origin = self._origin_of(planned.schedule)
        origin = origin.changed(rejected=schedule.rejected)
        status = Status.LIMIT if schedule.proof.status == Status.LIMIT else Status.WITHIN_GAP
        return schedule.changed(rejected=rows_with_margin(schedule, free, origin), status=status)

    def completed(self, schedule: Schedule) -> Schedule:
        """A schedule found here, beside the best of the paper's own policies."""
        search, origin = self._origin_of(schedule)
        return schedule.changed(rejected=search.rows_beside(origin))

    def _origin_of(self, schedule: Schedule) -> tuple[ProblemSearch, Schedule]:
        """(who found it, as it was found)"""
        searches = (*reversed(self._tighter), self.own, *self._longer)
        return next((search, one) for search in searches for one in search.found
                    if one.rejected is schedule.rejected)

    def explained(self, schedule: Schedule, asked: FixedSchedule) -> tuple[str, ...]:
        """Why the schedule, in sentences. `asked`: what the job fixes."""
        bound_s = schedule.bound.limit_s
        # what does not keep its margin is explained by what it does use
        limit_s = max(bound_s / schedule.margin.factor,
                      min(schedule.figures.latency_s, bound_s))
        problem = replace(self.problem, fixed=asked,
                          constraint=self.problem.constraint.with_latency(limit_s=bound_s))
        return tuple(map(_capital, explain_choice(
            schedule, problem, self._timing, latency_limit_s=limit_s)))


def _better(schedule: Schedule, floor_qps: float) -> Schedule:
    if schedule.figures.throughput_qps <= floor_qps:
        raise BeatenError(schedule.proof.bound_qps)
    return schedule


def _capital(sentence: str) -> str:
    """The sentence as one begins, but for a name that is not written so."""
    return sentence if sentence.startswith("vLLM") else sentence[:1].upper() + sentence[1:]
