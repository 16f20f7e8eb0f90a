"""How many queries a group's cache gets room for. Caches are sized once, before it is known what a
running job will change."""

from __future__ import annotations

import math
from dataclasses import replace

from xgpt.core.lengths import JointLengths, empirical
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate
from xgpt.core.units import DTYPE_BYTES
from xprofiler.timing import TimingSource
from xrunner.rules.rra import most_active
from xscheduler.live.pinned import PinnedSearch

# Times the queries that a group is planned to hold: should outputs turn out shorter than planned,
# and at least where lengths are yet to be observed.
HEADROOM, LEAST_OBSERVING = 2.0, 8.0
SHORT = 16  # lengths yet to be observed may be the caps' SHORTth part


def headroom(estimate: Estimate, problem: Problem, timing: TimingSource) -> float:
    """Queries that a group may come to hold once lengths have been seen, over those that it is
    planned to hold; infinite where not even short outputs tell."""
    outputs = empirical([max(round(problem.lengths.outputs.mean / SHORT), 1)])
    fixed = replace(problem.fixed, policy=estimate.policy, tp_degree=estimate.deployment.tp_degree,
                    tp_gpus=estimate.deployment.tp_gpus,
                    decode_micro_batches=estimate.deployment.num_groups)
    short = replace(problem, fixed=fixed, lengths=JointLengths(
        inputs=problem.lengths.inputs, outputs=outputs))
    best = PinnedSearch(estimate, short, timing, problem.constraint.latency_s).best()
    if best.estimate is None or best.reason is not None:
        return math.inf
    return max(LEAST_OBSERVING, most_active(best.estimate) / most_active(estimate))


def slots_for(estimate: Estimate, problem: Problem, longest: int, times: float) -> int:
    """Queries that a group's cache has room for: `times` those planned, as far as the memory of
    every rank and the number of queries go; never fewer than planned."""
    planned, groups = most_active(estimate), estimate.deployment.num_groups
    per_layer = problem.model.kv_elements_per_token_layer * DTYPE_BYTES[problem.dtype]
    fits = []
    for stage in estimate.deployment.stages:
        token_bytes = per_layer * stage.num_layers / stage.tp_degree
        for rank in stage.ranks:
            free = estimate.figures.memory_capacity_bytes - estimate.figures.memory_bytes[rank]
            free += int(estimate.deployment.kv_tokens * token_bytes)
            fits.append(free / max(groups * longest * token_bytes, 1))
    wanted = math.ceil(min(times * planned, (problem.num_queries or 0) / groups))
    return max(planned, min(wanted, int(min(fits))))


def mean_present(slots: int) -> int:
    """Queries of a group in the mean that, with three deviations above them (see most_active),
    have so many slots."""
    return max(math.floor(((math.sqrt(9 + 4 * slots) - 3) / 2) ** 2), 1)
