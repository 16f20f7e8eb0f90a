"""Which layout of this machine's cores (so many ranks of so many threads) a job is best run on.

Each layout has times of its own and is planned like a cluster of its own; the same objective that
chooses between two schedules of one layout chooses between the best of two: what the job's own
queries take where it is short on either, else the throughput of the steady state. To what the job
takes belongs what the ranks of a layout take to be at work and to end; within a layout it is the
same for every schedule, and no part of what is proved of their throughput. A layout whose
times were derived from others' measurements is never chosen: it is measured first where it may be
the best, and given up where even times as much better as they may be off would not make it that.
Nor is one chosen that was planned roughly: where it may be the best, it is planned in full."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from xgpt.core.errors import InfeasibleError, XgptError
from xgpt.core.layout import Layout
from xgpt.core.problem import Problem
from xgpt.core.schedule import Rejected, Schedule
from xgpt.core.units import format_seconds
from xprofiler.starts import start_s
from xprofiler.timing import TimingSource
from xscheduler.evaluator import Evaluator
from xscheduler.job_time import MOST_AGAIN, MOST_REPLAYS, is_short
from xscheduler.uncertainty import Doubts

LAYOUT_NOTE, LAYOUT_ROW = "layout: ", "layout "
ROUGH = 0.05  # chosen: by which a rough plan may miss what a full one would find
_CERTAIN = 1.64  # deviations: 95 % of a normal's lie below
_ALIKE = 0.15  # chosen: two figures no further apart are called as good, where they are as close


@dataclass(frozen=True, slots=True, kw_only=True)
class LaidOut:
    """A job on one layout: the times it was planned with, and the schedule or why there is none.
    `derived`: from what its times were derived ("": measured), which may be off by the relative
    `derived_error`. `is_rough`: planned without a margin and by few replays, in a fourth of the
    time; for all that is known, it may be better by ROUGH."""

    layout: Layout
    problem: Problem
    timing: TimingSource
    planned: Schedule | XgptError
    derived: str = ""
    derived_error: float = 0.0
    is_rough: bool = False


class LayoutComparison:
    """Layouts of one job, beside each other."""

    def __init__(self, tried: Sequence[LaidOut], *, is_steady: bool = False) -> None:
        """`is_steady`: compare the steady state, however few queries the job has."""
        self.tried = tuple(tried)
        self._is_for_job = not is_steady and any(
            is_short(one.problem, one.planned) for one in tried
            if isinstance(one.planned, Schedule))
        self._queries_per_s = {one.layout: self._worth(one) for one in tried}
        self._doubts = {one.layout: self._doubt(one) for one in tried}

    @property
    def has_schedule(self) -> bool:
        """Whether there is a best."""
        return any(not one.derived and isinstance(one.planned, Schedule) for one in self.tried)

    @property
    def best(self) -> LaidOut:
        """The best of those measured, of equals the one of fewer ranks. Raises the refusal where no
        layout has a schedule."""
        able = [one for one in self.tried
                if not one.derived and isinstance(one.planned, Schedule)]
        if not able:
            raise self._refusal()
        return max(able, key=lambda one: self._queries_per_s[one.layout])

    def undecided(self) -> list[LaidOut]:
        """Those that may be better than the best of those measured, for all that is known."""
        least = max((self._queries_per_s[one.layout] for one in self.tried if not one.derived),
                    default=0.0)
        return [one for one in self.tried if one.derived and least < self._queries_per_s[
            one.layout] * math.exp(ROUGH * one.is_rough + _CERTAIN * self._doubts[one.layout])]

    def chosen(self) -> Schedule:
        """The best one's schedule, which says what it was compared with. Raises as `best`."""
        best = self.best
        assert isinstance(best.planned, Schedule) and not best.is_rough, f"{best.layout = }"
        if len(self.tried) == 1:
            return best.planned
        others = [one for one in self.tried if one is not best]
        note = "; ".join([f"{LAYOUT_NOTE}{best.layout.words} {self._figure(best)}",
                          *(f"{one.layout.words} {self._beside(one, best)}" for one in others)])
        rows = tuple(self._row(one, best) for one in others)
        return best.planned.changed(notes=(*best.planned.estimate.notes, note),
                                    rejected=(*best.planned.rejected, *rows))

    def contenders(self) -> list[LaidOut]:
        """The best, and those that are as good within what their times may be off."""
        best = self.best
        return [best, *(one for one in self.tried if one is not best and not one.derived
                        and self._is_close(one, best))]

    def seconds(self, one: LaidOut) -> float:
        """What its job is expected to take, where it is short with the start and end of the ranks;
        infinite for one without end, or without a schedule."""
        if one.problem.num_queries is None or not self._queries_per_s[one.layout]:
            return math.inf
        return one.problem.num_queries / self._queries_per_s[one.layout]

    def _worth(self, one: LaidOut) -> float:
        """Queries/s: of the job's own where it is short, ramp, drain and the ranks' start and end
        included; 0 where there is no schedule."""
        if not isinstance(one.planned, Schedule):
            return 0.0
        count, estimate = one.problem.num_queries, one.planned.estimate
        if not self._is_for_job or not count:
            return estimate.figures.throughput_qps
        replays = min(max(MOST_AGAIN // count, 1), MOST_REPLAYS)
        job = Evaluator(one.problem, one.timing).job(estimate, replays)
        return 0.0 if job is None else count / (job.wall_s + self._start_s(one))

    def _start_s(self, one: LaidOut) -> float:
        return start_s(one.timing, one.layout.ranks)

    def _doubt(self, one: LaidOut) -> float:
        if not isinstance(one.planned, Schedule):
            return one.derived_error
        doubts = Doubts(one.problem, Evaluator(one.problem, one.timing))
        return math.hypot(doubts.timing_spread(one.planned.estimate), one.derived_error)

    def _is_close(self, one: LaidOut, best: LaidOut) -> bool:
        ratio = self._queries_per_s[best.layout] / max(self._queries_per_s[one.layout], 1e-12)
        return math.log(ratio) < ROUGH * one.is_rough + _CERTAIN * math.hypot(
            self._doubts[one.layout], self._doubts[best.layout])

    def _figure(self, one: LaidOut) -> str:
        if self._is_for_job:
            return (f"is expected to answer the {one.problem.num_queries} queries in "
                    f"{format_seconds(self.seconds(one))}, {format_seconds(self._start_s(one))} "
                    "of them to start and end its ranks")
        return f"answers {self._queries_per_s[one.layout]:.4g} queries/s in steady state"

    def _beside(self, one: LaidOut, best: LaidOut) -> str:
        if not self._queries_per_s[one.layout]:
            return ("has no schedule within the bound" if isinstance(one.planned, InfeasibleError)
                    else "cannot run it")
        ratio = self._queries_per_s[best.layout] / self._queries_per_s[one.layout]
        about = "about " if one.is_rough else ""
        text = (f"would take {about}{format_seconds(self.seconds(one))} (+{ratio - 1:.0%}), "
                f"{format_seconds(self._start_s(one))} of them to start and end"
                if self._is_for_job else
                f"{about}{self._queries_per_s[one.layout]:.4g} queries/s (-{1 - 1 / ratio:.0%})")
        if one.derived:
            return f"{text}, {one.derived}"
        if not self._is_close(one, best):
            return text
        return f"{text}, as good within what the times may be off" if ratio - 1 < _ALIKE else (
            f"{text}, known so roughly that it may be as good")

    def _row(self, one: LaidOut, best: LaidOut) -> Rejected:
        label = f"{LAYOUT_ROW}{one.layout.words}"
        if isinstance(one.planned, XgptError):
            return Rejected(label=label, reason=str(one.planned), throughput_qps=None,
                            latency_s=None)
        figures = one.planned.figures
        return Rejected(label=label, reason=self._beside(one, best), latency_s=figures.latency_s,
                        throughput_qps=figures.throughput_qps)

    def _refusal(self) -> XgptError:
        """Why no layout has a schedule: the one refusal, or each layout's own."""
        refusals = {one.layout: one.planned for one in self.tried
                    if isinstance(one.planned, XgptError)}
        infeasible = {layout: why for layout, why in refusals.items()
                      if isinstance(why, InfeasibleError)}
        if not infeasible or len(refusals) == 1:
            return next(iter(refusals.values()))
        return InfeasibleError("; ".join(f"{layout.words}: {why}"
                                         for layout, why in infeasible.items()))

