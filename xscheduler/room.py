"""Room for the longest of a job's requests, where the memory allows it: one request longer than the
planned lengths should be answered, not refused."""

from __future__ import annotations

from xgpt.core.problem import Problem
from xgpt.core.schedule import Schedule
from xgpt.core.units import DTYPE_BYTES
from xrunner.rules.paged import BLOCK_TOKENS


def with_room(schedule: Schedule, problem: Problem) -> Schedule:
    """`schedule` with room for the longest request of the problem, as far as lengths are known."""
    if problem.queries is None:
        return schedule
    return with_room_for(schedule, problem, int(problem.queries.reserves.max()))


def with_room_for(schedule: Schedule, problem: Problem, query_tokens: int) -> Schedule:
    """`schedule` with KV tokens for a query of `query_tokens` in every group, if they fit; else
    unchanged."""
    estimate = schedule.estimate
    if getattr(estimate.controls, "token_budget", None):  # its memory is paged
        query_tokens = -(-query_tokens // BLOCK_TOKENS) * BLOCK_TOKENS
    kv_tokens = max(estimate.deployment.kv_tokens, query_tokens * estimate.deployment.num_groups)
    per_layer = problem.model.kv_elements_per_token_layer * DTYPE_BYTES[problem.dtype]
    added = (kv_tokens - estimate.deployment.kv_tokens) * per_layer
    extra = {rank: added * stage.num_layers // stage.tp_degree
             for stage in estimate.deployment.stages for rank in stage.ranks}
    memory = tuple(size + extra[rank] for rank, size in enumerate(estimate.figures.memory_bytes))
    if max(memory) > estimate.figures.memory_capacity_bytes:
        return schedule
    return schedule.changed(kv_tokens=kv_tokens, memory_bytes=memory)
