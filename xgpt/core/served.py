"""Figures of a service: requests arrive over time, and a share of them keeps its limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from xgpt.core.units import Amount, Count, Flag, Share, Unbounded

# seconds from the arrival to the start of the prefill, to the first token, and to the last one;
# seconds of each token after the first; latency over output tokens
ServedMetric = Literal["queueing", "ttft", "tpot", "latency", "latency_per_token"]
Binding = Literal["queueing", "batch slots", "memory", "bubbles", "slow model", "nothing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricFigures:
    """Seconds of a metric over requests. The first and the last tenth by arrival are left out.
    `limit_s`: None without a limit. `share`: of the requests that keep it."""

    metric: ServedMetric
    mean_s: Unbounded
    p50_s: Unbounded
    p90_s: Unbounded
    p95_s: Unbounded
    p99_s: Unbounded
    limit_s: Unbounded | None = None
    share: Share | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaFigures:
    """Figures of one replica's replay. `batch`, `batch_p75`: requests decoded by a step, mean and
    75th percentile. `tokens`: of a step, encoded and decoded, in the mean. `busy`: share of the
    time that its stages work. `memory`: mean share of its KV cache in use. `mfu`: FLOPs of the
    model over those of the devices."""

    requests: Count
    steps: Count
    batch: Amount
    batch_p75: Amount
    tokens: Amount
    busy: Share
    memory: Share
    mfu: Amount
    preemptions: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The highest rate, in requests/s, at which the limits hold: the mean over seeds, with the
    lowest and the highest. `bare_qps`: without the doubt about step times. `saturated_qps`: with
    all requests there at once, which no arrivals exceed. `is_settled`: whether the replays were
    long enough to tell."""

    qps: Amount
    lowest_qps: Amount
    highest_qps: Amount
    bare_qps: Amount
    saturated_qps: Amount
    is_settled: Flag = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """The account of a search: candidates replayed, given up by a bound that is proved or by an
    estimate, and refused; they add up to `candidates`."""

    candidates: Count
    replayed: Count
    by_bound: Count
    by_estimate: Count
    refused: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Figures of a schedule whose requests arrive. `rate`: requests/s that the figures are for.
    `is_at_capacity`: the rate was looked for. `attainment`: share of the requests that keep all
    limits together; None without limits. `wanted`: share that must; None: each limit has its own
    quantile. `price_per_hour`: of all devices; 0 if unknown."""

    rate: Amount
    is_at_capacity: Flag
    routing: str
    capacity: Capacity
    metrics: tuple[MetricFigures, ...]
    replicas: tuple[ReplicaFigures, ...]
    binds: Binding
    attainment: Share | None = None
    wanted: Share | None = None
    price_per_hour: Amount = 0.0
    search: Search | None = None

    @property
    def qps_per_price(self) -> float | None:
        """Capacity in requests/s over the price of an hour; None if that is unknown."""
        return self.capacity.qps / self.price_per_hour if self.price_per_hour else None
