"""One number of copies of the model under one latency bound: at first sight, searched, and why it
has no schedule."""

from __future__ import annotations

from collections.abc import Sequence

from xgpt.core.errors import BeatenError, InfeasibleError, InputError
from xgpt.core.schedule import Schedule, Status
from xscheduler.copies import has_room
from xscheduler.copies_shown import NO_ROOM, Looked, found_qps
from xscheduler.copy_planner import CopyPlanner


def glance_at(planner: CopyPlanner, latency_bound_s: float, floor_qps: float) -> Looked:
    """One number of copies on one part at first sight."""
    if planner.problem.copies > 1 and not has_room(planner.problem):
        return Looked(planner, None, 0.0, InfeasibleError(NO_ROOM))
    try:
        found = planner.own.glance(latency_bound_s, floor_qps)
    except BeatenError as unseen:
        return Looked(planner, None, unseen.upper_qps)
    except (InfeasibleError, InputError) as refusal:
        return Looked(planner, None, 0.0, refusal)
    return Looked(planner, found, _most_qps(found))


def searched(glanced: Looked, latency_bound_s: float, floor_qps: float) -> Looked:
    """The same searched for what is better than the floor."""
    try:
        found = glanced.planner.own.find(latency_bound_s, floor_qps)
    except BeatenError as beaten:
        return glanced._replace(upper_qps=min(glanced.upper_qps, beaten.upper_qps))
    except (InfeasibleError, InputError) as refusal:
        return Looked(glanced.planner, None, 0.0, refusal)
    best = found if found.figures.throughput_qps >= found_qps(glanced) else glanced.found
    return glanced._replace(found=best, upper_qps=min(glanced.upper_qps, _most_qps(found)),
                            is_limited=found.proof.status == Status.LIMIT)


def _most_qps(found: Schedule) -> float:
    """What no schedule of so many copies exceeds; of a policy without a space what was found,
    for nothing is proved of that."""
    proof = found.proof
    return found.figures.throughput_qps if proof.status == Status.GRID else proof.bound_qps


def look_at(parts: Sequence[CopyPlanner], latency_bound_s: float) -> Looked:
    """One number of copies on the largest part on which there is a schedule."""
    refused: list[Looked] = []
    for place, planner in enumerate(parts):
        if planner.problem.copies > 1 and not has_room(planner.problem):
            break  # nor on smaller ones
        try:
            if place:  # a smaller part is looked into where something is seen at first
                planner.own.glance(latency_bound_s, 0.0)
            found = planner.own.find(latency_bound_s)
        except (InfeasibleError, InputError) as refusal:
            refused.append(Looked(planner, None, 0.0, refusal))
        else:
            return Looked(planner, found, _most_qps(found),
                           is_limited=found.proof.status == Status.LIMIT)
    infeasible = [one for one in refused if isinstance(one.refusal, InfeasibleError)]
    if refused:  # what could be had says more than that nothing can be laid out on a larger part
        return (infeasible or refused)[0]
    return Looked(parts[0], None, 0.0, InfeasibleError(
        NO_ROOM))


def refusal_of(looked: Sequence[Looked]) -> InfeasibleError | InputError:
    """Of numbers of copies that all have no schedule: the tightest latency that any can keep, else
    what is in the way of the fewest."""
    infeasible = [one for one in looked if isinstance(one.refusal, InfeasibleError)]
    tightest = min(reversed(infeasible), default=None, key=lambda one: (
        one.refusal.tightest_s if isinstance(one.refusal, InfeasibleError) else 0.0))
    refusal = looked[-1].refusal if tightest is None else tightest.refusal
    assert refusal is not None, f"{looked = }"
    if tightest is None or (problem := tightest.planner.problem).copies == 1 and (
            problem.cluster.num_devices == max(
                one.planner.problem.cluster.num_devices for one in looked)):
        return refusal
    assert isinstance(refusal, InfeasibleError)
    copies, devices = problem.copies, problem.cluster.num_devices
    on = f"{devices} device{'s' * (devices != 1)}"
    where = f"in each of {copies} copies of the model, on {on} each" if copies > 1 else (
        f"in a copy of the model on {on}")
    return InfeasibleError(f"{refusal} ({where})", refusal.tightest_s)
