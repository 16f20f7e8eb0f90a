"""The choice when lengths change: keep the schedule, adjust it, or deploy another one (paper
sections 7.6 and 7.7).

    keep      The present control variables under the new lengths.
    adjust    The best without moving a layer: stages, tensor plan and (WAA) the division of the
              devices stay. Batch sizes, (RRA) decode_iterations and chunks change.
    redeploy  The best of the whole search; ranks load the weights that they lack.

A redeployment stops the ranks for `cost_s`. It pays after N requests, with q and q' the throughput
of the best alternative and of the new schedule:

    N / q = cost_s + N / q',  so  N = cost_s q q' / (q' - q)

The drain before and the ramp-up after a change are not counted.

`revise` adjusts a schedule while it runs: weights and caches stay where they are. The control
variables are searched on fixed stages (`fixed_stages.py`) within the limit and its confidence, as
for the first schedule."""

import math
from dataclasses import dataclass, replace
from typing import Literal

from xgpt.core.controls import ContinuousControls
from xgpt.core.errors import InfeasibleError, InputError
from xgpt.core.policies import policy
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate, Schedule
from xgpt.core.units import format_bytes, format_seconds
from xprofiler.timing import TimingSource
from xscheduler.live.fixed_stages import FixedStages, Option, check_deployable, variables_words
from xscheduler.live.weight_loading import Loading, loading_between
from xscheduler.replicas import problem_of_replica
from xscheduler.search_planner import SearchPlanner
from xscheduler.space import LEAST_GAIN, NOTHING

Choice = Literal["keep", "adjust", "redeploy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reschedule:
    """The three options (keep, adjust, redeploy) and the choice for the remaining requests.
    loading: None without a redeployment."""

    keep: Option
    adjust: Option
    redeploy: Option
    loading: Loading | None
    cost_s: float  # of the redeployment, weights loaded from DRAM; 0 without one
    break_even_queries: float  # inf: never; 0: nothing else is admissible
    queries_left: float  # inf: unknown
    choice: Choice | None  # None: no option is admissible
    sentence: str

    @property
    def chosen(self) -> Estimate | None:
        """The estimate of the chosen option; None if none is admissible."""
        way: Option | None = None if self.choice is None else getattr(self, self.choice)
        return None if way is None else way.estimate


def reschedule(current: Schedule | Estimate, problem: Problem, timing: TimingSource, *,
               latency_limit_s: float | None = None,
               best: Schedule | InfeasibleError | InputError | None = None) -> Reschedule:
    """The options and the choice for `problem`, which has the new lengths and the remaining
    requests, while `current` is deployed on its cluster.

    latency_limit_s: limit / margin; None: the limit. best: the best schedule of the problem or its
    refusal; None: a search without margin finds it. Raises InputError for a schedule of another
    model, cluster or policy."""
    deployed = current.estimate if isinstance(current, Schedule) else current
    check_deployable(deployed, problem)
    limit_s = problem.constraint.latency_s if latency_limit_s is None else latency_limit_s
    stages = FixedStages(deployed, problem, timing)
    limited = problem.constraint.with_latency(limit_s=limit_s)
    keep = adjust = stages.unchanged(limited, has_margin=False)
    if not isinstance(deployed.controls, ContinuousControls):
        adjust = stages.best(limited, has_margin=False)
    if keep.qps > adjust.qps:  # it holds more requests than are left, or the job fixes other values
        adjust = keep
    if best is None:
        try:
            best = SearchPlanner(problem, timing, is_brief=True).best(
                problem.constraint.latency_s, has_margin=False)
        except (InfeasibleError, InputError) as cause:
            best = cause
    redeploy = (Option(estimate=best.estimate, reason=None) if isinstance(best, Schedule) else
                Option(estimate=None, reason=str(best)))
    loading = None
    if redeploy.estimate is not None:
        old, new = deployed.deployment, redeploy.estimate.deployment
        loading = loading_between(deployed.all_pools, redeploy.estimate.all_pools,
                               problem.model, problem.dtype, problem.cluster)
        # no layer would move; another policy needs a new start all the same
        if loading.total_bytes == 0 and new.replicas == old.replicas and (
                redeploy.estimate.policy == deployed.policy):
            adjust = redeploy if redeploy.qps > adjust.qps else adjust
            redeploy, loading = Option(estimate=None, reason="no layer would move"), None
    cost_s = 0.0 if loading is None else loading.from_dram_s
    return _recommend(Reschedule(
        keep=keep, adjust=adjust, redeploy=redeploy, loading=loading, cost_s=cost_s,
        break_even_queries=break_even(max(keep.qps, adjust.qps), redeploy.qps, cost_s),
        queries_left=math.inf if problem.num_queries is None else float(problem.num_queries),
        choice=None, sentence=""))


def break_even(old_qps: float, new_qps: float, cost_s: float) -> float:
    """Number of requests after which a stop of `cost_s` has paid; inf if the new schedule is not
    quicker, 0 if the old one has no throughput."""
    if new_qps <= old_qps:
        return math.inf
    return cost_s * old_qps * new_qps / (new_qps - old_qps)


def _recommend(ways: Reschedule) -> Reschedule:
    """`ways` with its choice and sentence. Of equal options the one that changes less is chosen."""
    keep, adjust, left = ways.keep.qps, ways.adjust.qps, ways.queries_left
    best = max(keep, adjust)
    is_better = ways.redeploy.qps > best * (1 + NOTHING)
    if is_better and left > ways.break_even_queries:
        return replace(ways, choice="redeploy", sentence=_redeploy_words(ways))
    if best == 0:
        return replace(ways, choice=None, sentence=(
            f"No schedule keeps the limit. Without moving layers: {ways.adjust.reason}. "
            f"With redeployment: {ways.redeploy.reason}"))
    unless = ""
    if is_better:
        unless = (f"; a redeployment would bring {ways.redeploy.qps / best - 1:.1%} more but pays "
                  f"after {math.ceil(ways.break_even_queries)} requests, and {left:.0f} are left")
    if adjust <= keep * (1 + NOTHING):
        return replace(ways, choice="keep", sentence=(
            f"Keep the schedule: under these lengths it answers {keep:.4g} requests/s within the "
            f"limit, and no other batch sizes bring more than {NOTHING:.1%}{unless}."))
    gain = (f"{adjust / keep - 1:.1%} more than now" if keep
            else f"while the current one no longer serves ({ways.keep.reason})")
    assert ways.adjust.estimate is not None
    return replace(ways, choice="adjust", sentence=(
        f"Change the batch sizes to {configuration_words(ways.adjust.estimate)}: {adjust:.4g} "
        f"requests/s, {gain}, and no layer moves{unless}."))


def _redeploy_words(ways: Reschedule) -> str:
    assert ways.redeploy.estimate is not None and ways.loading is not None
    best = max(ways.keep.qps, ways.adjust.qps)
    loaded = (f"{format_bytes(ways.loading.total_bytes)} are loaded in "
              f"{format_seconds(ways.cost_s)}")
    start = (f"Redeploy as {configuration_words(ways.redeploy.estimate)}: {ways.redeploy.qps:.4g} "
             "requests/s")
    if not best:
        return (f"{start}; {loaded}. Without moving layers no schedule is admissible "
                f"({ways.adjust.reason}).")
    return (f"{start}, {ways.redeploy.qps / best - 1:.1%} more than without moving layers; "
            f"{loaded}, which is made up for after {math.ceil(ways.break_even_queries)} requests.")


def configuration_words(estimate: Estimate) -> str:
    """The policy, its control variables and its tensor plan, in words."""
    return (f"{estimate.policy}, {variables_words(estimate)}, tp_degree "
            f"{estimate.deployment.tp_degree}, tp_gpus {estimate.deployment.tp_gpus}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    """A decision on a running schedule.

    `keep`: the present control variables under the new lengths. `estimate`: the configuration to
    change to; None: no change. `reason`: why. `is_kept`: whether the schedule from now on keeps the
    limit with its confidence."""

    keep: Option
    estimate: Estimate | None
    reason: str
    is_kept: bool


def revise(running: Schedule, problem: Problem, timing: TimingSource, *,
           most_present: int | None = None, caution: float = 1.0,
           initial: Estimate | None = None) -> Revision:
    """The revision of the running schedule for `problem`, which has the new lengths and the
    remaining requests.

    `most_present`: requests that the caches of a replica hold. `caution`: share of the limit that a
    change is planned for. `initial`: the schedule that the caches were made for, of a policy whose
    sizes may only shrink. None: RRA, whose batches may grow up to `most_present`."""
    now, bound = running.estimate, problem.constraint
    assert policy(now.policy).is_changeable or initial is not None, f"{now.policy = }"
    stages = FixedStages(now, problem_of_run(now, problem, most_present), timing, initial=initial)
    keep = stages.unchanged(bound, has_margin=True)
    cautious = bound.with_latency(limit_s=caution * bound.latency_s)
    best = stages.best(cautious, has_margin=True)

    def stays(reason: str) -> Revision:
        return Revision(keep=keep, estimate=None, reason=reason, is_kept=keep.qps > 0)

    if best.estimate is None or best.reason is not None:
        if best.estimate is None or keep.qps or not _is_quicker(
                best.estimate, keep, cautious.latency_s):
            return stays(f"no other batch sizes keep the limit: {best.reason}")
        return Revision(keep=keep, estimate=best.estimate, is_kept=False, reason=(
            f"the present one no longer serves: {keep.reason}; the smallest latency keeps the "
            f"limit, though not with a confidence of {bound.confidence:g}"))
    if keep.qps and best.qps <= keep.qps * (1 + LEAST_GAIN):
        return stays(f"other batch sizes bring no more than {LEAST_GAIN:.0%}")
    gain = (f"{best.qps / keep.qps - 1:.0%} more requests/s" if keep.qps
            else f"the present one no longer serves: {keep.reason}")
    return Revision(keep=keep, estimate=best.estimate, reason=gain, is_kept=True)


def problem_of_run(now: Estimate, problem: Problem, most_present: int | None) -> Problem:
    """`problem` for one replica. All values that a run of `now` cannot change are fixed, and there
    are no more requests than its caches hold."""
    fixed = replace(problem.fixed, policies=(now.policy,), tp_degree=now.deployment.tp_degree,
                    tp_gpus=now.deployment.tp_gpus, decode_micro_batches=now.deployment.num_groups)
    problem = problem_of_replica(problem, now)
    most = [count for count in (problem.num_queries, most_present) if count is not None]
    return replace(problem, fixed=fixed, num_queries=min(most, default=None))


def _is_quicker(nearest: Estimate, keep: Option, bound_s: float) -> bool:
    """Whether the least latency keeps the limit, or is clearly below that of the running one."""
    kept_s = math.inf if keep.estimate is None else keep.estimate.figures.latency_s
    return nearest.figures.latency_s <= min(bound_s, (1 - LEAST_GAIN) * kept_s)
