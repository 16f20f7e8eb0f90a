"""Constraint of a schedule: limits on times, their confidence, the share of the cluster that it may
use, and the objective."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from xgpt.core.units import Share, Unbounded

BoundKind = Literal["sequence", "queries"]
# latency: from the start of a request's prefill to its last token; ttft: from there to its first
# token; tpot: mean time of each token after the first; makespan: of the whole job, from the first
# request's start to the last token; deadline: from there to the last token of each request, of
# which each may have a limit of its own. Where requests arrive over time, latency, ttft and
# deadline count from the arrival; queueing: from there to the start of the prefill
Metric = Literal["latency", "ttft", "tpot", "makespan", "deadline", "queueing"]
# the most requests a second; the fewest devices, or the least price, that keep every limit
Objective = Literal["throughput", "devices", "cost"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)
METRIC_WORDS: Mapping[Metric, str] = {
    "latency": "latency", "ttft": "the time to the first token",
    "tpot": "the time per output token", "makespan": "the time of the whole job",
    "deadline": "the end of each request", "queueing": "the wait for the prefill"}
OnDeadline = Literal["finish", "stop"]  # what has not begun by its deadline is run, or left out
ATTAINMENT = 0.95  # default share of requests that must be in time


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A limit of `limit_s` seconds on `metric` (`math.inf`: none). It holds for a request whose
    output length is the `quantile` of all (`kind` sequence; latency alone), or for that share of
    all requests (`kind` queries). Both are meaningless for the makespan."""

    metric: Metric = "latency"
    limit_s: Unbounded
    kind: BoundKind = "sequence"
    quantile: Share = 0.99


def deadline_bound(limit_s: float = math.inf, attainment: float = ATTAINMENT) -> Bound:
    """A limit on deadlines: the share `attainment` of the requests must end by their own, or else
    by `limit_s` seconds (infinite: by none)."""
    return Bound(metric="deadline", limit_s=limit_s, kind="queries", quantile=attainment)


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """Limits that hold jointly: one on latency, which may be infinite, and at most one on each
    other metric. `objective` chooses among the schedules that keep them.

    `attainment`: share of the requests that must keep all limits jointly, where they arrive over
    time; None: each limit has its own quantile."""

    bounds: tuple[Bound, ...]
    confidence: float = 0.95  # least probability that every limit is kept
    drift: float = 0.0  # share by which the mean output length may be longer or shorter
    memory_bytes: int | None = None  # usable, per device; None: all
    host_bytes: int | None = None  # usable, of a node's host memory below its devices; None: all
    disk_bytes: int | None = None  # usable, of a node's disk for what memory cannot hold; None: all
    max_gpus: int | None = None  # usable devices; None: all
    objective: Objective = "throughput"
    on_deadline: OnDeadline = "finish"
    attainment: float | None = None

    @property
    def latency(self) -> Bound:
        """The bound on latency."""
        return next(bound for bound in self.bounds if bound.metric == "latency")

    @property
    def latency_s(self) -> float:
        return self.latency.limit_s

    @property
    def kind(self) -> BoundKind:
        return self.latency.kind

    @property
    def quantile(self) -> float:
        return self.latency.quantile

    def bound_on(self, metric: Metric) -> Bound | None:
        """The limit on a metric; None if there is none."""
        return next((bound for bound in self.bounds if bound.metric == metric), None)

    def limit_s(self, metric: Metric) -> float:
        """Limit on a metric in seconds; infinite if there is none."""
        bound = self.bound_on(metric)
        return math.inf if bound is None else bound.limit_s

    def with_latency(self, **changes: Any) -> Constraint:
        """A copy of this constraint with fields of the latency limit changed."""
        return replace(self, bounds=tuple(
            replace(bound, **changes) if bound.metric == "latency" else bound
            for bound in self.bounds))


def latency_constraint(latency_s: float, *, kind: BoundKind = "sequence", quantile: float = 0.99,
                       further: tuple[Bound, ...] = (), **others: Any) -> Constraint:
    """A Constraint with a limit on latency and `further` ones; `others`: fields of Constraint."""
    return Constraint(bounds=(Bound(limit_s=latency_s, kind=kind, quantile=quantile), *further),
                      **others)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    """Expected value of a metric other than latency, in seconds: as simulated, and with the safety
    margin for the constraint's confidence. For deadlines these are the latest deadline, and what it
    would have to be, all others in proportion, so that the `share` asked for is in time. `in_time`:
    the share that is."""

    metric: Metric
    limit_s: Unbounded
    expected_s: Unbounded
    with_margin_s: Unbounded
    share: Share | None = None
    in_time: Share | None = None
    in_time_with_margin: Share | None = None

    @property
    def is_kept(self) -> bool:
        return self.with_margin_s <= self.limit_s
