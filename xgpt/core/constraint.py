"""What a schedule has to keep: bounds, how surely, and what of the cluster may be used; and what is
asked for among those that keep it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from xgpt.core.units import Share, Unbounded

BoundKind = Literal["sequence", "queries"]
# latency: of a query, from the start of its encoding to its last token; ttft: from there to its
# first token; tpot: the mean of each of its tokens after the first; makespan: of the whole job,
# from its first query's start to its last token
Metric = Literal["latency", "ttft", "tpot", "makespan"]
# the most queries a second; the fewest devices, or the least price, that keep every bound
Objective = Literal["throughput", "devices", "cost"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)
METRIC_WORDS: Mapping[Metric, str] = {
    "latency": "latency", "ttft": "the time to the first token",
    "tpot": "the time per output token", "makespan": "the time of the whole job"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """`metric` is to be at most `limit_s` seconds (`math.inf`: no limit): for a query whose output
    has the `quantile` length of all outputs (`sequence`; of a latency), or for that share of all
    queries. The makespan is the job's, and has neither."""

    metric: Metric = "latency"
    limit_s: Unbounded
    kind: BoundKind = "sequence"
    quantile: Share = 0.99


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """Bounds that hold jointly: one on the latency of queries, which may be infinite, and at most
    one on each other metric. Of the schedules that keep them the `objective` takes one."""

    bounds: tuple[Bound, ...]
    confidence: float = 0.95  # least P(every bound is kept), given what is uncertain
    drift: float = 0.0  # share by which the mean output length may turn out longer or shorter
    memory_bytes: int | None = None  # of each device; None: all it has
    max_gpus: int | None = None  # devices; None: all of the cluster
    objective: Objective = "throughput"

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
        """The bound on a metric; None where there is none."""
        return next((bound for bound in self.bounds if bound.metric == metric), None)

    def limit_s(self, metric: Metric) -> float:
        """Most that a metric may be; infinite where it has no bound."""
        bound = self.bound_on(metric)
        return math.inf if bound is None else bound.limit_s

    def with_latency(self, **changes: Any) -> Constraint:
        """The same constraint with some of the latency bound's fields changed."""
        return replace(self, bounds=tuple(
            replace(bound, **changes) if bound.metric == "latency" else bound
            for bound in self.bounds))


def latency_constraint(latency_s: float, *, kind: BoundKind = "sequence", quantile: float = 0.99,
                       further: tuple[Bound, ...] = (), **others: Any) -> Constraint:
    """A constraint with a bound on latency and `further` ones; `others` are fields of
    Constraint."""
    return Constraint(bounds=(Bound(limit_s=latency_s, kind=kind, quantile=quantile), *further),
                      **others)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    """What is expected of a bound besides that on latency: as it is replayed,
    and with the margin that the constraint's confidence asks for."""

    metric: Metric
    limit_s: Unbounded
    expected_s: Unbounded
    with_margin_s: Unbounded

    @property
    def is_kept(self) -> bool:
        return self.with_margin_s <= self.limit_s
