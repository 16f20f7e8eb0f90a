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
from xscheduler.space import OPTIMISM, Cell, Point
from xsimulator.replay.prediction import num_checked_queries
from xsimulator.replay.service_replay import ServiceReplayer
from xsimulator.replay.step_clock import StepClocks

PROBES = 3  # chosen: candidates of a policy that are replayed before its estimates are corrected
_NEAR = 1.5  # chosen: neighbours of a candidate that uses up to so much of its limits are looked at
_FIRST_LONGER = 4  # chosen: replays of a comparison may be so many times as long as the shortest


def steady(problem: Problem) -> Problem:
    """The problem without limits and requests of its own: those of the steady state."""
    return replace(problem, arrivals=None, num_queries=None, queries=None, is_synthetic=False,
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
    clocks: StepClocks
    slower: float = 1.0  # factor by which its step times may be longer
    capacity_qps: float | None = None  # None: below that of the best at its time
    used: float = math.inf  # share of its limits that it used at the rate that it was tried at

    @cached_property
    def estimate(self) -> Estimate:
        """All its replicas, with the figures of their steady state."""
        one = self.cell.formula.estimate(self.cell.plan, self.point)
        found = self.replays.of(one, num_checked_queries(self.cell.problem, one))
        return found.shown(self.cell.problem).in_copies(self.copies)

    @property
    def saturated_qps(self) -> float:
        """Requests/s with all requests there at once, by step times `slower` times as long."""
        figures = self.estimate.figures
        return figures.throughput_qps / self.slower if math.isfinite(figures.latency_s) else 0.0

    @cached_property
    def replayer(self) -> ServiceReplayer:
        return ServiceReplayer(self.cell.problem, self.replays.timing, self.estimate, self.clocks)

    def replay(self, lengths: QueryLengths, arrival_s: FloatArray) -> QueryTimes:
        """Times of these requests on all replicas."""
        return self.replayer.run(lengths, arrival_s, has_steps=False).times


@dataclass(kw_only=True)
class Account:
    """How many candidates there were, and how each was settled."""

    candidates: int = 0
    replayed: int = 0
    by_bound: int = 0
    refused: int = 0
    bound_qps: float = 0.0

    @property
    def search(self) -> Search:
        """The account for a schedule; what is left was given up by estimate."""
        settled = self.replayed + self.by_bound + self.refused
        return Search(candidates=self.candidates, replayed=self.replayed, by_bound=self.by_bound,
                      refused=self.refused, by_estimate=self.candidates - settled,
                      bound_qps=self.bound_qps)


@dataclass(kw_only=True)
class ServiceSearch:
    """The search of one problem whose requests arrive. `requests`: length of every replay; None: as
    long as it takes."""

    problem: Problem
    timing: TimingSource
    watch: Watch
    has_margin: bool = True
    requests: int | None = None
    account: Account = field(default_factory=Account)
    tried: list[Candidate] = field(default_factory=list)  # that were replayed

    def __post_init__(self) -> None:
        plain = steady(self.problem)
        self._cells = [(cell, replays) for cell, replays in cells_of(plain, self.timing)
                       if len(cell.points)]
        self._clocks = {id(replays): StepClocks(cell.problem, self.timing)
                        for cell, replays in self._cells}
        limited = replace(plain, constraint=plain.constraint.with_latency(limit_s=1.0))
        self._margins = Margins(limited, Evaluator(limited, self.timing))
        self.load = Load(self.problem, self.problem.seed)
        self._ratios: defaultdict[tuple[str, bool | None], list[float]] = defaultdict(list)
        self._seen: set[tuple[Cell, Point]] = set()
        self._entered = 0

    def best(self, least_qps: float = 0.0) -> Candidate | None:
        """The candidate with the highest value; None if none keeps the limits at `least_qps`, in
        requests/s, or above."""
        best: Candidate | None = None
        line = self._in_order()
        while line and not self.watch.cuts():
            estimated, _, candidate = heapq.heappop(line)
            to_beat = 0.0 if best is None else self.value(best, best.capacity_qps or 0.0)
            kind = candidate.cell.policy, candidate.cell.is_chunked
            ratios = self._ratios[kind]
            likely = -estimated * (1.0 if len(ratios) < PROBES else max(ratios))
            place = candidate.cell, candidate.point
            if (1 + OPTIMISM) * likely <= to_beat or place in self._seen:
                continue
            self._seen.add(place)
            if not self._consider(candidate, best, least_qps):
                continue
            found = candidate.capacity_qps
            if found is not None and self.value(candidate, found) > to_beat:
                best = candidate
            reached = found if found is not None else to_beat / self.value(candidate, 1.0)
            ratios.append(reached / candidate.estimated_qps)
            if found is not None or candidate.used <= _NEAR:
                for other in self._neighbours(candidate):
                    heapq.heappush(line, self._entry(other))
        self.account.bound_qps = max((-one[0] for one in line), default=0.0)
        return best

    def value(self, candidate: Candidate, qps: float) -> float:
        """Requests/s in all, of a device, or for a price: the objective makes it the largest."""
        if self.problem.constraint.objective == "throughput":
            return qps
        price = self.problem.cluster.device.price_per_hour or 1.0
        devices = candidate.copies * candidate.cell.problem.cluster.num_devices
        return qps / devices / (price if self.problem.constraint.objective == "cost" else 1.0)

    def trials(self, candidate: Candidate, *, load: Load | None = None,
               most_longer: int = MOST_LONGER) -> Trials:
        """Trials of rates on the candidate, with its doubt about step times."""
        return Trials(replay=candidate.replay, load=load or self.load, requests=self.requests,
                      saturated_qps=candidate.saturated_qps, slower=candidate.slower,
                      constraint=self.problem.constraint, most_longer=most_longer)

    def _consider(self, candidate: Candidate, best: Candidate | None, least_qps: float) -> bool:
        """Replays a candidate unless a bound gives it up; returns whether it was replayed."""
        try:
            most = candidate.saturated_qps
            if self.has_margin and most:
                candidate.slower = self._margins.margin(candidate.estimate.one_copy).timing
                most = candidate.saturated_qps
            to_beat = max(least_qps, 0.0 if best is None else self.value(
                best, best.capacity_qps or 0.0) / self.value(candidate, 1.0))
            if not most:
                self.account.refused += 1
                return False
            if most <= to_beat:
                self.account.by_bound += 1
                return False
            trials = self.trials(candidate, most_longer=_FIRST_LONGER)
            wanted = to_beat * (1 + PRECISION) if best is not None else to_beat
            if wanted:
                tried = trials.at(wanted)
                candidate.used = tried.used
            if not wanted or tried.holds:
                found = highest_rate(trials, wanted * (1 + PRECISION) if wanted else None)
                candidate.capacity_qps = found.qps or None
        except XgptError:  # a request never fits
            self.account.refused += 1
            return False
        self.account.replayed += 1
        self.tried.append(candidate)
        return True

    def _in_order(self) -> list[tuple[float, int, Candidate]]:
        """A heap of the best candidate of each cell, by its estimate."""
        line = []
        for cell, replays in self._cells:
            self.account.candidates += len(cell.points)
            qps = self._within_limits(cell)
            at = int(np.argmax(qps))
            if qps[at] > 0:
                one = self._candidate(cell, replays, at, float(qps[at]))
                line.append(self._entry(one))
        heapq.heapify(line)
        return line

    def _entry(self, one: Candidate) -> tuple[float, int, Candidate]:
        self._entered += 1  # of equals the first
        return -self.value(one, one.estimated_qps), self._entered, one

    def _within_limits(self, cell: Cell) -> FloatArray:
        """[points] requests/s of all replicas by the rough formula; 0 beyond the limits."""
        constraint, rough = self.problem.constraint, cell.rough
        outputs = max(cell.problem.lengths.outputs.mean - 1, 1)
        keeps = ((rough.ttft_s <= constraint.limit_s("ttft"))
                 & (rough.latency_s - rough.ttft_s <= outputs * constraint.limit_s("tpot"))
                 & (rough.latency_s <= min(constraint.latency_s, constraint.limit_s("deadline"))))
        return np.where(keeps, cell.copies * rough.throughput_qps, 0.0)

    def _candidate(self, cell: Cell, replays: Replays, at: int, qps: float) -> Candidate:
        return Candidate(cell=cell, replays=replays, point=tuple(cell.points[at].tolist()),
                         estimated_qps=qps, copies=cell.copies, clocks=self._clocks[id(replays)])

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
                    yield self._candidate(cell, candidate.replays, row,
                                          max(float(qps[row]), candidate.estimated_qps))
