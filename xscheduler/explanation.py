"""Reasons for a schedule, in three sentences like the case study of the paper's Table 6: the
policy, the control variables, the binding limits and the cost of the latency limit."""

import math
from collections.abc import Sequence

from xgpt.core.cluster import Cluster
from xgpt.core.controls import ContinuousControls, RraControls, StaticControls, max_in_system
from xgpt.core.deployment import Pool
from xgpt.core.policies import policy
from xgpt.core.problem import Problem
from xgpt.core.schedule import NOT_SURE, Estimate, Rejected, Schedule
from xgpt.core.units import format_seconds
from xscheduler.admission_choice import room_words
from xscheduler.space import LEAST_GAIN, NOTHING
from xsimulator import memory

LATENCY = "the latency limit"


def explain_choice(schedule: Schedule, problem: Problem, *,
                   latency_limit_s: float | None = None) -> tuple[str, str, str]:
    """(reason for the policy, reason for the control variables, binding limits and cost of the
    latency limit), in words. latency_limit_s: the limit divided by the margin; None: the limit."""
    limit_s = schedule.bound.limit_s if latency_limit_s is None else latency_limit_s
    return (_why_policy(schedule, problem),
            _why_variables(schedule, problem) + _numbering(problem.cluster),
            f"{_what_binds(schedule, problem, limit_s)}{_cost_of_bound(schedule)}.")


def _why_policy(schedule: Schedule, problem: Problem) -> str:
    own_qps = schedule.figures.throughput_qps
    start = f"{policy(schedule.estimate.policy).title} ({_how(schedule)})"
    rows = [row for row in schedule.rejected if row.kind == "policy"]
    if not rows:
        return (f"{start}: the job fixes the policy." if problem.fixed.policy is not None else
                f"{start}: no other policy was compared.")
    others = sorted(rows, key=lambda row: -(row.throughput_qps or 0.0))
    slower = [_compared(schedule, row) for row in others if row.throughput_qps]
    absent = [policy(row.subject).title for row in others if not row.throughput_qps]
    none = "" if not absent else (
        f"{_and(absent)} {'have' if absent[1:] else 'has'} no schedule within the limits")
    if not slower:
        return f"{start} is the only policy that can be used: {none}."
    answers = f"{start} answers {own_qps:.4g} requests/s in steady state"
    return f"{answers}; {_and(slower)}{f'; {none}' if none else ''}."


def _how(schedule: Schedule) -> str:
    """The work of the devices under the policy, in words."""
    deployment, figures = schedule.deployment, schedule.figures
    if isinstance(schedule.controls, ContinuousControls):
        return policy(schedule.controls.policy).words.rpartition(": ")[2]
    if isinstance(schedule.controls, StaticControls):
        return ("every device works a batch until its longest request is done, encoding for "
                f"{figures.encode_s / figures.period_s:.0%} of the time")
    chunk = getattr(schedule.controls, "encode_chunk", 0)
    if chunk and len(deployment.pools) == 1:
        return "every device encodes beside decoding, so that no iteration waits for an encoding"
    if len(deployment.pools) == 1:
        return ("every device encodes and decodes in turn, encoding for "
                f"{figures.encode_s / figures.period_s:.0%} of the time")
    encode = deployment.encoding.num_devices
    return (f"{encode} device{'s' * (encode != 1)} encode{'s' * (encode == 1)} while "
            f"{deployment.decoding.num_devices} decode"
            f"{', and encode what those cannot' if chunk else ''}, so that no iteration waits for "
            "an encoding")


def _compared(schedule: Schedule, row: Rejected) -> str:
    assert row.throughput_qps
    title, qps = policy(row.subject).title, row.throughput_qps
    most = schedule.proof.left_open(row.subject, qps)
    if row.is_unsure:
        return f"{title} {qps:.4g} ({row.words}; {NOT_SURE})"
    if most is not None:  # its search ended early, since it cannot win: a range, no percentage
        return f"{title} between {qps:.4g} ({row.words}) and {most:.4g}"
    return f"{title} {qps:.4g} ({row.words})"


def _why_variables(schedule: Schedule, problem: Problem) -> str:
    batch, decoding = schedule.figures.encode_batch, f"{schedule.figures.decode_batch:.0f} decoding"
    requests = "one request is" if batch == 1 else f"{batch} requests are"
    if isinstance(schedule.controls, RraControls):
        iterations = schedule.figures.decode_iterations
        every = "iteration" if iterations == 1 else f"{iterations} iterations"
        if chunk := schedule.controls.encode_chunk:
            work = (f"{requests} encoded every {every}, in chunks of at most {chunk} tokens beside "
                    f"decoding, which keeps {decoding}")
        else:
            work = (f"{requests} encoded{'' if batch == 1 else ' together'} once every {every}, "
                    f"which keeps {decoding} when a phase begins")
    elif isinstance(controls := schedule.controls, ContinuousControls):
        budget = controls.token_budget
        work = (f"up to {controls.max_active} requests are active at a time, {decoding}"
                f"{f', in steps of at most {budget} tokens' if budget else ''}")
    elif isinstance(controls, StaticControls):
        steps = controls.encode_micro_batches
        parts = f" in {steps} steps" if steps > 1 else ""
        work = f"{requests} encoded{parts}, then decoded together"
    else:
        work = f"{requests} encoded at a time, which keeps {decoding}"
        if chunk := getattr(controls, "encode_chunk", 0):
            work = (f"{requests} encoded at a time, and up to {chunk} tokens beside decoding while "
                    f"fewer than planned decode, which keeps {decoding}")
    room = room_words(schedule.estimate, problem)
    why = f" The KV cache holds {room}: not all are at their longest together." if room else ""
    return (f"{work[0].upper()}{work[1:]}; {_groups(schedule.deployment.decoding)}; "
            f"{_tensor_plan(schedule)}.{why}")


def _numbering(cluster: Cluster) -> str:
    """The devices that the ranks are on, in words; "" if all are linked alike."""
    if cluster.island_link is None:
        return ""
    return (f" Groups and stages are on the devices that {cluster.island_link.name} joins where "
            "they can.")


def _groups(decoding: Pool) -> str:
    count, groups = len(decoding.stages), decoding.num_groups
    if groups < count:
        # a group is on one stage at a time, so that the other stages have no work
        return (f"{_counted(groups, 'group')} on {_counted(count, 'decoding stage')}: "
                f"{1 - groups / count:.0%} of the stages idle, for fewer, larger steps")
    more = groups - count
    waiting = f", {more} more wait{'s its' if more == 1 else ' their'} turn" if more else ""
    return f"one group for each of {_counted(count, 'decoding stage')}{waiting}"


def _tensor_plan(schedule: Schedule) -> str:
    deployment, figures = schedule.deployment, schedule.figures
    held = [stage.num_layers + stage.num_encoder_layers for stage in deployment.stages]
    stages = _counted(len(held), "stage")
    plan = (f"no tensor parallelism: {stages} of one device" if deployment.tp_degree == 1 else
            f"tensor parallelism in groups of {deployment.tp_degree} on {deployment.tp_gpus} of "
            f"{len(figures.memory_bytes)} devices: {stages}")
    layers = f"{min(held)}" if min(held) == max(held) else f"{min(held)} to {max(held)}"
    plan = f"{plan}, {layers} layers each"
    qps, best = max(((row.throughput_qps, row) for row in schedule.rejected
                     if row.kind == "tp_degree" and row.throughput_qps),
                    key=lambda pair: pair[0], default=(0.0, None))
    if best is None:
        return plan
    lost = 1 - qps / figures.throughput_qps
    return f"{plan} (degree {best.subject}, the next best, would lose {lost:.1%})"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def _what_binds(schedule: Schedule, problem: Problem, limit_s: float) -> str:
    figures = schedule.figures
    share = max(figures.memory_bytes) / figures.memory_capacity_bytes
    used = [_latency_used(schedule, limit_s), f"{share:.0%} of the memory of the fullest device"]
    state = f"the schedule uses {_and([words for words in used if words])}"
    binding = binding_limits(schedule, problem, limit_s)
    is_free = LATENCY in binding and _costs_nothing(schedule)
    if is_free:  # a limit that is reached, and without which nothing would be faster
        binding = [limit for limit in binding if limit != LATENCY]
    if binding:
        aside = f"; {LATENCY} is reached, too, and costs nothing" if is_free else ""
        return f"Throughput is bound by {_and(binding)}{aside} ({state})"
    if is_free:
        return f"{LATENCY[0].upper()}{LATENCY[1:]} is reached, but costs nothing ({state})"
    return f"No limit is reached within {LEAST_GAIN:.0%}: {state}"


def _costs_nothing(schedule: Schedule) -> bool:
    """Whether a schedule without the limit is at most NOTHING faster."""
    free = schedule.proof.unbounded_qps
    return free is not None and 1 - schedule.figures.throughput_qps / free < NOTHING


def binding_limits(schedule: Schedule, problem: Problem, limit_s: float) -> list[str]:
    """The limits that are reached. Of the latency limit less than LEAST_GAIN is left; of memory and
    of the number of requests, less than one more request of the encode batch takes."""
    figures = schedule.figures
    present = max(figures.decode_batch, float(max_in_system(schedule.controls)))
    is_reached = {
        LATENCY: figures.latency_s > limit_s * (1 - LEAST_GAIN),
        "memory": _next_memory(schedule.estimate, problem) > (
            figures.memory_capacity_bytes * (1 - LEAST_GAIN)),
        "the number of requests": problem.num_queries is not None and (
            present + present / figures.encode_batch > problem.num_queries)}
    return [limit for limit, reached in is_reached.items() if reached]


def _next_memory(estimate: Estimate, problem: Problem) -> float:
    """Bytes on the fullest rank with one more request in the encode batch."""
    fullest = max(estimate.figures.memory_bytes)
    rank = estimate.figures.memory_bytes.index(fullest)
    weights = sum(
        float(size) for pool in estimate.deployment.pools for stage, size in zip(
            pool.stages, memory.weight_bytes(problem.model, pool.stages, problem.dtype,
                                             problem.weight_dtype), strict=True)
        if rank in stage.ranks)
    return fullest + max(fullest - weights, 0.0) / estimate.figures.encode_batch


def _latency_used(schedule: Schedule, limit_s: float) -> str:
    latency_s, bound_s = schedule.figures.latency_s, schedule.bound.limit_s
    if math.isinf(bound_s):
        return ""
    margin = f" ({format_seconds(limit_s)} with its margin)" if limit_s < bound_s else ""
    return (f"{latency_s:.4g} s of the limit of {format_seconds(bound_s)}{margin}, "
            f"{latency_s / bound_s:.1%}")


def _cost_of_bound(schedule: Schedule) -> str:
    if math.isinf(schedule.bound.limit_s):
        return "; there is no latency limit"
    free = schedule.proof.unbounded_qps
    if free is None:
        return ""
    if _costs_nothing(schedule):
        return f"; without a latency limit it would be no more than {free:.4g} requests/s"
    row = next((row for row in schedule.rejected if row.kind == "without a latency bound"), None)
    at = "" if row is None or row.latency_s is None else f" at {format_seconds(row.latency_s)}"
    lost = 1 - schedule.figures.throughput_qps / free
    return f"; the limit costs {lost:.0%} of the {free:.4g} requests/s without one{at}"


def _and(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
