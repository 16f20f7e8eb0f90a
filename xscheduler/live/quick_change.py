"""A quick change to smaller batches, found by a few replays.

If steps have become slower, every query that starts before a change may be late, and a full plan
takes seconds of a core that the ranks share with another program. So if the running schedule misses
the limit itself, the best of TRIES configurations with no larger batch (RRA) or smaller limits
(other policies) is taken at once. It is planned for limit / margin, though the margin at the new
times is not known yet. A full plan follows beside the run."""

from dataclasses import dataclass
from typing import Any

from xgpt.core.controls import ContinuousControls
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate, Schedule
from xprofiler.timing import TimingSource
from xscheduler.live.allowance import AllowanceEvidence
from xscheduler.live.evidence import StepTimeEvidence
from xscheduler.live.given_stages import GivenStages
from xscheduler.live.reschedule import Revised, held_problem
from xscheduler.search import TRIES
from xscheduler.space import LEAST_GAIN


def is_pressing(look: object) -> bool:
    """Whether the evidence means that queries are late: there is no time for a full plan."""
    if isinstance(look, StepTimeEvidence):
        return look.drift.slowed > 1
    return isinstance(look, AllowanceEvidence) and look.share < look.planned


def revise_at_once(running: Schedule, problem: Problem, timing: TimingSource, *,
                   most_present: int | None, began: Estimate | None) -> Revised | None:
    """The change to make at once (see `revise`); None if the running schedule keeps the limit by a
    replay without margin, or nothing smaller is quicker."""
    now, bound = running.estimate, problem.constraint
    with_margin_s = bound.latency_s / running.margin.factor
    most = {} if isinstance(now.controls, ContinuousControls) else {
        "encode_batch": max(now.figures.encode_batch, 1)}
    stages = GivenStages(now, held_problem(now, problem, most_present), timing, began=began,
                         most=most)
    keep = stages.as_it_is(bound, has_margin=False)
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
    kept = "" if way.qps else "; the tightest there is misses it, too, by less"
    return Revised(keep=keep, estimate=found, is_kept=limit_s < bound.latency_s, reason=(
        "at once, of a few schedules that were simulated; as it was it no longer serves: "
        f"{keep.reason}{kept}"))


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowUpEvidence:
    """Evidence that led to a quick change, for the full plan that follows it."""

    look: StepTimeEvidence | AllowanceEvidence

    is_observing = False  # not about lengths

    @property
    def left(self) -> int:
        return self.look.left

    @property
    def done(self) -> int:
        return self.look.done

    def record(self) -> dict[str, Any]:
        return {**self.look.record(), "follows": "a change at once"}

    @property
    def sentence(self) -> str:
        return (f"planned again as a whole, after the quick change "
                f"made when {self.look.done} queries were done")
