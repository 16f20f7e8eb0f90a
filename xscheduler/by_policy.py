"""The best schedule that keeps its bound with its margin, looked for policy by policy.

Margins belong to schedules, and those of one policy may be much larger than another's: where the
best without a margin has a large one, another policy may be better under the same bound, safe at a
target at which the first is not. So each policy is planned for alone, those first that promise
most, and one whose bound is no higher than what is had with its margin is not looked into."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from xgpt.core.errors import InfeasibleError
from xgpt.core.schedule import Schedule
from xscheduler.within import PlannedWithin


def plan_by_policy(free: Schedule, plan: Callable[[str, float], PlannedWithin], *, gap: float,
                   floor_qps: float = 0.0,
                   cuts: Callable[[], bool] = lambda: False) -> PlannedWithin:
    """The best over all policies, else what comes nearest to keeping the bound. Raises
    InfeasibleError where no policy has anything.

    free: the best of any policy without a margin, with what none of each policy exceeds. plan: the
    best of one policy with its margin, by its name; what is no better than the floor, in queries/s,
    need not be looked into; raises InfeasibleError. gap: share by which a policy must be able to be
    better. floor_qps: had elsewhere. cuts: whether a safe schedule is to be left at that."""
    first, bounds = free.estimate.policy, dict(free.proof.policy_bounds)
    found: list[PlannedWithin] = []
    refusals: list[InfeasibleError] = []
    for name in (first, *(name for name in bounds if name != first)):
        if name != first and bounds[name] <= floor_qps * (1 + gap):
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
            if planned.schedule.estimate == free.estimate or cuts():
                break
    if not found:
        raise refusals[0]
    return replace(max(found, key=PlannedWithin.rank), free=free)
