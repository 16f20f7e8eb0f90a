"""The layout of this machine's cores, ranks x threads of each, that suits a job best.

Each layout has its own step times and is planned like a cluster of its own. Short jobs are compared
by makespan, including the start of several ranks, others by throughput in steady state."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from xgpt.core.errors import InfeasibleError, XgptError
from xgpt.core.problem import Problem
from xgpt.core.schedule import Schedule
from xgpt.core.system.machine import Layout
from xgpt.core.units import format_seconds
from xprofiler.timing import TimingSource
from xscheduler.evaluator import Evaluator
from xscheduler.makespan import is_short
from xscheduler.space import OPTIMISM

LAYOUT_NOTE = "layout: "
SEVERAL_START_S = 1.0  # chosen: extra seconds to start several ranks rather than one


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLayout:
    """A job planned on one layout: its step times, and its schedule or the error. is_rough: planned
    without a margin and with few replays, in a quarter of the time."""

    layout: Layout
    problem: Problem
    timing: TimingSource
    planned: Schedule | XgptError
    is_rough: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutComparison:
    """Layouts by requests/s, 0 without a schedule. is_for_job: over the whole job."""

    tried: Sequence[PlannedLayout]
    queries_per_s: Mapping[Layout, float]
    is_for_job: bool

    @property
    def best(self) -> PlannedLayout:
        """The best layout, of equals the first. Raises the error if none has a schedule."""
        refusals = [one for one in self.tried if isinstance(one.planned, XgptError)]
        if len(refusals) < len(self.tried):
            return max(self.tried, key=lambda one: self.queries_per_s[one.layout])
        infeasible = [one for one in refusals if isinstance(one.planned, InfeasibleError)]
        if not infeasible or len(refusals) == 1:
            raise refusals[0].planned  # type: ignore[misc]
        raise InfeasibleError("; ".join(f"{one.layout.words}: {one.planned}" for one in infeasible))

    def may_be_best(self, rough: PlannedLayout) -> bool:
        """Whether a roughly planned layout may turn out best when it is planned in full."""
        return (1 + OPTIMISM) * self.queries_per_s[rough.layout] > max(
            self.queries_per_s[one.layout] for one in self.tried if one is not rough)

    def seconds(self, one: PlannedLayout) -> float:
        """Expected seconds of the job; infinite without a schedule or a number of requests."""
        rate = self.queries_per_s[one.layout]
        return one.problem.num_queries / rate if one.problem.num_queries and rate else math.inf

    def chosen(self) -> Schedule:
        """The schedule of the best layout, with a note on the others. Raises as `best`."""
        best = self.best
        assert isinstance(best.planned, Schedule) and not best.is_rough, f"{best.layout = }"
        if len(self.tried) == 1:
            return best.planned
        of = (f"is expected to answer the {best.problem.num_queries} requests in "
              f"{format_seconds(self.seconds(best))}" if self.is_for_job else
              f"answers {self.queries_per_s[best.layout]:.4g} requests/s in steady state")
        others = [one for one in self.tried if one is not best]
        note = "; ".join([f"{LAYOUT_NOTE}{best.layout.words} {of}", *(
            f"{one.layout.words} {self._beside(one, best)}" for one in others)])
        return best.planned.changed(notes=(*best.planned.estimate.notes, note))

    def _beside(self, one: PlannedLayout, best: PlannedLayout) -> str:
        rate, about = self.queries_per_s[one.layout], "about " if one.is_rough else ""
        if not rate:
            return ("has no schedule within the limit" if isinstance(one.planned, InfeasibleError)
                    else "cannot run it")
        ratio = self.queries_per_s[best.layout] / rate
        return (f"would take {about}{format_seconds(self.seconds(one))} (+{ratio - 1:.0%})"
                if self.is_for_job else f"{about}{rate:.4g} requests/s (-{1 - 1 / ratio:.0%})")


def compare_layouts(tried: Sequence[PlannedLayout], *, is_steady: bool) -> LayoutComparison:
    """The comparison of planned layouts. is_steady: in steady state even for a short job."""
    is_for_job = not is_steady and any(is_short(one.problem, one.planned) for one in tried
                                       if isinstance(one.planned, Schedule))
    return LayoutComparison(tried=tried, is_for_job=is_for_job, queries_per_s={
        one.layout: _queries_per_s(one, is_for_job) for one in tried})


def _queries_per_s(one: PlannedLayout, is_for_job: bool) -> float:
    if not isinstance(one.planned, Schedule):
        return 0.0
    count, estimate = one.problem.num_queries, one.planned.estimate
    if one.planned.served is not None:
        return one.planned.served.capacity.qps
    if not is_for_job or not count:
        return estimate.figures.throughput_qps
    job = Evaluator(one.problem, one.timing).job(estimate)
    start_s = SEVERAL_START_S if one.layout.ranks > 1 else 0.0
    return 0.0 if job is None else count / (job.wall_s + start_s)
