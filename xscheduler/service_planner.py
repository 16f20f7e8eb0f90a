"""The schedule of a service: the best candidate (xscheduler.service) with its capacity over several
seeds, the figures of its requests, its alternatives, and the account of the search."""

import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import TypeVar

import numpy as np

from xgpt.core.errors import InfeasibleError, LacksMemoryError
from xgpt.core.lengths import FloatArray
from xgpt.core.problem import Problem, QueryLengths
from xgpt.core.schedule import CopiesTried, Margin, Proof, Rejected, Schedule, Status
from xgpt.core.served import Capacity, MetricFigures, ReplicaFigures, Served, ServedMetric
from xgpt.core.units import format_seconds
from xprofiler.timing import TimingSource
from xscheduler.capacity import SEEDS, Load, highest_rate
from xscheduler.evaluator import job_lengths
from xscheduler.labels import configuration
from xscheduler.progress import Watch
from xscheduler.refusals import check
from xscheduler.service import Candidate, ServiceSearch
from xsimulator.bound import UpperBound, kind_of
from xsimulator.replay.service import (
    attainment,
    binding,
    counted_seconds,
    limits_of,
    metric_figures,
    replica_figures,
)

MOST_SHOWN = 20_000  # chosen: requests of the replay whose figures are shown
_ALTERNATIVES = 3  # chosen: candidates of a policy, or number of replicas, whose capacity is found
_MOST_DEVICES = 1024  # chosen: a refusal tries no more of them
_LEAST_MORE = 0.95  # chosen: a refusal tries replicas from so many times the proportion on

Key = TypeVar("Key", str, int)


class ServicePlanner:
    """Plans one problem whose requests arrive over time. Arguments as of ServiceSearch."""

    def __init__(self, problem: Problem, timing: TimingSource, watch: Watch, *,
                 has_margin: bool = True, requests: int | None = None) -> None:
        self.problem, self.timing, self._watch = problem, timing, watch
        assert problem.arrivals is not None
        self._rate = problem.arrivals.own_rate
        self.search = ServiceSearch(problem=problem, timing=timing, watch=watch,
                                    has_margin=has_margin, requests=requests)
        self._bound = cache(lambda part: UpperBound(part, timing))

    def best(self, least_qps: float | None = None) -> Schedule:
        """The schedule with the highest value. Raises InfeasibleError if none keeps the limits at
        `least_qps` requests/s (None: at the job's rate), or at any."""
        check(self.problem, self.timing)
        if not self.search.cells:
            raise LacksMemoryError(f"no schedule: {self.problem.model.name} does not fit into the "
                                   "memory of any part of the cluster that the job allows")
        is_fewest = self._rate is not None and self.problem.constraint.objective != "throughput"
        found = self.search.fewest(self._rate or 0.0) if is_fewest else None
        found = found or self.search.best(least_qps or 0.0)
        least_qps = (self._rate or 0.0) if least_qps is None else least_qps
        if found is None or (found.capacity_qps or 0.0) < least_qps:
            raise self._refusal(found)
        served = self.served(found)
        value = self.search.value(found, served.capacity.qps)
        bound = max(self._bound_value(), value)
        status = Status.LIMIT if self._watch.has_cut else Status.WITHIN_GAP
        return Schedule(
            estimate=found.estimate, bounds=self.problem.constraint.bounds, served=served,
            fingerprint=self.problem.fingerprint, margin=Margin(
                factor=found.slower, cost=1 - served.capacity.qps / served.capacity.bare_qps),
            proof=Proof(status=status, bound_qps=bound * served.capacity.qps / value,
                        gap=bound / value - 1, nodes=self.search.account.candidates,
                        seconds=self._watch.seconds),
            rejected=tuple(self._rejected(found)),
            over_copies=tuple(self._over_copies(found, served.capacity)))

    def served(self, found: Candidate) -> Served:
        """Capacity of a candidate over SEEDS seeds, and its figures at the job's rate or there."""
        trials = [self.search.trials(found, load=Load(self.problem, self.problem.seed + seed))
                  for seed in range(SEEDS)]
        highest = [highest_rate(one, found.capacity_qps) for one in trials]
        trials[0].slower, trials[0].saturated_qps = 1.0, found.saturated_qps * found.slower
        bare = highest[0] if found.slower == 1 else highest_rate(
            trials[0], highest[0].qps * found.slower)
        rates = [one.qps for one in highest]
        capacity = Capacity(
            qps=float(np.mean(rates)), lowest_qps=min(rates), highest_qps=max(rates),
            bare_qps=max(bare.qps, float(np.mean(rates))),
            saturated_qps=found.estimate.figures.throughput_qps,
            is_settled=all(one.is_settled for one in highest))
        # at the lowest every seed keeps the limits; a seed may keep them at no rate
        rate = self._rate or capacity.lowest_qps or capacity.qps
        return self.at(found, rate, capacity, min(max(one.count for one in trials), MOST_SHOWN))

    def at(self, found: Candidate, rate: float, capacity: Capacity, count: int) -> Served:
        """Figures of `count` requests at `rate` requests/s, or of the job's at their own times, as
        expected. The part that binds is that of the promise, with step times in doubt."""
        lengths, arrival_s = self._requests(found, rate, count)
        seconds, metrics, replicas = self._figures(found, lengths, arrival_s, 1.0)
        late = (seconds, metrics, replicas) if found.slower == 1 else self._figures(
            found, lengths, arrival_s, found.slower)
        problem, price = self.problem, self.problem.cluster.device.price_per_hour or 0.0
        return Served(
            rate=rate, is_at_capacity=self._rate is None, routing=problem.adjustment.routing,
            capacity=capacity, metrics=metrics, replicas=replicas,
            binds=binding(late[1], late[2], late[0]["tpot"],
                          found.estimate.variables.get("max_active")),
            attainment=attainment(seconds, problem.constraint),
            wanted=problem.constraint.attainment,
            price_per_hour=price * found.estimate.num_devices, search=self.search.account)

    def _figures(self, found: Candidate, lengths: QueryLengths, arrival_s: FloatArray,
                 slower: float) -> tuple[dict[ServedMetric, FloatArray],
                                         tuple[MetricFigures, ...], tuple[ReplicaFigures, ...]]:
        """(seconds by metric, their figures, figures of replicas) with step times `slower` times as
        long: those of bare times and as many times the rate, as much longer."""
        assert self.problem.arrivals is not None
        result = found.replayer.run(lengths, arrival_s / slower,
                                    concurrency=self.problem.arrivals.concurrency)
        seconds = {name: slower * every for name, every in counted_seconds(
            result.times, result.output_tokens).items()}
        return (seconds, metric_figures(seconds, self.problem.constraint),
                replica_figures(result, found.cell.problem, lengths.inputs))

    def _requests(self, found: Candidate, rate: float,
                  count: int) -> tuple[QueryLengths, FloatArray]:
        """(lengths, arrival in seconds): the job's own requests where it has them, else drawn."""
        arrivals = self.problem.arrivals
        assert arrivals is not None
        own, times_s = job_lengths(self.problem, found.estimate), arrivals.times_s
        load = Load(self.problem, self.problem.seed)
        if times_s is None:
            return load.at(rate, count)
        if own is None or own.outputs is None or len(own.inputs) != len(times_s):
            own, _ = load.at(rate, len(times_s))
        return own, times_s

    def _bound_value(self) -> float:
        """Upper bound on the value of every candidate that was given up by estimate."""
        search, most = self.search, 0.0
        left = {(cell.problem, cell.plan, kind_of(cell.policy)): cell.copies
                for cell, _ in search.cells}
        for (part, plan, kind), copies in left.items():
            qps = self._bound(part).of_plan(plan, kind, math.inf)
            most = max(most, search.value_on(copies * qps, copies * part.cluster.num_devices))
        return most

    def _rejected(self, found: Candidate) -> Iterator[Rejected]:
        """Yields the best candidate of every other policy that was replayed."""
        best = self._best_by(lambda one: one.cell.policy)
        for name, one in best.items():
            if name != found.cell.policy:
                why = "no rate keeps its limits" if not one.capacity_qps else (
                    "a lower capacity" if one.used is None else
                    f"at {one.tried_qps:.3g} requests/s its {one.used.metric} takes "
                    f"{one.used.share:.3g} times the limit")
                yield Rejected(kind="policy", subject=name, words=configuration(one.estimate),
                               throughput_qps=one.capacity_qps, reason=why)
        names = {cell.policy for cell, _ in self.search.cells} - {found.cell.policy, *best}
        for name in sorted(names):
            yield Rejected(kind="policy", subject=name, reason="ruled out, or unlikely")

    def _over_copies(self, found: Candidate, capacity: Capacity) -> Iterator[CopiesTried]:
        """Yields the best candidate of each number of replicas that was replayed."""
        best = {**self._best_by(lambda one: one.copies), found.copies: found}
        for copies, one in sorted(best.items(), reverse=True):
            yield CopiesTried(
                replicas=copies, devices_per_replica=one.cell.problem.cluster.num_devices,
                throughput_qps=capacity.qps if one is found else one.capacity_qps, latency_s=None,
                bound_qps=max(one.saturated_qps, one.capacity_qps or 0.0),
                words=configuration(one.estimate))

    def _best_by(self, key: Callable[[Candidate], Key]) -> dict[Key, Candidate]:
        """The best replayed candidate by each value of `key`, with its capacity if there is time to
        find it."""
        best: dict[Key, Candidate] = {}
        for _ in range(_ALTERNATIVES):
            for one in self.search.tried:
                if key(one) not in best or _reached_qps(one) > _reached_qps(best[key(one)]):
                    best[key(one)] = one
            for one in best.values():
                if one.capacity_qps is None and not self._watch.cuts():
                    one.capacity_qps = highest_rate(self.search.trials(one), _reached_qps(one)).qps
        return best

    def _refusal(self, found: Candidate | None) -> InfeasibleError:
        limits = " and ".join(f"{bound.metric}_s {format_seconds(bound.limit_s)}"
                              for _, bound in limits_of(self.problem.constraint))
        if found is None:
            at = f"at {self._rate:.3g} requests/s" if self._rate else "at any rate"
            return InfeasibleError(f"no schedule was found that keeps {limits} {at}")
        copies = found.copies
        at_most = (f"at most {found.capacity_qps:.3g} requests/s keep {limits} "
                   f"({found.cell.policy}, {copies} replica{'s' * (copies != 1)})")
        rate, each = self._rate or 0.0, found.cell.problem.cluster.num_devices
        least = math.ceil(_LEAST_MORE * copies * rate / (found.capacity_qps or math.inf))
        is_tried = rate > 0 and least * each <= _MOST_DEVICES
        for more in range(max(copies + 1, least), 2 * (copies + least)) if is_tried else ():
            if self.search.trials(found.in_copies(more)).at(rate).holds:
                devices = (more - copies) * each
                return InfeasibleError(f"{at_most}; {devices} more device{'s' * (devices != 1)} "
                                       f"would keep them at {rate:g}")
        return InfeasibleError(at_most)


def _reached_qps(one: Candidate) -> float:
    """Requests/s that a candidate keeps its limits at, about."""
    if one.capacity_qps is not None or one.used is None:
        return one.capacity_qps or 0.0
    return one.tried_qps / max(one.used.share, 1.0)
