"""A change that is found at once: what runs, made smaller.

Where steps have become slower, every second until a change is a second in which queries are begun
that will be late; and a plan with its margins takes seconds of a core that the ranks and another
program share. So where what runs misses the bound itself, the best that a few replays find is taken
up, of no larger batch (RRA), or of smaller limits (the others). It is planned for what the margin
of the schedule that the run began with leaves of the bound, and CAUTIOUS of that: the margin of
smaller batches at other times is not known yet. Then all is planned as ever, beside the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from xgpt.core.controls import ContinuousControls
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate, Schedule
from xprofiler.timing import TimingSource
from xscheduler.live.allowance import AllowanceEvidence
from xscheduler.live.evidence import StepTimeEvidence
from xscheduler.live.given_stages import GivenStages
from xscheduler.live.reschedule import WORTH_CHANGING, Revised, held_problem

CAUTIOUS = 0.85  # chosen: share of what the margin leaves that is planned for
REPLAYS = 12  # chosen


def is_pressing(look: object) -> bool:
    """Whether what was seen is about queries that are late: there is no time for a whole plan."""
    if isinstance(look, StepTimeEvidence):
        return look.drift.slowed > 1
    return isinstance(look, AllowanceEvidence) and look.share < look.planned


def revise_at_once(running: Schedule, problem: Problem, timing: TimingSource, *,
                   most_present: int | None, began: Estimate | None) -> Revised | None:
    """What to change to for now (see `revise`); None where what runs keeps the bound by a
    replay, if not with a margin, or nothing smaller is quicker."""
    now, bound = running.estimate, problem.constraint
    with_margin_s = bound.latency_s / running.margin.factor
    most = {} if isinstance(now.controls, ContinuousControls) else {
        "encode_batch": max(now.figures.encode_batch, 1)}
    stages = GivenStages(now, held_problem(now, problem, most_present), timing, began=began,
                         most=most)
    keep = stages.as_it_is(bound, has_margin=False)
    if keep.qps or keep.estimate is None:
        return None
    for limit_s in (CAUTIOUS * with_margin_s, with_margin_s, bound.latency_s):
        way = stages.best(bound.with_latency(limit_s=limit_s), has_margin=False,
                          most_replays=REPLAYS)
        if way.qps:
            break
    found = way.estimate
    if found is None or found.figures.latency_s > (
            1 - WORTH_CHANGING) * keep.estimate.figures.latency_s:
        return None
    kept = "" if way.qps else "; the tightest there is misses it, too, by less"
    return Revised(keep=keep, estimate=found, is_kept=limit_s < bound.latency_s, reason=(
        "at once, of a few schedules that were simulated; as it was it no longer serves: "
        f"{keep.reason}{kept}"))


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowUpEvidence:
    """What led to a change at once, which is now planned for as a whole."""

    look: StepTimeEvidence | AllowanceEvidence

    is_observing = False  # lengths are not what this is about

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
