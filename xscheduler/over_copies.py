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
from itertools import islice

from xgpt.core.errors import InfeasibleError
from xgpt.core.job import FixedSchedule
from xgpt.core.problem import Problem
from xgpt.core.schedule import Rejected, Schedule
from xprofiler.timing import TimingSource
from xscheduler.alternatives import BARE_ROW, FREE_ROW
from xscheduler.copies import problem_on, problems_of_copies
from xscheduler.copies_looked import glance_at, look_at, refusal_of, searched
from xscheduler.copies_proved import certified, proved_again
from xscheduler.copies_shown import (
    Looked,
    beside_papers_own,
    beside_policies,
    found_qps,
    tried_row,
    why_so_many,
)
from xscheduler.copy_planner import CopyPlanner
from xscheduler.search import is_proved
from xscheduler.spaces.space import Effort, Selection
from xscheduler.within import PlannedWithin, for_its_margin

SHOWN = 0.9  # of the best so far: at first sight what is no better at other numbers of copies is
# not looked into, but by the first policy
Planned = PlannedWithin | InfeasibleError


class CopiesSearch:
    """Schedules of one problem over all numbers of copies, under one latency bound after the
    other."""

    def __init__(self, problem: Problem, timing: TimingSource, effort: Effort, *,
                 is_brief: bool, asked: FixedSchedule | None = None,
                 has_margin: bool = False) -> None:
        """is_brief: not explained, and not compared with what there would be without a bound.
        asked: what the job fixes, where the problem fixes more. has_margin: nothing will be asked
        for without a margin."""
        self.problem, self._effort, self._asked = problem, effort, asked or problem.fixed
        self._timing, self._has_margin = timing, has_margin
        self._every = [[CopyPlanner(one, timing, effort, has_margin=has_margin) for one in parts]
                       for parts in problems_of_copies(problem)]
        self._of_hidden: dict[tuple[str, ...], list[CopyPlanner]] = {}
        self._on = {one.problem.cluster.num_devices: one for parts in self._every for one in parts}
        # what `best` went over, and planned with a margin, by bound and whether that was asked for
        self.gone_over: dict[tuple[float, bool], list[tuple[Looked, Planned | None]]] = {}
        self._unbounded: tuple[Rejected | None] | None = None  # once it was asked for
        self._compares = not is_brief and is_proved(problem.fixed)

    def best(self, latency_bound_s: float, *, has_margin: bool) -> Schedule:
        """The best within the bound; `has_margin`: with the constraint's confidence. Raises
        InfeasibleError, and InputError for fixed values that no copy can hold."""
        began, before = time.monotonic(), self.nodes
        looked = self._looked_within(latency_bound_s) if has_margin else (
            self._look(latency_bound_s))
        free = max((one.found for one in looked if one.found is not None),
                   key=lambda found: found.figures.throughput_qps)
        tried: dict[int, Planned] = {}
        schedule, planner = free, next(one.planner for one in looked if one.found is free)
        if self._compares and not has_margin:
            schedule = planner.completed(free)
        if has_margin:
            tried = self._planned(looked, latency_bound_s)
            planner, planned = _safest(looked, tried)
            looked = [proved_again(one, planned) if one.planner is planner else one
                      for one in looked]
            if free.bound.limit_s < latency_bound_s:  # every schedule has a margin
                free = planner.own.at_first_sight(latency_bound_s, planned.schedule, free)
            cost = 1 - planned.schedule.figures.throughput_qps / free.figures.throughput_qps
            schedule = planner.compared(planned, free) if self._compares else planned.schedule
            schedule = schedule.changed(margin=planned.margin.kept(cost=max(cost, 0.0)))
        watch = self._effort.watch
        schedule = certified(schedule, looked, is_cut=watch is not None and watch.has_cut)
        if self._compares:
            schedule = beside_papers_own(beside_policies(schedule, looked))
            schedule = self._beside_no_bound(schedule, free, looked)
        if self._compares and has_margin:
            schedule = schedule.changed(explanation=planner.explained(schedule, self._asked))
            if len(looked) > 1:
                schedule = schedule.changed(explanation=(
                    *schedule.explanation, why_so_many(schedule, looked)))
        gone_over = [(one, tried.get(index)) for index, one in enumerate(looked)]
        self.gone_over[latency_bound_s, has_margin] = gone_over
        rows = () if len(looked) < 2 else tuple(tried_row(*one) for one in gone_over)
        took_s, nodes = time.monotonic() - began, self.nodes - before
        return replace(schedule.changed(nodes=nodes, seconds=took_s), over_copies=rows,
                       fingerprint=self.problem.fingerprint)

    def on(self, devices: int) -> CopyPlanner:
        """The planner of copies on so many devices of one node, or on whole nodes."""
        if devices not in self._on:
            self._on[devices] = CopyPlanner(problem_on(self.problem, devices), self._timing,
                                            self._effort, has_margin=self._has_margin)
        return self._on[devices]

    def of_policies(self, problem: Problem, names: tuple[str, ...]) -> CopyPlanner:
        """A planner of copies that are to be planned for by these policies alone."""
        return CopyPlanner(replace(problem, fixed=replace(problem.fixed, policies=names)),
                           self._timing, self._effort, has_margin=self._has_margin)

    def selections(self, num_queries: int) -> list[Selection]:
        """Configurations all over the space, for a job of so many queries: on the largest part of
        each number of copies, since too few are replayed to go over the others, too."""
        largest = {planner.problem.copies: planner for planner in reversed(self._able)}
        return [selection for planner in reversed(largest.values())
                for selection in planner.own.selections(-(-num_queries // planner.problem.copies))]

    @property
    def nodes(self) -> int:
        """Configurations evaluated so far."""
        return sum(planner.nodes for own in (self._on.values(), *self._of_hidden.values())
                   for planner in own)

    @cached_property
    def _planners(self) -> list[CopyPlanner]:
        """What is compared: of each number of copies the planner on the largest part that the model
        can be laid out on, and on smaller ones where GPUs may idle: of a number that the job asks
        for on every part, else on the largest of 2^k GPUs or nodes, which divide as heads and
        layers do. Ranks of a processor are there to be used, for fewer of them would have more
        threads. (Nor of a policy without a space: nothing is proved of it, and its grid would be
        gone over for each part.)"""
        compared: list[CopyPlanner] = []
        is_gpu, is_asked = self.problem.cluster.device.kind == "gpu", self.problem.fixed.replicas
        for parts in self._every:
            able = (planner for planner in parts if planner.is_able)
            own = list(islice(able, 1)) or parts[:1]
            if is_gpu and own[0].is_able and own[0].own.proves:
                smaller = able if is_asked else (one for one in able if _divides(one))
                own += islice(smaller, None if is_asked else int(not _divides(own[0])))
            compared += own
        return compared

    def _hidden(self, first: Looked, latency_bound_s: float) -> list[Looked]:
        """What policies of which nothing was found on the part that was looked at, where another
        has something, come to on smaller ones: alone they would be planned there."""
        parts, found = self._every[0], first.found
        if found is None or not first.planner.own.proves:
            return []
        names = first.planner.own.without(latency_bound_s)
        if names and names not in self._of_hidden:
            self._of_hidden[names] = [self.of_policies(one.problem, names)
                                      for one in parts[parts.index(first.planner) + 1:]]
        smaller = self._of_hidden.get(names, [])
        hidden = look_at(smaller, latency_bound_s) if smaller else None
        return [] if hidden is None or hidden.found is None else [hidden]

    def _looked_within(self, latency_bound_s: float) -> list[Looked]:
        """Every number of copies under what the margin that all schedules have leaves of the bound.
        Raises the refusal that says most where none has a schedule."""
        least_factor = self._every[0][0].doubts(latency_bound_s).least_factor
        try:
            return self._look(latency_bound_s / least_factor)
        except InfeasibleError as refusal:
            if least_factor == 1:
                raise
            best = max(self._look(latency_bound_s), key=found_qps)
            assert best.found is not None, "else it is refused"
            margin = best.planner.doubts(latency_bound_s).margin(best.found.estimate)
            raise for_its_margin(best.found, margin, latency_bound_s, refusal) from refusal

    def _look(self, latency_bound_s: float) -> list[Looked]:
        """Every number of copies under a bound. A glance at each tells in which order they are
        searched, and which cannot win. Raises the refusal that says most where none has a
        schedule."""
        if len(self._planners) == 1:
            looked = [look_at(self._every[0], latency_bound_s)]
            looked += self._hidden(looked[0], latency_bound_s)
        else:
            looked = []
            for planner in self._planners:
                best_qps = max(map(found_qps, looked), default=0.0)
                looked.append(glance_at(planner, latency_bound_s, SHOWN * best_qps))
            for index in sorted(range(len(looked)), key=lambda index: -found_qps(looked[index])):
                floor_qps = max(map(found_qps, looked))
                is_first = floor_qps == found_qps(looked[index])
                if is_first or looked[index].upper_qps > floor_qps * (1 + self._effort.gap):
                    looked[index] = searched(looked[index], latency_bound_s,
                                              SHOWN * floor_qps if is_first else floor_qps)
        if all(one.found is None for one in looked):
            looked = [look_at(parts, latency_bound_s) for parts in self._every]
        if all(one.found is None for one in looked):
            raise refusal_of(looked)
        return looked

    def _planned(self, looked: Sequence[Looked], latency_bound_s: float) -> dict[int, Planned]:
        """Those that may be the best with their margin, by their place in `looked`."""
        order = sorted((index for index, one in enumerate(looked) if one.upper_qps > 0),
                       key=lambda index: (-found_qps(looked[index]), -looked[index].upper_qps))
        promised = self._promised(looked, order, latency_bound_s)
        order.sort(key=lambda index: -promised[index])  # of equals the order stays
        tried: dict[int, Planned] = {}
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

    def _promised(self, looked: Sequence[Looked], order: Sequence[int],
                  latency_bound_s: float) -> dict[int, float]:
        """What each number of copies may have with its margin, by its place in `looked`; 0: no more
        than others, at first sight. It takes no replays, and spares those of what is beaten."""
        promised: dict[int, float] = {}
        watch = self._effort.watch
        is_free = math.isinf(latency_bound_s)  # what was found is what there is: no margin
        for index in order:
            most = max(promised.values(), default=0.0)
            is_beaten = looked[index].upper_qps <= most * (1 + self._effort.gap)
            is_over = watch is not None and watch.is_over
            promised[index] = 0.0 if len(order) < 2 or is_beaten or is_over or is_free else (
                looked[index].planner.promised(latency_bound_s, most))
        return promised

    def _beside_no_bound(self, schedule: Schedule, free: Schedule,
                         looked: Sequence[Looked]) -> Schedule:
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

    def _without_bound(self, looked: Sequence[Looked]) -> Rejected | None:
        """The best without a latency bound: what some numbers of copies have is the others' floor,
        and those that have most within the bound come first."""
        best: Rejected | None = None
        within_qps = {one.planner: found_qps(one) for one in looked}
        for planner in sorted(self._able, key=lambda one: -within_qps.get(one, 0.0)):
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
        """Those compared on whose part the model can be laid out."""
        return [planner for planner in self._planners if planner.is_able]


def _divides(planner: CopyPlanner) -> bool:
    """Whether its nodes, or the devices of its one node, are a power of 2."""
    part = planner.problem.cluster
    number = part.num_nodes if part.num_nodes > 1 else part.devices_per_node
    return number & (number - 1) == 0


def _safest(looked: Sequence[Looked],
            tried: dict[int, Planned]) -> tuple[CopyPlanner, PlannedWithin]:
    """The best that keeps the bound with its margin, else what comes nearest to that. Raises
    InfeasibleError where nothing was planned."""
    planned = {index: one for index, one in tried.items() if isinstance(one, PlannedWithin)}
    if not planned:
        raise next(one for one in tried.values() if isinstance(one, InfeasibleError))
    best = max(planned, key=lambda index: planned[index].rank())
    return looked[best].planner, planned[best]
