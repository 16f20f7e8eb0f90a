"""The deployment of a service: requests arrive over time, and the objective is about those that are
answered within the limits (Vidur-Search, sections 6 and 7.3).

A candidate is a number of replicas, a policy, a tensor plan, and a value of each control variable.
Candidates are looked at in the order of their estimate: replicas times the throughput at which the
rough formula keeps the limits, corrected by what replays of the same policy have shown. For each:

1. It is given up for good if its throughput with all requests there at once, which no arrivals
   exceed, cannot beat the best found.
2. Else it is replayed at the rate that would beat the best. If the limits hold there, its capacity
   is found (xscheduler.capacity), and its neighbours are looked at.

Candidates that are unlikely to win are given up by estimate, and the account says how many."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from xgpt.core.constraint import Bound
from xgpt.core.errors import XgptError
from xgpt.core.lengths import FloatArray
from xgpt.core.policies import served_policies
from xgpt.core.problem import Problem, QueryLengths, QueryTimes
from xgpt.core.schedule import Estimate
from xgpt.core.served import Search
from xprofiler.timing import TimingSource
from xscheduler.capacity import MOST_LONGER, PRECISION, Load, Trials, highest_rate
from xscheduler.cells import cells_of
from xscheduler.evaluator import Evaluator
from xscheduler.margin import Margins
from xscheduler.progress import Watch
from xscheduler.replays import Replays
from xscheduler.space import OPTIMISM, Cell, CellKind, Point
from xsimulator.replay.prediction import num_checked_queries
from xsimulator.replay.service import Used
from xsimulator.replay.service_replay import ServiceReplayer

PROBES = 3  # chosen: candidates of a kind that are replayed before its estimates are corrected
_NEAR = 1.1  # chosen: neighbours of a candidate that uses up to so much of its limits are looked at
_FIRST_LONGER = 4  # chosen: replays of a comparison may be so many times as long as the shortest


def steady(problem: Problem) -> Problem:
    """The problem without limits and requests of its own: those of the steady state. Its policies
    are those that are searched for a service."""
    return replace(problem, arrivals=None, num_queries=None, queries=None, is_synthetic=False,
                   fixed=replace(problem.fixed,
                                 policies=problem.fixed.policies or served_policies()),
                   constraint=replace(problem.constraint, objective="throughput", attainment=None,
                                      bounds=(Bound(limit_s=math.inf, kind="queries"),)))


@dataclass(kw_only=True, eq=False)
class Candidate:
    """A configuration and its replicas. `estimated_qps`: by the rough formula within the limits."""

    cell: Cell
    replays: Replays
    point: Point
    estimated_qps: float
    copies: int
    slower: float = 1.0  # factor by which its step times may be longer
    capacity_qps: float | None = None  # None: below that of the best at its time
    tried_qps: float = 0.0  # the rate that would have beaten the best; it used so much there
    used: Used | None = None
    given: Estimate | None = None  # one replica, whatever its point is

    @cached_property
    def estimate(self) -> Estimate:
        """All its replicas, with the figures of their steady state."""
        one = self.given or self.cell.formula.estimate(self.cell.plan, self.point)
        found = self.replays.of(one, num_checked_queries(self.cell.problem, one))
        return found.shown(self.cell.problem).in_copies(self.copies)

    def in_copies(self, count: int) -> Candidate:
        """This configuration on another number of replicas."""
        return replace(self, copies=count, estimated_qps=self.estimated_qps * count / self.copies)

    @property
    def saturated_qps(self) -> float:
        """Requests/s with all requests there at once, by step times `slower` times as long."""
        figures = self.estimate.figures
        return figures.throughput_qps / self.slower if math.isfinite(figures.latency_s) else 0.0

    @cached_property
    def replayer(self) -> ServiceReplayer:
        return ServiceReplayer(self.cell.problem, self.replays.timing, self.estimate,
                               self.replays.clocks)

    def replay(self, lengths: QueryLengths, arrival_s: FloatArray,
               clients: int | None = None) -> QueryTimes:
        """Times of these requests on all replicas; clients: of a closed loop."""
        return self.replayer.run(lengths, arrival_s, concurrency=clients, has_steps=False).times


@dataclass(kw_only=True)
class ServiceSearch:
    """The search of one problem whose requests arrive. `requests`: length of every replay; None: as
    long as it takes."""

    problem: Problem
    timing: TimingSource
    watch: Watch
    has_margin: bool = True
    requests: int | None = None
    candidates: int = 0
    by_bound: int = 0  # of them
    refused: int = 0
    tried: list[Candidate] = field(default_factory=list)  # that were replayed

    def __post_init__(self) -> None:
        plain = steady(self.problem)
        self.cells = [(cell, replays) for cell, replays in cells_of(plain, self.timing)
                      if len(cell.points) and cell.copies == (plain.fixed.replicas or cell.copies)]
        if plain.fixed.replicas and plain.fixed.tp_degree:  # a layout: equal groups on all
            most = max((cell.problem.cluster.num_devices for cell, _ in self.cells), default=0)
            self.cells = [(cell, replays) for cell, replays in self.cells if most == (
                cell.problem.cluster.num_devices) and cell.plan[1] in (0, most)]
        limited = replace(plain, constraint=plain.constraint.with_latency(limit_s=1.0))
        self._margins = Margins(limited, Evaluator(limited, self.timing))
        self.load = Load(self.problem, self.problem.seed)
        self._ratios: defaultdict[CellKind, list[float]] = defaultdict(list)
        self._entered = 0

    @property
    def account(self) -> Search:
        """How many candidates there were, and how each was settled."""
        replayed, by_bound, refused = len(self.tried), self.by_bound, self.refused
        return Search(candidates=self.candidates, replayed=replayed, by_bound=by_bound,
                      refused=refused,
                      by_estimate=self.candidates - replayed - by_bound - refused)

    def fewest(self, rate: float) -> Candidate | None:
        """The candidate on the fewest devices that keeps the limits at `rate` requests/s, with the
        highest capacity on so many; None if none does."""
        sizes = {copies * cell.problem.cluster.num_devices for cell, _ in self.cells
                 for copies in range(1, cell.copies + 1)}
        return next((found for devices in sorted(sizes)
                     if (found := self.best(rate, devices)) is not None), None)

    def best(self, least_qps: float = 0.0, devices: int | None = None) -> Candidate | None:
        """The candidate with the highest value; None if none keeps the limits at `least_qps`, in
        requests/s, or above. devices: of all its replicas; None: as many as there are."""
        best: Candidate | None = None
        line, seen = self._in_order(devices), set[tuple[Cell, Point]]()
        while line and not self.watch.cuts():
            estimated, _, candidate = heapq.heappop(line)
            least = 0.0 if best is None else self.value(best, best.capacity_qps or 0.0)
            to_beat = max(least / self.value(candidate, 1.0), least_qps)
            ratios = self._ratios[candidate.cell.alike]
            likely = candidate.estimated_qps * (
                1.0 if len(ratios) < PROBES else max(ratios))
            place = candidate.cell, candidate.point
            if (1 + OPTIMISM) * likely <= to_beat or place in seen:
                continue
            seen.add(place)
            if not self._consider(candidate, to_beat):
                continue
            found = candidate.capacity_qps
            if found is not None:
                best = candidate
            ratios.append((found or to_beat) / candidate.estimated_qps)
            if found is not None or (candidate.used and candidate.used.share <= _NEAR):
                for other in self._neighbours(candidate):
                    heapq.heappush(line, self._entry(other))
        return best

    def value(self, candidate: Candidate, qps: float) -> float:
        """Requests/s in all, of a device, or for a price: the objective makes it the largest."""
        return self.value_on(qps, candidate.copies * candidate.cell.problem.cluster.num_devices)

    def value_on(self, qps: float, devices: int) -> float:
        """The value of `qps` requests/s on so many devices."""
        constraint, device = self.problem.constraint, self.problem.cluster.device
        if constraint.objective == "throughput":
            return qps
        return qps / devices / (
            (device.price_per_hour or 1.0) if constraint.objective == "cost" else 1.0)

    def trials(self, candidate: Candidate, *, load: Load | None = None,
               most_longer: int = MOST_LONGER) -> Trials:
        """Trials of rates on the candidate, with its doubt about step times."""
        return Trials(replay=candidate.replay, load=load or self.load, requests=self.requests,
                      saturated_qps=candidate.saturated_qps, slower=candidate.slower,
                      constraint=self.problem.constraint, most_longer=most_longer)

    def of(self, given: Estimate) -> Candidate:
        """The candidate of a given estimate. Raises StopIteration if no replica of the job may have
        as many devices."""
        own = given.deployment
        cell, replays = next(pair for pair in self.cells if (
            pair[0].problem.cluster.num_devices == own.devices_per_replica))
        found = Candidate(cell=cell, replays=replays, point=(), estimated_qps=0.0,
                          copies=own.replicas, given=given.one_copy)
        if self.has_margin and found.saturated_qps:
            found.slower = self._margins.margin(found.estimate.one_copy).timing
        return found

    def _consider(self, candidate: Candidate, to_beat: float) -> bool:
        """Replays a candidate unless a bound gives it up; returns whether it was replayed. Its
        capacity is set if that is above `to_beat`, in requests/s."""
        try:
            if self.has_margin and candidate.saturated_qps:
                candidate.slower = self._margins.margin(candidate.estimate.one_copy).timing
            most, wanted = candidate.saturated_qps, to_beat * (1 + PRECISION)
            if most <= to_beat:
                self.by_bound += bool(most)
                self.refused += not most
                return False
            trials = self.trials(candidate, most_longer=_FIRST_LONGER)
            if wanted and not self.load.clients:
                tried = trials.at(wanted)
                trials.most_longer = MOST_LONGER
                if not tried.is_settled and tried.used.share <= 1:
                    tried = trials.at(wanted)
                candidate.tried_qps, candidate.used = wanted, tried.used
            if not candidate.used or tried.holds:
                found = highest_rate(trials, wanted * (1 + PRECISION) if wanted else None)
                candidate.capacity_qps = found.qps if found.qps > to_beat else None
        except XgptError:  # a request never fits
            self.refused += 1
            return False
        self.tried.append(candidate)
        return True

    def _in_order(self, devices: int | None) -> list[tuple[float, int, Candidate]]:
        """A heap of the best candidate of each cell, by its estimate."""
        line = []
        for cell, replays in self.cells:
            copies, rest = (cell.copies, 0) if devices is None else divmod(
                devices, cell.problem.cluster.num_devices)
            if rest or not 1 <= copies <= cell.copies:
                continue
            self.candidates += len(cell.points)
            qps = self._within_limits(cell)
            at = int(np.argmax(qps))
            if qps[at] > 0:
                line.append(self._entry(Candidate(
                    cell=cell, replays=replays, point=tuple(cell.points[at].tolist()),
                    estimated_qps=copies * float(qps[at]), copies=copies)))
        heapq.heapify(line)
        return line

    def _entry(self, one: Candidate) -> tuple[float, int, Candidate]:
        self._entered += 1  # of equals the first
        return -self.value(one, one.estimated_qps), self._entered, one

    def _within_limits(self, cell: Cell) -> FloatArray:
        """[points] requests/s of a replica by the rough formula; beyond a limit as many times fewer
        as the limit is used."""
        constraint, rough = self.problem.constraint, cell.rough
        after = cell.problem.lengths.outputs.quantile(cell.problem.constraint.quantile) - 1
        used = np.maximum.reduce([
            np.ones(len(cell.points)), rough.ttft_s / constraint.limit_s("ttft"),
            (rough.latency_s - rough.ttft_s) / (max(after, 1) * constraint.limit_s("tpot")),
            rough.latency_s / min(constraint.latency_s, constraint.limit_s("deadline"))])
        return np.asarray(rough.throughput_qps / used)

    def _neighbours(self, candidate: Candidate) -> Iterator[Candidate]:
        """Yields the candidates that differ by one step of the grid in one variable."""
        cell, points, own = candidate.cell, candidate.cell.points, np.array(candidate.point)
        qps = self._within_limits(cell)
        for column in range(points.shape[1]):
            values = np.unique(points[:, column])
            at = int(np.searchsorted(values, own[column]))
            for value in {*values[max(at - 1, 0):at + 2].tolist()} - {int(own[column])}:
                wanted = own.copy()
                wanted[column] = value
                for row in np.flatnonzero((points == wanted).all(axis=1)).tolist():
                    yield replace(
                        candidate, point=tuple(wanted.tolist()), slower=1.0, capacity_qps=None,
                        estimated_qps=max(candidate.copies * float(qps[row]),
                                          candidate.estimated_qps))
