"""The section `constraint` of a job file, and what is asked for within it: `objective`, and the
`price_per_hour` of a device."""

import math
import re
from typing import cast

from xgpt.core.constraint import (
    OBJECTIVES,
    Bound,
    BoundKind,
    Constraint,
    Metric,
    Objective,
    latency_constraint,
)
from xgpt.core.sections import Section
from xgpt.core.units import parse_bytes, parse_seconds, parse_share

_CLOCK = re.compile(r"([01]?[0-9]|2[0-3]):[0-5][0-9]")
_QUANTILE = "between 0 and 1"


def read_constraint(top: Section) -> Constraint:
    objective = cast(Objective, top.choice("objective", "throughput", OBJECTIVES))
    section = top.section("constraint", "a mapping, for example {latency_s: 11.5}")
    if section is None:
        return latency_constraint(latency_s=math.inf, objective=objective)
    quantile = section.number("quantile", 0.99, lambda x: 0 < x < 1, _QUANTILE)
    further = (_read_bound(section, "ttft", quantile), _read_bound(section, "tpot", quantile),
               _read_makespan(section))
    constraint = latency_constraint(
        latency_s=section.amount("latency_s", math.inf, parse_seconds, lambda x: x > 0,
                                 "seconds > 0, '90 s', '2 min', or inf"),
        kind=cast(BoundKind, section.choice("kind", "sequence", ("sequence", "queries"))),
        quantile=quantile, further=tuple(bound for bound in further if bound is not None),
        confidence=section.number("confidence", 0.95, lambda x: 0.5 <= x < 1,
                                  "at least 0.5 and below 1"),
        drift=section.amount("drift", 0.0, parse_share, lambda x: 0 <= x < 1,
                             "a share of the mean output length, '15%' or 0.15, below 1"),
        memory_bytes=cast("int | None", section.amount(
            "memory", None, parse_bytes, lambda x: x > 0,
            "bytes of each device, for example '40 GiB'")),
        max_gpus=section.integer("max_gpus", None, 1, 100_000), objective=objective)
    section.finish()
    return constraint


def read_price(section: Section) -> float | None:
    """What an hour of a device costs, in whatever money the user counts in."""
    return section.number("price_per_hour", None, lambda x: x > 0,
                          "what one device costs in an hour, a number > 0")


def _read_bound(section: Section, metric: Metric, quantile: float) -> Bound | None:
    """A bound on each query's `metric`: seconds, or a mapping with a quantile of its own."""
    key, allowed = f"{metric}_s", "seconds > 0, '500 ms'"
    inner = section.mapping(key)
    if inner is None:
        limit_s = section.amount(key, None, parse_seconds, _is_limit,
                                 f"{allowed}, or {{limit_s: 0.5, quantile: 0.9}}")
        return None if limit_s is None else Bound(
            metric=metric, limit_s=limit_s, kind="queries", quantile=quantile)
    if not inner.has("limit_s"):
        inner.reject("limit_s", f"required: {allowed}")
    bound = Bound(metric=metric, kind="queries",
                  limit_s=inner.amount("limit_s", 1.0, parse_seconds, _is_limit, allowed),
                  quantile=inner.number("quantile", quantile, lambda x: 0 < x < 1, _QUANTILE))
    inner.finish()
    return bound


def _read_makespan(section: Section) -> Bound | None:
    """A bound on the whole job: seconds, or the time of day by which it is to be done."""
    clocks: list[str] = []

    def seconds(value: str | float) -> float:
        if isinstance(value, str) and _CLOCK.fullmatch(value.strip()):
            clocks.append(value.strip())
            return 1.0  # for now: xgpt.core.problem looks at the clock
        return parse_seconds(value)

    limit_s = section.amount("makespan_s", None, seconds, _is_limit,
                             "seconds > 0, '90 min', '6h', or a time of day, '06:00'")
    if clocks:
        return Bound(metric="makespan", limit_s=math.inf, until=clocks[0])
    return None if limit_s is None else Bound(metric="makespan", limit_s=limit_s)


def _is_limit(seconds: float) -> bool:
    return 0 < seconds < math.inf
