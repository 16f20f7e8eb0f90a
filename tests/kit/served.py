"""A service as a search would leave it: made-up figures, and a schedule that has them."""

import math
from dataclasses import replace
from functools import cache
from typing import Any

from problems import estimate_of, problem_of, schedule_of

from xgpt.core.arrivals import Arrivals
from xgpt.core.constraint import Bound
from xgpt.core.problem import Problem
from xgpt.core.schedule import CopiesTried, Rejected, Schedule
from xgpt.core.served import Capacity, MetricFigures, ReplicaFigures, Search, Served

METRICS = tuple(MetricFigures(
    metric=name, mean_s=mean_s, p50_s=0.8 * mean_s, p90_s=1.5 * mean_s, p95_s=2 * mean_s,
    p99_s=4 * mean_s, limit_s=limit_s, share=share) for name, mean_s, limit_s, share in (
        ("queueing", 0.0213, None, None), ("ttft", 0.213, 0.4, 0.9137), ("tpot", 0.0813, 0.1, 0.95),
        ("latency", 12.3, None, None), ("latency_per_token", 0.113, None, None)))
REPLICA = ReplicaFigures(requests=1012, steps=22_143, batch=41.3, batch_p75=62.0, tokens=155.4,
                         busy=0.93, memory=0.61, mfu=0.312, preemptions=12)
SERVED = Served(
    rate=4.0, is_at_capacity=False, routing="least-queries", metrics=METRICS,
    capacity=Capacity(qps=5.123, lowest_qps=4.98, highest_qps=5.26, bare_qps=5.41,
                      saturated_qps=6.8),
    replicas=(REPLICA,) * 4, binds="batch slots", attainment=0.9031, wanted=0.9,
    price_per_hour=3.16, search=Search(candidates=142, replayed=31, by_bound=90, by_estimate=11,
                                       refused=10))


@cache
def service() -> Problem:
    return replace(problem_of("opt-13b", "a40-4"), num_queries=None, arrivals=Arrivals(rate=4.0))


def served_schedule(**changes: Any) -> Schedule:
    """Four replicas of one device under Sarathi; `changes`: of the served figures."""
    of_copy = replace(service(), cluster=replace(
        service().cluster, devices_per_node=1, name="one"), arrivals=None)
    found = schedule_of(service(), estimate_of(
        of_copy, "sarathi", max_active=64, token_budget=512).in_copies(4))
    bounds = [Bound(limit_s=math.inf, kind="queries"), *(
        Bound(metric=metric, limit_s=limit_s, kind="queries", quantile=0.9)
        for metric, limit_s in (("ttft", 0.4), ("tpot", 0.1)))]
    return replace(
        found, served=replace(SERVED, **changes), bounds=tuple(bounds),
        proof=replace(found.proof, gap=0.034),
        rejected=(
            Rejected(kind="policy", subject="vllm", words="max_active 32", throughput_qps=3.9,
                     reason="TPOT is over 100 ms above this rate"),
            Rejected(kind="policy", subject="ft", reason="no rate keeps ttft_s 0.4")),
        over_copies=tuple(CopiesTried(
            replicas=copies, devices_per_replica=4 // copies, throughput_qps=qps, latency_s=None,
            bound_qps=bound_qps, words=words) for copies, qps, bound_qps, words in (
                (4, 5.123, 6.2, "max_active 64, token_budget 512"),
                (2, 4.1, 4.9, "max_active 64, token_budget 256, tp_degree 2, tp_gpus 2"),
                (1, None, 3.0, "given up by a proved bound"))))
