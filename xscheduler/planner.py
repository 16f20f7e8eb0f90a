"""The one planner: the schedule of a problem, whatever is fixed, short, or yet to be observed.

    steady     the best of the policies that are searched, or that the job names, within the bound
               and its confidence, explained
    beginning  where outputs are known only as caps and no schedule keeps the bound with those:
               the quickest there is
    job        for a job of few requests what answers these soonest, ramp and drain included
    room       for the longest request, where memory allows it"""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Literal

from xgpt.core.errors import InfeasibleError
from xgpt.core.policies import changeable_policy, policies
from xgpt.core.problem import Problem
from xgpt.core.schedule import Schedule
from xprofiler.timing import TimingSource
from xscheduler.copies import idle_note
from xscheduler.evaluator import Evaluator
from xscheduler.fallback import begin
from xscheduler.job_time import for_the_job
from xscheduler.margin import Margins
from xscheduler.progress import Watch
from xscheduler.prospects import judged
from xscheduler.room import with_room
from xscheduler.search_planner import SearchPlanner
from xscheduler.unmeasured_engine import plan_untimed
from xsimulator.roofline_limit import roofline_limit_qps

Horizon = Literal["job", "steady"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """`gap`: the search ends once nothing is better by more than this share; None: when it expects
    nothing better. `max_nodes`: replays of one look over all configurations at most; None: as many
    as it takes. `horizon`: plan for the problem's own requests, where it has any, or for the steady
    state of a job without end. `untimed`: why the times are not those of what will run ("" where
    they are). `has_margin`: the bound is kept with the constraint's confidence; else as it is
    expected. `is_brief`: not explained, and not compared with what there would be without a bound.
    `is_rough`: for a comparison, by fewer replays; all that is seen of it is about how good it is.
    `max_seconds`: after so many it ends with what it has found and proved until then; None: when it
    is done."""

    gap: float | None = None
    max_nodes: int | None = None
    horizon: Horizon = "job"
    untimed: str = ""
    has_margin: bool = True
    is_brief: bool = False
    is_rough: bool = False
    max_seconds: float | None = None


def plan(problem: Problem, timing: TimingSource, options: PlanOptions | None = None, *,
         tell: Callable[[str], None] | None = None) -> Schedule:
    """The schedule to run. `tell` takes notes for the user. Raises InfeasibleError, and InputError
    for fixed values that the model or the cluster cannot hold."""
    return Planner(problem, timing, options, tell=tell).plan()


def plan_with_enough(problem: Problem, plan: Callable[[Problem], Schedule],
                     tell: Callable[[str], None]) -> Schedule:
    """`plan` of the problem or, where nothing but its number of requests forbids what the job fixes
    (a job file that is tried on its first lines), of one without a number: its batches never fill.
    Raises InfeasibleError."""
    try:
        return plan(problem)
    except InfeasibleError as refusal:
        controls = {name for row in policies() for name in row.variable_names}
        if problem.num_queries is None or all(
                problem.fixed.value_of(name) is None for name in controls):
            raise
        try:
            schedule = plan(replace(problem, num_queries=None))
        except InfeasibleError:
            raise refusal from None
    count = problem.num_queries
    tell(f"note: the job has {count:,} quer{'y' if count == 1 else 'ies'}, fewer than its fixed "
         "schedule keeps at work at a time: batches will not fill")
    return schedule


class Planner:
    """Schedules of one problem under one latency bound after the other: what was evaluated for one
    serves the next."""

    def __init__(self, problem: Problem, timing: TimingSource, options: PlanOptions | None = None,
                 *, tell: Callable[[str], None] | None = None, watch: Watch | None = None) -> None:
        """See `plan`. watch: another's, who resets it; else each schedule has a time of its own."""
        keep_freed()
        self.problem, self.timing, self.options = problem, timing, options or PlanOptions()
        self._watch, self._resets = watch or Watch(self.options.max_seconds), watch is None
        self._tell = tell if tell is not None else lambda text: None
        self._numberless: Planner | None = None
        self._known: dict[float, Schedule] = {}  # of the steady state, by latency bound

    def plan(self, latency_bound_s: float | None = None) -> Schedule:
        """The schedule to run under a bound, by default the problem's. Raises InfeasibleError."""
        problem = _bounded(self.problem, latency_bound_s)
        with self._watched(), uncollected():
            schedule = with_room(plan_with_enough(
                problem, lambda enough: self._like(enough)._for_its_horizon(enough), self._tell),
                problem)
            schedule = judged(schedule, Margins(problem, self._evaluator), self._tell,
                              is_job=self.options.horizon == "job",
                              has_margin=self.options.has_margin and not self.options.untimed)
        return _noted(problem, schedule.changed(hardware_qps=roofline_limit_qps(problem)))

    def steady(self, latency_bound_s: float | None = None) -> Schedule:
        """The best schedule in steady state that keeps the bound (by default the problem's) with
        the constraint's confidence. Raises InfeasibleError."""
        with self._watched(), uncollected():
            return plan_with_enough(
                _bounded(self.problem, latency_bound_s),
                lambda enough: self._like(enough)._steady(enough), lambda note: None)

    def of(self, problem: Problem) -> Schedule:
        """The steady state's schedule of a problem like this one, with the same options, by
        replicas of unlike sizes where these are better. Raises InfeasibleError."""
        own = self if _bounded(problem, self.problem.constraint.latency_s) == self.problem else (
            Planner(problem, self.timing, self.options))
        return own.steady(problem.constraint.latency_s)

    def without_margin(self, problem: Problem) -> Schedule:
        """The best schedule of a problem like this one, all taken as certain. Raises
        InfeasibleError."""
        return self._search_of(problem).best(problem.constraint.latency_s, has_margin=False)

    def _watched(self) -> Watch:
        if self._resets:
            self._watch.reset()
        return self._watch

    def _like(self, problem: Problem) -> Planner:
        """The planner of the problem under any bound, perhaps without its number of requests."""
        if problem.num_queries == self.problem.num_queries:
            return self
        if self._numberless is None:
            self._numberless = Planner(replace(self.problem, num_queries=None), self.timing,
                                       self.options, watch=self._watch)
        return self._numberless

    def _for_its_horizon(self, problem: Problem) -> Schedule:
        if self.options.horizon == "steady" or self.options.untimed:
            return self._steady(problem)
        try:
            schedule = self._steady(problem)
        except InfeasibleError as refused:
            schedule = begin(problem, self.timing, refused)
        return for_the_job(problem, self._evaluator, schedule, self._own.all_cells,
                           cuts=self._watch.cuts, has_margin=self.options.has_margin,
                           is_rough=self.options.is_rough)

    def _steady(self, problem: Problem) -> Schedule:
        bound_s = problem.constraint.latency_s
        if bound_s not in self._known:
            self._known[bound_s] = (
                plan_untimed(problem, self.timing, self.options.untimed) if self.options.untimed
                else self._own.best(bound_s, has_margin=self.options.has_margin))
        return self._known[bound_s]

    @property
    def _narrowed(self) -> Problem:
        """What is searched: lengths yet to be observed want a schedule that can be changed in
        place."""
        fixed = self.problem.fixed
        changeable = changeable_policy(fixed)
        if self.options.horizon == "steady" or not self.problem.observes or not changeable:
            return self.problem
        return replace(self.problem, fixed=replace(fixed, policies=(changeable,)))

    @cached_property
    def _evaluator(self) -> Evaluator:
        return Evaluator(self._narrowed, self.timing)

    @cached_property
    def _own(self) -> SearchPlanner:
        return self._search_of(self._narrowed)

    def _search_of(self, problem: Problem) -> SearchPlanner:
        return SearchPlanner(problem, self.timing, watch=self._watch, gap=self.options.gap,
                             most_replays=self.options.max_nodes, asked=self.problem.fixed,
                             is_brief=self.options.is_brief)


def _bounded(problem: Problem, latency_bound_s: float | None) -> Problem:
    if latency_bound_s is None:
        return problem
    return replace(problem, constraint=problem.constraint.with_latency(limit_s=latency_bound_s))


def _noted(problem: Problem, schedule: Schedule) -> Schedule:
    """The schedule with a word on devices that no replica has."""
    note = idle_note(problem.cluster, schedule.estimate)
    return schedule.changed(notes=(*schedule.estimate.notes, note)) if note else schedule


_lock = threading.Lock()
_held = 0  # who has asked for it not to, now
_was_enabled = True
_others_froze = False  # once seen, taken to stay so: what is frozen is counted one by one


@contextmanager
def uncollected() -> Iterator[None]:
    """Python looks for no garbage that refers to itself meanwhile, in any thread: over all there is
    after some hundred objects more, that is a tenth to a third of a search. What is not referred to
    is freed as ever. For seconds of work, not for a whole run. What is left of it in the end counts
    as old: it is looked at when all there is is, and not at once."""
    global _held, _was_enabled
    with _lock:
        if not _held:
            _was_enabled = gc.isenabled()
            gc.disable()
        _held += 1
    try:
        yield
    finally:
        with _lock:
            _held -= 1
            if not _held and _was_enabled:
                _age()
                gc.enable()


def _age() -> None:
    global _others_froze
    _others_froze = _others_froze or gc.get_freeze_count() > 0
    if not _others_froze:  # nor is what others have frozen melted
        gc.freeze()
        gc.unfreeze()


# glibc's mallopt(3): its numbers, the variables by which a user sets the same, and what is set
_TRIM, _PAD, _MAPPED = -1, -2, -3
_OPTIONS = {
    _TRIM: ("MALLOC_TRIM_THRESHOLD_", 2**30),  # bytes free at the end before they are given back
    _PAD: ("MALLOC_TOP_PAD_", 64 * 2**20),  # asked for beyond what is wanted
    _MAPPED: ("MALLOC_MMAP_THRESHOLD_", 32 * 2**20),  # from which on a block is the system's own
}


@cache
def keep_freed() -> None:
    """From now on this process keeps what it frees, up to 1 GiB, for itself: glibc would give it to
    the system, and have it again page by page (one to five hundredths of a search's time). What a
    user's environment says of it stays; with another C library than glibc nothing changes."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    for option, (variable, num_bytes) in _OPTIONS.items():
        if variable not in os.environ:
            mallopt(option, num_bytes)
