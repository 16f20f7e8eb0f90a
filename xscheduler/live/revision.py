"""New control variables for an RRA schedule that is running, once the lengths turn out different.

Layers, tensor-parallel plan and micro-batches stay, and with them the ranks' weights and caches;
encode_batch and decode_iterations are searched on the stages there are (`pinned.py`), within the
bound and its confidence (`uncertainty.py`), as the schedule itself was.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from xgpt.core.errors import InfeasibleError
from xgpt.core.policies import policy
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate, Schedule
from xprofiler.timing import TimingSource
from xscheduler.evaluator import Evaluator
from xscheduler.live.pinned import PinnedSearch, Way
from xscheduler.uncertainty import Doubts
from xscheduler.within import plan_within

# Share of throughput from which on a change is made: it costs a few phases in which the pool
# swings into its new batch sizes, which no estimate counts.
WORTH = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Revised:
    """`keep`: the control variables as they are, under the new lengths; its reason says why they
    do not do. `estimate` None: they stay. `reason`: why. `is_kept`: what is left running keeps the
    bound with its confidence."""

    keep: Way
    estimate: Estimate | None
    reason: str
    is_kept: bool


def revise(running: Schedule, problem: Problem, timing: TimingSource, *,
           most_present: int | None = None, caution: float = 1.0) -> Revised:
    """What to change for `problem`, which has the new lengths and the queries that are left, while
    `running` is executed. `most_present`: queries that the caches hold. `caution`: share of the
    bound that a change is planned for."""
    now = running.estimate
    assert policy(now.policy).is_changeable, f"{now.policy = }"
    fixed = replace(problem.fixed, policy=now.policy, tp_degree=now.deployment.tp_degree,
                    tp_gpus=now.deployment.tp_gpus,
                    decode_micro_batches=now.deployment.num_groups)
    most = [count for count in (problem.num_queries, most_present) if count is not None]
    problem = replace(problem, fixed=fixed, num_queries=min(most, default=None))
    evaluator = Evaluator(problem, timing)
    keep = _keep(now, evaluator)

    def find(other: Problem) -> Schedule:
        way = PinnedSearch(now, other, timing, other.constraint.latency_s).best()
        if way.estimate is None or way.reason is not None:
            raise InfeasibleError(way.reason or "nothing is admissible")
        return running.changed(estimate=way.estimate, bound_qps=way.qps, unbounded_qps=None)

    def within(latency_s: float) -> Schedule:
        return find(replace(problem, constraint=problem.constraint.with_latency(limit_s=latency_s)))

    def stays(reason: str) -> Revised:
        return Revised(keep=keep, estimate=None, reason=reason, is_kept=keep.qps > 0)

    constraint = problem.constraint.with_latency(limit_s=caution * problem.constraint.latency_s)
    try:
        planned = plan_within(Doubts(replace(problem, constraint=constraint), evaluator), within,
                              search_problem=find)
    except InfeasibleError as cause:
        return stays(f"no other batch sizes do: {cause}")
    found = planned.schedule.estimate
    if keep.qps and found.figures.throughput_qps <= keep.qps * (1 + WORTH):
        return stays(f"other batch sizes bring no more than {WORTH:.0%}")
    if not keep.qps and not planned.is_safe and found.figures.latency_s >= _latency_s(keep):
        return stays(f"no other batch sizes do: {planned.margin.sentence}")
    gain = (f"{found.figures.throughput_qps / keep.qps - 1:.0%} more queries/s" if keep.qps
            else f"as it was it no longer serves: {keep.reason}")
    return Revised(keep=keep, estimate=found, reason=gain, is_kept=planned.is_safe)


def _keep(now: Estimate, evaluator: Evaluator) -> Way:
    """Also held to the bound's confidence."""
    problem = evaluator.problem
    bound_s = problem.constraint.latency_s
    keep = PinnedSearch(now, problem, evaluator.timing, bound_s).current()
    if keep.estimate is None or keep.reason is not None:
        return keep
    own = Doubts(problem, evaluator).margin(keep.estimate)
    if keep.estimate.figures.latency_s * own.factor <= bound_s:
        return keep
    return replace(keep, reason=f"its latency of {keep.estimate.figures.latency_s:.3g} s keeps the "
                                "bound "
                                f"of {bound_s:.3g} s with less than the confidence asked for")


def _latency_s(way: Way) -> float:
    return way.estimate.figures.latency_s if way.estimate is not None else float("inf")
