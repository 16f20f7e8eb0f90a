"""The best schedule that keeps its bound with its margin, looked for policy by policy.

Margins belong to schedules, and those of one policy may be much larger than another's: where the
best without a margin has a large one, another policy may be better under the same bound, safe at a
target at which the first is not. So each policy is planned for alone, those first that promise
most with their margin before a replay, which costs more than a search: one whose bound is no higher
than what is had with its margin is not looked into, nor one replayed that promises no more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from xgpt.core.errors import BeatenError, InfeasibleError
from xgpt.core.schedule import Schedule
from xscheduler.within import PlannedWithin


def plan_by_policy(free: Schedule, plan: Callable[[str, float], PlannedWithin], *,
                   promise: Callable[[str, float], float], gap: float, floor_qps: float = 0.0,
                   is_first: bool = False,
                   cuts: Callable[[], bool] = lambda: False) -> PlannedWithin:
    """The best over all policies, else what comes nearest to keeping the bound. Raises
    InfeasibleError where no policy has anything.

    free: the best of any policy with no margin of its own, with what none of each policy exceeds.
    plan: the best of one policy with its margin, by its name; what is no better than the floor, in
    queries/s, need not be looked into; raises InfeasibleError. promise: the throughput that one may
    have with its margin, by its name, 0 where that is no better than a floor. gap: share by which a
    policy must be able to be better. is_first: `free` was searched for to a wider gap than `plan`
    searches. floor_qps: had elsewhere. cuts: whether a safe schedule is to
    be left at that."""
    bounds = dict(free.proof.policy_bounds)
    found: list[PlannedWithin] = []
    refusals: list[InfeasibleError] = []
    for place, name in enumerate(_in_turn(free, promise, gap, floor_qps)):
        if place and bounds.get(name, 0.0) <= floor_qps * (1 + gap):
            continue
        try:
            planned = plan(name, floor_qps)
        except InfeasibleError as refusal:
            refusals.append(refusal)
            continue
        found.append(planned)
        if planned.is_safe:
            floor_qps = max(floor_qps, planned.schedule.figures.throughput_qps)
            # of the best without a margin nothing is lost
            if (planned.schedule.estimate == free.estimate and not is_first) or cuts():
                break
    if not found:
        raise refusals[0] if refusals else BeatenError(free.proof.bound_qps)
    return replace(max(found, key=PlannedWithin.rank), free=free)


def _in_turn(free: Schedule, promise: Callable[[str, float], float], gap: float,
             floor_qps: float) -> list[str]:
    """The policies by what they promise; of those that promise nothing the best without a margin
    comes first. Above a floor there are those alone that promise something."""
    first, bounds = free.estimate.policy, dict(free.proof.policy_bounds)
    names = [first, *(name for name in bounds if name != first)]
    promised: dict[str, float] = {}
    if floor_qps:
        promised = {name: promise(name, floor_qps) for name in names
                    if name == first or bounds[name] > floor_qps * (1 + gap)}
        return sorted((name for name, qps in promised.items() if qps), key=lambda name: (
            -promised[name]))
    for name in names if len(names) > 1 else ():
        most = max(promised.values(), default=0.0)
        if most >= free.figures.throughput_qps:  # nothing has more
            break
        if name == first or bounds[name] > most * (1 + gap):
            promised[name] = promise(name, most)
    return sorted(names, key=lambda name: -promised.get(name, 0.0))
