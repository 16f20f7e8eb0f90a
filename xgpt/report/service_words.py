"""Figures of a service as words and rows of tables: capacity, attainment, what binds, percentiles,
replicas, and the account of the search."""

import math
from collections.abc import Iterator, Mapping, Sequence

from xgpt.core.constraint import Bound
from xgpt.core.schedule import Schedule
from xgpt.core.served import Binding, ReplicaFigures, Served, ServedMetric
from xgpt.core.units import format_seconds
from xgpt.report.figures import floor_percent, percent, plain
from xgpt.report.words import counted

METRIC_NAMES: Mapping[ServedMetric, str] = {
    "queueing": "queueing", "ttft": "TTFT", "tpot": "TPOT after TTFT", "latency": "latency",
    "latency_per_token": "latency/token"}
BINDS: Mapping[Binding, str] = {  # by step times with the margin
    "queueing": "queueing: the P99 of the wait for prefill is near its limit or TTFT's",
    "batch slots": "batch slots: nearly all are taken at P75 of the steps",
    "memory": "memory: most of the KV cache is in use in the mean",
    "bubbles": "bubbles: the stages idle for much of the time",
    "slow model": "step times: even the quickest quarter is near the limit on TPOT",
    "nothing": "nothing: queueing, slots, memory, bubbles and step times have room"}
PERCENTILES = ("from arrival", "mean", "P50", "P90", "P95", "P99", "limit", "kept")
REPLICAS = ("replica", "requests", "steps", "batch", "P75", "tokens", "busy", "KV", "preempted",
            "MFU")


def service_facts(schedule: Schedule, unit: str = " unit of price") -> Iterator[tuple[str, str]]:
    """Pairs (label, text): capacity, rate, attainment, what binds, and the search. unit: of the
    price. None of a schedule that is not served."""
    if (served := schedule.served) is None:
        return
    of, devices, price = served.capacity, schedule.estimate.num_devices, served.qps_per_price
    unsettled = "; NOT SETTLED: replays are too short" * (not of.is_settled)
    yield "capacity", (
        f"{plain(of.qps)} requests/s ({plain(of.lowest_qps)} to {plain(of.highest_qps)} by seed), "
        f"{plain(of.bare_qps)} without the margin of {percent(schedule.margin.factor - 1)} on step "
        f"times{unsettled}")
    yield "", f"{plain(of.qps / devices)} per device ({devices})" + ("" if price is None else (
        f", {plain(price)} per{unit} an hour ({plain(served.price_per_hour)})"))
    share = served.rate / of.qps if of.qps else math.inf
    yield "rate", (f"{plain(served.rate)} requests/s, {percent(share)} of the capacity, routed by "
                   f"{served.routing}")
    yield "attainment", attainment_words(served)
    yield "binding", BINDS[served.binds]
    for row in sorted((row for row in schedule.rejected if row.kind == "policy" and row.words),
                      key=lambda row: -(row.throughput_qps or 0.0))[:1]:
        rate = "" if row.throughput_qps is None else f" with {plain(row.throughput_qps)} requests/s"
        yield "second best", f"{row.name}{rate}{' by one seed' * bool(rate)}: {row.reason}"
    if (search := served.search) is not None:
        yield "search", (
            f"{counted(search.candidates, 'candidate')}: {search.replayed:,} replayed, "
            f"{search.by_bound:,} ruled out, {search.by_estimate:,} unlikely, {search.refused:,} "
            f"refused; " + (f"gap {percent(schedule.proof.gap)} to the bound of the unlikely"
                            if search.by_estimate else "none can be better"))


def attainment_words(served: Served) -> str:
    """The share that keeps all limits, rounded down, beside the share that must."""
    if served.attainment is None:
        return "no limit was set; capacity keeps the limit below on the P99 of queueing"
    wanted = "each has its own quantile" if served.wanted is None else (
        f"{served.wanted * 100:g} % must")
    return f"{floor_percent(served.attainment)} of the requests keep all limits; {wanted}"


def percentile_rows(served: Served, bounds: Sequence[Bound]) -> list[tuple[str, ...]]:
    """Cells below PERCENTILES, a row a metric, with quantiles where limits do not hold jointly."""
    own = {{"deadline": "latency"}.get(one.metric, one.metric): f" P{one.quantile * 100:g}"
           for one in bounds if served.wanted is None and math.isfinite(one.limit_s)}
    return [(METRIC_NAMES[one.metric], *map(format_seconds, (
        one.mean_s, one.p50_s, one.p90_s, one.p95_s, one.p99_s)), "-" if one.limit_s is None else (
            format_seconds(one.limit_s) + own.get(one.metric, "")),
        "-" if one.share is None else floor_percent(one.share)) for one in served.metrics]


def replica_cells(replicas: Sequence[ReplicaFigures]) -> list[tuple[str, ...]]:
    """Cells below REPLICAS, a row a replica."""
    return [(str(number), f"{one.requests:,}", f"{one.steps:,}", plain(one.batch),
             plain(one.batch_p75), plain(one.tokens), percent(one.busy), percent(one.memory),
             f"{one.preemptions:,}", percent(one.mfu)) for number, one in enumerate(replicas)]
