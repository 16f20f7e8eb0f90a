"""The section `constraint` of a job file, and what is asked for within it: `objective`, and the
`price_per_hour` of a device."""

import math
import re
from dataclasses import dataclass
from typing import Annotated, Any, get_args

from xgpt.core.constraint import (
    Bound,
    BoundKind,
    Constraint,
    Metric,
    Objective,
    latency_constraint,
)
from xgpt.core.units import parse_bytes, parse_seconds, parse_share
from xgpt.job.typed import CONFIG, Of, OrMapping, amount, choice, number, whole

_CLOCK = re.compile(r"([01]?[0-9]|2[0-3]):[0-5][0-9]")
_SECONDS = "seconds > 0, '500 ms'"


def _is_limit(seconds: float) -> bool:
    return 0 < seconds < math.inf


def _makespan(value: Any) -> Bound:
    """A bound on the whole job: seconds, or the time of day by which it is to be done, which
    xgpt.core.problem looks at the clock for."""
    if isinstance(value, str) and _CLOCK.fullmatch(value.strip()):
        return Bound(metric="makespan", limit_s=math.inf, until=value.strip())
    return Bound(metric="makespan", limit_s=_MAKESPAN.value_of(value))


_MAKESPAN = amount(parse_seconds, _is_limit,
                   "seconds > 0, '90 min', '6h', or a time of day, '06:00'")
Quantile = Annotated[float, number("between 0 and 1", gt=0, lt=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Limit:
    """Seconds of each query's metric, perhaps with a quantile of its own."""

    limit_s: Annotated[float, amount(parse_seconds, _is_limit, _SECONDS)]
    quantile: Quantile | None = None


Limit = Annotated[Any, OrMapping(_Limit, amount(parse_seconds, _is_limit, _SECONDS),
                                 f"{_SECONDS}, or {{limit_s: 0.5, quantile: 0.9}}")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstraintSection:
    """The section's keys."""

    __pydantic_config__ = CONFIG
    latency_s: Annotated[float, amount(parse_seconds, lambda x: x > 0,
                                       "seconds > 0, '90 s', '2 min', or inf")] = math.inf
    kind: Annotated[BoundKind, choice(get_args(BoundKind))] = "sequence"
    quantile: Quantile = 0.99
    ttft_s: Limit | None = None
    tpot_s: Limit | None = None
    makespan_s: Annotated[Bound | None, Of(_makespan, **_MAKESPAN.schema)] = None
    confidence: Annotated[float, number("at least 0.5 and below 1", ge=0.5, lt=1)] = 0.95
    drift: Annotated[float, amount(parse_share, lambda x: 0 <= x < 1,
                                   "a share of the mean output length, '15%' or 0.15, below 1")] = (
        0.0)
    memory: Annotated[int | None, amount(parse_bytes, lambda x: x > 0,
                                         "bytes of each device, for example '40 GiB'")] = None
    max_gpus: Annotated[int, whole(1, 100_000)] | None = None


def constraint_of(own: ConstraintSection, objective: Objective) -> Constraint:
    given: dict[Metric, _Limit | float | None] = {"ttft": own.ttft_s, "tpot": own.tpot_s}
    limits = {metric: limit if isinstance(limit, _Limit) else _Limit(limit_s=limit)
              for metric, limit in given.items() if limit is not None}
    further = [Bound(metric=metric, limit_s=limit.limit_s, kind="queries",
                     quantile=limit.quantile or own.quantile) for metric, limit in limits.items()]
    return latency_constraint(
        latency_s=own.latency_s, kind=own.kind, quantile=own.quantile,
        further=(*further, *([own.makespan_s] if own.makespan_s is not None else [])),
        confidence=own.confidence, drift=own.drift, memory_bytes=own.memory,
        max_gpus=own.max_gpus, objective=objective)
