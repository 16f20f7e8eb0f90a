"""Why this schedule, in three sentences, as the case study of the paper's Table 6 does: the policy,
the control variables, and what binds and what the bound costs. Facts of the figures alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from xgpt.core.controls import RraControls, max_in_system
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate, Rejected, Schedule
from xgpt.core.units import format_seconds
from xprofiler.timing import TimingSource
from xscheduler.admissible import Limit, Limits, breaches
from xscheduler.alternatives import DEGREE_ROW, FREE_ROW, NOT_LOOKED_INTO, POLICY_ROW
from xsimulator import memory
from xsimulator.policies import make_config, make_policy

_BINDING = {Limit.LATENCY: "the latency bound", Limit.MEMORY: "memory",
            Limit.QUERIES: "the number of queries"}
FULL = 0.01  # share of a limit left below which it counts as reached


def explain_choice(schedule: Schedule, problem: Problem, timing: TimingSource | None = None, *,
                   latency_limit_s: float | None = None) -> tuple[str, str, str]:
    """(why this policy, why these control variables, what binds and what the bound costs).

    timing: with it, what binds is found by evaluating one query more in each encode batch; without,
    it is told by what is left of each limit. latency_limit_s: what the latency is held to, where a
    margin makes that less than the bound.
    """
    limit_s = schedule.bound.limit_s if latency_limit_s is None else latency_limit_s
    return (_why_policy(schedule, problem), _why_variables(schedule),
            f"{_what_binds(schedule, problem, timing, limit_s)}{_cost_of_bound(schedule)}.")


# --- the policy -------------------------------------------------------------------------------


def _why_policy(schedule: Schedule, problem: Problem) -> str:
    estimate = schedule.estimate
    name = estimate.policy.upper()
    start = f"{name} ({_how(estimate)})"
    rows = [row for row in schedule.rejected if row.label.startswith(POLICY_ROW)]
    if not rows:
        return (f"{start}: the job fixes the policy." if problem.fixed.policy is not None else
                f"{start}: no other policy was compared.")
    others = sorted(rows, key=lambda row: -(row.throughput_qps or 0.0))
    found = [row for row in others if row.throughput_qps]
    unseen = [row for row in others if row.reason.startswith(NOT_LOOKED_INTO)]
    absent = [_policy_of(row) for row in others if not row.throughput_qps and row not in unseen]
    none = "; ".join([f"{_policy_of(row)} was {row.reason}" for row in unseen])
    if absent:
        none = "; ".join(filter(None, [none, f"{_and(absent)} "
                         f"{'have' if absent[1:] else 'has'} no schedule within the limits"]))
    if not found and not unseen:
        return f"{start} is the only policy that can be used: {none}."
    if not found:
        return f"{start} answers {estimate.figures.throughput_qps:.4g} queries/s; {none}."
    better = f"{start} answers {estimate.figures.throughput_qps:.4g} queries/s, " + _and(
        [_compared(estimate, row) for row in found])
    return f"{better}; {none}." if none else f"{better}."


def _how(estimate: Estimate) -> str:
    """What the policy makes the devices do, in its figures."""
    if len(estimate.deployment.pools) == 1:
        share = estimate.figures.encode_s / estimate.figures.period_s
        return f"every device encodes and decodes in turn, encoding for {share:.0%} of the time"
    encode = _devices(estimate, "encode")
    return (f"{encode} device{'s' * (encode != 1)} encode{'s' * (encode == 1)} while "
            f"{_devices(estimate, 'decode')} decode, so that no iteration waits for an encoding")


def _compared(estimate: Estimate, row: Rejected) -> str:
    assert row.throughput_qps
    more = estimate.figures.throughput_qps / row.throughput_qps - 1
    name, point = _policy_of(row), row.label.partition(":")[2].strip()
    than = "as many as" if abs(more) < 5e-4 else f"{more:.1%} more than" if more > 0 else (
        f"{-more:.1%} less than")
    return f"{than} the best of {name}{f' ({point})' if point else ''}"


def _policy_of(row: Rejected) -> str:
    return row.label.removeprefix(POLICY_ROW).partition(":")[0].strip().upper()


def _devices(estimate: Estimate, role: str) -> int:
    return sum(len(stage.ranks) for stage in estimate.deployment.stages if stage.role == role)


# --- the control variables --------------------------------------------------------------------


def _why_variables(schedule: Schedule) -> str:
    estimate = schedule.estimate
    if isinstance(estimate.controls, RraControls):
        iterations = estimate.figures.decode_iterations
        together = "" if estimate.figures.encode_batch == 1 else " together"
        work = (f"{_queries(estimate.figures.encode_batch)} encoded{together} once every "
                f"{'iteration' if iterations == 1 else f'{iterations} iterations'}, which keeps "
                f"{estimate.figures.decode_batch:.0f} decoding when a phase begins")
    else:
        work = (f"{_queries(estimate.figures.encode_batch)} encoded at a time, which keeps "
                f"{estimate.figures.decode_batch:.0f} decoding")
    return f"{work}; {_groups(estimate)}; {_tensor_plan(schedule)}."


def _groups(estimate: Estimate) -> str:
    stages = [stage for stage in estimate.deployment.stages if stage.role != "encode"]
    count, groups = len(stages), estimate.deployment.num_groups
    split = f"{_counted(groups, 'group')} on {_counted(count, 'decoding stage')}"
    if groups < count:
        # a group is on one stage at a time, so that the others' devices have nothing to do
        return f"{split}: {1 - groups / count:.0%} of the stages idle, for fewer, larger steps"
    return f"{split}: " + ("each has one to work on" if groups == count else
                           f"{groups / count:.2g} for each to work on")


def _tensor_plan(schedule: Schedule) -> str:
    estimate = schedule.estimate
    held = [stage.num_layers + stage.num_encoder_layers for stage in estimate.deployment.stages]
    layers = f"{min(held)}" if min(held) == max(held) else f"{min(held)} to {max(held)}"
    plan = (f"no tensor parallelism: {_counted(len(held), 'stage')} of one device, {layers} "
            "layers each"
            if estimate.deployment.tp_degree == 1 else
            f"tensor parallelism in groups of {estimate.deployment.tp_degree} on "
            f"{estimate.deployment.tp_gpus} of {len(estimate.figures.memory_bytes)} devices: "
            f"{_counted(len(held), 'stage')}, {layers} "
            "layers each")
    rows = [row for row in schedule.rejected
            if row.label.startswith(DEGREE_ROW) and row.throughput_qps]
    best = max(rows, key=lambda row: row.throughput_qps or 0.0, default=None)
    if best is None or not best.throughput_qps:
        return plan
    degree = best.label.removeprefix(DEGREE_ROW).partition(":")[0]
    lost = 1 - best.throughput_qps / estimate.figures.throughput_qps
    return f"{plan} (degree {degree}, the next best, would lose {lost:.1%})"


def _queries(count: int) -> str:
    return "one query is" if count == 1 else f"{count} queries are"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


# --- what binds -------------------------------------------------------------------------------


def _what_binds(schedule: Schedule, problem: Problem, timing: TimingSource | None,
                limit_s: float) -> str:
    estimate = schedule.estimate
    used = [_latency_used(schedule, limit_s), f"{_memory_share(estimate):.0%} of the memory of the "
                                              "fullest device"]
    state = f"the schedule uses {_and([words for words in used if words])}"
    binding = (binding_limits(schedule, problem, limit_s) if timing is None
               else next_batch_breaks(schedule, problem, timing, limit_s))
    if binding:
        words = f"{_and(binding)} {'binds' if len(binding) == 1 else 'bind'}"
        proof = ": one query more in the encode batch would not be admissible" if timing else ""
        return f"{words[0].upper()}{words[1:]}{proof} ({state})"
    if timing is None:
        return f"No limit is reached within {FULL:.0%}: {state}"
    return ("No limit binds: one query more in the encode batch would be admissible but not bring "
            f"more, the devices are as busy as batches make them ({state})")


def binding_limits(schedule: Schedule, problem: Problem, limit_s: float) -> list[str]:
    """Limits that are reached, by what is left of each: less than FULL, or (memory, number of
    queries) less than another query of the encode batch takes in the mean."""
    estimate = schedule.estimate
    found = []
    if estimate.figures.latency_s > limit_s * (1 - FULL):
        found.append(_BINDING[Limit.LATENCY])
    if _next_memory(estimate, problem) > estimate.figures.memory_capacity_bytes * (1 - FULL):
        found.append(_BINDING[Limit.MEMORY])
    present = max(estimate.figures.decode_batch, float(max_in_system(estimate.controls)))
    if problem.num_queries is not None and (
            present + present / estimate.figures.encode_batch > problem.num_queries):
        found.append(_BINDING[Limit.QUERIES])
    return found


def next_batch_breaks(schedule: Schedule, problem: Problem, timing: TimingSource,
                      limit_s: float) -> list[str]:
    """Limits that the same schedule with one query more in each encode batch does not keep."""
    estimate = schedule.estimate
    config, _ = make_config(estimate.policy, estimate)
    assert config is not None, f"{estimate.policy = }"
    closed_form = make_policy(estimate.policy, problem, timing)
    larger = replace(config, encode_batch=config.encode_batch + 1)
    arrays: Any = closed_form.evaluate([larger])
    arrays = replace(arrays, fits=arrays.memory_bytes <= estimate.figures.memory_capacity_bytes)
    broken = breaches(arrays, Limits(queries=problem.num_queries or math.inf, latency_s=limit_s))
    return [words for limit, words in _BINDING.items() if broken[limit][0]]


def _next_memory(estimate: Estimate, problem: Problem) -> float:
    """Bytes on the fullest rank if what is not weights grew by one query's part of the batch."""
    fullest = max(estimate.figures.memory_bytes)
    rank = estimate.figures.memory_bytes.index(fullest)
    weights = 0.0
    for role in dict.fromkeys(stage.role for stage in estimate.deployment.stages):
        pool = [stage for stage in estimate.deployment.stages if stage.role == role]
        sizes = memory.weight_bytes(problem.model, pool, problem.dtype)
        weights += sum(float(size) for stage, size in zip(pool, sizes, strict=True)
                       if rank in stage.ranks)
    return fullest + max(fullest - weights, 0.0) / estimate.figures.encode_batch


def _latency_used(schedule: Schedule, limit_s: float) -> str:
    estimate, bound_s = schedule.estimate, schedule.bound.limit_s
    if math.isinf(bound_s):
        return ""
    margin = f" ({format_seconds(limit_s)} with its margin)" if limit_s < bound_s else ""
    return (f"{estimate.figures.latency_s:.4g} s of the bound of "
            f"{format_seconds(bound_s)}{margin}, "
            f"{estimate.figures.latency_s / bound_s:.1%}")


def _memory_share(estimate: Estimate) -> float:
    return max(estimate.figures.memory_bytes) / estimate.figures.memory_capacity_bytes


def _cost_of_bound(schedule: Schedule) -> str:
    if math.isinf(schedule.bound.limit_s):
        return "; there is no latency bound"
    free = schedule.proof.unbounded_qps
    if free is None:
        return ""
    lost = 1 - schedule.estimate.figures.throughput_qps / free
    if lost < FULL / 2:
        return f"; without a latency bound it would be no more than {free:.4g} queries/s"
    row = next((row for row in schedule.rejected if row.label.startswith(FREE_ROW)), None)
    at = "" if row is None or row.latency_s is None else f" at {format_seconds(row.latency_s)}"
    return (f"; the bound costs {lost:.0%} of the {free:.4g} queries/s that there would be without "
            f"one{at}")


def _and(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
