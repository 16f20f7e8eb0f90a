"""Latencies of static batches as the ExeGPT paper runs FasterTransformer. The paper takes its
latency limits from them (section 7.1)."""

from bisect import bisect_left

import numpy as np

from xgpt.core.errors import InfeasibleError
from xgpt.core.problem import Problem
from xprofiler.timing import TimingSource
from xscheduler.replays import Replays
from xsimulator.memory import capacity_bytes
from xsimulator.rough.formulas import Formulas

BATCHES = range(4, 16_384 + 1, 4)  # multiples of four as in the paper; the end is chosen
REPLAYED = 48  # chosen: batches; latencies scatter by 2 %


def ft_plan(problem: Problem) -> tuple[int, int]:
    """(tp_degree, tp_gpus) of the paper's FT: tensor parallelism in nodes, a pipeline over
    nodes."""
    each = problem.cluster.devices_per_node
    return (each, problem.cluster.num_devices) if each > 1 else (1, 0)


def ft_latency_s(problem: Problem, timing: TimingSource, percent: float) -> float:
    """The percentile, in seconds, of FT's latencies for batches of 4, 8, 12 ... requests that fit
    into memory. It is the latency, by replay with one micro-batch per stage, of the batch at this
    percentile, since latencies grow with batches. Raises InfeasibleError if no batch fits."""
    form, plan = Formulas(problem, timing).of("ft"), ft_plan(problem)
    groups, capacity = problem.cluster.num_nodes, capacity_bytes(problem.cluster.device)

    def is_too_large(batch: int) -> bool:
        return bool(form.rough(plan, np.array([[batch, groups]])).memory_bytes[0] > capacity)

    count = bisect_left(BATCHES, True, key=is_too_large) if form.can_allocate(plan) else 0
    if not count:
        raise InfeasibleError(
            f"no static batch of {BATCHES[0]} requests of {problem.model.name} fits with tensor "
            f"parallelism over {plan[0]} devices: give the latency limit in seconds")
    batch = round(np.percentile(BATCHES[:count], percent))
    estimate = form.estimate(plan, (batch, groups))
    return Replays(problem, timing).of(estimate, REPLAYED * batch).latency_s
