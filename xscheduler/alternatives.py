"""What a schedule was chosen before: the best of other policies, of other tensor-parallel degrees,
and what the latency bound excludes; or, where there is no schedule, why, and the tightest latency
that one could keep."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from xgpt.core.constraint import METRIC_WORDS, Constraint, Metric
from xgpt.core.errors import InfeasibleError, XgptError
from xgpt.core.policies import policy
from xgpt.core.problem import Problem
from xgpt.core.schedule import NOT_SURE, Estimate, Rejected, Schedule, Status
from xgpt.core.units import format_bytes, format_seconds, seconds_up
from xscheduler.admissible import Limit
from xscheduler.branch_and_bound import Candidate
from xscheduler.spaces.space import Searched, Space, Tight, words_of
from xsimulator.memory import least_weight_bytes

# how the rows are labelled
POLICY_ROW, DEGREE_ROW = "policy ", "tp_degree "
NOT_LOOKED_INTO = "not looked into"  # how the reason of a policy begins that is known to lose
LEFT_OUT = "left out"  # and of one that is not among those compared
FREE_ROW, BARE_ROW = "without a latency bound", "without a margin"
PAPERS_ROW = "RRA and WAA alone"  # where another policy is better
MOSTLY = 0.5  # of the latency: a part of it that is named as the cause


class BestPoint(NamedTuple):
    """A policy's best admissible point."""

    space: Space
    searched: Searched
    candidate: Candidate

    @property
    def plan(self) -> int:
        return self.searched.plan_of_root[self.candidate.root]


def best_in(space: Space, searched: Searched) -> list[BestPoint]:
    """The best that a search found, alone in a list; [] where no point was admissible."""
    best = searched.outcome.best
    return [] if best is None else [BestPoint(space, searched, best)]


def rows_beside(best: BestPoint, spaces: Sequence[Space], results: Mapping[str, Searched],
                free: BestPoint | None, latency_bound_s: float) -> tuple[Rejected, ...]:
    """The best of each other policy, of the paper's own together where this is none of them, of
    each other tensor-parallel degree of this one, and of `free`, without a bound, where that is
    quicker."""
    rows = [_row(f"{POLICY_ROW}{space.name}", space, results[space.name],
                 range(len(space.plans)), best) for space in spaces if space is not best.space]
    rows += _papers_row(best, spaces, results)
    own = best.space
    chosen = own.plans[best.plan].tp_degree
    for degree in sorted({plan.tp_degree for plan in own.plans} - {chosen}):
        plans = [k for k, plan in enumerate(own.plans) if plan.tp_degree == degree]
        rows.append(_row(f"{DEGREE_ROW}{degree}", own, best.searched, plans, best))
    if free is not None and free.candidate.objective > best.candidate.objective:
        rows.append(row_without_bound(free, latency_bound_s))
    return tuple(rows)


def _papers_row(best: BestPoint, spaces: Sequence[Space],
                results: Mapping[str, Searched]) -> list[Rejected]:
    """What there would be without the policies that the paper does not propose."""
    own = [space for space in spaces if policy(space.name).is_papers]
    found = [one for space in own for one in best_in(space, results[space.name])]
    if policy(best.space.name).is_papers or not found:
        return []
    most = max(found, key=lambda one: one.candidate.objective)
    qps, latency_s = most.space.figures(most.plan, most.candidate.point)
    upper = max(results[space.name].outcome.upper_bound for space in own)
    return [Rejected(
        label=f"{PAPERS_ROW}: {most.space.name}, "
              f"{words_of(most.space, most.plan, most.candidate.point)}",
        throughput_qps=qps * most.space.problem.copies, latency_s=latency_s,
        reason=f"lower throughput by {1 - qps / best.candidate.objective:.1%}: no more than "
               f"{max(upper, qps) * most.space.problem.copies:.4g} queries/s")]


def row_without_bound(free: BestPoint, latency_bound_s: float) -> Rejected:
    """What there would be without a bound on the latency."""
    space, point = free.space, free.candidate.point
    qps, latency_s = space.figures(free.plan, point)
    return Rejected(label=f"{FREE_ROW}: {space.name}, {words_of(space, free.plan, point)}",
                    throughput_qps=qps * space.problem.copies, latency_s=latency_s,
                    reason=f"latency above {latency_bound_s:g} s")


def rows_with_margin(schedule: Schedule, free: Schedule, origin: Schedule) -> tuple[Rejected, ...]:
    """Alternatives to `schedule`, which keeps a margin, in one currency: it was searched for as
    `origin`, for longer outputs, and so were they; `free` is the best without a margin."""
    rows = [row for row in origin.rejected if not row.label.startswith(FREE_ROW)]
    if schedule.estimate != origin.estimate:
        rows = [in_the_same_lengths(row, schedule, origin) for row in rows]
    rows += [row for row in free.rejected if row.label.startswith(FREE_ROW)]
    return (*rows, Rejected(
        label=f"{BARE_ROW}: {free.estimate.policy}", latency_s=free.figures.latency_s,
        throughput_qps=free.figures.throughput_qps,
        reason="keeps the bound only if all is as expected" + (
            "; at first sight" if free.proof.status == Status.LIMIT else "")))


def in_the_same_lengths(row: Rejected, schedule: Schedule, origin: Schedule) -> Rejected:
    """An alternative to `origin`, which was searched for longer outputs, beside `schedule`, which
    is the same with the problem's own: with the share that it loses there."""
    if row.throughput_qps is None:
        return row
    share = row.throughput_qps / origin.figures.throughput_qps
    return replace(row, latency_s=None, throughput_qps=share * schedule.figures.throughput_qps,
                   reason="no better, with the margin" if share >= 1 else
                   f"lower throughput by {1 - share:.1%}, with the margin")


def _row(label: str, space: Space, searched: Searched, plans: Sequence[int],
         best: BestPoint) -> Rejected:
    candidate, upper = searched.best_of(plans)
    copies = space.problem.copies
    if candidate is None:
        is_proved = upper == -math.inf
        return Rejected(label=label, throughput_qps=None, latency_s=None,
                        reason="no admissible schedule" if is_proved else
                        not_looked_into(upper * copies))
    plan = searched.plan_of_root[candidate.root]
    qps, latency_s = space.figures(plan, candidate.point)
    return Rejected(label=f"{label}: {words_of(space, plan, candidate.point)}",
                    reason=why_not(qps, best.candidate.objective, max(upper, qps) * copies),
                    throughput_qps=qps * copies, latency_s=latency_s)


def not_looked_into(most_qps: float) -> str:
    """Why a policy is not among those looked into."""
    return f"{NOT_LOOKED_INTO}: no more than {most_qps:.4g} queries/s"


def why_not(qps: float, chosen_qps: float, most_qps: float | None = None) -> str:
    """What speaks against an alternative, of which nothing exceeds `most_qps`. One that is quicker
    than what was chosen has a margin of its own that is too large."""
    lost = 1 - qps / chosen_qps
    if lost > 0:
        return f"lower throughput by {lost:.1%}" + (
            "" if most_qps is None else f": no more than {most_qps:.4g} queries/s")
    return "no better" if lost == 0 else (
        f"quicker by {-lost:.1%}, but {NOT_SURE}")


class Unmet(InfeasibleError):
    """No schedule of a search keeps its bound. Why is found out only where it is asked for: most
    searches are begun to see whether there is one."""

    def __init__(self, explain: Callable[[], InfeasibleError]) -> None:
        XgptError.__init__(self)
        self._explain: Callable[[], InfeasibleError] = cache(explain)

    def __str__(self) -> str:
        return str(self._explain())

    @property
    def tightest_s(self) -> float:  # type: ignore[override]
        """The tightest bound that can be met; infinite where none can."""
        return self._explain().tightest_s


# control variables of which larger values take more memory
_TAKE_MEMORY = ("encode_batch", "max_active", "token_budget")


class _Easy(NamedTuple):
    space: Space
    tight: Tight

    @property
    def estimate(self) -> Estimate:
        return self.space.estimate(self.tight.plan, self.tight.point)


def explain(spaces: Sequence[Space], latency_bound_s: float, *, is_proved: bool) -> InfeasibleError:
    """The error to raise: the binding constraint, the tightest latency and who reaches it."""
    # a time that is infinite is one the profile does not speak of, whatever bound is on it
    of_times = (Limit.NONE, Limit.TTFT, Limit.TPOT)
    easy = [_Easy(space, tight._replace(limit=Limit.RANGE) if (
                tight.limit in of_times and math.isinf(tight.latency_s)) else tight)
            for space in spaces for tight in space.easiest()]
    with_room = [one for one in easy if not one.tight.limit]
    if not with_room:
        return InfeasibleError(_without_room(easy))
    best = min(with_room, key=lambda one: (one.tight.latency_s, one.tight.point))
    space, tight = best
    problem, estimate = space.problem, best.estimate
    longest = problem.lengths.outputs.quantile(problem.constraint.quantile)
    start = "no schedule satisfies" if is_proved else "the search's limit came before any that met"
    crowded = min((one.tight.latency_s for one in easy if one.tight.limit is Limit.MEMORY),
                  default=math.inf)
    text = (f"{start} the bound of {format_seconds(latency_bound_s)} for a query of "
            f"{longest} output tokens (quantile {problem.constraint.quantile:g}): every one takes "
            f"longer. The tightest that can be met is {seconds_up(tight.latency_s)} s, by policy "
            f"{space.name}, {words_of(space, tight.plan, tight.point)} "
            f"({tight.throughput_qps * problem.copies:.3g} queries/s): {_binding(estimate)}")
    if crowded < tight.latency_s:
        text += (f". Memory forbids quicker ones, down to {format_seconds(crowded)}: more memory "
                 "or a smaller model, dtype or maximum output would allow them")
    return InfeasibleError(text, tight.latency_s)


def _binding(estimate: Estimate) -> str:
    """What most of a tightest latency goes into."""
    figures, depth = estimate.figures, len(estimate.deployment.decoding.stages)
    if (share := figures.encode_s / figures.latency_s) > MOSTLY:
        return f"{share:.0%} of it is encoding"
    iteration = f"{format_seconds(figures.decode_iteration_s)} an iteration"
    return f"most of it is decoding, {iteration}" if depth == 1 else (
        f"most of it is decoding, where each token passes {depth} stages, {iteration}")


def _without_room(easy: Sequence[_Easy]) -> str:
    problem = easy[0].space.problem
    limits = {one.tight.limit for one in easy}
    if slow := [one for one in easy if one.tight.limit in (Limit.TTFT, Limit.TPOT)]:
        return _too_slow(slow, problem.constraint)
    if Limit.RANGE in limits:
        # a smaller memory need than the capacity must not be told as the reason
        one = next(one for one in easy if one.tight.limit is Limit.RANGE)
        beyond = one.space.beyond(one.tight)
        return ("no schedule: the profile was measured for smaller sizes than this job's, and "
                f"says nothing beyond 4 times as much{beyond}; measure one for this job")
    if roomy := [one for one in easy if one.tight.limit is Limit.QUERIES]:
        present, one = min(((one.space.present(one.tight), one) for one in roomy),
                           key=lambda pair: (pair[0], pair[1].tight.point))
        return (f"no schedule: the job has {problem.num_queries} queries, and the fewest that are "
                f"present at a time are {present:.0f}, {_by(one)}")
    return _too_large(easy)


def _too_large(easy: Sequence[_Easy]) -> str:
    """What the least memory is needed for, or why it has no room though all devices have enough."""
    held, one = min(((max(one.estimate.figures.memory_bytes), one) for one in _one_a_plan(easy)),
                    key=lambda pair: pair[0])
    problem, estimate = one.space.problem, one.estimate
    pools, room = estimate.deployment.pools, estimate.figures.memory_capacity_bytes
    rank = estimate.figures.memory_bytes.index(held)
    fullest = next(pool for pool in pools if any(rank in stage.ranks for stage in pool.stages))
    what = "there is too little memory"
    if len(pools) > 1:  # each of which holds all of the weights
        each, total = least_weight_bytes(problem), problem.cluster.num_devices * room
        what = (f"{what}: each of {len(pools)} pools holds all weights, {format_bytes(each)}, and "
                f"all devices have {format_bytes(total)}") if len(pools) * each > total else (
            f"no division of the devices fits: {fullest.num_devices} of "
            f"{problem.cluster.num_devices} {fullest.role}, and hold all of the weights")
    return (f"no schedule: {what}. {problem.model.name} needs at least {format_bytes(held)} on its "
            f"fullest device, of which {format_bytes(room)} can be used, {_by(one)}; it takes "
            f"{_smaller_fixed(problem)}{'another policy, ' * (len(pools) > 1)}more devices, or a "
            "smaller model, dtype or maximum output")


def _by(one: _Easy) -> str:
    """By what a figure is, so that `xgpt simulate` can be asked for it."""
    return f"by policy {one.space.name}, {words_of(one.space, one.tight.plan, one.tight.point)}"


def _smaller_fixed(problem: Problem) -> str:
    """The values that the job fixes and that take memory, before what else would help."""
    fixed = [f"schedule.{name} = {value}" for name in _TAKE_MEMORY
             if (value := problem.fixed.value_of(name)) is not None]
    return f"smaller values than the job fixes ({', '.join(fixed)}), " if fixed else ""


def _too_slow(slow: Sequence[_Easy], constraint: Constraint) -> str:
    """What binds where even easy configurations break the bounds on the tokens' pace."""
    quickest = {(one.space.name, one.tight.plan): one for one in sorted(
        slow, key=lambda one: (-one.tight.latency_s, one.tight.point))}
    estimates = [one.estimate for one in (*quickest.values(), *_one_a_plan(slow))]
    metrics: tuple[Metric, ...] = ("ttft", "tpot")
    for metric in metrics:
        least_s = min(getattr(estimate.figures, f"{metric}_s") for estimate in estimates)
        if least_s > (limit_s := constraint.limit_s(metric)):
            return (f"no schedule satisfies the bound of {format_seconds(limit_s)} on "
                    f"{METRIC_WORDS[metric]}: the least seen is {seconds_up(least_s)} s")
    both = " and ".join(f"{format_seconds(constraint.limit_s(metric))} for {METRIC_WORDS[metric]}"
                        for metric in metrics)
    return f"no schedule was seen that keeps both bounds at once: {both}"


def _one_a_plan(easy: Sequence[_Easy]) -> list[_Easy]:
    """The smallest point of each policy and tensor plan."""
    of_plan: dict[tuple[str, int], _Easy] = {}
    for one in easy:
        key = (one.space.name, one.tight.plan)
        if key not in of_plan or one.tight.point < of_plan[key].tight.point:
            of_plan[key] = one
    return list(of_plan.values())
