"""Sizes of the KV caches, which are allocated once. They hold the job's longest request, if memory
allows, and the requests that a running job may hold after its schedule has changed."""

import math
from dataclasses import replace

from xgpt.core.lengths import JointLengths, empirical
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate, Schedule
from xprofiler.timing import TimingSource
from xrunner.rules.paged import BLOCK_TOKENS
from xrunner.rules.rra import most_active
from xscheduler.live.fixed_stages import FixedStages
from xscheduler.replicas import problem_of_replica
from xsimulator.memory import kv_bytes
from xsimulator.sharing import sharing_of

# chosen: requests that a group has room for / planned requests: if outputs are shorter than
# planned, and at least while lengths are still observed
HEADROOM, LEAST_OBSERVING = 2.0, 8.0
SHORT = 16  # chosen: outputs still to be observed may be this many times shorter than their caps


def with_room(schedule: Schedule, problem: Problem) -> Schedule:
    """`schedule` with KV cache for the longest known request; unchanged if it does not fit."""
    if problem.queries is None:
        return schedule
    return with_room_for(schedule, problem, int(problem.queries.reserves.max()))


def with_room_for(schedule: Schedule, problem: Problem, query_tokens: int) -> Schedule:
    """`schedule` with KV cache for `query_tokens` in every group; unchanged if it does not fit."""
    deployment, figures = schedule.deployment, schedule.figures
    if getattr(schedule.controls, "token_budget", None):  # its memory is paged
        query_tokens = -(-query_tokens // BLOCK_TOKENS) * BLOCK_TOKENS
    kv_tokens = max(deployment.kv_tokens, query_tokens * deployment.num_groups)
    added = kv_bytes(problem, deployment.stages, kv_tokens - deployment.kv_tokens)
    extra = {rank: int(own) for stage, own in zip(deployment.stages, added, strict=True)
             for rank in stage.ranks}
    memory = tuple(size + extra[rank] for rank, size in enumerate(figures.memory_bytes))
    if max(memory) > figures.memory_capacity_bytes:
        return schedule
    return schedule.changed(kv_tokens=kv_tokens, memory_bytes=memory)


def headroom(estimate: Estimate, problem: Problem, timing: TimingSource) -> float:
    """Ratio of the requests that a group may hold once output lengths have been observed to the
    planned ones; infinite if short outputs have no schedule."""
    problem, estimate = problem_of_replica(problem, estimate), estimate.one_copy
    outputs = empirical([max(round(problem.lengths.outputs.mean / SHORT), 1)])
    deployment = estimate.deployment
    fixed = replace(problem.fixed, policies=(estimate.policy,), tp_degree=deployment.tp_degree,
                    tp_gpus=deployment.tp_gpus, decode_micro_batches=deployment.num_groups)
    short = replace(problem, fixed=fixed, lengths=JointLengths(
        inputs=problem.lengths.inputs, outputs=outputs))
    best = FixedStages(estimate, short, timing).best(problem.constraint, has_margin=False)
    if best.estimate is None or best.reason is not None:
        return math.inf
    return max(LEAST_OBSERVING, most_active(best.estimate) / most_active(estimate))


def slots_for(estimate: Estimate, problem: Problem, longest: int, times: float, *,
              in_blocks: bool = False) -> int:
    """Number of requests that a group's cache has room for: `times` the planned number, at least
    that number. It is at most the number that the job has, and that the memory of every rank holds
    (rows of `longest` tokens, unless `in_blocks`)."""
    planned, groups = most_active(estimate), estimate.deployment.num_groups
    wanted = math.ceil(min(times * planned, (problem.num_queries or 0) / groups))
    if not in_blocks:
        wanted = min(wanted, int(_most_tokens(estimate, problem) / max(longest, 1)))
    return max(planned, wanted)


def kv_tokens_for(estimate: Estimate, problem: Problem, most: int, slots: int = 0) -> int:
    """Number of tokens that a group's paged cache has room for: as many as the memory of every rank
    holds, at most `most`, at least the planned number. Where prefixes are shared, each of `slots`
    requests beyond the planned ones may leave two blocks partly empty."""
    held, sharing = int(_most_tokens(estimate, problem)), sharing_of(problem)
    if sharing is not None and estimate.shares_prefixes:
        held -= int(sharing.slack(max(slots - most_active(estimate), 0), 0))
    return max(estimate.deployment.group_kv_tokens, min(held, most))


def _most_tokens(estimate: Estimate, problem: Problem) -> float:
    """Number of a group's KV tokens that fit on every rank."""
    deployment, figures = estimate.deployment, estimate.figures
    fits = []
    each = kv_bytes(problem, deployment.stages, 1.0)
    for stage, own in zip(deployment.stages, each, strict=True):
        token_bytes = float(own)
        for rank in stage.ranks:
            free = figures.memory_capacity_bytes - figures.memory_bytes[rank]
            free += int(deployment.kv_tokens * token_bytes)
            fits.append(free / max(deployment.num_groups * token_bytes, 1))
    return min(fits)


def mean_present(slots: int) -> int:
    """Mean number of requests of a group whose three-sigma maximum is `slots` (see most_active)."""
    return max(math.floor(((math.sqrt(9 + 4 * slots) - 3) / 2) ** 2), 1)
