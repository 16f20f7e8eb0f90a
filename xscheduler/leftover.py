"""Copies of another shape on the devices that the chosen copies leave over: with a schedule of
their own, under the same bounds, they share the queries with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from xgpt.core.errors import InfeasibleError, InputError
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate, Schedule
from xscheduler.job_time import words_of
from xscheduler.room import with_room

LEAST_SHARE = 0.02  # of all queries: for less nobody is to tell two schedules apart


def left_over(problem: Problem, schedule: Schedule) -> Problem | None:
    """The problem of the devices that are left over, with their share of the queries; None where
    none are, or where nothing may be put there: the number of copies is the job's, lengths are yet
    to be observed (a run by several schedules is not planned anew), nodes are several or links
    within them are (what is left over would not be a node like others), or ranks are of processors
    (which are planned for on every layout)."""
    cluster, taken = problem.cluster, schedule.estimate.num_devices
    idle = cluster.num_devices - taken
    if idle <= 0 or problem.copies != 1 or problem.fixed.replicas is not None or problem.observes:
        return None
    if cluster.num_nodes > 1 or cluster.islands or cluster.device.kind != "gpu" or (
            len(problem.constraint.bounds) > 1):
        return None
    count = problem.num_queries
    share = None if count is None else max(count * idle // cluster.num_devices, 1)
    return replace(problem, cluster=cluster.with_nodes(num_nodes=1, devices_per_node=idle),
                   num_queries=share)


def beside_left_over(problem: Problem, schedule: Schedule,
                     plan: Callable[[Problem], Schedule]) -> Schedule:
    """The schedule with copies on what it leaves over, where the model has a schedule there that
    takes every query that the chosen copies take. `plan`: of the steady state of a problem."""
    part = left_over(problem, schedule)
    if part is None:
        return schedule
    try:
        found = plan(part)
    except (InfeasibleError, InputError):
        return schedule
    found = with_room(found, part)
    own, other = schedule.estimate, replace(found.estimate, notes=())
    if not _takes_all(own, other, problem):
        return schedule
    estimate = own.beside((other,))
    qps, more = estimate.figures.throughput_qps, other.figures.throughput_qps
    if more < LEAST_SHARE * qps:
        return schedule
    bound_qps = schedule.proof.bound_qps + max(found.proof.bound_qps, more)
    devices = other.deployment.devices_per_replica
    copies = "a copy" if other.deployment.replicas == 1 else f"{other.deployment.replicas} copies"
    return schedule.changed(
        estimate=estimate, bound_qps=bound_qps, gap=bound_qps / qps - 1, explanation=(
            *schedule.explanation,
            f"On what these copies leave over, {copies} of another shape (devices: {devices} each) "
            f"by {words_of(other.one_copy)}: {more:.4g} of the {qps:.4g} queries/s. What is proved "
            "is proved of copies that are all alike, and of what these leave over; other divisions "
            "were not looked at."))


def _takes_all(own: Estimate, other: Estimate, problem: Problem) -> bool:
    """Whether the other copies take every query of the problem that these do."""
    lengths = problem.lengths
    longest, most_input = lengths.inputs.max + lengths.outputs.max, lengths.inputs.max
    if problem.queries is not None:
        longest = int(problem.queries.reserves.max(initial=1))
        most_input = int(problem.queries.inputs.max(initial=1))
    most_encoded = other.longest_input or most_input
    return other.longest_query >= min(own.longest_query, longest) and (
        most_encoded >= min(own.longest_input or most_input, most_input))
