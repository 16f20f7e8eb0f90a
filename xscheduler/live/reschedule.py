"""When the lengths change: keep the schedule, adjust it, or deploy another (paper sections 7.6 and
7.7).

    keep      the current control variables, under the new lengths
    adjust    the best that is reached without moving a layer: the stages, the tensor-parallel plan
              and (WAA) the division of the devices stay; encode_batch, decode_micro_batches and
              (RRA) decode_iterations change. A running pool takes that over at once.
    redeploy  the best of the whole search, for which ranks load what they do not hold

A redeployment stops the pool for `cost_s`, and is made up for after N queries, with q and q' the
throughput of the best alternative and of the new schedule:

    N / q = cost_s + N / q',  so  N = cost_s q q' / (q' - q)

The queries present are finished before layers move; how long the pool drains and fills again is not
counted, nor is what a running pool takes to swing into new batch sizes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from xgpt.core.errors import InfeasibleError, InputError
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate, Schedule, StageAssignment
from xgpt.core.units import format_bytes, format_seconds
from xprofiler.timing import TimingSource
from xscheduler.live.deployment import Loading, redeployment
from xscheduler.live.pinned import PinnedSearch, Way, fits_the_job, iterations_words
from xscheduler.search import find_schedule

WORTH = 0.005  # share of throughput below which two schedules count as equal: the search's gap
Choice = Literal["keep", "adjust", "redeploy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reschedule:
    """The three ways, and which is best for the queries left. `loading` None: no redeployment."""

    keep: Way
    adjust: Way
    redeploy: Way
    loading: Loading | None
    cost_s: float  # of the redeployment, from the source asked for; 0 without one
    break_even_queries: float  # inf: never; 0: nothing else is admissible
    queries_left: float  # inf where the problem does not say
    choice: Choice | None  # None: no way is admissible
    sentence: str

    @property
    def chosen(self) -> Estimate | None:
        """The estimate of the way chosen."""
        way = {"keep": self.keep, "adjust": self.adjust, "redeploy": self.redeploy}
        return None if self.choice is None else way[self.choice].estimate


def reschedule(current: Schedule | Estimate, problem: Problem, timing: TimingSource, *,
               source: Literal["dram", "ssd"] = "dram", latency_limit_s: float | None = None,
               best: Schedule | InfeasibleError | None = None) -> Reschedule:
    """What to do about `problem`, which has the new lengths and the queries that are left, while
    `current` is deployed on its cluster.

    source: where weights are loaded from. latency_limit_s: what the latency is held to, where a
    margin makes that less than the bound. best: the best schedule of the problem, or why there is
    none; by default what a search without a margin finds. Raises InputError for a schedule of
    another model, cluster or policy.
    """
    deployed = current.estimate if isinstance(current, Schedule) else current
    fits_the_job(deployed, problem)
    limit_s = problem.constraint.latency_s if latency_limit_s is None else latency_limit_s
    pinned = PinnedSearch(deployed, problem, timing, limit_s)
    keep, adjust = pinned.current(), pinned.best()
    if keep.qps > adjust.qps:  # it lies off the lines that were looked at
        adjust = keep
    redeploy = _searched(problem, timing) if best is None else _way_of(best)
    loading = None
    if redeploy.estimate is not None:
        loading = _loading_of(deployed.deployment.stages,
                              redeploy.estimate.deployment.stages, problem)
        if loading.total_bytes == 0:  # the best has the layers where they are
            adjust = redeploy if redeploy.qps > adjust.qps else adjust
            redeploy, loading = Way(estimate=None, reason="no layer would move"), None
    cost_s = 0.0 if loading is None else (
        loading.from_dram_s if source == "dram" else loading.from_ssd_s)
    return _recommend(Reschedule(
        keep=keep, adjust=adjust, redeploy=redeploy, loading=loading, cost_s=cost_s,
        break_even_queries=break_even(max(keep.qps, adjust.qps), redeploy.qps, cost_s),
        queries_left=math.inf if problem.num_queries is None else float(problem.num_queries),
        choice=None, sentence=""))


def break_even(old_qps: float, new_qps: float, cost_s: float) -> float:
    """Queries after which a stop of `cost_s` is made up for; inf where the new schedule is not
    quicker, 0 where the old one answers nothing."""
    if new_qps <= old_qps:
        return math.inf
    return cost_s * old_qps * new_qps / (new_qps - old_qps)


def _searched(problem: Problem, timing: TimingSource) -> Way:
    try:
        return _way_of(find_schedule(problem, timing))
    except (InfeasibleError, InputError) as cause:
        return Way(estimate=None, reason=str(cause))


def _way_of(best: Schedule | InfeasibleError) -> Way:
    if isinstance(best, InfeasibleError):
        return Way(estimate=None, reason=str(best))
    return Way(estimate=best.estimate, reason=None)


def _loading_of(old: tuple[StageAssignment, ...], new: tuple[StageAssignment, ...],
                problem: Problem) -> Loading:
    return redeployment(old, new, problem.model, problem.dtype, problem.cluster)


def _recommend(found: Reschedule) -> Reschedule:
    """With the choice and its sentence: of equals, the one that changes less."""
    keep, adjust, left = found.keep.qps, found.adjust.qps, found.queries_left
    best = max(keep, adjust)
    is_better = found.redeploy.qps > best * (1 + WORTH)
    if is_better and left > found.break_even_queries:
        return replace(found, choice="redeploy", sentence=_redeploy_words(found))
    if best == 0:
        return replace(found, choice=None, sentence=(
            f"No schedule meets the bound. Without moving layers: {found.adjust.reason}. "
            f"With redeployment: {found.redeploy.reason}"))
    unless = ""
    if is_better:
        unless = (f"; a redeployment would bring {found.redeploy.qps / best - 1:.1%} more but pays "
                  f"after {math.ceil(found.break_even_queries)} queries, and {left:.0f} are left")
    if adjust <= keep * (1 + WORTH):
        return replace(found, choice="keep", sentence=(
            f"Keep the schedule: under these lengths it answers {keep:.4g} queries/s within the "
            f"bound, and no other batch sizes bring more than {WORTH:.1%}{unless}."))
    gain = (f"{adjust / keep - 1:.1%} more than now" if keep
            else f"while the current one no longer serves ({found.keep.reason})")
    assert found.adjust.estimate is not None
    return replace(found, choice="adjust", sentence=(
        f"Change the batch sizes to {variables(found.adjust.estimate)}: {adjust:.4g} queries/s, "
        f"{gain}, and no layer moves{unless}."))


def _redeploy_words(found: Reschedule) -> str:
    assert found.redeploy.estimate is not None and found.loading is not None
    best = max(found.keep.qps, found.adjust.qps)
    loaded = (f"{format_bytes(found.loading.total_bytes)} are loaded in "
              f"{format_seconds(found.cost_s)}")
    start = f"Redeploy as {variables(found.redeploy.estimate)}: {found.redeploy.qps:.4g} queries/s"
    if not best:
        return (f"{start}; {loaded}. Without moving layers no schedule is admissible "
                f"({found.adjust.reason}).")
    return (f"{start}, {found.redeploy.qps / best - 1:.1%} more than without moving layers; "
            f"{loaded}, which is made up for after {math.ceil(found.break_even_queries)} queries.")


def variables(estimate: Estimate) -> str:
    """The control variables in words."""
    return (f"{estimate.policy}, encode_batch {estimate.figures.encode_batch}, "
            f"{iterations_words(estimate)}decode_micro_batches "
            f"{estimate.deployment.num_groups}, tp_degree "
            f"{estimate.deployment.tp_degree}, tp_gpus {estimate.deployment.tp_gpus}")
