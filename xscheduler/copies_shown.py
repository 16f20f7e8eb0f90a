"""What is shown of several numbers of copies of the model: each one's best, the best of each policy
at any number, and why there are so many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from xgpt.core.errors import BeatenError, InfeasibleError, InputError
from xgpt.core.policies import policy
from xgpt.core.schedule import CopiesTried, Estimate, Rejected, Schedule
from xscheduler.alternatives import (
    NOT_LOOKED_INTO,
    PAPERS_ROW,
    POLICY_ROW,
    not_looked_into,
    why_not,
)
from xscheduler.copy_planner import CopyPlanner
from xscheduler.within import PlannedWithin

NO_ROOM = "the weights alone are more than the devices of a copy hold"


class Looked(NamedTuple):
    """What one number of copies comes to under a bound. `found` None: nothing that is better than
    what others have, or nothing at all (`refusal`)."""

    planner: CopyPlanner
    found: Schedule | None
    upper_qps: float
    refusal: InfeasibleError | InputError | None = None
    is_limited: bool = False  # the search was ended by its limit


def found_qps(one: Looked) -> float:
    return 0.0 if one.found is None else one.found.figures.throughput_qps


def tried_row(one: Looked, planned: PlannedWithin | InfeasibleError | None) -> CopiesTried:
    """One number of copies as it is shown; with its margin where that was asked for."""
    problem, found = one.planner.problem, one.found
    words = "nothing better was found"
    if isinstance(planned, PlannedWithin):
        found = planned.schedule
    elif planned is not None and not isinstance(planned, BeatenError):
        found, words = None, "no schedule keeps the bound with its margin"
    elif one.refusal is not None:
        words = _short(one.refusal)
    return CopiesTried(
        replicas=problem.copies, devices_per_replica=problem.cluster.num_devices,
        throughput_qps=None if found is None else found.figures.throughput_qps,
        latency_s=None if found is None else found.figures.latency_s,
        bound_qps=one.upper_qps, words=words if found is None else configuration(found.estimate))


def beside_policies(schedule: Schedule, looked: Sequence[Looked]) -> Schedule:
    """The schedule beside the best of each other policy at whatever number of copies."""
    best = {_policy_of(row): row for row in schedule.rejected
            if row.label.startswith(POLICY_ROW) and row.throughput_qps}
    for one in looked:
        copies = one.planner.problem.copies
        if one.found is None or _is_of(schedule, one):
            continue
        for row in (*one.found.rejected, _as_row(one.found)):
            name, qps = _policy_of(row), row.throughput_qps
            if row.label.startswith(POLICY_ROW) and qps and name != schedule.estimate.policy and (
                    name not in best or qps > (best[name].throughput_qps or 0.0)):
                best[name] = replace(
                    row, reason=why_not(qps, schedule.figures.throughput_qps),
                    label=f"{POLICY_ROW}{name}: {copies} cop{'y' if copies == 1 else 'ies'}, "
                          f"{row.label.partition(': ')[2]}")
    others = [row for row in schedule.rejected
              if not (row.label.startswith(POLICY_ROW) and _policy_of(row) in best)]
    told = {schedule.estimate.policy, *best, *map(_policy_of, others)}
    unseen = {_policy_of(row): row for one in looked if one.found is not None
              for row in one.found.rejected
              if row.label.startswith(POLICY_ROW) and _policy_of(row) not in told}
    rows = (*best.values(), *unseen.values(), *others)
    return schedule.changed(rejected=tuple(_at_any_number(row, schedule) for row in rows))


def _at_any_number(row: Rejected, schedule: Schedule) -> Rejected:
    """A policy that was not looked into for the copies chosen, with what was proved of it for all
    numbers: of those alone, or under the bound that a margin leaves, it may have been less."""
    is_policy = row.label.startswith(POLICY_ROW) and row.reason.startswith(NOT_LOOKED_INTO)
    most_qps = dict(schedule.proof.policy_bounds).get(_policy_of(row)) if is_policy else None
    return row if most_qps is None else replace(row, reason=not_looked_into(most_qps))


def beside_papers_own(schedule: Schedule) -> Schedule:
    """The row on the paper's own policies, where the schedule is by another, says their best at any
    number of copies. The rows on policies do so already."""
    papers = [row for row in schedule.rejected if row.label.startswith(POLICY_ROW)
              and row.throughput_qps and policy(_policy_of(row)).is_papers]
    if policy(schedule.estimate.policy).is_papers or not papers:
        return schedule
    best = max(papers, key=lambda row: row.throughput_qps or 0.0)
    qps, own_qps = best.throughput_qps or 0.0, schedule.figures.throughput_qps
    most = max((bound for name, bound in schedule.proof.policy_bounds
                if policy(name).is_papers), default=qps)
    words = best.label.removeprefix(POLICY_ROW).replace(": ", ", ", 1)
    row = replace(best, label=f"{PAPERS_ROW}: {words}",
                  reason=why_not(qps, own_qps, max(most, qps)))
    others = [one for one in schedule.rejected if not one.label.startswith(PAPERS_ROW)]
    place = 1 + max(k for k, one in enumerate(others) if one.label.startswith(POLICY_ROW))
    return schedule.changed(rejected=(*others[:place], row, *others[place:]))


def _policy_of(row: Rejected) -> str:
    return row.label.removeprefix(POLICY_ROW).partition(":")[0]


def _as_row(found: Schedule) -> Rejected:
    name, _, words = configuration(found.estimate).partition(", ")
    return Rejected(label=f"{POLICY_ROW}{name}: {words}", reason="",
                    throughput_qps=found.figures.throughput_qps, latency_s=found.figures.latency_s)


def why_so_many(schedule: Schedule, looked: Sequence[Looked]) -> str:
    """The number of copies chosen beside the next best, in a sentence."""
    deployment, qps = schedule.deployment, schedule.figures.throughput_qps
    own, each = deployment.replicas, deployment.devices_per_replica
    chosen = (f"One copy of the model on {_counted(each)}" if own == 1 else
              f"{own} copies of the model on {_counted(each)} each share the queries")
    others = [one for one in looked if one.found is not None and not _is_of(schedule, one)]
    if not others:
        return f"{chosen}: no other number of copies has a schedule within the limits."
    best = max(others, key=found_qps)
    problem = best.planner.problem
    more = problem.copies
    words = (f"one on {_counted(problem.cluster.num_devices)}" if more == 1 else
             f"{more} on {_counted(problem.cluster.num_devices)} each")
    share = 1 - found_qps(best) / qps
    amount = "as many" if abs(share) <= 5e-4 else (
        f"{share:.1%} less" if share > 0 else f"{-share:.1%} more")
    beside = f"answer{'s' * (more == 1)} {amount}{', but without the margin' * (share <= 5e-4)}"
    return f"{chosen}: the next best, {words}, {beside} ({found_qps(best):.4g} queries/s)."


def _is_of(schedule: Schedule, one: Looked) -> bool:
    """Whether the schedule has so many copies, on as many devices each."""
    deployment, problem = schedule.deployment, one.planner.problem
    return (deployment.replicas, deployment.devices_per_replica) == (
        problem.copies, problem.cluster.num_devices)


def _counted(devices: int) -> str:
    return f"{devices} device{'s' * (devices != 1)}"


def _short(refusal: InfeasibleError | InputError) -> str:
    if isinstance(refusal, InputError):
        return "; ".join(mistake.allowed for mistake in refusal.mistakes)
    return str(refusal) if str(refusal) == NO_ROOM else "no schedule within the limits"


def configuration(estimate: Estimate) -> str:
    """Policy, the control variables that tell most, and the tensor plan; what is 0 is left out."""
    names = (*policy(estimate.policy).variable_names[:2], "encode_chunk", "tp_degree", "tp_gpus")
    values = [f"{name} {value}" for name in names if (value := estimate.variables.get(name))]
    return ", ".join([estimate.policy, *values])
