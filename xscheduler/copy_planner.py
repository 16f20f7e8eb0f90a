"""The planner of one copy of the model: its best schedules, without a margin and with one, under
one latency bound after the other. Their figures are those of all copies that are like it."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from functools import cached_property

from xgpt.core.constraint import Constraint
from xgpt.core.errors import BeatenError, InfeasibleError, InputError
from xgpt.core.job import FixedSchedule
from xgpt.core.problem import Problem
from xgpt.core.schedule import Rejected, Schedule, Status
from xprofiler.timing import TimingSource
from xscheduler.alternatives import rows_with_margin
from xscheduler.by_policy import plan_by_policy
from xscheduler.copies import has_room
from xscheduler.evaluator import Evaluator
from xscheduler.explanation import explain_choice
from xscheduler.prospects import plan_jointly
from xscheduler.quickest import quickest_with_margin
from xscheduler.search import FIRST_GAP, Scheduler, is_proved
from xscheduler.spaces.grid_search import GridSearch
from xscheduler.spaces.space import Effort, Selection
from xscheduler.uncertainty import Doubts
from xscheduler.within import PlannedWithin, plan_within

SEEN = 0.75  # of what is had elsewhere: a policy of which no more is seen at first under what its
# margin leaves of the bound is not looked into
FLOORS_APART = 0.9  # where nothing was seen above a floor, nobody looks again for one so much lower


class ProblemSearch:
    """The search of one copy's problem, and what it found."""

    def __init__(self, problem: Problem, search: GridSearch | Scheduler,
                 whole: ProblemSearch | None = None, *, gap: float = 0.0) -> None:
        """whole: of all policies, where this is the search of one of them. gap: one wide enough
        under any latency bound."""
        self.problem, self._search, self._whole, self.gap = problem, search, whole, gap
        self._alone: dict[str, ProblemSearch] = {}
        self.spaces = tuple(search.spaces) if isinstance(search, Scheduler) else ()
        self.found: list[Schedule] = []
        # by latency bound and gap
        self._known: dict[tuple[float, float], tuple[Schedule | InfeasibleError, float]] = {}
        self._glances: dict[float, Schedule] = {}
        # by latency bound: the floor above which nothing was seen
        self._unseen: dict[float, tuple[float, InfeasibleError]] = {}

    @classmethod
    def of(cls, problem: Problem, timing: TimingSource, effort: Effort, *,
           gap: float = 0.0) -> ProblemSearch:
        """Raises InputError for fixed values that the model or the devices cannot hold."""
        return cls(problem, Scheduler(problem, timing, effort) if is_proved(problem.fixed)
                   else GridSearch(problem, timing), gap=gap)

    @property
    def proves(self) -> bool:
        """Whether what it finds comes with a bound; nothing is proved of a grid."""
        return not isinstance(self._search, GridSearch)

    def without(self, latency_bound_s: float) -> tuple[str, ...]:
        """Names of policies of which nothing was found within the bound."""
        return self._search.without(latency_bound_s) if isinstance(self._search, Scheduler) else ()

    def alone(self, name: str) -> ProblemSearch:
        """The search of one policy; of a grid's, and of the only one, this."""
        if isinstance(self._search, GridSearch) or len(self._search.spaces) == 1:
            return self
        if name not in self._alone:
            self._alone[name] = ProblemSearch(self.problem, self._search.alone(name), self)
        return self._alone[name]

    @property
    def all_found(self) -> list[Schedule]:
        """What was found here and policy by policy."""
        return [*self.found, *(found for one in self._alone.values() for found in one.found)]

    @property
    def nodes(self) -> int:
        """Configurations evaluated so far."""
        return self._search.num_evaluated

    def find(self, latency_bound_s: float, floor_qps: float = 0.0, *,
             gap: float = 0.0) -> Schedule:
        """See Scheduler.find. What was found for a lower floor, or beats its floor, is not looked
        for again."""
        gap = _gap_under(latency_bound_s, gap, self.gap)
        won = _won(self, latency_bound_s, gap)
        if won is not None and won[1] <= floor_qps:
            return won[0]
        key = latency_bound_s, gap
        if self._known.get(key, (None, math.inf))[1] > floor_qps:
            self._known[key] = self._found(latency_bound_s, floor_qps, gap)
        found, _ = self._known[key]
        if isinstance(found, InfeasibleError):
            raise found
        return found

    def glance(self, latency_bound_s: float, floor_qps: float, *, gap: float = 0.0,
               is_anew: bool = False) -> Schedule:
        """The best that is seen at first, with an upper bound on all there is; only a policy or two
        are looked at for what is no better than the floor. is_anew: nor is it the best that was
        seen for a higher floor. Raises InfeasibleError, and BeatenError where there may be
        something, but nothing was seen."""
        if isinstance(self._search, GridSearch):
            return self.find(latency_bound_s)
        if is_anew or latency_bound_s not in self._glances:
            gap = _gap_under(latency_bound_s, gap, self.gap)
            if (won := _won(self, latency_bound_s, gap)) is not None:
                return won[0]  # whatever the floor that it was searched for with
            least_qps, unseen = self._unseen.get(latency_bound_s, (math.inf, None))
            if unseen is not None and floor_qps >= FLOORS_APART * least_qps:
                raise unseen.with_traceback(None)
            try:
                seen = self._search.find(latency_bound_s, compares=False, is_glance=True,
                                         floor_qps=floor_qps, gap=gap)
            except InfeasibleError as refusal:  # where it is not beaten there is nothing at all
                self._unseen[latency_bound_s] = (
                    floor_qps if isinstance(refusal, BeatenError) else 0.0), refusal
                raise
            self._glances[latency_bound_s] = seen
            if seen.proof.status != Status.LIMIT and not floor_qps:  # there is no more to be found
                self._known[latency_bound_s, gap] = seen, 0.0
                self.found.append(seen)
        return self._glances[latency_bound_s]

    def first(self, latency_bound_s: float, floor_qps: float) -> Schedule:
        """What is known of all policies before each is planned for: the best that is seen at first,
        where there is a floor, else found; where it is searched for again, the best that is known,
        or else seen. Raises InfeasibleError."""
        if not self.gap:
            look = self.glance if floor_qps else self.find
            return look(latency_bound_s, floor_qps)
        key = latency_bound_s, _gap_under(latency_bound_s, self.gap)
        known, _ = self._known.get(key, (None, 0.0))
        if isinstance(known, Schedule):
            return known
        try:
            return self.glance(latency_bound_s, floor_qps)
        except BeatenError:
            if floor_qps:
                raise
            return self.find(latency_bound_s)

    def at_first_sight(self, latency_bound_s: float, planned: Schedule,
                       free: Schedule) -> Schedule:
        """What is seen at first within a bound, all taken as certain, of the policy planned and of
        that of `free`, which was best within less; where that is no more, the best."""
        seen = []
        for name in dict.fromkeys((free.estimate.policy, planned.estimate.policy)):
            if isinstance(self._search, Scheduler) and all(
                    space.name != name for space in self._search.spaces):
                continue  # devices of so few cannot be divided
            with suppress(InfeasibleError):
                seen.append(self.alone(name).glance(latency_bound_s, 0.0))
        best = max(seen, key=lambda one: one.figures.throughput_qps, default=None)
        if best is None or best.figures.throughput_qps <= planned.figures.throughput_qps:
            return self.find(latency_bound_s)
        return best

    def rows_beside(self, found: Schedule) -> tuple[Rejected, ...]:
        """The alternatives to one of those `found`, the paper's own policies looked into."""
        if isinstance(self._search, GridSearch):
            return found.rejected
        for one in self._alone.values():
            if isinstance(one._search, Scheduler) and any(own is found for own in one.found):
                return self._search.rows_beside_alone(one._search, found.bound.limit_s)
        return self._search.rows_beside(found.bound.limit_s)

    def without_bound(self, floor_qps: float) -> Rejected | None:
        """See Scheduler.without_bound; of a grid nothing is compared with."""
        return None if isinstance(self._search, GridSearch) else (
            self._search.without_bound(floor_qps))

    def selections(self, num_queries: int) -> list[Selection]:
        """Configurations all over the space for a job whose copies have so many queries each."""
        return [replace(one, copies=self.problem.copies)
                for one in self._search.selections(num_queries)]

    def _found(self, latency_bound_s: float, floor_qps: float,
               gap: float) -> tuple[Schedule | InfeasibleError, float]:
        """What is found, and the least floor for which it holds."""
        search = self._search
        try:
            schedule = search.find(latency_bound_s) if isinstance(search, GridSearch) else (
                search.find(latency_bound_s, compares=False, floor_qps=floor_qps, gap=gap))
        except BeatenError as beaten:
            return beaten, floor_qps
        except InfeasibleError as refusal:
            return refusal, 0.0
        self.found.append(schedule)
        return schedule, floor_qps * (schedule.figures.throughput_qps <= floor_qps)


def _won(search: ProblemSearch, latency_bound_s: float,
         gap: float) -> tuple[Schedule, float] | None:
    """Of one policy what won against the others where all were searched, to no wider a gap, is its
    best; and the least floor for which it is."""
    whole, own = search._whole, search._search
    if whole is None or not isinstance(own, Scheduler):
        return None
    own_gap = _gap_under(latency_bound_s, whole.gap)
    won, least_qps = whole._known.get((latency_bound_s, own_gap), (None, math.inf))
    if own_gap > gap or not isinstance(won, Schedule) or (
            won.estimate.policy != own.spaces[0].name):
        return None
    return won, least_qps


class CopyPlanner:
    """Plans one copy's problem."""

    def __init__(self, problem: Problem, timing: TimingSource, effort: Effort, *,
                 has_margin: bool = False) -> None:
        """has_margin: what is found under a bound is searched for again with its margin."""
        self.problem, self._timing, self._effort = problem, timing, effort
        self._has_margin = has_margin
        self._longer: list[ProblemSearch] = []  # for longer outputs, in the order of their use
        self._tighter: list[ProblemSearch] = []  # under tighter bounds besides the latency's
        self._doubts: dict[float, Doubts] = {}  # by latency bound

    @cached_property
    def own(self) -> ProblemSearch:
        """Raises InputError for fixed values that the model or the devices cannot hold."""
        # where some schedules have no margin, they are not searched for again
        gap = FIRST_GAP * (self._has_margin and self.doubts(1.0).least_factor > 1)
        return ProblemSearch.of(self.problem, self._timing, self._effort, gap=gap)

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

    def doubts(self, latency_bound_s: float) -> Doubts:
        """Margins under the bound."""
        if latency_bound_s not in self._doubts:
            self._doubts[latency_bound_s] = Doubts(replace(
                self.problem, constraint=self.problem.constraint.with_latency(
                    limit_s=latency_bound_s)), self._evaluator, replays=True)
        return self._doubts[latency_bound_s]

    def promised(self, latency_bound_s: float, floor_qps: float) -> float:
        """What any policy may have with its margin before a replay; 0: no more than the floor, at
        first sight."""
        doubts, most = self.doubts(latency_bound_s), floor_qps
        try:
            free = self.own.first(latency_bound_s / doubts.least_factor, floor_qps)
        except InfeasibleError:
            return 0.0
        for name, upper_qps in free.proof.policy_bounds:
            if upper_qps > most * (1 + self._effort.gap):
                most = max(most, self._promise(name, doubts, most, is_glance=True))
        return most if most > floor_qps else 0.0

    def within(self, latency_bound_s: float, floor_qps: float = 0.0) -> PlannedWithin:
        """The best schedule of any policy that keeps the bound with the constraint's confidence.
        Raises BeatenError where none is better than `floor_qps`, and InfeasibleError."""
        doubts = self.doubts(latency_bound_s)
        watch = self._effort.watch
        most_s = latency_bound_s / doubts.least_factor
        return plan_by_policy(
            _better(self.own.first(most_s, floor_qps), SEEN * floor_qps),
            lambda name, least_qps: self._of_policy(name, doubts, least_qps),
            promise=lambda name, least_qps: self._promise(name, doubts, least_qps),
            gap=self._effort.gap, floor_qps=floor_qps, is_first=self.own.gap > 0,
            cuts=watch.cuts if watch is not None else lambda: False)

    def _promise(self, name: str, doubts: Doubts, floor_qps: float, *,
                 is_glance: bool = False) -> float:
        """What one policy may have with its margin before a replay; 0: no more than the floor, at
        first sight. is_glance: nor is more looked at without a floor, to tell who comes first."""
        search, bound_s = self.own.alone(name), doubts.problem.constraint.latency_s
        try:
            is_glance = is_glance or floor_qps > 0
            most_s = bound_s / doubts.least_factor
            look = search.glance if is_glance else search.find
            least_qps = SEEN * floor_qps
            free = _better(look(most_s, least_qps, gap=self.own.gap), least_qps)
            factor = doubts.margin(free.estimate, is_replayed=False).factor
            if free.figures.latency_s * factor <= bound_s or math.isinf(factor):
                return free.figures.throughput_qps
            if is_glance:  # a proof that there is nothing takes much longer
                return _better(search.glance(bound_s / factor, least_qps),
                               least_qps).figures.throughput_qps
            return search.find(bound_s / factor).figures.throughput_qps
        except InfeasibleError:
            return 0.0

    def _of_policy(self, name: str, doubts: Doubts, floor_qps: float) -> PlannedWithin:
        """The best of one policy that keeps the bound with its margin; see `within`."""
        watch = self._effort.watch
        cuts = watch.cuts if watch is not None else lambda: False

        def find(bound_s: float, gap: float = 0.0) -> Schedule:
            return _better(self.own.alone(name).find(bound_s, floor_qps, gap=gap), floor_qps)

        def of_problem(other: Problem) -> Schedule:
            # a schedule's queries with longer outputs take longer, at most as their square
            share = (doubts.problem.lengths.outputs.mean / other.lengths.outputs.mean) ** 2
            least_qps = min(share, 1.0) * floor_qps
            return _better(self._search_like(self._longer, other).alone(name).find(
                other.constraint.latency_s, least_qps), least_qps)

        def of_constraint(constraint: Constraint) -> PlannedWithin:
            if constraint == doubts.problem.constraint:
                return plan_within(doubts, find, cuts=cuts, floor_qps=floor_qps, quickest=lambda: (
                                       quickest_with_margin(self.own.alone(name).spaces, doubts)),
                                   search_first=lambda bound_s: find(bound_s, self.own.gap),
                                   search_problem=of_problem if self.own.proves else None)
            search = self._search_like(self._tighter, replace(
                doubts.problem, constraint=constraint)).alone(name)
            return plan_within(doubts, lambda bound_s: _better(
                search.find(bound_s, floor_qps), floor_qps), cuts=cuts, floor_qps=floor_qps)

        return plan_jointly(doubts, of_constraint)

    def _search_like(self, searches: list[ProblemSearch], problem: Problem) -> ProblemSearch:
        """That one of the searches, or a new one among them, which is of the problem under any
        latency bound."""
        latency_s = problem.constraint.latency_s
        for one in reversed(searches):
            if one.problem.lengths is problem.lengths and problem.constraint == (
                    one.problem.constraint.with_latency(limit_s=latency_s)):
                return one
        searches.append(ProblemSearch.of(problem, self._timing, self._effort))
        return searches[-1]

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
        return next((search, one) for search in searches for one in search.all_found
                    if one.rejected is schedule.rejected
                    and one.proof.pruned is schedule.proof.pruned)

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


def _gap_under(latency_bound_s: float, *gaps: float) -> float:
    """The widest of gaps that are wide enough under a bound; without one there is no margin, and
    none of them is."""
    return max(gaps) if math.isfinite(latency_bound_s) else 0.0


def _better(schedule: Schedule, floor_qps: float) -> Schedule:
    if schedule.figures.throughput_qps <= floor_qps:
        raise BeatenError(schedule.proof.bound_qps)
    return schedule


def _capital(sentence: str) -> str:
    """The sentence as one begins, but for a name that is not written so."""
    return sentence if sentence.startswith("vLLM") else sentence[:1].upper() + sentence[1:]
