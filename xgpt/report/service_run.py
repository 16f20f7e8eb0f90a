"""Figures of a run whose requests arrive over time, measured beside predicted."""

from typing import Any

import numpy as np

from xgpt.core.constraint import Constraint
from xgpt.core.lengths import IntArray
from xgpt.core.problem import QueryTimes
from xgpt.core.schedule import Schedule
from xgpt.core.served import MetricFigures
from xgpt.report.output import QueryColumns
from xsimulator.replay.records import ReplayResult
from xsimulator.replay.service import attainment, counted_seconds, metric_figures

FIGURES = ("mean_s", "p50_s", "p90_s", "p95_s", "p99_s", "share")


def constraint_of(schedule: Schedule) -> Constraint:
    """The limits that a schedule was planned for, with the share that keeps them jointly."""
    wanted = None if schedule.served is None else schedule.served.wanted
    return Constraint(bounds=schedule.bounds, attainment=wanted)


def times_of(queries: QueryColumns) -> QueryTimes:
    """The moments of requests that arrived over time."""
    arrival_s = queries.times("arrival_s")
    return QueryTimes(arrival_s=arrival_s, start_s=queries.times("encode_start_s"),
                      first_token_s=arrival_s + queries.times("ttft_s"),
                      last_token_s=arrival_s + queries.times("latency_s"))


def service_facts(queries: QueryColumns, schedule: Schedule | None,
                  replayed: ReplayResult | None = None) -> dict[str, Any]:
    """`served` of metrics.json, measured and predicted: rate, attainment, figures of each metric.
    The first and the last tenth of the requests by arrival are left out; {} of a batch job.
    `replayed`: these requests, arriving as they did; None: what the schedule expects."""
    times = times_of(queries)
    if schedule is None or schedule.served is None or not np.isfinite(times.arrival_s).any():
        return {}
    own, limits = schedule.served, constraint_of(schedule)
    share, metrics = _figures(times, queries.counts("output_tokens"), limits)
    expected, others = (own.attainment, own.metrics) if replayed is None else _figures(
        replayed.times, replayed.output_tokens, limits)
    rate = (len(queries) - 1) / max(float(np.ptp(times.arrival_s)), 1e-9)
    pairs = {"rate": (rate, own.rate), "attainment": (share, expected)}
    predicted = {one.metric: one for one in others}
    for one in metrics:
        pairs |= {f"{one.metric}_{name}": (getattr(one, name), getattr(
            predicted.get(one.metric), name, None)) for name in FIGURES}
    return {"served": {key: dict(zip(("measured", "predicted"), pair, strict=True))
                       for key, pair in pairs.items()}}


def _figures(times: QueryTimes, output_tokens: IntArray,
             limits: Constraint) -> tuple[float | None, tuple[MetricFigures, ...]]:
    seconds = counted_seconds(times, output_tokens)
    return attainment(seconds, limits), metric_figures(seconds, limits)
