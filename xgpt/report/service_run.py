"""Figures of a run whose requests arrive over time, measured beside predicted."""

from typing import Any

import numpy as np

from xgpt.core.constraint import Constraint
from xgpt.core.lengths import FloatArray, IntArray
from xgpt.core.schedule import Schedule
from xgpt.core.served import ServedMetric
from xgpt.report.output import QueryColumns
from xsimulator.replay.records import ReplayResult
from xsimulator.replay.service import (
    attainment,
    counted,
    metric_figures,
    seconds_by_metric,
)

FIGURES = ("mean_s", "p50_s", "p90_s", "p95_s", "p99_s", "share")


def constraint_of(schedule: Schedule) -> Constraint:
    """The limits that a schedule was planned for, with the share that keeps them jointly."""
    wanted = None if schedule.served is None else schedule.served.wanted
    return Constraint(bounds=schedule.bounds, attainment=wanted)


def seconds_of(queries: QueryColumns,
               rows: IntArray | slice = slice(None)) -> dict[ServedMetric, FloatArray]:
    """{metric: [rows] seconds}; nan for the time per token of a single one."""
    found: dict[ServedMetric, FloatArray] = {
        "queueing": queries.times("encode_start_s") - queries.times("arrival_s"),
        "ttft": queries.times("ttft_s"), "tpot": queries.times("tpot_s"),
        "latency": queries.times("latency_s"), "latency_per_token":
            queries.times("latency_s") / np.maximum(queries.counts("output_tokens"), 1)}
    return {name: every[rows] for name, every in found.items()}


def service_facts(queries: QueryColumns, schedule: Schedule | None,
                  replayed: ReplayResult | None = None) -> dict[str, Any]:
    """`served` of metrics.json, measured and predicted: rate, attainment, figures of each metric.
    The first and the last tenth of the requests by arrival are left out; {} of a batch job.
    `replayed`: these requests, arriving as they did; None: what the schedule expects."""
    arrival_s = queries.times("arrival_s")
    if schedule is None or schedule.served is None or not np.isfinite(arrival_s).any():
        return {}
    constraint, seconds = constraint_of(schedule), seconds_of(queries, counted(arrival_s))
    share, metrics = schedule.served.attainment, schedule.served.metrics
    if replayed is not None:
        rows = counted(replayed.times.arrival_s)
        expected = {name: every[rows] for name, every in seconds_by_metric(
            replayed.times, replayed.output_tokens).items()}
        share, metrics = attainment(expected, constraint), metric_figures(expected, constraint)
    rate = (len(arrival_s) - 1) / max(float(np.ptp(arrival_s)), 1e-9)
    pairs = {"rate": (rate, schedule.served.rate),
             "attainment": (attainment(seconds, constraint), share)}
    others = {one.metric: one for one in metrics}
    for one in metric_figures(seconds, constraint):
        pairs |= {f"{one.metric}_{name}": (getattr(one, name), getattr(
            others.get(one.metric), name, None)) for name in FIGURES}
    return {"served": {key: dict(zip(("measured", "predicted"), pair, strict=True))
                       for key, pair in pairs.items()}}
