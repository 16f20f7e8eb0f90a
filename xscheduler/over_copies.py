"""The best schedule over every number of copies of the model (xscheduler.copies).

Each number has a planner of its own, of one copy. They are asked in turn, those of the smallest
parts first, which are soonest done; what is found is the floor for the others' searches, so that a
number of copies that cannot win costs the examination of its roots. What is proved holds for all
numbers: no schedule of any is above the highest of their bounds. The margin, which takes replays,
is asked of those alone whose bound is above what is had with its margin."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from xgpt.core.errors import BeatenError, InfeasibleError, InputError
from xgpt.core.job import FixedSchedule
from xgpt.core.policies import baselines, policy
from xgpt.core.problem import Problem
from xgpt.core.schedule import CopiesTried, Estimate, Rejected, Schedule, Status
from xprofiler.timing import TimingSource
from xscheduler.alternatives import BARE_ROW, FREE_ROW, POLICY_ROW
from xscheduler.copies import has_room, problems_of_copies
from xscheduler.copy_planner import CopyPlanner
from xscheduler.spaces.space import Effort, Selection
from xscheduler.within import PlannedWithin

_NO_ROOM = "the weights alone are more than the devices of a copy hold"
_CLOSED = 1e-9  # share by which a bound may exceed the throughput it proves, by rounding


class _Looked(NamedTuple):
    """What one number of copies comes to under a bound. `found` None: nothing that is better than
    what others have, or nothing at all (`refusal`)."""

    planner: CopyPlanner
    found: Schedule | None
    upper_qps: float
    refusal: InfeasibleError | InputError | None = None
    is_limited: bool = False  # the search was ended by its limit


class CopiesSearch:
    """Schedules of one problem over all numbers of copies, under one latency bound after the
    other."""

    def __init__(self, problem: Problem, timing: TimingSource, effort: Effort, *,
                 is_brief: bool, asked: FixedSchedule | None = None) -> None:
        """is_brief: not explained, and not compared with what there would be without a bound.
        asked: what the job fixes, where the problem fixes more."""
        self.problem, self._effort, self._asked = problem, effort, asked or problem.fixed
        self._planners = [[CopyPlanner(one, timing, effort) for one in parts]
                          for parts in problems_of_copies(problem)]
        self._unbounded: tuple[Rejected | None] | None = None  # once it was asked for
        self._compares = not is_brief and problem.fixed.policy not in baselines()

    def best(self, latency_bound_s: float, *, has_margin: bool) -> Schedule:
        """The best within the bound; `has_margin`: with the constraint's confidence. Raises
        InfeasibleError, and InputError for fixed values that no copy can hold."""
        began, before = time.monotonic(), self._nodes
        looked = self._look(latency_bound_s)
        free = max((one.found for one in looked if one.found is not None),
                   key=lambda found: found.figures.throughput_qps)
        tried: dict[int, PlannedWithin | InfeasibleError] = {}
        schedule, planner = free, next(one.planner for one in looked if one.found is free)
        if has_margin:
            tried = self._planned(looked, latency_bound_s)
            planner, planned = _safest(looked, tried)
            cost = 1 - planned.schedule.figures.throughput_qps / free.figures.throughput_qps
            schedule = planner.compared(planned, free) if self._compares else planned.schedule
            schedule = schedule.changed(margin=planned.margin.kept(cost=max(cost, 0.0)))
        watch = self._effort.watch
        schedule = _certified(schedule, looked, is_cut=watch is not None and watch.has_cut)
        if self._compares:
            schedule = self._beside_no_bound(_beside_policies(schedule, looked), free, looked)
        if self._compares and has_margin:
            schedule = schedule.changed(explanation=planner.explained(schedule, self._asked))
            if len(looked) > 1:
                schedule = schedule.changed(explanation=(
                    *schedule.explanation, _why_so_many(schedule, looked)))
        return replace(schedule.changed(nodes=self._nodes - before,
                                        seconds=time.monotonic() - began),
                       fingerprint=self.problem.fingerprint,
                       over_copies=() if len(looked) < 2 else tuple(
                           _tried_row(one, tried.get(index)) for index, one in enumerate(looked)))

    def selections(self, num_queries: int) -> list[Selection]:
        """Configurations all over the space, for a job of so many queries."""
        return [selection for planner in self._able
                for selection in planner.own.selections(-(-num_queries // planner.problem.copies))]

    @property
    def _nodes(self) -> int:
        return sum(planner.nodes for parts in self._planners for planner in parts)

    def _look(self, latency_bound_s: float) -> list[_Looked]:
        """Every number of copies without a margin. A glance at each tells in which order they are
        searched, and which cannot win. Raises the refusal that says most where none has a
        schedule."""
        if len(self._planners) == 1:
            looked = [_look_at(self._planners[0], latency_bound_s)]
        else:
            looked = [_glance_at(parts, latency_bound_s) for parts in self._planners]
            for index in sorted(range(len(looked)), key=lambda index: -_found_qps(looked[index])):
                floor_qps = max(map(_found_qps, looked))
                is_first = floor_qps == _found_qps(looked[index])
                if is_first or looked[index].upper_qps > floor_qps * (1 + self._effort.gap):
                    looked[index] = _searched(looked[index], latency_bound_s,
                                              0.0 if is_first else floor_qps)
        if all(one.found is None for one in looked):
            looked = [_look_at(parts, latency_bound_s) for parts in self._planners]
        if all(one.found is None for one in looked):
            raise _refusal(looked)
        return looked

    def _planned(self, looked: Sequence[_Looked],
                 latency_bound_s: float) -> dict[int, PlannedWithin | InfeasibleError]:
        """Those that may be the best with their margin, by their place in `looked`."""
        order = sorted((index for index, one in enumerate(looked) if one.upper_qps > 0),
                       key=lambda index: (-_found_qps(looked[index]), -looked[index].upper_qps))
        tried: dict[int, PlannedWithin | InfeasibleError] = {}
        floor_qps, watch = 0.0, self._effort.watch
        for index in order:
            if looked[index].upper_qps <= floor_qps * (1 + self._effort.gap) or (
                    floor_qps and watch is not None and watch.cuts()):
                continue
            try:
                planned = looked[index].planner.within(latency_bound_s, floor_qps)
            except InfeasibleError as refusal:
                tried[index] = refusal
                continue
            tried[index] = planned
            if planned.is_safe:
                floor_qps = max(floor_qps, planned.schedule.figures.throughput_qps)
        return tried

    def _beside_no_bound(self, schedule: Schedule, free: Schedule,
                         looked: Sequence[_Looked]) -> Schedule:
        """The schedule with what there would be without its bound."""
        qps, bound_s = free.figures.throughput_qps, free.bound.limit_s
        if not math.isinf(bound_s) and self._unbounded is None:
            self._unbounded = (self._without_bound(looked),)
        row = None if math.isinf(bound_s) or self._unbounded is None else self._unbounded[0]
        if row is not None and row.throughput_qps is not None and row.throughput_qps > qps:
            qps = row.throughput_qps
            row = replace(row, reason=f"latency above {bound_s:g} s")
            others = [one for one in schedule.rejected if not one.label.startswith(BARE_ROW)]
            schedule = schedule.changed(rejected=(
                *others, row, *(one for one in schedule.rejected if one not in others)))
        return schedule.changed(unbounded_qps=qps)

    def _without_bound(self, looked: Sequence[_Looked]) -> Rejected | None:
        """The best without a latency bound. Numbers of copies that have most within one are asked
        first: what they have is the others' floor."""
        best: Rejected | None = None
        within = {one.planner.problem.copies: _found_qps(one) for one in looked}
        for planner in sorted(self._able, key=lambda planner: -within[planner.problem.copies]):
            row = planner.own.without_bound(0.0 if best is None else best.throughput_qps or 0.0)
            if row is not None and (row.throughput_qps or 0.0) > (
                    0.0 if best is None else best.throughput_qps or 0.0):
                copies = planner.problem.copies
                words = row.label.removeprefix(f"{FREE_ROW}: ")
                best = row if copies == 1 else replace(
                    row, label=f"{FREE_ROW}: {copies} copies, {words}")
        return best

    @cached_property
    def _able(self) -> list[CopyPlanner]:
        """Of each number of copies the planner on the largest part that the model can be laid out
        on."""
        able = [next((planner for planner in parts if planner.is_able), None)
                for parts in self._planners]
        return [planner for planner in able if planner is not None]


def _glance_at(parts: Sequence[CopyPlanner], latency_bound_s: float) -> _Looked:
    """One number of copies at first sight, on the largest part on which it can be laid out."""
    planner = next((planner for planner in parts if planner.is_able), parts[0])
    if planner.problem.copies > 1 and not has_room(planner.problem):
        return _Looked(planner, None, 0.0, InfeasibleError(_NO_ROOM))
    try:
        found = planner.own.glance(latency_bound_s)
    except BeatenError as unseen:
        return _Looked(planner, None, unseen.upper_qps)
    except (InfeasibleError, InputError) as refusal:
        return _Looked(planner, None, 0.0, refusal)
    return _Looked(planner, found, _most_qps(found))


def _searched(glanced: _Looked, latency_bound_s: float, floor_qps: float) -> _Looked:
    """The same searched for what is better than the floor."""
    try:
        found = glanced.planner.own.find(latency_bound_s, floor_qps)
    except BeatenError as beaten:
        return glanced._replace(upper_qps=min(glanced.upper_qps, beaten.upper_qps))
    except (InfeasibleError, InputError) as refusal:
        return _Looked(glanced.planner, None, 0.0, refusal)
    best = found if found.figures.throughput_qps >= _found_qps(glanced) else glanced.found
    return glanced._replace(found=best, upper_qps=min(glanced.upper_qps, _most_qps(found)),
                            is_limited=found.proof.status == Status.LIMIT)


def _most_qps(found: Schedule) -> float:
    """What no schedule of so many copies exceeds; of a baseline what was found, for nothing is
    proved of those."""
    proof = found.proof
    return found.figures.throughput_qps if proof.status == Status.GRID else proof.bound_qps


def _look_at(parts: Sequence[CopyPlanner], latency_bound_s: float) -> _Looked:
    """One number of copies on the largest part on which there is a schedule."""
    refused: list[_Looked] = []
    for planner in parts:
        if planner.problem.copies > 1 and not has_room(planner.problem):
            break  # nor on smaller ones
        try:
            found = planner.own.find(latency_bound_s)
        except (InfeasibleError, InputError) as refusal:
            refused.append(_Looked(planner, None, 0.0, refusal))
        else:
            return _Looked(planner, found, _most_qps(found),
                           is_limited=found.proof.status == Status.LIMIT)
    return refused[0] if refused else _Looked(parts[0], None, 0.0, InfeasibleError(
        _NO_ROOM))


def _refusal(looked: Sequence[_Looked]) -> InfeasibleError | InputError:
    """Of numbers of copies that all have no schedule: the tightest latency that any can keep, else
    what is in the way of the fewest."""
    infeasible = [one for one in looked if isinstance(one.refusal, InfeasibleError)]
    tightest = min(reversed(infeasible), default=None, key=lambda one: (
        one.refusal.tightest_s if isinstance(one.refusal, InfeasibleError) else 0.0))
    refusal = looked[-1].refusal if tightest is None else tightest.refusal
    assert refusal is not None, f"{looked = }"
    if tightest is None or (copies := tightest.planner.problem.copies) == 1:
        return refusal
    assert isinstance(refusal, InfeasibleError)
    devices = tightest.planner.problem.cluster.num_devices
    return InfeasibleError(f"{refusal} (in each of {copies} copies of the model, on {devices} "
                           f"device{'s' * (devices != 1)} each)", refusal.tightest_s)


def _safest(looked: Sequence[_Looked], tried: dict[int, PlannedWithin | InfeasibleError],
            ) -> tuple[CopyPlanner, PlannedWithin]:
    """The best that keeps the bound with its margin, else what comes nearest to that. Raises
    InfeasibleError where nothing was planned."""
    planned = {index: one for index, one in tried.items() if isinstance(one, PlannedWithin)}
    if not planned:
        raise next(one for one in tried.values() if isinstance(one, InfeasibleError))

    def rank(index: int) -> tuple[bool, float]:
        figures, own = planned[index].schedule.figures, planned[index]
        return own.is_safe, (figures.throughput_qps if own.is_safe
                             else -figures.latency_s * own.margin.factor)

    best = max(planned, key=rank)
    return looked[best].planner, planned[best]


def _certified(schedule: Schedule, looked: Sequence[_Looked], *, is_cut: bool) -> Schedule:
    """The schedule with what was proved over all numbers of copies. is_cut: by the clock."""
    qps, upper_qps = schedule.figures.throughput_qps, max(one.upper_qps for one in looked)
    status = schedule.proof.status
    if status == Status.GRID:  # of which nothing is proved
        return schedule
    if is_cut or any(one.is_limited for one in looked):
        status = Status.LIMIT
    elif status in (Status.OPTIMAL, Status.WITHIN_GAP):
        status = Status.OPTIMAL if upper_qps <= qps * (1 + _CLOSED) else Status.WITHIN_GAP
    return schedule.changed(status=status, bound_qps=upper_qps, gap=upper_qps / qps - 1,
                            policy_bounds=_policy_bounds(looked))


def _policy_bounds(looked: Sequence[_Looked]) -> tuple[tuple[str, float], ...]:
    """What no configuration of each policy exceeds at any number of copies, the highest first."""
    bounds: dict[str, float] = {}
    for one in looked:
        for name, bound_qps in () if one.found is None else one.found.proof.policy_bounds:
            bounds[name] = max(bounds.get(name, 0.0), min(bound_qps, one.upper_qps))
    unseen_qps = max((one.upper_qps for one in looked if one.found is None), default=0.0)
    return tuple(sorted(((name, max(bound_qps, unseen_qps)) for name, bound_qps in bounds.items()),
                        key=lambda pair: -pair[1]))


def _found_qps(one: _Looked) -> float:
    return 0.0 if one.found is None else one.found.figures.throughput_qps


def _tried_row(one: _Looked, planned: PlannedWithin | InfeasibleError | None) -> CopiesTried:
    """One number of copies as it is shown; with its margin where that was asked for."""
    problem, found = one.planner.problem, one.found
    words = "nothing better was found"
    if isinstance(planned, PlannedWithin):
        found = planned.schedule
    elif planned is not None and not isinstance(planned, BeatenError):
        found, words = None, "no schedule keeps the bound with its margin"
    elif one.refusal is not None:
        words = _short(one.refusal)
    return CopiesTried(
        replicas=problem.copies, devices_per_replica=problem.cluster.num_devices,
        throughput_qps=None if found is None else found.figures.throughput_qps,
        latency_s=None if found is None else found.figures.latency_s,
        bound_qps=one.upper_qps, words=words if found is None else configuration(found.estimate))


def _beside_policies(schedule: Schedule, looked: Sequence[_Looked]) -> Schedule:
    """The schedule beside the best of each other policy at whatever number of copies."""
    best = {_policy_of(row): row for row in schedule.rejected
            if row.label.startswith(POLICY_ROW) and row.throughput_qps}
    for one in looked:
        copies = one.planner.problem.copies
        if one.found is None or copies == schedule.deployment.replicas:
            continue
        for row in (*one.found.rejected, _as_row(one.found)):
            name, qps = _policy_of(row), row.throughput_qps
            if row.label.startswith(POLICY_ROW) and qps and name != schedule.estimate.policy and (
                    name not in best or qps > (best[name].throughput_qps or 0.0)):
                share = 1 - qps / schedule.figures.throughput_qps
                best[name] = replace(
                    row, reason=f"lower throughput by {share:.1%}" if share > 0 else "no better",
                    label=f"{POLICY_ROW}{name}: {copies} cop{'y' if copies == 1 else 'ies'}, "
                          f"{row.label.partition(': ')[2]}")
    others = [row for row in schedule.rejected
              if not (row.label.startswith(POLICY_ROW) and _policy_of(row) in best)]
    told = {schedule.estimate.policy, *best, *map(_policy_of, others)}
    unseen = {_policy_of(row): row for one in looked if one.found is not None
              for row in one.found.rejected
              if row.label.startswith(POLICY_ROW) and _policy_of(row) not in told}
    return schedule.changed(rejected=(*best.values(), *unseen.values(), *others))


def _policy_of(row: Rejected) -> str:
    return row.label.removeprefix(POLICY_ROW).partition(":")[0]


def _as_row(found: Schedule) -> Rejected:
    name, _, words = configuration(found.estimate).partition(", ")
    return Rejected(label=f"{POLICY_ROW}{name}: {words}", reason="",
                    throughput_qps=found.figures.throughput_qps, latency_s=found.figures.latency_s)


def _why_so_many(schedule: Schedule, looked: Sequence[_Looked]) -> str:
    """The number of copies chosen beside the next best, in a sentence."""
    deployment, qps = schedule.deployment, schedule.figures.throughput_qps
    own, each = deployment.replicas, deployment.devices_per_replica
    chosen = (f"One copy of the model on {_counted(each)}" if own == 1 else
              f"{own} copies of the model on {_counted(each)} each share the queries")
    others = [one for one in looked if one.found is not None and one.planner.problem.copies != own]
    if not others:
        return f"{chosen}: no other number of copies has a schedule within the limits."
    best = max(others, key=_found_qps)
    problem = best.planner.problem
    more = problem.copies
    words = (f"one on {_counted(problem.cluster.num_devices)}" if more == 1 else
             f"{more} on {_counted(problem.cluster.num_devices)} each")
    share = 1 - _found_qps(best) / qps
    beside = f"answer{'s' * (more == 1)} {share:.1%} less" if share > 5e-4 else (
        f"answer{'s' * (more == 1)} as many, but without the margin")
    return f"{chosen}: the next best, {words}, {beside} ({_found_qps(best):.4g} queries/s)."


def _counted(devices: int) -> str:
    return f"{devices} device{'s' * (devices != 1)}"


def _short(refusal: InfeasibleError | InputError) -> str:
    if isinstance(refusal, InputError):
        return "; ".join(mistake.allowed for mistake in refusal.mistakes)
    return str(refusal) if str(refusal) == _NO_ROOM else "no schedule within the limits"


def configuration(estimate: Estimate) -> str:
    """Policy, the control variables that tell most, and the tensor plan; what is 0 is left out."""
    names = (*policy(estimate.policy).variable_names[:2], "encode_chunk", "tp_degree", "tp_gpus")
    values = [f"{name} {value}" for name in names if (value := estimate.variables.get(name))]
    return ", ".join([estimate.policy, *values])
