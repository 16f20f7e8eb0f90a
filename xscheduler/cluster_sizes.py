"""How many devices a job is to have, where it asks for the fewest that keep every bound, or for
those of the least price.

A size is a part of the cluster: some devices of one node, or whole nodes. Each is planned by the
planner of all sizes. One that does not even keep the bounds without a margin is given up for that,
and the others are planned in full: for `devices` the smallest first, for `cost` by what they would
cost without a margin, until what is left cannot be cheaper."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from xgpt.core.cluster import Cluster
from xgpt.core.constraint import Objective
from xgpt.core.errors import InfeasibleError, InputError
from xgpt.core.problem import Problem
from xgpt.core.schedule import Rejected, Schedule
from xgpt.core.units import format_seconds
from xscheduler.evaluator import Evaluator
from xscheduler.job_time import is_short

SIZE_ROW = "devices "  # how the rows of other sizes are labelled
MILLION = 1_000_000  # queries, of which the price is told where a job has no number of them
SLACK = 0.02  # chosen: of a price: a plan without a margin may miss the best by as much
REPLAYS = 3  # chosen
Refusal = InfeasibleError | InputError


def sizes_of(cluster: Cluster) -> list[int]:
    """The numbers of devices that may be had of it, rising."""
    per_node = cluster.devices_per_node
    return [*range(1, per_node + 1),
            *(nodes * per_node for nodes in range(2, cluster.num_nodes + 1))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """What a schedule takes of so many devices: seconds for the job's own queries, or for a million
    of them, and its price, 0 where no price is known."""

    devices: int
    seconds: float
    queries: int
    price: float
    is_job: bool
    tariff: str = ""  # what an hour of a device costs, and by whom

    @property
    def words(self) -> str:
        what = "the job takes" if self.is_job else "a million queries take"
        devices = f"{self.devices} device{'s' * (self.devices > 1)}"
        price = f", {self.price:,.2f}" if self.price else ""
        return f"{what} {devices} for {format_seconds(self.seconds)}{price}"


def spent(problem: Problem, schedule: Schedule, evaluator: Evaluator) -> Spent:
    """What a schedule of the problem takes: of its own queries (short jobs by replay), or of a
    million in steady state."""
    count, is_job = problem.num_queries or MILLION, problem.num_queries is not None
    seconds = count / schedule.figures.throughput_qps
    if is_short(problem, schedule):
        job = evaluator.job(schedule.estimate, REPLAYS)
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
    """plan: the schedule of a size, with a margin or without; raises what it is refused for.
    spent: what a size's schedule takes."""

    plan: Callable[[int, bool], Schedule]
    spent: Callable[[int, Schedule], Spent]
    refused: dict[int, Refusal] = field(default_factory=dict)
    planned: dict[int, Schedule] = field(default_factory=dict)  # in full
    _rough: dict[int, Spent] = field(default_factory=dict)

    def choose(self, objective: Objective, sizes: Sequence[int]) -> int:
        """The size to take. Raises the refusal of the largest where none has a schedule."""
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
            least = (1 - SLACK) * self._cost(self._rough[size])
            if best is not None and least >= self.cost(best):
                break
            if self._try(size) and (best is None or self.cost(size) < self.cost(best)):
                best = size
        return best

    def _try(self, size: int) -> bool:
        """Whether it has a schedule with its margin."""
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
        """Device-seconds of a size that was planned: in the order of prices."""
        return self._cost(self.spent(size, self.planned[size]))

    @staticmethod
    def _cost(spent: Spent) -> float:
        return spent.devices * spent.seconds

    def told(self, objective: Objective, best: int, sizes: Sequence[int]) -> Schedule:
        """The schedule of the best size, which says what the others come to."""
        schedule, own = self.planned[best], self.spent(best, self.planned[best])
        smaller = max((size for size in self.refused if size < best), default=None)
        note = f"{own.words}{f' ({own.tariff})' if own.tariff else ''}: " + (
            f"the fewest devices of {sizes[-1]} that keep every bound" if objective == "devices"
            else f"the least cost of any size up to {sizes[-1]} devices")
        if smaller is not None:
            note += f". With {smaller}: {self.refused[smaller]}"
        rows = [Rejected(label=f"{SIZE_ROW}{size}", throughput_qps=None, latency_s=None,
                         reason=str(self.refused[size]))
                for size in sizes if size in self.refused and size != best]
        seen = {size: self.spent(size, one) for size, one in self.planned.items()}
        for size, other in sorted({**self._rough, **seen}.items()):
            if size != best and size not in self.refused:
                rows.append(Rejected(
                    label=f"{SIZE_ROW}{size}", latency_s=None,
                    throughput_qps=other.queries / other.seconds,
                    reason=other.words + ("" if size in seen else ", without a margin")))
        return schedule.changed(explanation=(*schedule.explanation,
                                             f"{note[:1].upper()}{note[1:]}."),
                                rejected=(*schedule.rejected, *rows))
