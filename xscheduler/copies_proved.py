"""What is proved of a schedule over all numbers of copies of the model."""

from __future__ import annotations

from collections.abc import Sequence

from xgpt.core.schedule import Schedule, Status
from xscheduler.copies_shown import Looked, found_qps
from xscheduler.within import PlannedWithin

_CLOSED = 1e-9  # share by which a bound may exceed the throughput it proves, by rounding


def proved_again(looked: Looked, planned: PlannedWithin) -> Looked:
    """What a number of copies was proved to have, with what the search of the policy that was
    planned there has proved of that policy: it is to a narrower gap. (Of further bounds, which
    that search may have tightened, it says nothing.)"""
    found, schedule = looked.found, planned.schedule
    bounds = {} if found is None else dict(found.proof.policy_bounds)
    name = schedule.estimate.policy
    if found is None or name not in bounds or len(looked.planner.problem.constraint.bounds) > 1:
        return looked
    bounds[name] = min(bounds[name], schedule.proof.bound_qps)
    return looked._replace(upper_qps=min(looked.upper_qps, max(bounds.values())),
                           found=found.changed(policy_bounds=tuple(bounds.items())))


def certified(schedule: Schedule, looked: Sequence[Looked], *, is_cut: bool) -> Schedule:
    """The schedule with what was proved over all numbers of copies. is_cut: by the clock."""
    qps, upper_qps = schedule.figures.throughput_qps, max(one.upper_qps for one in looked)
    status = schedule.proof.status
    if status == Status.GRID:  # of which nothing is proved
        return schedule
    if is_cut or any(one.is_limited for one in looked):
        status = Status.LIMIT
    elif status in (Status.OPTIMAL, Status.WITHIN_GAP):
        status = Status.OPTIMAL if upper_qps <= qps * (1 + _CLOSED) else Status.WITHIN_GAP
    bare_qps = max(map(found_qps, looked)) if schedule.margin.cost > 0 else None
    return schedule.changed(status=status, bound_qps=upper_qps, gap=max(upper_qps / qps - 1, 0.0),
                            bare_qps=bare_qps,
                            policy_bounds=_policy_bounds(looked))


def _policy_bounds(looked: Sequence[Looked]) -> tuple[tuple[str, float], ...]:
    """What no configuration of each policy exceeds at any number of copies, the highest first."""
    bounds: dict[str, float] = {}
    for one in looked:
        for name, bound_qps in () if one.found is None else one.found.proof.policy_bounds:
            bounds[name] = max(bounds.get(name, 0.0), min(bound_qps, one.upper_qps))
    unseen_qps = max((one.upper_qps for one in looked if one.found is None), default=0.0)
    return tuple(sorted(((name, max(bound_qps, unseen_qps)) for name, bound_qps in bounds.items()),
                        key=lambda pair: -pair[1]))
