"""A quick change to smaller batches, found by a few replays.

If steps have become slower, every request that starts before a change may be late. A full plan
takes seconds of a core that the ranks share with another program. So if the running schedule
exceeds the limit, the best of TRIES configurations is taken at once. None of them has a larger
batch (RRA) or larger limits (other policies). They are planned for limit / margin, though the
margin at the new times is not known yet. A full plan follows beside the run."""

from dataclasses import dataclass
from typing import Any

from xgpt.core.controls import ContinuousControls
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate, Schedule
from xprofiler.timing import TimingSource
from xscheduler.live.allowance import AllowanceEvidence
from xscheduler.live.evidence import StepTimeEvidence
from xscheduler.live.fixed_stages import FixedStages
from xscheduler.live.reschedule import Revision, problem_of_run
from xscheduler.search import TRIES
from xscheduler.space import LEAST_GAIN


def is_urgent(evidence: object) -> bool:
    """Whether the evidence means that requests are late, so that a full plan takes too long."""
    if isinstance(evidence, StepTimeEvidence):
        return evidence.drift.slowed > 1
    return isinstance(evidence, AllowanceEvidence) and evidence.share < evidence.planned


def revise_quickly(running: Schedule, problem: Problem, timing: TimingSource, *,
                   most_present: int | None, initial: Estimate | None) -> Revision | None:
    """The change to make at once (see `revise`); None if the running schedule keeps the limit by a
    replay without margin, or nothing smaller is quicker."""
    now, bound = running.estimate, problem.constraint
    with_margin_s = bound.latency_s / running.margin.factor
    most = {} if isinstance(now.controls, ContinuousControls) else {
        "encode_batch": max(now.figures.encode_batch, 1)}
    stages = FixedStages(now, problem_of_run(now, problem, most_present), timing, initial=initial,
                         most=most)
    keep = stages.unchanged(bound, has_margin=False)
    if keep.qps or keep.estimate is None:
        return None
    for limit_s in (with_margin_s, bound.latency_s):
        way = stages.best(bound.with_latency(limit_s=limit_s), has_margin=False,
                          most_replays=TRIES)
        if way.qps:
            break
    found = way.estimate
    if found is None or found.figures.latency_s > (
            1 - LEAST_GAIN) * keep.estimate.figures.latency_s:
        return None
    kept = "" if way.qps else "; even the smallest latency exceeds the limit, by less"
    return Revision(keep=keep, estimate=found, is_kept=limit_s < bound.latency_s, reason=(
        "the best of a few simulated schedules; the present one no longer serves: "
        f"{keep.reason}{kept}"))


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowUpEvidence:
    """Evidence that led to a quick change, for the full plan that follows it."""

    cause: StepTimeEvidence | AllowanceEvidence

    is_observing = False  # not about lengths

    @property
    def left(self) -> int:
        return self.cause.left

    @property
    def done(self) -> int:
        return self.cause.done

    def record(self) -> dict[str, Any]:
        return {**self.cause.record(), "follows": "a change at once"}

    @property
    def sentence(self) -> str:
        return f"full plan after the quick change at {self.cause.done} requests"
