"""What a schedule has to keep: bounds, how surely, and what of the cluster may be used."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

BoundKind = Literal["sequence", "queries"]
Metric = Literal["latency"]  # of a query, from the start of its encoding to its last token


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """`metric` is to be at most `limit_s` seconds (`math.inf`: no limit): for a query whose output
    has the `quantile` length of all outputs (`sequence`), or for that share of all queries."""

    metric: Metric = "latency"
    limit_s: float
    kind: BoundKind = "sequence"
    quantile: float = 0.99


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """Bounds that hold jointly. Today each job has one, on the latency of its queries."""

    bounds: tuple[Bound, ...]
    confidence: float = 0.95  # least P(every bound is kept), given what is uncertain
    drift: float = 0.0  # share by which the mean output length may turn out longer or shorter
    memory_bytes: int | None = None  # of each device; None: all it has
    max_gpus: int | None = None  # devices; None: all of the cluster

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

    def with_latency(self, **changes: Any) -> Constraint:
        """The same constraint with some of the latency bound's fields changed."""
        return replace(self, bounds=tuple(
            replace(bound, **changes) if bound is self.latency else bound
            for bound in self.bounds))


def latency_constraint(latency_s: float, *, kind: BoundKind = "sequence", quantile: float = 0.99,
                       **others: Any) -> Constraint:
    """A constraint whose only bound is on latency; `others` are fields of Constraint."""
    return Constraint(bounds=(Bound(limit_s=latency_s, kind=kind, quantile=quantile),), **others)
