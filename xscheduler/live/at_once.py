"""A change that is found at once: what runs, made smaller.

Where steps have become slower, every second until a change is a second in which queries are begun
that will be late; and a plan with its margins, of half a dozen searches and replays, takes seconds
of a core that the ranks and another program share. So what runs is first held to the closed form
alone, and where that misses the bound itself the best of no larger batch (RRA; with other phases
and chunks), or of smaller limits (the others, within their caches), is taken up: a search of a
tenth of a second. It is planned for what the margin of the schedule that the run began with leaves
of the bound, and CAUTIOUS of that: the margin of smaller batches at other times is not known yet.
Then all is planned as ever, beside the ranks, and may better it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from xgpt.core.controls import ContinuousControls
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate, Schedule
from xprofiler.timing import TimingSource
from xscheduler.live.allowance import KeptLook
from xscheduler.live.reschedule import WORTH_CHANGING, Revised, best_held, held_problem, way_now
from xscheduler.live.slowed import StepLook

# Share of what the margin leaves that is planned for: of schedules of slowed stages with RRA in
# chunks a replay showed latencies 1.1 to 1.3 times those of the closed form.
CAUTIOUS = 0.85


def is_pressing(look: object) -> bool:
    """Whether what was seen is about queries that are late: there is no time for a whole plan."""
    if isinstance(look, StepLook):
        return look.drift.slowed > 1
    return isinstance(look, KeptLook) and look.share < look.planned


def revise_at_once(running: Schedule, problem: Problem, timing: TimingSource, *,
                   most_present: int | None, began: Estimate | None) -> Revised | None:
    """What to change to for now (see `revise`); None where the closed form says that what runs
    keeps the bound, if not with a margin, or that nothing smaller is quicker."""
    now, bound_s = running.estimate, problem.constraint.latency_s
    with_margin_s = bound_s / running.margin.factor
    problem = held_problem(now, problem, most_present)

    def within(limit_s: float) -> Problem:
        return replace(problem, constraint=problem.constraint.with_latency(limit_s=limit_s))

    keep = way_now(now, within(bound_s), timing)
    # (more present than the caches hold is no reason: the run holds them to that)
    if keep.qps or keep.estimate is None or keep.estimate.figures.latency_s <= bound_s:
        return None
    most_batch = {} if isinstance(now.controls, ContinuousControls) else {
        "most_batch": max(now.figures.encode_batch, 1)}
    for limit_s in (CAUTIOUS * with_margin_s, with_margin_s, bound_s):
        way = best_held(now, began, within(limit_s), timing, **most_batch)
        if way.qps:
            break
    found = way.estimate
    if found is None or found.figures.latency_s > (
            1 - WORTH_CHANGING) * keep.estimate.figures.latency_s:
        return None
    kept = "" if way.qps else "; the tightest there is misses it, too, by less"
    return Revised(keep=keep, estimate=found, is_kept=limit_s < bound_s, reason=(
        f"at once, by the closed form; as it was it no longer serves: {keep.reason}{kept}"))


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeLook:
    """What led to a change at once, which is now planned for as a whole."""

    look: StepLook | KeptLook

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
