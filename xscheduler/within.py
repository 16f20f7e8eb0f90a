"""The best schedule that keeps its bound with the confidence that is asked for."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from xgpt.core.errors import BeatenError, InfeasibleError
from xgpt.core.problem import Problem
from xgpt.core.schedule import Schedule
from xgpt.core.units import format_seconds
from xscheduler.uncertainty import Doubts, MarginParts

ROUNDS = 6  # searches under tightened bounds at most
NEAR = 1.02  # a safe and an unsafe bound this near each other: no more is to be gained
STEEP = 1.05  # times what is had: while an unsafe schedule near it has more, more is to be gained
WORTH = 0.02  # share of its throughput that an unsafe schedule must have more to go on: the first
# searches of all policies leave as much open, and what is given up is within the bound that is told
SAME = 0.001  # share by which a schedule must have more than one that is known to be safe, of the
NARROW = 0.005  # same policy, and than what is had elsewhere, to be worth a replay
GROW = 1.15  # from a safe bound to the next, while none is known to be unsafe
SHRINK = 0.985  # of an unsafe schedule's latency: what is tried next, at least; more each time
FAR = 1.3  # between what nothing meets and an unsafe bound: further apart, their middle is tried
# where margins leap, as those for lengths do
SHRINK_UNKNOWN = 0.75  # the same of one whose margin is infinite: beyond what the profile reaches


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedWithin:
    """A schedule whose latency keeps the bound with its margin (or, where `is_safe` is false, comes
    nearest to that), and what its margin cost: the share of the throughput that `free`, the
    best with no more than every schedule's margin, has more."""

    schedule: Schedule
    free: Schedule
    margin: MarginParts
    cost: float
    is_safe: bool = True

    def rank(self) -> tuple[bool, float]:
        """Higher is better: safe ones by their throughput, others by how near they come."""
        figures = self.schedule.figures
        return self.is_safe, (figures.throughput_qps if self.is_safe
                              else -figures.latency_s * self.margin.factor)


def plan_within(doubts: Doubts, search: Callable[[float], Schedule], *,
                search_problem: Callable[[Problem], Schedule] | None = None,
                search_first: Callable[[float], Schedule] | None = None,
                cuts: Callable[[], bool] = lambda: False,
                floor_qps: float = 0.0) -> PlannedWithin:
    """The best schedule found whose latency times its own margin, as `doubts` say, keeps the bound
    of their problem.

    search: the best schedule within a latency bound in seconds; raises InfeasibleError.
    search_first: the same to a wider gap, enough for what is not safe (default: `search`).
    search_problem: the same for a problem like this one with other lengths and another bound.
    cuts: whether a safe schedule, if there is one, is to be left at that. floor_qps: had elsewhere;
    BeatenError is raised where nothing safe is better, or nothing that may be.

    A margin belongs to a schedule: where a query of one token more waits a whole phase more, it is
    large, and the best schedules sit at such edges. Tighter bounds do not keep the search from
    edges; longer outputs do. So with `search_problem` the search is asked for outputs as long as
    they may have to be reckoned with (Doubts.longer), at bounds around the given one, and what it
    finds is judged with the problem's own lengths; without it, at tightened bounds. Bounds are
    tried until one is safe, then others between it and the least unsafe one, while that has more
    throughput by WORTH: where the bound would just be kept, if what is needed goes evenly from one
    to the other. A replay, which costs more than all else, is asked for only where the margin
    without it keeps the bound. The schedule's `latency_bound_s` is the problem's, its `bound_qps`
    and `free` are of schedules with the margin that all have at least (Doubts.least_factor)."""
    problem = doubts.problem
    bound_s = problem.constraint.latency_s
    most_s = bound_s / doubts.least_factor  # nothing longer keeps the bound with its margin
    free = (search_first or search)(most_s)
    tried = _Tried(doubts, free, floor_qps)
    first = tried.margin(free)
    if search_first is not None and free.figures.latency_s * first.factor <= bound_s:
        safe, free = free, search(most_s)
        if free.figures.throughput_qps <= (1 + SAME) * safe.figures.throughput_qps:
            # what is known to be safe is as good
            return PlannedWithin(schedule=safe.changed(
                limit_s=bound_s, bound_qps=free.proof.bound_qps,
                gap=free.proof.bound_qps / safe.figures.throughput_qps - 1,
                policy_bounds=free.proof.policy_bounds), free=free, margin=first, cost=0.0)
        tried = _Tried(doubts, free, floor_qps)
        first = tried.margin(free)
    if free.estimate.figures.latency_s * first.factor <= bound_s:
        return PlannedWithin(schedule=free.changed(limit_s=bound_s), free=free, margin=first,
                             cost=0.0)
    begin_s, find = _tighter_s(bound_s, free.estimate.figures.latency_s, first.factor), search
    if search_problem is not None and first.lengths * first.drift > 1:
        begin_s = _tighter_s(bound_s, free.estimate.figures.latency_s, first.timing * first.model)
        longer = replace(problem, lengths=doubts.longer)

        def find(target_s: float) -> Schedule:
            return search_problem(replace(
                longer, constraint=longer.constraint.with_latency(limit_s=target_s)))

    else:
        tried.begin_below(most_s, first)
    for _ in range(ROUNDS):
        target_s = tried.next_target_s(begin_s)
        if target_s is None or (tried.has_safe and cuts()):
            break
        try:
            schedule = find(target_s)
        except InfeasibleError as refusal:
            tried.refused(target_s, refusal)
            continue
        tried.add(target_s, schedule.estimate.figures.latency_s,
                  schedule if find is search else doubts.with_own_lengths(schedule))
    return tried.result()


class _Tried:
    """Latency bounds searched with, and what came of them."""

    def __init__(self, doubts: Doubts, free: Schedule, floor_qps: float) -> None:
        self._doubts, self._free, self._floor_qps = doubts, free, floor_qps
        self._bound_s = doubts.problem.constraint.latency_s
        self._model = 1.0  # of the last schedule replayed: what others' replays may add
        self._least_s: float | None = None  # the largest that is safe, or that nothing meets
        self._least_needed_s: float | None = None  # by its schedule; None: it has none
        self._most_s: float | None = None  # the least whose schedule is not safe
        self._most_needed_s = math.inf  # by its schedule
        self._most_margin = MarginParts(factor=1.0, sentence="")
        self._next_s: float | None = None  # after an unsafe one
        self._safe: list[tuple[Schedule, MarginParts]] = []
        self._unsafe: list[tuple[Schedule, MarginParts]] = []  # perhaps not replayed
        self._most_qps = math.inf  # of the schedule of `_most_s`
        self._refusal: InfeasibleError | None = None

    @property
    def has_safe(self) -> bool:
        return bool(self._safe)

    @property
    def _had_qps(self) -> float:
        """What is had with its margin, here or elsewhere."""
        return max(self._floor_qps, *(schedule.figures.throughput_qps
                                      for schedule, _ in self._safe), 0.0)

    def margin(self, schedule: Schedule) -> MarginParts:
        """The schedule's margin, without a replay where that could only add to what is too much;
        noted with it if it is not safe."""
        estimate = schedule.estimate
        own = self._doubts.margin(estimate, is_replayed=False)
        if estimate.figures.latency_s * own.factor <= self._bound_s:
            if self._floor_qps and not self._safe and (
                    schedule.figures.throughput_qps <= (1 + NARROW) * self._floor_qps):
                raise BeatenError(self._free.proof.bound_qps)
            own = self._doubts.margin(estimate)
            self._model = own.model
        if estimate.figures.latency_s * own.factor > self._bound_s:
            self._unsafe.append((schedule, own))
        return own

    def begin_below(self, unsafe_s: float, margin: MarginParts) -> None:
        """What the search finds within so long, `free`, is known to be unsafe."""
        self._most_s, self._most_qps = unsafe_s, self._free.figures.throughput_qps
        self._most_needed_s = self._free.estimate.figures.latency_s * margin.factor
        self._most_margin = margin

    def next_target_s(self, begin_s: float) -> float | None:
        least_s, most_s = self._least_s, self._most_s
        if most_s is not None and self._floor_qps and (
                self._most_qps <= (1 + WORTH) * self._floor_qps):
            return None
        if least_s is None:
            return begin_s if self._next_s is None else self._next_s
        if most_s is None:
            return GROW * least_s
        if self._most_qps <= (1 + WORTH) * self._had_qps or most_s <= NEAR * least_s and (
                not self._safe or self._most_qps <= STEEP * self._had_qps):
            return None
        needed_s, middle_s = self._least_needed_s, math.sqrt(least_s * most_s)
        if math.isinf(self._most_needed_s):
            return middle_s
        if needed_s is None:
            margin = self._most_margin
            # one that a replay shows to be far off is that schedule's own
            is_even = margin.lengths * margin.drift == 1 and margin.model < FAR
            is_shut = most_s * self._bound_s / self._most_needed_s <= NEAR * least_s and (
                is_even or most_s <= FAR * least_s)
            return None if is_shut else middle_s
        if needed_s >= self._most_needed_s:
            return middle_s
        room = min(math.sqrt(NEAR), math.sqrt(math.sqrt(most_s / least_s)))
        share = math.log(self._bound_s / needed_s) / math.log(self._most_needed_s / needed_s)
        aimed_s = least_s * math.exp(share * math.log(most_s / least_s))
        return min(max(aimed_s, least_s * room), most_s / room)

    def add(self, target_s: float, searched_s: float, schedule: Schedule) -> None:
        """searched_s: the schedule's latency in the eyes of the search."""
        latency_s, qps = schedule.estimate.figures.latency_s, schedule.figures.throughput_qps
        if qps <= self._floor_qps:  # as if there were nothing: more is at wider bounds alone
            self._least_s, self._least_needed_s = target_s, None
            return
        if self._safe and qps <= self._had_qps and (
                latency_s * self._doubts.margin(schedule.estimate, is_replayed=False).factor
                <= self._bound_s):
            self._least_s, self._least_needed_s = target_s, None
            return
        own = self.margin(schedule)
        needed_s = latency_s * own.factor
        if needed_s <= self._bound_s:
            self._safe.append((schedule, own))
            self._least_s, self._least_needed_s = target_s, needed_s
            return
        if own.model == 1:  # not replayed, perhaps
            needed_s *= self._model
        self._most_s, self._most_qps = target_s, qps
        self._most_needed_s, self._most_margin = needed_s, own
        self._next_s = min(SHRINK**len(self._unsafe) * searched_s, _tighter_s(
            target_s, searched_s, needed_s / self._bound_s))

    def refused(self, target_s: float, refusal: InfeasibleError) -> None:
        self._least_s, self._least_needed_s, self._refusal = target_s, None, refusal

    def result(self) -> PlannedWithin:
        if not self._safe and self._floor_qps:
            raise BeatenError(self._free.proof.bound_qps)
        if not self._safe and self._refusal is not None:
            raise for_its_margin(*self._unsafe[0], self._bound_s, self._refusal) from self._refusal
        if self._safe:
            schedule, own = max(self._safe, key=lambda pair: pair[0].figures.throughput_qps)
        else:
            schedule, _ = min(self._unsafe,
                              key=lambda pair: pair[0].figures.latency_s * pair[1].factor)
            own = self._doubts.margin(schedule.estimate)
            own = replace(own, sentence=f"NOT kept with that confidence: {own.sentence}")
        queries, bound_qps = schedule.estimate.figures.throughput_qps, self._free.proof.bound_qps
        return PlannedWithin(
            schedule=schedule.changed(
                limit_s=self._bound_s, bound_qps=bound_qps, gap=bound_qps / queries - 1,
                policy_bounds=self._free.proof.policy_bounds,
                unbounded_qps=self._free.proof.unbounded_qps),
            free=self._free, margin=own,
            cost=max(1 - queries / self._free.estimate.figures.throughput_qps, 0.0),
            is_safe=bool(self._safe))


def for_its_margin(schedule: Schedule, margin: MarginParts, bound_s: float,
                   refusal: InfeasibleError) -> InfeasibleError:
    """The refusal of a bound that nothing keeps with its margin. `schedule`: what has the most
    throughput within it without one. `refusal`: of what the margin leaves of the bound."""
    estimate = schedule.estimate
    return InfeasibleError(
        f"no schedule was found that keeps the bound of {format_seconds(bound_s)} with its margin "
        f"(without one: {estimate.policy} at {format_seconds(estimate.figures.latency_s)}; "
        f"{margin.sentence}). With a margin: {refusal}{margin.remedy}")


def _tighter_s(target_s: float, searched_s: float, factor: float) -> float:
    """The bound to search with after `target_s`, whose schedule (of latency `searched_s`) needs
    `factor` times as much."""
    if math.isinf(factor):
        return SHRINK_UNKNOWN * min(target_s, searched_s)
    return target_s / factor
