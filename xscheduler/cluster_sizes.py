"""The number of devices for a job that asks for the fewest devices or the least cost.

A size is some devices of one node, or whole nodes. A size that misses a limit even without a safety
margin is dropped. The others are planned in full: for `devices` the smallest first, for `cost` in
the order of their cost without a margin, until no size left can be cheaper."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from xgpt.core.constraint import Objective
from xgpt.core.errors import InfeasibleError, InputError
from xgpt.core.problem import Problem
from xgpt.core.schedule import Rejected, Schedule
from xgpt.core.units import format_seconds
from xscheduler.evaluator import Evaluator
from xscheduler.job_time import is_short
from xscheduler.space import LEAST_GAIN

MILLION = 1_000_000  # queries that a cost is given for if the job has no number of them
Refusal = InfeasibleError | InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Device time and price of a schedule: seconds for the job's own queries (is_job) or for a
    million, and the price in the tariff's currency, 0 if no price is known."""

    devices: int
    seconds: float
    queries: int
    price: float
    is_job: bool
    tariff: str = ""  # price of a device-hour and its source, in words

    @property
    def words(self) -> str:
        what = "the job takes" if self.is_job else "a million queries take"
        devices = f"{self.devices} device{'s' * (self.devices > 1)}"
        price = f", {self.price:,.2f}" if self.price else ""
        return f"{what} {devices} for {format_seconds(self.seconds)}{price}"


def spent(problem: Problem, schedule: Schedule, evaluator: Evaluator) -> Spent:
    """Device time and price of a schedule: for a short job by replay, else by its throughput."""
    count, is_job = problem.num_queries or MILLION, problem.num_queries is not None
    seconds = count / schedule.figures.throughput_qps
    if is_short(problem, schedule):
        job = evaluator.job(schedule.estimate)
        seconds = seconds if job is None else job.wall_s
    devices = problem.cluster.num_devices
    price = (problem.cluster.device.price_per_hour or 0.0) * devices * seconds / 3600
    device = problem.cluster.device
    tariff = "" if device.price_per_hour is None else (
        f"at {device.price_per_hour:g} an hour for each by {device.price_source or 'the job file'}")
    return Spent(devices=devices, seconds=seconds, queries=count, price=price, is_job=is_job,
                 tariff=tariff)


@dataclass(slots=True, kw_only=True)
class SizeSearch:
    """Search over sizes. plan(size, has_margin): the schedule, raises the refusal. spent(size,
    schedule): its device time and price."""

    plan: Callable[[int, bool], Schedule]
    spent: Callable[[int, Schedule], Spent]
    refused: dict[int, Refusal] = field(default_factory=dict)
    planned: dict[int, Schedule] = field(default_factory=dict)  # in full
    _rough: dict[int, Spent] = field(default_factory=dict)

    def choose(self, objective: Objective, sizes: Sequence[int]) -> int:
        """The size to take. Raises the refusal of the largest if no size has a schedule."""
        assert objective != "throughput", f"{objective = }"
        if objective == "devices":
            best = next((size for size in sizes if self._try(size)), None)
        else:
            best = self._cheapest(sizes)
        if best is None:
            raise self.refused[sizes[-1]]
        return best

    def _cheapest(self, sizes: Sequence[int]) -> int | None:
        for size in sizes:
            if (schedule := self._asked(size, has_margin=False)) is not None:
                self._rough[size] = self.spent(size, schedule)
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
        if size not in self._rough and self._asked(size, has_margin=False) is None:
            return False
        schedule = self._asked(size, has_margin=True)
        if schedule is None:
            return False
        self.planned[size] = schedule
        return True

    def _asked(self, size: int, *, has_margin: bool) -> Schedule | None:
        try:
            return self.plan(size, has_margin)
        except (InfeasibleError, InputError) as refusal:
            self.refused[size] = refusal
            return None

    def cost(self, size: int) -> float:
        """Device-seconds of a planned size; sizes have the order of their prices."""
        return self._cost(self.spent(size, self.planned[size]))

    @staticmethod
    def _cost(spent: Spent) -> float:
        return spent.devices * spent.seconds

    def schedule_of(self, objective: Objective, best: int, sizes: Sequence[int]) -> Schedule:
        """The schedule of the best size with rows for the other sizes."""
        schedule, own = self.planned[best], self.spent(best, self.planned[best])
        smaller = max((size for size in self.refused if size < best), default=None)
        note = f"{own.words}{f' ({own.tariff})' if own.tariff else ''}: " + (
            f"the fewest devices found, of {sizes[-1]}, that keep every bound"
            if objective == "devices" else
            f"the least cost found of any size up to {sizes[-1]} devices")
        if smaller is not None:
            # a search with a gap finds no schedule; it does not prove that there is none
            note += "; that fewer cannot is not proved" * (objective == "devices")
            note += f". With {smaller}: {self.refused[smaller]}"
        rows = [Rejected(kind="devices", subject=str(size), reason=str(self.refused[size]))
                for size in sizes if size in self.refused and size != best]
        full = {size: self.spent(size, one) for size, one in self.planned.items()}
        for size, other in sorted({**self._rough, **full}.items()):
            if size != best and size not in self.refused:
                rows.append(Rejected(
                    kind="devices", subject=str(size),
                    throughput_qps=other.queries / other.seconds,
                    reason=other.words + ("" if size in full else ", without a margin")))
        return schedule.changed(explanation=(*schedule.explanation,
                                             f"{note[:1].upper()}{note[1:]}."),
                                rejected=(*schedule.rejected, *rows))
