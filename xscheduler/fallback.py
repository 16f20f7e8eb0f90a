"""The schedule that a job starts with if `workload.output_tokens: observe` has no feasible one.

Such a job is planned as if every request ran to its cap. If no schedule keeps the latency limit
that way, the job starts with the schedule of least latency. It is planned again once output lengths
have been observed (xscheduler.live). Each batch is decoded to its end before the next is encoded.
No request is quicker than one that no encoding interrupts, and a phase ends with its actual
outputs. The largest batch within NEAR of the least latency is taken. Requests that run to their cap
are late anyway, and the others are far from the limit. A limit that not even an answer of one token
keeps is refused, since no observed lengths could help."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from xgpt.core.errors import InfeasibleError
from xgpt.core.lengths import empirical
from xgpt.core.policies import changeable_policy
from xgpt.core.problem import Problem
from xgpt.core.schedule import Schedule, Status
from xgpt.core.units import format_seconds
from xprofiler.timing import TimingSource
from xscheduler.replicas import replica_problems
from xscheduler.search_planner import SearchPlanner

NEAR = 0.1  # chosen: share of the least latency that a larger batch may cost
FIRST_QUERIES = 20  # chosen: requests done before the lengths are first estimated


def hint(problem: Problem, timing: TimingSource) -> str:
    """A sentence for the message of no schedule, if a run that observes lengths could start."""
    if not can_settle(problem) or initial_schedule(problem, timing) is None:
        return ""
    return (". With `output_tokens: observe`, `xgpt submit` would start with the schedule of least "
            "latency, and plan again once output lengths have been observed")


def can_settle(problem: Problem) -> bool:
    """Whether a run of the job can change its schedule after it has observed lengths."""
    fixed = problem.fixed
    is_fixed = fixed.encode_batch is not None and fixed.decode_iterations is not None
    may_change = changeable_policy(fixed) is not None
    return (problem.observes and problem.is_revised and may_change and not is_fixed
            and (problem.num_queries or 0) > FIRST_QUERIES)


def initial_schedule(problem: Problem, timing: TimingSource) -> Schedule | None:
    """The schedule to start with, of a policy that can be changed while it runs; None if something
    other than the output lengths prevents a schedule."""
    constraint = problem.constraint
    if math.isinf(constraint.latency_s) or not (able := _able(problem, timing)):
        return None
    least_s = min(one.least_s for one in able)
    if one_token_s(problem, timing) > constraint.latency_s:
        return None
    quickest = max((one.planner.best((1 + NEAR) * least_s, has_margin=False)
                    for one in able if one.least_s <= (1 + NEAR) * least_s),
                   key=lambda schedule: schedule.figures.throughput_qps)
    return quickest.changed(
        limit_s=constraint.latency_s, status=Status.BEGINNING, bound_qps=math.inf, gap=math.inf,
        rejected=(), pruned=(), policy_bounds=(), fingerprint=problem.fingerprint,
        explanation=(f"{_sentence(problem, least_s)}.", _why(quickest, least_s)))


def initial_or_raise(problem: Problem, timing: TimingSource, refused: InfeasibleError) -> Schedule:
    """The schedule to start with for a job that was refused at its caps.

    Raises `refused` if the job cannot change while it runs, or if no lengths could help."""
    if not can_settle(problem):
        raise refused
    if (initial := initial_schedule(problem, timing)) is not None:
        return initial
    least_s = one_token_s(problem, timing)
    if problem.constraint.latency_s < least_s < math.inf:
        raise InfeasibleError(
            f"{refused}. An answer of a single token takes {format_seconds(least_s)} at least, so "
            "no output lengths that a run may observe would help", refused.tightest_s) from refused
    raise refused


def one_token_s(problem: Problem, timing: TimingSource) -> float:
    """The least latency of answers of one token each, in seconds; infinite if there is none."""
    lengths = replace(problem.lengths, outputs=empirical([1]), pairs=None)
    return min((one.least_s for one in _able(replace(problem, lengths=lengths), timing)),
               default=math.inf)


def _able(problem: Problem, timing: TimingSource) -> list[_Quickest]:
    """[(planner, least latency)] by number of replicas, if each batch is decoded to its end."""
    if (name := changeable_policy(problem.fixed)) is None:
        return []
    return [one for copies in dict.fromkeys(part.copies for part in replica_problems(problem))
            if (one := _quickest(name, problem, copies, timing)) is not None]


class _Quickest(NamedTuple):
    """A planner of replicas that decode each batch to its end, and the least latency, in seconds,
    of a request at its cap."""

    planner: SearchPlanner
    least_s: float


def _quickest(name: str, problem: Problem, copies: int, timing: TimingSource) -> _Quickest | None:
    """The planner of so many replicas, by the policy `name`; None if they do not fit."""
    fixed = replace(problem.fixed, policies=(name,), replicas=copies)
    if fixed.decode_iterations is None:
        most = problem.lengths.outputs.max - (not problem.model.is_encoder_decoder)
        fixed = replace(fixed, decode_iterations=max(most, 1), encode_chunk=0)
    problem = replace(problem, fixed=fixed)
    search = SearchPlanner(problem, timing, is_brief=True)
    found = search.search.quickest()
    least_s = min((one.replayed.latency_s for one in found), default=math.inf)
    return None if math.isinf(least_s) else _Quickest(search, least_s)


def initial_reason(schedule: Schedule) -> str | None:
    """Why a job only starts with this schedule, in words; None for any other schedule."""
    if schedule.proof.status != Status.BEGINNING or not schedule.explanation:
        return None
    return schedule.explanation[0].removesuffix(".")


def _sentence(problem: Problem, least_s: float) -> str:
    constraint, caps = problem.constraint, problem.lengths.outputs
    is_equal = np.count_nonzero(caps.pmf) == 1
    cap = f"its cap of {caps.max} tokens" if is_equal else f"its cap ({caps.max} tokens at most)"
    surely = "" if least_s > constraint.latency_s else (
        f" with a confidence of {constraint.confidence:.0%}")
    return (f"No schedule keeps the limit of {constraint.latency_s:g} s{surely} if every request "
            f"runs to {cap}; the job starts with the least latency, until lengths are observed")


def _why(schedule: Schedule, least_s: float) -> str:
    estimate = schedule.estimate
    batch, iterations = estimate.figures.encode_batch, estimate.figures.decode_iterations
    requests = "1 request" if batch == 1 else f"{batch} requests"
    return (f"{requests} encoded together, then up to {iterations} decode iterations: "
            f"{format_seconds(estimate.figures.latency_s)} for a request that runs to its cap; "
            f"the least possible is {format_seconds(least_s)}.")
