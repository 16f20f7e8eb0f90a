"""What one copy of the model comes to on so many devices of a node, size by size: what was seen of
it, what no schedule of it exceeds, and, where it is to be used, the schedule to use.

Most of it is known from the search over equal copies, which looks at every size that these may
have. Of another one, and of one that leaves devices idle there, of which hardly anything was looked
at beside what all devices have, a glance is taken; a search, and where margins are asked for their
replays, are made only of sizes that promise enough. What sizes keep of what was seen, once they
have margins of their own, hangs on policies and control variables that differ from size to size:
where a division would win if all were kept, glances under what the margins leave of the bound say
how much is."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace

from xgpt.core.errors import BeatenError, InfeasibleError, InputError
from xgpt.core.problem import Problem
from xgpt.core.schedule import Schedule
from xscheduler.copies_hoped import Hopes
from xscheduler.copies_shown import Looked
from xscheduler.copy_planner import CopyPlanner
from xscheduler.over_copies import CopiesSearch, Planned
from xscheduler.room import with_room
from xscheduler.targets import WORTH
from xscheduler.within import PlannedWithin


class CopySizes:
    """Copies of a problem under one bound, by their devices. All throughputs are of one copy; what
    is promised has its margin, as far as can be told before it is planned with one."""

    def __init__(self, problem: Problem, search: CopiesSearch, *, has_margin: bool,
                 kept: float = 1.0) -> None:
        """search: what went over equal copies of the problem. kept: share of its throughput that
        the best of those keeps with its margin."""
        self.problem, self._search, self.has_margin, self._kept = problem, search, has_margin, kept
        self.bound_s = problem.constraint.latency_s
        self.worth: dict[int, float] = {}  # queries/s promised, or planned; 0: nothing
        self._seen: dict[int, Schedule] = {}
        self.most: dict[int, float] = {}  # what no schedule exceeds, of those looked at
        self._settled: dict[int, Schedule | None] = {}
        self._of_some: dict[int, CopyPlanner] = {}  # policies
        self.hopes = Hopes(has_margin=has_margin and math.isfinite(self.bound_s))
        gone_over = search.gone_over.get((self.bound_s, has_margin), ())
        self._had_qps = max((planned.schedule.figures.throughput_qps for _, planned in gone_over
                             if isinstance(planned, PlannedWithin) and planned.is_safe),
                            default=math.inf)  # the best of equal copies with its margin
        self._beside_more: set[int] = set()  # sizes looked at beside what more devices have
        for looked, planned in gone_over:
            own = looked.planner.problem
            devices = own.cluster.num_devices
            if looked.planner is search.on(devices):
                if planned is None and own.copies * devices < problem.cluster.num_devices and (
                        not any(one is looked.found for one in looked.planner.own.found)):
                    self._beside_more.add(devices)
                else:
                    self._take(looked, planned)

    def is_settled(self, devices: int) -> bool:
        return devices in self._settled

    @property
    def hoped(self) -> dict[int, float]:
        """What sizes may be worth once they are planned."""
        return {size: own if self.is_settled(size) or size not in self._seen else self.hopes.of(
            size, own, self._seen[size].figures.throughput_qps / _copies(self._search.on(size)),
            is_found=self._is_found(size)) for size, own in self.worth.items()}

    def _is_found(self, devices: int) -> bool:
        """Whether what was seen of a size was searched for."""
        seen = self._seen.get(devices)
        return seen is not None and any(
            one is seen for one in self._search.on(devices).own.found)

    @property
    def nodes(self) -> int:
        """Configurations evaluated here, beside those of the search over equal copies."""
        return sum(planner.nodes for planner in self._of_some.values())

    def schedule(self, devices: int) -> Schedule | None:
        """Of one copy: as planned, or else as it was seen."""
        found = self._settled.get(devices) or self._seen.get(devices)
        return None if found is None else replace(found, estimate=found.estimate.one_copy)

    def glance(self, devices: int) -> None:
        """Looks at a size for the first time."""
        planner = self._search.on(devices)
        try:
            if not planner.is_able:
                raise InfeasibleError("no room")
            seen = planner.own.glance(_free_s(planner, self), 0.0,
                                      is_anew=devices in self._beside_more)
        except BeatenError as unseen:
            self.worth[devices], self.most[devices] = 0.0, unseen.upper_qps / _copies(planner)
        except (InfeasibleError, InputError):
            self.worth[devices] = self.most[devices] = 0.0
        else:
            self._see(planner, seen)

    def glance_at_some(self, devices: int, names: tuple[str, ...]) -> None:
        """Looks at these policies alone for a copy of that size. Nothing is proved of the size."""
        planner = self._search.of_policies(self._search.on(devices).problem, names)
        self._of_some[devices] = planner
        self.worth[devices] = 0.0
        if planner.is_able:
            with suppress(InfeasibleError):
                seen = planner.own.glance(_free_s(planner, self), 0.0)
                self._seen[devices] = seen
                self.worth[devices] = self._kept * seen.figures.throughput_qps / _copies(planner)

    def take(self, devices: int, schedule: Schedule) -> None:
        """A schedule of such copies, as it is to be used."""
        own = schedule.estimate.one_copy
        self._settled[devices] = replace(schedule, estimate=own)
        self.worth[devices] = own.figures.throughput_qps

    def drop(self, devices: int) -> None:
        """Nothing on so many devices can be used."""
        self.worth[devices], self._settled[devices] = 0.0, None

    def promise(self, devices: int, floor_qps: float) -> None:
        """Says what the size has with its margin, as far as that can be told at first sight, if it
        is more than the floor."""
        planner = self._of_some.get(devices, self._search.on(devices))
        least_qps = max(floor_qps, 0.0)
        promised_qps = planner.promised(self.bound_s, least_qps * _copies(planner))
        self.hopes.promise(devices)
        if promised_qps:
            self.worth[devices] = promised_qps / _copies(planner)
        else:
            self.hopes.beat(devices)
            self.worth[devices] = min(self.worth[devices], least_qps)

    def settle(self, devices: int, floor_qps: float) -> None:
        """Plans a copy of that size as it is to be used, if it answers more than the floor."""
        planner, least_qps = self._search.on(devices), max(floor_qps, 0.0)
        try:
            schedule = self._planned(planner, least_qps * _copies(planner))
        except BeatenError as beaten:
            self.hopes.beat(devices)
            self.worth[devices] = min(self.worth[devices], least_qps)
            if not self.has_margin:  # of a size of which some policies were seen, it is the first
                self.most[devices] = min(self.most.get(devices, float("inf")),
                                          beaten.upper_qps / _copies(planner))
        except (InfeasibleError, InputError):
            self.drop(devices)
        else:
            self.take(devices, with_room(schedule, planner.problem))

    def _planned(self, planner: CopyPlanner, least_qps: float) -> Schedule:
        """Raises InfeasibleError."""
        if self.has_margin:
            # of what has hardly more than a floor nobody asks how safe it is
            within = planner.within(self.bound_s, least_qps / (1 + WORTH))
            if not within.is_safe:
                raise InfeasibleError("its margin is more than the bound leaves")
            return _as_planned(within)
        devices = planner.problem.cluster.num_devices
        if self._is_found(devices):
            seen = self._seen[devices]
            if seen.figures.throughput_qps <= least_qps:
                raise BeatenError(seen.proof.bound_qps)
            return seen
        found = planner.own.find(self.bound_s, least_qps)
        self._see(planner, found)
        return found

    def _take(self, looked: Looked, planned: Planned | None) -> None:
        """What the search over equal copies found."""
        planner = looked.planner
        devices = planner.problem.cluster.num_devices
        self.worth[devices], self.most[devices] = 0.0, looked.upper_qps / _copies(planner)
        if looked.found is not None:
            self._see(planner, looked.found)
            self.most[devices] = looked.upper_qps / _copies(planner)
        if isinstance(planned, PlannedWithin) and planned.is_safe:
            self.take(devices, with_room(_as_planned(planned), planner.problem))
        elif planned is not None and not isinstance(planned, BeatenError):
            self.drop(devices)
        elif self.has_margin:
            self.hopes.compare(devices, self._had_qps / _copies(planner))

    def _see(self, planner: CopyPlanner, seen: Schedule) -> None:
        devices, copies = planner.problem.cluster.num_devices, _copies(planner)
        self._seen[devices] = seen
        self.worth[devices] = self._kept * seen.figures.throughput_qps / copies
        self.most[devices] = min(self.most.get(devices, float("inf")),
                                  seen.proof.bound_qps / copies)


def _free_s(planner: CopyPlanner, sizes: CopySizes) -> float:
    """What the margin that every schedule has leaves of the bound."""
    return sizes.bound_s / (planner.doubts(sizes.bound_s).least_factor if sizes.has_margin else 1.0)


def _copies(planner: CopyPlanner) -> int:
    return planner.problem.copies


def _as_planned(within: PlannedWithin) -> Schedule:
    return within.schedule.changed(margin=within.margin.kept(cost=within.cost))
