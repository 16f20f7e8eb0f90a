"""One replay of a job: its queries, any number of pools, what moves queries between them.

All of them are processes on one kernel (xsimulator.replay.kernel); the KV budget is kept by the
pools' rules.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from xgpt.core.query_times import QueryTimes
from xsimulator.replay.flow import Arrivals, Handover, HandoverPlan
from xsimulator.replay.kernel import Kernel
from xsimulator.replay.pool import Pool, PoolPlan
from xsimulator.replay.queries import Queries
from xsimulator.replay.records import ReplayResult


def run(queries: Queries, pools: Sequence[PoolPlan],
        handovers: Sequence[HandoverPlan] = ()) -> ReplayResult:
    """Until every query is done. Queries come to all pools but those that only decode. Raises
    XgptError for a query that can never fit."""
    kernel = Kernel()
    by_name = {plan.name: Pool(plan, kernel, queries) for plan in pools}
    assert len(by_name) == len(pools), f"{[plan.name for plan in pools]}"
    links = [Handover(plan, kernel, queries, by_name) for plan in handovers]
    Arrivals(kernel, queries, [p for p in by_name.values() if p.plan.role != "decode"]).start()
    kernel.run()
    count = len(queries.inputs)
    assert queries.num_done == count, f"{count - queries.num_done} queries have nothing to do"
    times = QueryTimes(
        arrival_s=queries.arrival_s, start_s=np.array(queries.start_s, float),
        first_token_s=np.array(queries.first_token_s, float),
        last_token_s=np.array(queries.last_token_s, float))
    return ReplayResult(
        pools=tuple(pool.records() for pool in by_name.values()),
        handovers=tuple(link.records() for link in links), times=times,
        output_tokens=queries.output_tokens, preemptions=queries.preemptions)
