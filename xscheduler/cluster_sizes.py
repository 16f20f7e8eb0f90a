"""The number of devices for a job that asks for the fewest devices or the least cost.

A size is some devices of one node, or whole nodes. A size that exceeds a limit even without a
safety margin is dropped. The others are planned in full: for `devices` the smallest first, for
`cost` in the order of their cost without a margin, until no size left can be cheaper."""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from xgpt.core.constraint import Objective
from xgpt.core.errors import InfeasibleError, InputError
from xgpt.core.problem import Problem
from xgpt.core.schedule import Schedule, SizeTried
from xgpt.core.units import format_seconds
from xscheduler.evaluator import Evaluator
from xscheduler.makespan import is_short
from xscheduler.margin import Margins
from xscheduler.replicas import weights_fit
from xscheduler.space import LEAST_GAIN
from xsimulator.roofline_limit import roofline_limit_qps

FEW_SIZES = 4  # chosen: up to so many are tried one after the other
MILLION = 1_000_000  # requests that a cost is given for if the job has no number of them
Refusal = InfeasibleError | InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeCost:
    """Device time and price of a schedule for the job's requests, or for a million if it has no
    number. with_margin_s: at the constraint's confidence. price: in the tariff's currency, 0 if
    unknown."""

    devices: int
    seconds: float
    with_margin_s: float
    price: float


def why_impossible(problem: Problem) -> str:
    """The reason why the problem can have no schedule: the weights do not fit, or by the roofline
    limit the job takes longer than its makespan limit. "" if neither is so."""
    devices = problem.cluster.num_devices
    if not weights_fit(problem):
        return f"the weights do not fit on {devices} devices"
    limit_s = problem.constraint.limit_s("makespan")
    least_s = (problem.num_queries or 0) / roofline_limit_qps(problem)
    return "" if least_s <= limit_s else (
        f"no schedule is possible within {format_seconds(limit_s)}: by the roofline limit "
        f"{devices} devices take at least {format_seconds(least_s)}")


def size_cost(problem: Problem, schedule: Schedule, evaluator: Evaluator) -> SizeCost:
    """Device time and price of a schedule: for a short job by replay, else by its throughput."""
    seconds = (problem.num_queries or MILLION) / schedule.figures.throughput_qps
    if is_short(problem, schedule):
        job = evaluator.job(schedule.estimate)
        seconds = seconds if job is None else job.wall_s
    devices = problem.cluster.num_devices
    price = (problem.cluster.device.price_per_hour or 0.0) * devices * seconds / 3600
    factor = Margins(problem, evaluator).margin(schedule.estimate, "makespan").factor
    return SizeCost(devices=devices, seconds=seconds, with_margin_s=factor * seconds, price=price)


@dataclass(slots=True, kw_only=True)
class SizeSearch:
    """Search over numbers of devices.

    `plan(size, has_margin)` returns a schedule or raises the refusal. `cost_of(size, schedule)`
    returns its device time and price. `problem(size)` returns the problem on so many devices."""

    plan: Callable[[int, bool], Schedule]
    cost_of: Callable[[int, Schedule], SizeCost]
    problem: Callable[[int], Problem]
    refused: dict[int, Refusal] = field(default_factory=dict)
    planned: dict[int, Schedule] = field(default_factory=dict)  # in full
    _rough: dict[int, SizeCost] = field(default_factory=dict)

    def choose(self, objective: Objective, sizes: Sequence[int]) -> int:
        """The number of devices to take. Raises the largest's refusal if none has a schedule."""
        assert objective != "throughput", f"{objective = }"
        for size in sizes:  # rising; a job that is impossible on some devices is so on fewer
            if reason := why_impossible(self.problem(size)):
                self.refused[size] = InfeasibleError(reason)
        possible = [size for size in sizes if size not in self.refused]
        best = self._fewest(possible) if objective == "devices" else self._cheapest(possible)
        if best is None:
            raise self.refused[sizes[-1]]
        return best

    def _fewest(self, sizes: Sequence[int]) -> int | None:
        """The first of a few sizes that has a schedule. Of many, the search begins at an estimate,
        which divides the time of a smaller size with its margin by more devices."""
        start = 0
        is_request_late = sizes[1:] and not self._has_rough(sizes[0]) and math.isfinite(
            getattr(self.refused[sizes[0]], "tightest_s", math.inf))
        if is_request_late and not self._has_rough(sizes[-1]):
            return None  # a limit on one request that the largest size misses too
        if len(sizes) > FEW_SIZES:
            start = bisect_left(sizes, True, key=lambda size: self._has_rough(size))
            if start < len(sizes):
                size = sizes[start]
                limit_s = self.problem(size).constraint.limit_s("makespan")
                more = self._rough[size].with_margin_s / limit_s
                start = min(bisect_left(sizes, size * max(more, 1.0)), len(sizes) - 1)
        best = next((size for size in sizes[start:] if self._try(size)), None)
        for size in reversed(sizes[:start]):
            if best is None or not self._try(size):
                break
            best = size
        return best

    def _has_rough(self, size: int) -> bool:
        """Whether the size has a schedule without a margin."""
        if size not in self._rough and size not in self.refused:
            rough = self._plan_or_none(size, has_margin=False)
            if rough is not None:
                self._rough[size] = self.cost_of(size, rough)
        return size in self._rough

    def _cheapest(self, sizes: Sequence[int]) -> int | None:
        for size in sizes:
            self._has_rough(size)
        best: int | None = None
        for size in sorted(self._rough, key=lambda size: (self._cost(self._rough[size]), size)):
            least = (1 - LEAST_GAIN) * self._cost(self._rough[size])
            if best is not None and least >= self.cost(best):
                break
            if self._try(size) and (best is None or self.cost(size) < self.cost(best)):
                best = size
        return best

    def _try(self, size: int) -> bool:
        """Whether the size has a schedule with its margin."""
        if not self._has_rough(size):
            return False
        schedule = self._plan_or_none(size, has_margin=True)
        if schedule is None:
            return False
        self.planned[size] = schedule
        return True

    def _plan_or_none(self, size: int, *, has_margin: bool) -> Schedule | None:
        try:
            return self.plan(size, has_margin)
        except (InfeasibleError, InputError) as refusal:
            self.refused[size] = refusal
            return None

    def cost(self, size: int) -> float:
        """Device-seconds of a planned size; sizes have the order of their prices."""
        return self._cost(self.cost_of(size, self.planned[size]))

    @staticmethod
    def _cost(own: SizeCost) -> float:
        return own.devices * own.seconds

    def schedule_of(self, best: int) -> Schedule:
        """The schedule of the best size with rows for those tried and the largest impossible."""
        rows = [*map(self._tried, sorted({*self._rough, *self.planned, *self.refused}))]
        least = max((row.devices for row in rows if row.is_impossible), default=0)
        return self.planned[best].changed(
            sizes=tuple(row for row in rows if row.devices >= least))

    def _tried(self, size: int) -> SizeTried:
        own = (self.cost_of(size, self.planned[size]) if size in self.planned else
               self._rough.get(size))
        reason = str(self.refused.get(size, ""))
        if own is None:
            return SizeTried(devices=size, reason=reason,
                             is_impossible=bool(why_impossible(self.problem(size))))
        limit_s = self.problem(size).constraint.limit_s("makespan")
        if not reason and own.with_margin_s > limit_s:  # one whose larger neighbour has no schedule
            reason = (f"with its margin the job takes {format_seconds(own.with_margin_s)}, longer "
                      f"than {format_seconds(limit_s)}")
        return SizeTried(devices=size, expected_s=own.seconds, with_margin_s=own.with_margin_s,
                         price=own.price, reason=reason)
