"""Figures of a service as words and rows of tables: capacity, attainment, what binds, percentiles,
replicas, and the account of the search."""

import math
from collections.abc import Iterator, Mapping, Sequence

from xgpt.core.constraint import Bound
from xgpt.core.schedule import Schedule
from xgpt.core.served import ReplicaFigures, Served, ServedMetric
from xgpt.core.units import format_seconds
from xgpt.report.figures import floor_percent, percent, plain
from xgpt.report.words import counted, value_of

METRIC_NAMES: Mapping[ServedMetric, str] = {
    "queueing": "queueing", "ttft": "TTFT", "tpot": "TPOT after TTFT", "latency": "latency",
    "latency_per_token": "latency/token"}
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
        f"{plain(of.bare_qps)} without the margin on step times{unsettled}")
    yield "", f"{plain(of.qps / devices)} for each of {counted(devices, 'device')}" + (
        "" if price is None else
        f", {plain(price)} for each{unit} an hour ({plain(served.price_per_hour)} in all)")
    share = served.rate / of.qps if of.qps else math.inf
    yield "rate", f"{plain(served.rate)} requests/s, {percent(share)} of the capacity"
    yield "attainment", attainment_words(served)
    yield "binding", binding_words(served, value_of(schedule.estimate, "max_active"))
    yield "routing", served.routing
    others = [(row.throughput_qps, row) for row in schedule.rejected
              if row.kind == "policy" and row.throughput_qps]
    if others:
        qps, row = max(others, key=lambda pair: pair[0])
        yield "second best", f"{row.name}, {plain(qps)} requests/s: {row.reason}"
    if (search := served.search) is not None:
        yield "search", (
            f"{counted(search.candidates, 'candidate')}: {search.replayed:,} replayed, given up "
            f"{search.by_bound:,} by a bound and {search.by_estimate:,} by an estimate, "
            f"{search.refused:,} refused; " + (
                f"gap {percent(schedule.proof.gap, 1)}, to the highest bound of those given up by "
                "an estimate" if search.by_estimate else "none of them can be better"))


def attainment_words(served: Served) -> str:
    """The share that keeps all limits, rounded down, beside the share that must."""
    if served.attainment is None:
        return "no limit was set" + "".join(
            f"; capacity keeps queueing P99 below {format_seconds(one.limit_s)}"
            for one in served.metrics if one.limit_s)
    wanted = "each has its own quantile" if served.wanted is None else (
        f"{served.wanted * 100:g} % must")
    return f"{floor_percent(served.attainment)} of the requests keep all limits; {wanted}"


def binding_words(served: Served, slots: int | None) -> str:
    """The part that binds, with its figure of the worst replica. slots: requests of a replica."""
    def worst(name: str) -> float:
        return max((getattr(one, name) for one in served.replicas), default=0.0)

    waits_s = max((one.p99_s for one in served.metrics if one.metric == "queueing"), default=0.0)
    idle = 1 - min((one.busy for one in served.replicas), default=1.0)
    return {"queueing": f"queueing: requests wait {format_seconds(waits_s)} for prefill at P99",
            "batch slots": f"batch slots: {plain(worst('batch_p75'))} of {slots} are taken at P75",
            "memory": f"memory: {percent(worst('memory'))} of the KV cache is in use",
            "bubbles": f"bubbles: the stages idle for {percent(idle)} of the time",
            "slow model": "step times: even the quickest quarter is near the TPOT limit",
            "nothing": "nothing: queueing, slots, memory, bubbles and step times have room",
            }[served.binds]


def percentile_rows(served: Served, bounds: Sequence[Bound]) -> list[tuple[str, ...]]:
    """Cells below PERCENTILES, a row a metric, with quantiles where limits do not hold jointly."""
    own = {one.metric: f" P{one.quantile * 100:g}" for one in bounds if served.wanted is None}
    return [(METRIC_NAMES[one.metric], *map(format_seconds, (
        one.mean_s, one.p50_s, one.p90_s, one.p95_s, one.p99_s)), "-" if one.limit_s is None else (
            format_seconds(one.limit_s) + "".join(
                words for metric, words in own.items() if metric == one.metric)),
        "-" if one.share is None else floor_percent(one.share)) for one in served.metrics]


def replica_cells(replicas: Sequence[ReplicaFigures]) -> list[tuple[str, ...]]:
    """Cells below REPLICAS, a row a replica."""
    return [(str(number), f"{one.requests:,}", f"{one.steps:,}", plain(one.batch),
             plain(one.batch_p75), plain(one.tokens), percent(one.busy), percent(one.memory),
             f"{one.preemptions:,}", percent(one.mfu)) for number, one in enumerate(replicas)]
