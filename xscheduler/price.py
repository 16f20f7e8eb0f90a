"""Gain from relaxing each limit a little. Each answer comes from a search of its own.

    latency   a 10 % longer limit (only if there is one)
    devices   one more GPU in a cluster of one node, else one more node
    memory    10 % more on every device

An offer without a gain says why. If the problem has no schedule, the offers say which limit
prevents one."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from xgpt.core.errors import InfeasibleError, InputError
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate, Schedule, devices_of_copies, devices_sum
from xgpt.core.units import format_bytes, format_seconds
from xscheduler.space import NOTHING
from xsimulator.memory import capacity_bytes

STEP = 0.1  # chosen: share by which a limit is relaxed
VARIABLES = ("replicas", "policy", "encode_batch", "decode_iterations", "decode_micro_batches",
             "tp_degree", "tp_gpus")
Find = Callable[[Problem], Schedule]
UNCHANGED = "as it is"  # the offer that says why there is no schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A control variable that differs between two schedules."""

    variable: str
    old: str | int
    new: str | int

    def __str__(self) -> str:
        return f"{self.variable} {self.old} -> {self.new}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """The outcome of one relaxed limit. throughput_qps None: no schedule, or not searched. gain
    None: nothing to compare with. reason: why there is no gain; None if there is one."""

    what: str
    throughput_qps: float | None = None
    gain: float | None = None  # share of the base's throughput; below 0 where it would cost
    changes: tuple[Change, ...] = ()  # of the control variables, against the base
    reason: str | None = None

    @property
    def sentence(self) -> str:
        """The offer in words."""
        if self.throughput_qps is None:
            return f"{self.what}: {self.reason}"
        offered = f"{self.what}: {self.throughput_qps:.4g} requests/s"
        if self.gain is None:
            return f"{offered}; without it there is no schedule"
        changed = f" ({', '.join(map(str, self.changes))})" if self.changes else ""
        return f"{offered}, {self.gain:+.1%}{changed}{f'; {self.reason}' if self.reason else ''}"


def price(problem: Problem, find: Find) -> tuple[Offer, ...]:
    """The offers for latency, devices and memory, in this order. find: returns the steady-state
    schedule of a problem like this one (a planner's `of`); raises InfeasibleError."""
    base, offers = None, []
    try:
        base = find(problem)
    except InfeasibleError as cause:  # names the limit, and the tightest that can be kept
        offers.append(Offer(what=UNCHANGED, reason=str(cause)))
    return (*offers, *(Offer(what=what, reason=changed) if isinstance(changed, str) else
                       _offer(what, problem, changed, find, base)
                       for what, changed in _relaxed(problem)))


def _relaxed(problem: Problem) -> list[tuple[str, Problem | str]]:
    """(words, problem with one limit relaxed or why it is not offered) for each limit."""
    constraint, cluster = problem.constraint, problem.cluster
    relaxed: list[tuple[str, Problem | str]] = []
    if not math.isinf(constraint.latency_s):
        later = constraint.latency_s * (1 + STEP)
        relaxed.append((f"{STEP:.0%} more latency ({format_seconds(later)})", replace(
            problem, constraint=constraint.with_latency(limit_s=later))))
    if cluster.device.kind == "cpu":
        relaxed.append(("one more device", (
            "not offered: the workers share this machine's cores, one more would have to take its "
            "cores from the others")))
    elif cluster.num_nodes == 1:
        relaxed.append((f"one more GPU ({cluster.num_devices + 1})", replace(
            problem, cluster=replace(cluster, devices_per_node=cluster.devices_per_node + 1))))
    else:
        more = replace(cluster, num_nodes=cluster.num_nodes + 1)
        relaxed.append((f"one more node ({more.num_devices} GPUs)", replace(problem, cluster=more)))
    device = replace(cluster.device, memory_bytes=round(cluster.device.memory_bytes * (1 + STEP)))
    room = format_bytes(capacity_bytes(device))
    relaxed.append((f"{STEP:.0%} more memory ({room} per rank)", replace(
        problem, cluster=replace(cluster, device=device))))
    return relaxed


def _offer(what: str, problem: Problem, changed: Problem, find: Find,
           base: Schedule | None) -> Offer:
    try:
        estimate = find(changed).estimate
    except InfeasibleError as cause:
        either = "no schedule then either: " if base is None else ""
        return Offer(what=what, reason=f"{either}{cause}")
    except InputError as cause:  # the job fixes values that the changed cluster excludes
        return Offer(what=what, reason="; ".join(mistake.allowed for mistake in cause.mistakes))
    qps = estimate.figures.throughput_qps
    if base is None:
        return Offer(what=what, throughput_qps=qps)
    gain = qps / base.figures.throughput_qps - 1
    return Offer(what=what, throughput_qps=qps, gain=gain, changes=changes(base.estimate, estimate),
                 reason=_why_nothing(gain, problem, changed, base))


def changes(old: Estimate, new: Estimate) -> tuple[Change, ...]:
    """The control variables in which two estimates differ."""
    before, after = (_variables(estimate) for estimate in (old, new))
    pairs = ((name, before[name], after[name]) for name in VARIABLES)
    if old.others or new.others:
        pairs = ((name, devices_sum(devices_of_copies(a)), devices_sum(devices_of_copies(b)))
                 for name, a, b in [("replicas on", old, new)])
    return tuple(Change(variable=name, old=a, new=b) for name, a, b in pairs if a != b)


def _variables(estimate: Estimate) -> dict[str, Any]:
    """{name: value} of VARIABLES; a variable that the policy lacks has an equivalent value."""
    deployment, figures = estimate.deployment, estimate.figures
    return {"replicas": deployment.replicas, "encode_batch": figures.encode_batch,
            "decode_iterations": figures.decode_iterations,
            "decode_micro_batches": deployment.num_groups, **estimate.variables}


def _why_nothing(gain: float, problem: Problem, changed: Problem,
                 base: Schedule) -> str | None:
    if gain > NOTHING:
        return None
    figures, limit_s = base.figures, base.bound.limit_s
    if changed.cluster.num_devices != problem.cluster.num_devices:
        if base.deployment.replicas > 1:
            each = base.deployment.devices_per_replica
            return f"it would idle: a replica takes {each}, and larger replicas bring no more"
        return ("all devices must be used, and the layers do not divide as well over these"
                if gain < -NOTHING else "the time of a stage does not fall: its layers do not "
                                        "divide, or its collectives grow")
    share = max(figures.memory_bytes) / figures.memory_capacity_bytes
    used = f"{share:.0%} of the fullest device's"
    if changed.constraint.latency_s > limit_s:
        return (f"no gain from that alone: {figures.latency_s / limit_s:.0%} of the limit is "
                f"used, and {used} memory")
    return f"no gain from that alone: {used} is used"
