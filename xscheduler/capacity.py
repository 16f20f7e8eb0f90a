"""Capacity of a deployment: the highest rate of arrivals at which its limits hold (goodput).

It is found by bisection on the rate, one replay a step (Vidur, section 6). Lengths and gaps are
drawn once, so two rates differ by nothing else. A replay of few requests may end before its queue
has grown, so that a rate beyond the capacity seems to hold. Therefore a replay is lengthened until
both halves of its requests tell the same.

Doubt about step times: a deployment whose steps take k times as long has, at the rate R and the
limits L, k times the times that it has at the rate k R. So its capacity is that of the bare one
under the limits L / k, divided by k, and no replay with longer steps is needed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from xgpt.core.arrivals import Arrivals
from xgpt.core.constraint import Constraint
from xgpt.core.lengths import FloatArray
from xgpt.core.problem import Problem, QueryLengths, QueryTimes
from xscheduler.replays import DrawnLengths
from xsimulator.replay.job import planned_queries
from xsimulator.replay.service import Used, counted, seconds_by_metric, used_of_limits

LEAST_S, LEAST_REQUESTS, LEAST_LATENCIES = 30.0, 2000, 20  # chosen, as Vidur's replays are short
MOST_LONGER = 64  # chosen: a replay may be so many times as long as the shortest
_AGREES = 0.25  # chosen: largest difference between the halves, as a share of the larger
_UNUSED = 0.1  # chosen: halves that use less of their limits need not agree
PRECISION, MOST_RATES = 0.01, 20  # chosen: of the bisection
SEEDS = 3  # chosen
_LOWEST = 1e-3  # chosen: share of the saturated throughput below which no rate is tried
_RELAXATIONS, _MOST_RELAXED = 10, 16  # chosen: length of a replay near the saturated throughput
_MOST_SATURATED = 2  # chosen: times the saturated throughput, beyond which nothing is learned
_BRACKET = 0.03  # chosen: first half-width of the bracket for further seeds

# times of requests with these lengths that arrive then, or (a number) come from so many clients
Replay = Callable[[QueryLengths, FloatArray, int | None], QueryTimes]


class Load:
    """Requests that arrive at any rate: lengths and gaps, drawn once for a seed."""

    def __init__(self, problem: Problem, seed: int) -> None:
        arrivals = problem.arrivals or Arrivals()
        self._problem, self._arrivals, self._seed = problem, arrivals, seed
        self.clients = arrivals.concurrency  # of a closed loop, whose rate follows its answers
        self._drawn = DrawnLengths(problem.lengths, (seed, 51))

    def at(self, rate: float, count: int) -> tuple[QueryLengths, FloatArray]:
        """(lengths, arrival in seconds) of the first `count` requests at `rate` requests/s."""
        return planned_queries(self._problem, *self._drawn.first(count)), (
            np.zeros(count) if self.clients else self._arrivals.at_rate(rate, count, self._seed))


class Tried(NamedTuple):
    """The outcome of a rate: whether the limits hold, the share of them that is used up, and
    whether the replay was long enough to tell."""

    holds: bool
    used: Used
    is_settled: bool


@dataclass(kw_only=True)
class Trials:
    """Tries rates on one deployment. `requests`: length of every replay; None: as long as it takes.
    `slower`: factor by which step times may be longer than the replay's; rates and limits are of
    those."""

    replay: Replay
    saturated_qps: float
    load: Load
    constraint: Constraint
    requests: int | None = None
    slower: float = 1.0
    most_longer: int = MOST_LONGER
    count: int = LEAST_REQUESTS  # requests of the longest replay
    reached_qps: float = 0.0  # requests/s of the latest replay

    def at(self, rate: float) -> Tried:
        """The outcome of `rate`, in requests/s."""
        bare = rate * self.slower
        if self.requests is not None or self.load.clients:
            return self._judged(bare, self.requests or max(
                LEAST_REQUESTS, LEAST_LATENCIES * (self.load.clients or 0)))[0]
        count = first = max(LEAST_REQUESTS, int(LEAST_S * bare) + 1)
        while True:
            tried, latency_s = self._judged(bare, count)
            enough = max(int(LEAST_LATENCIES * latency_s * bare) + 1, self._relaxed(rate, first))
            if (tried.is_settled and count >= enough) or count >= self.most_longer * first:
                return tried._replace(holds=tried.holds and tried.is_settled)
            count = min(max(2 * count, enough), self.most_longer * first)

    def _relaxed(self, rate: float, first: int) -> int:
        """Requests until a queue at this rate has forgotten how it began: about the inverse square
        of the share of the throughput that is idle."""
        idle = max(1 - rate / self.saturated_qps, 1e-3)
        return min(int(_RELAXATIONS / idle**2), _MOST_RELAXED * first)

    def _judged(self, bare: float, count: int) -> tuple[Tried, float]:
        self.count = max(self.count, count)
        lengths, arrival_s = self.load.at(bare, count)
        times = self.replay(lengths, arrival_s, self.load.clients)
        assert lengths.outputs is not None
        rows = counted(times.arrival_s)
        times = times.take(rows)
        self.reached_qps = len(rows) / max(float(np.ptp(times.last_token_s)), 1e-12) / self.slower
        own = seconds_by_metric(times, lengths.outputs[rows])
        used, *halves = (used_of_limits(
            {name: every[part] for name, every in own.items()}, self.constraint, self.slower)
            for part in (slice(None), slice(len(rows) // 2), slice(len(rows) // 2, None)))
        less, more = sorted(half.share for half in halves)
        is_settled = more - less <= _AGREES * more or more <= _UNUSED or less > 1
        return Tried(used.share <= 1, used, is_settled), float(own["latency"].mean())


class Found(NamedTuple):
    """The highest rate that holds, in requests/s (0: none does), and whether all replays that
    decided it were long enough."""

    qps: float
    is_settled: bool


def highest_rate(trials: Trials, near: float | None = None) -> Found:
    """The highest rate that holds, to PRECISION, from the saturated throughput on. near: a rate
    that is likely to be near it. In a closed loop: the rate that its clients reach."""
    if trials.load.clients:
        tried = trials.at(0.0)
        return Found(trials.reached_qps * tried.holds, tried.is_settled)
    low, high = (0.0, True), (math.inf, True)  # rate, whether its replay was long enough
    rate, width = near or trials.saturated_qps, _BRACKET
    for _ in range(MOST_RATES):
        tried = trials.at(rate)
        low, high = ((rate, tried.is_settled), high) if tried.holds else (
            low, (rate, tried.is_settled))
        is_near = high[0] < math.inf and low[0] >= (1 - PRECISION) * high[0]
        if is_near or high[0] < _LOWEST * trials.saturated_qps:
            break
        if low[0] > _MOST_SATURATED * trials.saturated_qps:  # too few requests to fill it
            return Found(trials.saturated_qps, False)
        if near is not None and (not low[0] or math.isinf(high[0])):
            rate = rate * (1 + width) if tried.holds else rate / (1 + width)
            width *= 2
        else:
            rate = 2 * low[0] if math.isinf(high[0]) else (low[0] + high[0]) / 2
    return Found(low[0], low[1] and high[1])
