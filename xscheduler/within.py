"""The best schedule that keeps its bound with the confidence that is asked for.

It is not below what the same policy has by itself, but for what a search leaves open (its gap),
WORTH of what is had, and, of longer outputs, schedules that a wider bound finds and that have less
by the problem's own: the targets are the same with a floor as without one (xscheduler.targets),
and all that a floor does is to end them where what is left has no more than WORTH above it, or to
pass over a target whose best has no more than NARROW above it. Of whatever was found to be safe on
the way the best is kept, and beside all that was found, safe or not, is looked for one that takes
as many queries at a time as the bound has room for with its margin (xscheduler.nearby)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from xgpt.core.errors import BeatenError, InfeasibleError
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate, Schedule
from xgpt.core.units import format_seconds, seconds_up
from xscheduler.nearby import nearby
from xscheduler.targets import WORTH, Targets, Unsafe, tighter_s
from xscheduler.uncertainty import Doubts, MarginParts

ROUNDS = 6  # searches under other targets at most
SAME = 0.001  # share by which a schedule must have more than one that is known to be safe, of the
NARROW = 0.005  # same policy, and than what is had elsewhere, to be worth a replay
REFINED = 3  # schedules beside those found that are replayed at most

Search = Callable[[float], Schedule]


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


def plan_within(doubts: Doubts, search: Search, *,
                search_problem: Callable[[Problem], Schedule] | None = None,
                search_first: Search | None = None,
                cuts: Callable[[], bool] = lambda: False,
                floor_qps: float = 0.0,
                quickest: Callable[[], Iterable[Estimate]] = tuple) -> PlannedWithin:
    """The best schedule found whose latency times its own margin, as `doubts` say, keeps the bound
    of their problem.

    search: the best schedule within a latency bound in seconds; raises InfeasibleError.
    search_first: the same to a wider gap, enough for what is not safe (default: `search`).
    search_problem: the same for a problem like this one with other lengths and another bound.
    cuts: whether a safe schedule, if there is one, is to be left at that. floor_qps: had elsewhere;
    BeatenError is raised where nothing safe is better, or nothing that may be. quickest: what is
    quickest with its margin, which is looked at where nothing else is safe, nor had elsewhere.

    A margin belongs to a schedule: where a query of one token more waits a whole phase more, it is
    large, and the best schedules sit at such edges. Tighter bounds do not keep the search from
    edges; longer outputs do. So with `search_problem` the search is asked for outputs as long as
    they may have to be reckoned with (Doubts.longer), at bounds around the given one, and what it
    finds is judged with the problem's own lengths; without it, at tightened bounds. A replay, which
    costs more than all else, is asked for only where the margin without it keeps the bound. The
    schedule's `latency_bound_s` is the problem's, its `bound_qps` and `free` are of schedules with
    the margin that all have at least (Doubts.least_factor)."""
    most_s = doubts.problem.constraint.latency_s / doubts.least_factor  # nothing longer is safe
    judged = _Judged(doubts, floor_qps)
    free = (search_first or search)(most_s)
    first = judged.best(free)
    if judged.safe and search_first is not None:
        free = search(most_s)
        if free.figures.throughput_qps > (1 + SAME) * judged.safe_qps:
            first = judged.best(free)  # else what is known to be safe is as good
    if free.figures.throughput_qps > (1 + WORTH) * judged.had_qps:  # nothing else has more
        _try_targets(judged, free, first, search, search_problem, cuts)
        judged.refine(cuts)
    for one in quickest() if judged.had_qps <= 0 else ():
        if judged.is_safe(replace(free, estimate=one)):
            break
    return judged.result(free)


def _try_targets(judged: _Judged, free: Schedule, first: MarginParts, search: Search,
                 search_problem: Callable[[Problem], Schedule] | None,
                 cuts: Callable[[], bool]) -> None:
    """Searches under one target after the other. free: the best whose margin, `first`, is too
    much."""
    doubts, bound_s = judged.doubts, judged.bound_s
    latency_s = free.estimate.figures.latency_s
    if search_problem is not None and first.lengths * first.drift > 1:
        targets = Targets(bound_s, tighter_s(bound_s, latency_s, first.timing * first.model))
        find = _for_longer(doubts, search_problem)
    else:
        targets, find = Targets(bound_s, tighter_s(bound_s, latency_s, first.factor)), search
        targets.begin_below(Unsafe(bound_s / doubts.least_factor, latency_s * first.factor,
                                   free.figures.throughput_qps, first))
    for _ in range(ROUNDS):
        target_s = targets.next_s(had_qps=judged.had_qps, safe_qps=judged.safe_qps)
        if target_s is None or (judged.safe and cuts()):
            break
        try:
            found = find(target_s)
        except BeatenError as beaten:
            judged.refusal = beaten
            targets.beaten(target_s)
        except InfeasibleError as refusal:
            judged.refusal = refusal
            targets.empty(target_s)
        else:
            own = found if find is search else doubts.with_own_lengths(found)
            unsafe = judged.judge(own, target_s)
            if unsafe is None:
                targets.beaten(target_s)
            else:
                targets.unsafe(unsafe, found.estimate.figures.latency_s)


def _for_longer(doubts: Doubts, search_problem: Callable[[Problem], Schedule]) -> Search:
    """The search for outputs as long as they may have to be reckoned with."""
    longer = replace(doubts.problem, lengths=doubts.longer)
    return lambda target_s: search_problem(replace(
        longer, constraint=longer.constraint.with_latency(limit_s=target_s)))


class _Judged:
    """Schedules found, with their margins: those that keep the bound, and those that do not."""

    def __init__(self, doubts: Doubts, floor_qps: float) -> None:
        self.doubts, self._floor_qps = doubts, floor_qps
        self.bound_s = doubts.problem.constraint.latency_s
        self.safe: list[tuple[Schedule, MarginParts]] = []
        self._unsafe: list[tuple[Schedule, MarginParts]] = []  # perhaps not replayed
        self._model = 1.0  # of the last replayed that is not safe: what others' may add
        self.refusal: InfeasibleError | None = None
        self._known: dict[Estimate, MarginParts] = {}  # margins without a replay

    @property
    def safe_qps(self) -> float:
        return max((schedule.figures.throughput_qps for schedule, _ in self.safe), default=0.0)

    @property
    def had_qps(self) -> float:
        """What is had with its margin, here or elsewhere."""
        return max(self._floor_qps, self.safe_qps)

    def best(self, schedule: Schedule) -> MarginParts:
        """The margin of one than which nothing has more. Raises BeatenError where it could only be
        safe in vain."""
        if self._is_no_better(schedule) and self._may_be_safe(schedule):
            raise BeatenError(schedule.proof.bound_qps)
        return self._margin(schedule)

    def judge(self, schedule: Schedule, target_s: float) -> Unsafe | None:
        """The schedule found within a target, where it is not safe, and better than the floor. Of
        what could be safe in vain nobody asks."""
        qps = schedule.figures.throughput_qps
        if qps <= self._floor_qps or (
                (qps <= (1 + SAME) * self.safe_qps or self._is_no_better(schedule))
                and self._may_be_safe(schedule)):
            return None
        margin = self._margin(schedule)
        needed_s = schedule.estimate.figures.latency_s * margin.factor
        if needed_s <= self.bound_s:
            return None
        return Unsafe(target_s, needed_s * (self._model if margin.model == 1 else 1.0), qps, margin)

    def is_safe(self, schedule: Schedule) -> bool:
        """The schedule is noted with its margin."""
        return schedule.estimate.figures.latency_s * self._margin(schedule).factor <= self.bound_s

    def refine(self, cuts: Callable[[], bool]) -> None:
        """Looks beside those found for one that takes as many queries at a time as the bound has
        room for with its margin."""
        asked: set[Estimate] = {schedule.estimate for schedule, _ in (*self.safe, *self._unsafe)}
        left = [*self.safe, *self._unsafe]
        beside: list[Schedule] = []
        for _ in range(REFINED):
            if cuts():
                break
            for schedule, own in left:
                found = self._beside(schedule, own)
                if found is not None and found not in asked:
                    asked.add(found)
                    beside.append(replace(schedule, estimate=found))
            best = max(beside, key=lambda one: one.figures.throughput_qps, default=None)
            if best is None or best.figures.throughput_qps <= (1 + NARROW) * self.had_qps:
                break
            beside.remove(best)
            left = [(best, self._margin(best))]

    def _beside(self, schedule: Schedule, own: MarginParts) -> Estimate | None:
        """What would just keep the bound by the margin of the schedule beside it."""
        factor = own.factor * (self._model if own.model == 1 else 1.0)
        return None if not math.isfinite(factor) else nearby(
            self.doubts.evaluator, schedule.estimate, self.bound_s / factor)

    def _is_no_better(self, schedule: Schedule) -> bool:
        return 0 < schedule.figures.throughput_qps <= (1 + NARROW) * self._floor_qps

    def _may_be_safe(self, schedule: Schedule) -> bool:
        """Before a replay, which can only add to the margin."""
        own = self._before_replay(schedule.estimate)
        return schedule.estimate.figures.latency_s * own.factor <= self.bound_s

    def _before_replay(self, estimate: Estimate) -> MarginParts:
        if estimate not in self._known:
            self._known[estimate] = self.doubts.margin(estimate, is_replayed=False)
        return self._known[estimate]

    def _margin(self, schedule: Schedule) -> MarginParts:
        """The schedule's margin, without a replay where that could only add to what is too much;
        the schedule is noted with it."""
        estimate = schedule.estimate
        own = self._before_replay(estimate)
        if estimate.figures.latency_s * own.factor <= self.bound_s:
            own = self.doubts.margin(estimate)
            if estimate.figures.latency_s * own.factor <= self.bound_s:
                self.safe.append((schedule, own))
                return own
            self._model = own.model
        self._unsafe.append((schedule, own))
        return own

    def result(self, free: Schedule) -> PlannedWithin:
        """The best that is safe, else what comes nearest to that, beside `free`, the best without a
        margin of its own."""
        if not self.safe and self._floor_qps:
            raise BeatenError(free.proof.bound_qps)
        if not self.safe and self.refusal is not None:
            raise for_its_margin(*self._unsafe[0], self.bound_s, self.refusal) from self.refusal
        if self.safe:
            schedule, own = max(self.safe, key=lambda pair: pair[0].figures.throughput_qps)
        else:
            schedule, _ = min(self._unsafe,
                              key=lambda pair: pair[0].figures.latency_s * pair[1].factor)
            own = self.doubts.margin(schedule.estimate)
            own = replace(own, sentence=f"NOT kept with that confidence: {own.sentence}")
        qps, proof = schedule.estimate.figures.throughput_qps, free.proof
        # what a search has in steps may lie between two of them
        most_qps = max(proof.bound_qps, qps)
        return PlannedWithin(
            schedule=schedule.changed(
                limit_s=self.bound_s, bound_qps=most_qps, gap=most_qps / qps - 1,
                policy_bounds=proof.policy_bounds, unbounded_qps=proof.unbounded_qps),
            free=free, margin=own, cost=max(1 - qps / free.estimate.figures.throughput_qps, 0.0),
            is_safe=bool(self.safe))


def for_its_margin(schedule: Schedule, margin: MarginParts, bound_s: float,
                   refusal: InfeasibleError) -> InfeasibleError:
    """The refusal of a bound that nothing keeps with its margin. `schedule`: what has the most
    throughput within it without one. `refusal`: of what the margin leaves of the bound."""
    estimate, needed_s = schedule.estimate, refusal.tightest_s * margin.factor
    kept = "" if math.isinf(needed_s) else (
        f". With such a margin that takes a bound of {seconds_up(needed_s)} s at least")
    return InfeasibleError(
        f"no schedule was found that keeps the bound of {format_seconds(bound_s)} with its margin "
        f"(without one: {estimate.policy} at {format_seconds(estimate.figures.latency_s)}; "
        f"{margin.sentence}). With a margin: {refusal}{kept}{margin.remedy}")
