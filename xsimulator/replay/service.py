"""Figures of a service from the replay of its requests, or from a run of them: seconds by metric,
attainment of the limits, figures of each replica, and the part that binds.

Seconds to the first and the last token, and queueing, count from a request's arrival. The first and
the last tenth of the requests by arrival are left out, since they meet a service that fills or
empties."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from xgpt.core.constraint import Bound, Constraint
from xgpt.core.lengths import FloatArray, IntArray
from xgpt.core.model import active_layer_params
from xgpt.core.problem import Problem, QueryTimes
from xgpt.core.served import Binding, MetricFigures, ReplicaFigures, ServedMetric
from xsimulator.replay.records import PoolRecords, ReplayResult
from xsimulator.replay.steady_state import quantile

QUEUEING_S, QUEUEING_SHARE = 5.0, 0.99  # Vidur, section 6: the limit where a job states none
_OUTSIDE = 0.1  # chosen: share of the requests left out at either end
# Vidur's thresholds (its released report of bottlenecks)
_SLOTS, _MEMORY, _IDLE, _SLOW, _NEAR = 0.9, 0.7, 0.4, 0.75, 0.8
_SHARES = (0.5, 0.9, 0.95, 0.99)


def seconds_by_metric(times: QueryTimes,
                      output_tokens: IntArray) -> dict[ServedMetric, FloatArray]:
    """{metric: [requests] seconds}; nan for the time per output token of a single token."""
    after = np.asarray(output_tokens) - 1
    latency_s = times.last_token_s - times.arrival_s
    tpot_s = np.full(len(after), math.nan)
    np.divide(times.last_token_s - times.first_token_s, after, out=tpot_s, where=after > 0)
    return {"queueing": times.start_s - times.arrival_s, "ttft": times.ttft_s, "tpot": tpot_s,
            "latency": latency_s, "latency_per_token": latency_s / np.maximum(output_tokens, 1)}


def counted(arrival_s: FloatArray) -> IntArray:
    """Indices of the requests that figures count, by arrival."""
    order, out = np.argsort(arrival_s, kind="stable"), int(_OUTSIDE * len(arrival_s))
    return order[out:len(order) - out]


def limits_of(constraint: Constraint) -> tuple[tuple[ServedMetric, Bound], ...]:
    """(metric, its bound) of every limit that arriving requests have. A deadline is a limit on the
    latency. Without any: Vidur's on queueing."""
    found: list[tuple[ServedMetric, Bound]] = [
        ("latency" if bound.metric == "deadline" else bound.metric, bound)
        for bound in constraint.bounds
        if math.isfinite(bound.limit_s) and bound.metric != "makespan"]
    return tuple(found) or (("queueing", Bound(
        metric="queueing", limit_s=QUEUEING_S, kind="queries", quantile=QUEUEING_SHARE)),)


def counted_seconds(times: QueryTimes,
                    output_tokens: IntArray) -> dict[ServedMetric, FloatArray]:
    """The seconds by metric of the requests that figures count, by arrival."""
    rows = counted(times.arrival_s)
    return seconds_by_metric(times.take(rows), output_tokens[rows])


class Used(NamedTuple):
    """The share of its limits that a service uses up, at most 1 if it keeps them, and the metric
    that uses most of its own limit."""

    share: float
    metric: ServedMetric


def used_of_limits(seconds: Mapping[ServedMetric, FloatArray], constraint: Constraint,
                   faster: float = 1.0) -> Used:
    """The share that is used up: with a joint attainment that quantile of the requests' largest
    shares, else the largest over the limits of their own quantiles. faster: factor by which every
    limit is divided."""
    limits, joint = limits_of(constraint), constraint.attainment
    shares = [faster * seconds[metric] / bound.limit_s for metric, bound in limits]
    if joint is not None:  # a single token keeps a limit on the time per token
        shares = [np.nan_to_num(share) for share in shares]
    each = [Used(quantile(own, joint or bound.quantile), metric) for share, (metric, bound) in zip(
        shares, limits, strict=True) if len(own := share[~np.isnan(share)])]
    most = max(each, default=Used(0.0, limits[0][0]))
    if joint is None or len(each) < 2:
        return most
    return Used(quantile(np.fmax.reduce(shares), joint), most.metric)


def attainment(seconds: Mapping[ServedMetric, FloatArray], constraint: Constraint) -> float | None:
    """Share of the requests that keep all stated limits jointly; None without limits."""
    limits = [(metric, bound) for metric, bound in limits_of(constraint)
              if bound in constraint.bounds]
    if not limits:
        return None
    # a single token has no time per token, which is no limit missed
    late = np.logical_or.reduce([seconds[metric] > bound.limit_s for metric, bound in limits])
    return float(1 - late.mean())


def metric_figures(seconds: Mapping[ServedMetric, FloatArray],
                   constraint: Constraint) -> tuple[MetricFigures, ...]:
    """Figures of every metric that a request has."""
    found, limits = [], dict(limits_of(constraint))
    for metric, every in seconds.items():
        own, bound = every[~np.isnan(every)], limits.get(metric)
        if not len(own):
            continue
        p50, p90, p95, p99 = np.quantile(own, _SHARES).tolist()
        limit_s = None if bound is None else bound.limit_s
        found.append(MetricFigures(
            metric=metric, mean_s=float(own.mean()), p50_s=p50, p90_s=p90, p95_s=p95, p99_s=p99,
            limit_s=limit_s, share=None if limit_s is None else float((own <= limit_s).mean())))
    return tuple(found)


def replica_figures(result: ReplayResult, problem: Problem,
                    inputs: IntArray) -> tuple[ReplicaFigures, ...]:
    """Figures of each replica of a replay with steps. problem: of one replica. inputs: [requests]
    tokens."""
    found, pools = [], list(result.pools)
    each = len(pools) // len(result.replicas)
    for place, own in enumerate(result.replicas):
        mine = pools[place * each:(place + 1) * each]
        span_s = max((pool.end_s.max() for pool in mine if len(pool.end_s)), default=0.0)
        span_s = max(span_s - float(result.times.arrival_s.min(initial=0.0)), 1e-12)
        decoded = np.concatenate([pool.decoded[pool.decoded > 0] for pool in mine])
        steps = sum(len(pool.decoded) for pool in mine)
        tokens = sum(int(pool.tokens.sum() + pool.decoded.sum()) for pool in mine)
        stages = sum(pool.end_s.shape[1] for pool in mine)
        busy_s = sum(float((pool.end_s - pool.start_s).sum()) for pool in mine)
        found.append(ReplicaFigures(
            requests=len(own), steps=steps, tokens=tokens / max(steps, 1),
            batch=float(decoded.mean()) if len(decoded) else 0.0,
            batch_p75=float(np.quantile(decoded, 0.75)) if len(decoded) else 0.0,
            busy=min(busy_s / (stages * span_s), 1.0),
            memory=max(_share_in_use(pool, span_s) for pool in mine),
            mfu=_flops(problem, mine, inputs[own]) / (
                span_s * problem.cluster.num_devices
                * problem.cluster.device.peak_flops_per_s(problem.dtype)),
            preemptions=result.preemptions and sum(  # steps are read one by one
                len(step.evicted) for pool in mine for step in pool.steps)))
    return tuple(found)


def binding(metrics: Sequence[MetricFigures], replicas: Sequence[ReplicaFigures],
            tpot_s: FloatArray, most_active: int | None) -> Binding:
    """The part of a service that binds, by the thresholds of Vidur's report. most_active: most
    requests at a time of a replica; None: any. tpot_s: time per token, nan for none."""
    limits_s = {one.metric: one.limit_s or math.inf for one in metrics}
    wait_s = min(limits_s["queueing"], limits_s.get("ttft", math.inf))
    queueing_s = next(one.p99_s for one in metrics if one.metric == "queueing")
    if queueing_s > _NEAR * (wait_s if math.isfinite(wait_s) else QUEUEING_S):
        return "queueing"
    if most_active and max(one.batch_p75 for one in replicas) > _SLOTS * most_active:
        return "batch slots"
    if max(one.memory for one in replicas) > _MEMORY:
        return "memory"
    if "tpot" in limits_s and np.nanquantile(tpot_s, 0.25) > _SLOW * limits_s["tpot"]:
        return "slow model"
    return "bubbles" if min(one.busy for one in replicas) < 1 - _IDLE else "nothing"


def _share_in_use(pool: PoolRecords, span_s: float) -> float:
    """Mean share of the pool's KV cache that requests hold over time."""
    if len(pool.memory_s) < 2 or not pool.kv_tokens:
        return 0.0
    held = float(pool.memory_tokens[:-1] @ np.diff(pool.memory_s))
    return min(held / (pool.kv_tokens * span_s), 1.0)


def _flops(problem: Problem, pools: Sequence[PoolRecords], inputs: IntArray) -> float:
    """FLOPs of the model in the steps of a replica's pools (Vidur, section 1)."""
    model, sizes = problem.model, inputs.astype(float)
    rows = sum(float(pool.tokens.sum() + pool.decoded.sum()) for pool in pools)
    read = sum(float(pool.decoded @ np.where(pool.decoded > 0, pool.context, 0.0))
               for pool in pools) + float(sizes @ (sizes + 1)) / 2
    return model.num_layers * (2 * active_layer_params(model) * rows
                               + 4 * model.num_heads * model.head_dim * read)
