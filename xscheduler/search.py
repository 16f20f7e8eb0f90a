"""The best schedule of a problem over policies, and what is proved about it (paper section 5).

Each policy's space is searched by branch and bound (xscheduler.spaces.rra, xscheduler.spaces.waa),
one after the other. Bounds hold for step times as they are, monotone or not, within the tolerances
that xsimulator.policies.{rra,waa}.bounds state; the reported gap is what is left between the best
schedule found and the highest bound of any box that was given up."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from xgpt.core.errors import BeatenError, InfeasibleError, wrong
from xgpt.core.job import FixedSchedule
from xgpt.core.policies import able_policies, policy, searched_policies
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate, Rejected, Schedule, Status
from xgpt.core.schedule_file import schedule_from_flat
from xprofiler.timing import TimingSource
from xscheduler.alternatives import (
    LEFT_OUT,
    POLICY_ROW,
    BestPoint,
    Unmet,
    best_in,
    explain,
    row_without_bound,
    rows_beside,
)
from xscheduler.branch_and_bound import Outcome
from xscheduler.spaces.space import (
    Effort,
    Searched,
    Selection,
    Space,
    SpaceSearch,
    search_space,
)
from xscheduler.spaces.tensor_plans import tensor_plans
from xscheduler.ties import simplest

GAP = 0.005
BRIEF_NODES = 200  # boxes of a policy that is known to lose
PAPERS_SHOWN = 0.8  # of a schedule by one of the paper's policies: what another needs, to be looked
# into for its own best
# Of the search of one policy under bounds that leave room for its margin, of which nothing is
# claimed: what is proved is proved of all policies under the bound that every margin leaves.
ALONE_GAP = 0.01
FREE_GAP = 0.02  # of the search without a latency bound, which is only compared with
PAPERS_FREE = 0.05  # share by which one of the paper's policies must be better than another there
FIRST_GAP = 0.02  # of the search of all policies under what every margin leaves of the bound: what
# it finds is searched for again, policy by policy, under what its own margin leaves
KEPT_SEARCHES = 4  # of a policy, from whose boxes those under tighter bounds begin


def is_proved(fixed: FixedSchedule) -> bool:
    """Whether what is searched has bounds: all but a policy without a space of its own, which is
    planned where it is the only one."""
    return fixed.policy is None or policy(fixed.policy).has_space


def find_schedule(problem: Problem, timing: TimingSource, effort: Effort | None = None) -> Schedule:
    """The schedule of highest steady-state throughput within the problem's constraint, all taken as
    certain, of one copy of the model on all devices. Raises InfeasibleError naming the tightest
    latency that can be met, InputError for fixed values that the model or cluster cannot hold."""
    return Scheduler(problem, timing, effort).find()


class Scheduler:
    """Searches one problem, under one latency bound after the other if wanted: what was evaluated
    for one serves the next."""

    def __init__(self, problem: Problem, timing: TimingSource,
                 effort: Effort | None = None) -> None:
        """effort: of each policy's search, by default until the gap is GAP; the result's status
        says when another limit was hit."""
        self.problem, self._effort = problem, effort or Effort(gap=GAP)
        names, self._left_out = _policies_of(problem)
        plans = tensor_plans(problem, timing)
        spaces = [policy(name).load("space")(name, problem, timing, plans)
                  for name in names]
        self.spaces: list[Space] = [space for space in spaces if space.plans]
        if not self.spaces:
            raise wrong("schedule", "schedule.policy", problem.fixed.policy,
                        f"take rra: cluster {problem.cluster.name} ({problem.cluster.num_devices} "
                        f"x {problem.cluster.device.name}) cannot be divided into an encode and a "
                        "decode pool for this model and tensor plan")
        self._whole: Scheduler | None = None  # of all policies, where this is of one of them
        self._free: dict[str, Searched] = {}
        self._begun = _Begun(math.nan, 0.0, 0.0, {}, {})
        self._results: dict[float, dict[str, Searched]] = {}  # by latency bound
        self._limits: dict[str, list[tuple[float, float]]] = {}  # (latency bound, upper bound)
        self._searches: dict[str, list[SpaceSearch]] = {}  # begun, under any bound
        # what is best under one bound often is under several
        self._estimates: dict[tuple[str, int, tuple[int, ...]], Estimate] = {}

    def find(self, latency_bound_s: float | None = None, *, compares: bool = True,
             floor_qps: float = 0.0, is_glance: bool = False, gap: float = 0.0) -> Schedule:
        """The best schedule within a bound, by default the problem's. `compares`: also with the
        best without a bound. `floor_qps`, had elsewhere: what is no better is not looked into, and
        a schedule below it is the best of those looked at. `is_glance`: no box is divided, and the
        first of all policies looked at whatever the floor; a search under the same bound goes on.
        `gap`: one wide enough, where nobody asked for another. Raises InfeasibleError, and
        BeatenError where there may be one, but none was seen for these."""
        began, constraint = time.monotonic(), self.problem.constraint
        bound_s = constraint.latency_s if latency_bound_s is None else latency_bound_s
        copies = self.problem.copies
        results = self._search_all(bound_s, floor_qps / copies, is_glance=is_glance, gap=gap)
        self._results[bound_s] = results
        if compares:
            self._complete(results, bound_s)
        upper = max(one.outcome.upper_bound for one in results.values())
        admissible = [best for space in self.spaces for best in best_in(space, results[space.name])]
        if not admissible:
            if (floor_qps > 0 or is_glance) and upper > -math.inf:
                raise BeatenError(upper * copies)
            if is_glance:
                raise InfeasibleError("no schedule within the limits")
            is_proved = all(one.outcome.upper_bound == -math.inf for one in results.values())
            raise Unmet(partial(explain, self.spaces, bound_s, is_proved=is_proved))
        best = simplest(admissible)
        estimate = _estimated(best, self._estimates)
        seconds = time.monotonic() - began
        free = self._unbounded(bound_s, results) if compares else None
        return schedule_from_flat(
            estimate=estimate.in_copies(copies), latency_bound_s=bound_s,
            constraint_kind=constraint.kind, quantile=constraint.quantile,
            status=_status(results, upper, best), bound_qps=upper * copies,
            gap=upper / estimate.figures.throughput_qps - 1, nodes=self.num_evaluated,
            seconds=seconds, fingerprint=self.problem.fingerprint,
            unbounded_qps=None if free is None else free.candidate.objective * copies,
            rejected=(*rows_beside(best, self.spaces, results, free, bound_s), *self._left_out),
            pruned=tuple((f"{name}: {reason}", count) for name, one in results.items()
                         for reason, count in one.outcome.closed),
            policy_bounds=_bounds_of(results, copies))

    def rows_beside(self, latency_bound_s: float) -> tuple[Rejected, ...]:
        """The alternatives to what was found under a bound, after a look into those of the paper's
        own policies that were given up for another's sake."""
        results = self._results[latency_bound_s]
        self._complete(results, latency_bound_s)
        best = simplest([best for space in self.spaces
                         for best in best_in(space, results[space.name])])
        return (*rows_beside(best, self.spaces, results, None, latency_bound_s), *self._left_out)

    def alone(self, name: str) -> Scheduler:
        """The search of one of the policies, which shares what was evaluated, and what is known of
        its bounds."""
        one, effort = copy.copy(self), self._effort
        # what is proved is proved of all policies
        one._effort = replace(effort.with_gap(ALONE_GAP), is_claimed=False)
        one._whole = self
        one.spaces = [space for space in self.spaces if space.name == name]
        one._begun, one._results, one._left_out = _Begun(math.nan, 0.0, 0.0, {}, {}), {}, ()
        return one

    def rows_beside_alone(self, alone: Scheduler, latency_bound_s: float) -> tuple[Rejected, ...]:
        """The alternatives to what the search of one policy found under a bound: the others at
        first sight, the paper's own looked into."""
        own = alone._results[latency_bound_s]
        (space,) = alone.spaces
        (best,) = best_in(space, own[space.name])
        others = self._results.get(latency_bound_s) or self._search_all(
            latency_bound_s, best.candidate.objective, is_glance=True)
        results = {**others, **own}
        self._complete(results, latency_bound_s)
        return (*rows_beside(best, self.spaces, results, None, latency_bound_s), *self._left_out)

    @property
    def num_evaluated(self) -> int:
        """Configurations evaluated so far."""
        return sum(space.num_evaluated for space in self.spaces)

    def without_bound(self, floor_qps: float = 0.0) -> Rejected | None:
        """The best without a latency bound, as an alternative; None where nothing is admissible.
        What is no better than `floor_qps`, had elsewhere, is not looked into."""
        best = self._unbounded(math.inf, {}, floor_qps / self.problem.copies)
        return None if best is None else row_without_bound(best, self.problem.constraint.latency_s)

    def without(self, latency_bound_s: float) -> tuple[str, ...]:
        """Names of the policies of which the search under this bound found nothing."""
        results = self._results.get(latency_bound_s, {})
        return tuple(name for name, one in results.items() if one.outcome.best is None)

    def selections(self, num_queries: int) -> list[Selection]:
        """Configurations of each policy all over its space, for a job of so many queries."""
        return [space.selection(num_queries) for space in self.spaces]

    def _search_all(self, bound_s: float, floor_qps: float, *, is_glance: bool,
                    gap: float = 0.0) -> dict[str, Searched]:
        """Each policy in turn. One that is shown not to win, against the others or against
        `floor_qps`, is not searched to its own best: its runner-up is the best seen, and its upper
        bound says how much better it may be."""
        begun, effort = self._begun, self._effort.with_gap(gap)
        is_narrower = not is_glance and effort.gap < begun.gap and bool(begun.searches)
        if begun.bound_s != bound_s or begun.floor_qps > floor_qps or is_narrower:
            if is_glance and floor_qps > 0 and (seen := self._seen_among_all(bound_s)) is not None:
                return seen
            begun = _Begun(bound_s, floor_qps, effort.gap, {}, {})
        begun = self._begun = begun._replace(floor_qps=floor_qps)
        effort = replace(effort, max_nodes=1) if is_glance else effort
        results = begun.results
        for number, space in enumerate(self._in_turn(results)):
            name = space.name
            others = [_best_qps(one) for other, one in results.items() if other != name]
            is_shown = is_glance and not number and self._whole is None
            floor = max((0.0 if is_shown else floor_qps, *others))
            results[name] = self._searched(space, begun, effort, floor)
            if not is_glance:
                results[name] = _beside_unproved(space, bound_s, effort.gap, floor, results[name])
                self._limits.setdefault(name, []).append(
                    (bound_s, results[name].outcome.upper_bound))
        return dict(results)

    def _seen_among_all(self, bound_s: float) -> dict[str, Searched] | None:
        """Of one policy what the search of all has found under the same bound, whatever its floor
        was; None where it has not begun that."""
        if self._whole is None or self._whole._begun.bound_s != bound_s:
            return None
        found = self._whole._begun.results
        names = [space.name for space in self.spaces]
        return {name: found[name] for name in names} if all(
            name in self._whole._begun.searches for name in names) else None

    def _searched(self, space: Space, begun: _Begun, effort: Effort, floor: float) -> Searched:
        """One policy's search begun, or gone on with; what is known of a wider bound may spare
        it."""
        name = space.name
        if name not in begun.searches:
            most = min((upper for wider_s, upper in self._limits.get(name, ())
                        if wider_s >= begun.bound_s), default=math.inf)
            if most <= floor * (1 + effort.gap) and floor > 0:
                return _spared(space, most)
            begun.searches[name] = SpaceSearch(space, begun.bound_s, effort, _wider(
                name, self._searches, begun.bound_s))
            _keep(self._searches.setdefault(name, []), begun.searches[name])
        return begun.searches[name].go_on(effort, floor)

    def _in_turn(self, results: Mapping[str, Searched]) -> list[Space]:
        """What is likely to win comes first, for it spares the others' searches: those that have
        most so far; WAA, whose boxes are few, before RRA. A wrong guess costs time alone."""
        backwards = list(reversed(self.spaces))
        return sorted(backwards, key=lambda space: (
            -_best_qps(results.get(space.name)), policy(space.name).turn))

    def _complete(self, results: dict[str, Searched], bound_s: float) -> None:
        """The paper's own policies that were given up for another's sake are looked into, briefly,
        to say what they would bring. What is shown of them together is the best: where that is not
        the schedule itself, what is no better than the best of them so far is not looked into, nor
        what has not even PAPERS_SHOWN of the schedule's throughput where it is."""
        papers = [space for space in self.spaces if policy(space.name).is_papers]
        most_qps = max(map(_best_qps, results.values()))
        for space in sorted(papers, key=lambda space: -_best_qps(results[space.name])):
            first, own_qps = results[space.name], _best_qps(results[space.name])
            papers_qps = max(_best_qps(results[one.name]) for one in papers)
            floor = papers_qps if papers_qps < most_qps else PAPERS_SHOWN * most_qps
            if first.outcome.upper_bound <= (1 + FREE_GAP) * max(floor, own_qps):
                continue
            again = search_space(space, bound_s, replace(
                self._effort, gap=FREE_GAP, keeps_gap=False, max_nodes=BRIEF_NODES), floor,
                _wider(space.name, self._searches, bound_s))
            results[space.name] = _better_of(first, again)

    def _unbounded(self, bound_s: float, results: Mapping[str, Searched],
                   floor_qps: float = 0.0) -> BestPoint | None:
        """The best without a latency bound, of any policy."""
        if math.isinf(bound_s):
            self._free.update(results)
        effort = replace(self._effort, gap=FREE_GAP, keeps_gap=False)
        seen: list[BestPoint] = []
        for space in sorted(self.spaces, key=lambda space: policy(space.name).turn):
            if space.name not in self._free:
                floor = max((floor_qps, *(one.candidate.objective for one in seen)))
                # the paper's own serve a latency: where others have something, they are looked
                # into briefly, and not for every number of copies
                is_brief = floor > 0 and policy(space.name).is_papers
                if is_brief and floor_qps > 0 and not all(
                        policy(one.name).is_papers for one in self.spaces):
                    continue
                brief = replace(effort, max_nodes=BRIEF_NODES) if is_brief else effort
                self._free[space.name] = search_space(
                    space, math.inf, brief, (1 + PAPERS_FREE * is_brief) * floor)
            seen += [best for searched in (self._free.get(space.name), results.get(space.name))
                     if searched is not None for best in best_in(space, searched)]
        return simplest(seen) if seen else None


class _Begun(NamedTuple):
    """Searches under one bound, and what they have found so far. `floor_qps`: the highest floor
    that they were gone on with. `gap`: to which they go."""

    bound_s: float
    floor_qps: float
    gap: float
    searches: dict[str, SpaceSearch]
    results: dict[str, Searched]


def _estimated(best: BestPoint,
               known: dict[tuple[str, int, tuple[int, ...]], Estimate]) -> Estimate:
    key = best.space.name, best.plan, best.candidate.point
    if key not in known:
        known[key] = best.space.estimate(*key[1:])
    return known[key]


def _wider(name: str, searches: Mapping[str, Sequence[SpaceSearch]],
           latency_bound_s: float) -> SpaceSearch | None:
    """Of a policy's searches under this bound or wider ones the latest of the tightest; None where
    nothing would be gained: lines of continuous batching are looked into whole."""
    if not policy(name).is_papers:
        return None
    return min((one for one in reversed(searches.get(name, ()))
                if one.latency_bound_s >= latency_bound_s), default=None,
               key=lambda one: one.latency_bound_s)


def _keep(searches: list[SpaceSearch], latest: SpaceSearch) -> None:
    """The latest, those before it, and one under the widest bound, from which all can begin: a
    planner that lives for long asks for many bounds."""
    searches.append(latest)
    if len(searches) > KEPT_SEARCHES:
        widest = max(searches, key=lambda one: one.latency_bound_s)
        searches.remove(next(one for one in searches if one is not widest))


def _best_qps(searched: Searched | None) -> float:
    return 0.0 if searched is None or searched.outcome.best is None else (
        searched.outcome.best.objective)


def _beside_unproved(space: Space, bound_s: float, gap: float, floor_qps: float,
                     searched: Searched) -> Searched:
    """What a search came to, and what is found of configurations that it does not cover."""
    found = space.unproved(bound_s, gap, max(floor_qps, _best_qps(searched)))
    return searched if found is None else searched.with_unproved(*found)


def _better_of(first: Searched, again: Searched) -> Searched:
    """What two searches of one space came to, by the one that found more."""
    best = again if _best_qps(again) > _best_qps(first) else first
    return best._replace(outcome=replace(
        best.outcome, status=first.outcome.status,
        upper_bound=min(first.outcome.upper_bound, again.outcome.upper_bound)))


def _spared(space: Space, upper_qps: float) -> Searched:
    """A policy that is known to have nothing better than `upper_qps` under a wider bound."""
    count = len(space.plans)
    return Searched(Outcome(
        status=Status.INFEASIBLE, best=None, upper_bound=upper_qps, nodes=0, closed=(),
        per_root=((None, upper_qps),) * count), tuple(range(count)))


def _policies_of(problem: Problem) -> tuple[tuple[str, ...], tuple[Rejected, ...]]:
    """(names of those that are searched, what is said of those left out)."""
    fixed = problem.fixed
    wanted = fixed.policies or searched_policies()
    able = [row.name for row in able_policies(fixed)]
    alone = [name for name in able if problem.model.is_encoder_decoder
             and policy(name).is_decoder_only]
    reasons = {"the job fixes a variable that it does not have": [
        name for name in wanted if name not in able], "for decoder-only models": alone}
    names = tuple(name for name in able if name not in alone and policy(name).is_searched)
    reasons["it is not searched; `xgpt simulate` finds its best"] = [
        name for name in able if not policy(name).is_searched]
    if not names:
        raise wrong("schedule", "schedule.policy", ", ".join(fixed.policies),
                    f"{', '.join(searched_policies())} (or left out): a policy without a "
                    "space is not searched; `xgpt simulate` finds its best")
    return names, tuple(
        Rejected(label=f"{POLICY_ROW}{', '.join(own)}", throughput_qps=None, latency_s=None,
                 reason=f"{LEFT_OUT}: {why}") for why, own in reasons.items() if own)


def _bounds_of(results: Mapping[str, Searched],
               copies: int) -> tuple[tuple[str, float], ...]:
    """Of each policy that has an admissible schedule, the highest first."""
    bounds = ((name, copies * one.outcome.upper_bound) for name, one in results.items())
    return tuple(sorted((pair for pair in bounds if pair[1] > 0), key=lambda pair: -pair[1]))


def _status(results: Mapping[str, Searched], upper: float, best: BestPoint) -> Status:
    if any(one.outcome.status is Status.LIMIT for one in results.values()):
        return Status.LIMIT
    is_closed = upper <= best.candidate.objective * (1 + 1e-9)
    return Status.OPTIMAL if is_closed else Status.WITHIN_GAP
