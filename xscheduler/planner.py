"""The one planner: the schedule of a problem, whether its values are fixed, it is short, or its
lengths are yet to be observed. A problem whose requests arrive over time is planned by
xscheduler.service_planner. Others in seven steps:

1. Steady state: the best of the policies that are searched, or that the job names, within the
   limits and their confidence.
2. If outputs are known only as caps and no schedule keeps the limit at the caps: the schedule of
   least latency to start with.
3. For a job of few requests: the schedule of shortest makespan.
4. For a job with deadlines: a schedule that has enough requests in time.
5. For static batches formed by a threshold that the job leaves open: the best one.
6. KV cache for the longest request, if memory allows it.
7. The order in which the job's requests are run. If that shares more prefixes, steps 1 to 6 are
   taken again in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from xgpt.core.controls import SHARING_ORDERS
from xgpt.core.errors import InfeasibleError
from xgpt.core.policies import changeable_policy, policies
from xgpt.core.problem import Problem
from xgpt.core.schedule import Schedule
from xprofiler.timing import TimingSource
from xscheduler.cache_sizing import with_room
from xscheduler.deadlines import best_in_time
from xscheduler.evaluator import Evaluator
from xscheduler.fallback import initial_or_raise
from xscheduler.makespan import best_for_job
from xscheduler.margin import Margins
from xscheduler.ordering import in_chosen_order, with_order
from xscheduler.placing import Placing, is_placed
from xscheduler.progress import Watch
from xscheduler.prospects import with_prospects
from xscheduler.replicas import idle_note
from xscheduler.search_planner import SearchPlanner
from xscheduler.service_planner import ServicePlanner
from xscheduler.thresholds import with_threshold
from xscheduler.unmeasured_engine import plan_untimed
from xsimulator.roofline_limit import roofline_limit_qps

Horizon = Literal["job", "steady"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Options of a plan.

    `gap`: optimality gap (a share) at which the search ends; None: when it expects nothing better.
    `max_nodes`: most replays of one pass over all configurations; None: the default. `horizon`:
    plan for the problem's own requests, if any ("job"), or for the steady state. `untimed`: why the
    times are not those of the engine that will run; "" if they are. `has_margin`: the limit is kept
    with its confidence, else as expected. `is_brief`: no explanation, no comparisons. `is_rough`:
    fewer replays, for a comparison. `max_seconds`: time limit, after which the best schedule so far
    is returned; None: no limit. `requests`: of each replay of requests that arrive over time; None:
    as many as it takes. `least_qps`: requests/s that such a service must sustain; None: the job's
    rate."""

    gap: float | None = None
    max_nodes: int | None = None
    horizon: Horizon = "job"
    untimed: str = ""
    has_margin: bool = True
    is_brief: bool = False
    is_rough: bool = False
    max_seconds: float | None = None
    requests: int | None = None
    least_qps: float | None = None


def plan(problem: Problem, timing: TimingSource, options: PlanOptions | None = None, *,
         tell: Callable[[str], None] | None = None) -> Schedule:
    """The schedule to run. tell: takes notes for the user. Raises InfeasibleError, and InputError
    for fixed values that the model or the cluster cannot hold."""
    return Planner(problem, timing, options, tell=tell).plan()


def plan_with_enough(problem: Problem, plan: Callable[[Problem], Schedule],
                     tell: Callable[[str], None]) -> Schedule:
    """The schedule by `plan` for the problem. If only the number of its requests forbids the values
    that the job fixes (a job file tried on its first lines), the schedule of a job without a
    number; its batches never fill. Raises InfeasibleError."""
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
    tell(f"note: the job has {count:,} request{'s' * (count != 1)}, fewer than its fixed schedule "
         "keeps in the system: batches will not fill")
    return schedule


class Planner:
    """Schedules of one problem under one latency limit after the other. Evaluations for one limit
    are reused for the next."""

    def __init__(self, problem: Problem, timing: TimingSource, options: PlanOptions | None = None,
                 *, tell: Callable[[str], None] | None = None, watch: Watch | None = None) -> None:
        """watch: clock of a caller, who resets it; None: each schedule has a clock of its own.
        Other arguments: see `plan`."""
        self.problem, self.timing, self.options = problem, timing, options or PlanOptions()
        self._watch, self._resets = watch or Watch(self.options.max_seconds), watch is None
        self._tell = tell if tell is not None else lambda text: None
        self._numberless: Planner | None = None
        self._known: dict[float, Schedule] = {}  # of the steady state, by latency limit

    def plan(self, latency_bound_s: float | None = None) -> Schedule:
        """The schedule within a latency limit, by default the problem's. Raises InfeasibleError."""
        problem = _with_limit(self.problem, latency_bound_s)
        with self._watched() as watch:
            if problem.arrivals is not None:
                return _with_idle_note(problem, with_room(ServicePlanner(
                    problem, self.timing, watch, has_margin=self.options.has_margin,
                    requests=self.options.requests).best(self.options.least_qps), problem))
            if self._is_placed:
                schedule = Placing(problem, self.timing, tell=self._tell,
                                   is_steady=self.options.horizon == "steady",
                                   has_margin=self.options.has_margin).best()
            else:
                schedule = with_room(plan_with_enough(
                    problem, lambda enough: self._like(enough)._for_its_horizon(enough),
                    self._tell), problem)
            is_job = self.options.horizon == "job" and not self.options.untimed
            has_margin = self.options.has_margin and not self.options.untimed
            longer = Margins(problem, self._evaluator).margin(
                schedule.estimate, "deadline").factor if is_job and has_margin else 1.0
            schedule = with_order(self._narrowed, self.timing, schedule, longer=longer,
                                  is_free=is_job and not self.options.is_rough)
            if problem.adjustment.order == "auto" and schedule.order in SHARING_ORDERS:
                return self._again_in_order(schedule, latency_bound_s)
            evaluator = self._evaluator if schedule.order == "input" else Evaluator(
                in_chosen_order(self._narrowed, schedule), self.timing)
            schedule = with_prospects(schedule, Margins(problem, evaluator), self._tell,
                              is_job=self.options.horizon == "job", has_margin=has_margin)
        return _with_idle_note(problem, schedule.changed(hardware_qps=roofline_limit_qps(problem)))

    def _again_in_order(self, found: Schedule, latency_bound_s: float | None) -> Schedule:
        """The schedule for the order that was chosen for `found`, in which more is shared than in
        the order of its search."""
        ordered = Planner(in_chosen_order(self.problem, found), self.timing, self.options,
                          tell=self._tell, watch=self._watch)
        schedule, cost = ordered.plan(latency_bound_s), found.reordered
        if cost is not None and schedule.reordered is not None:  # the input's order as planned for
            cost = replace(cost, first_s=schedule.reordered.first_s)
        return schedule.changed(order_gain=found.order_gain, reordered=cost)

    def steady(self, latency_bound_s: float | None = None) -> Schedule:
        """The best schedule in steady state that keeps the limit (by default the problem's) with
        the constraint's confidence. Raises InfeasibleError."""
        problem = _with_limit(self.problem, latency_bound_s)
        with self._watched():
            if self._is_placed:
                return Placing(problem, self.timing, tell=lambda note: None, is_steady=True,
                               has_margin=self.options.has_margin).best()
            return plan_with_enough(
                problem, lambda enough: self._like(enough)._steady(enough), lambda note: None)

    def of(self, problem: Problem) -> Schedule:
        """The steady-state schedule of a problem like this one, with the same options; also by
        replicas of unequal sizes. Raises InfeasibleError."""
        own = self if _with_limit(problem, self.problem.constraint.latency_s) == self.problem else (
            Planner(problem, self.timing, self.options))
        return own.steady(problem.constraint.latency_s)

    def without_margin(self, problem: Problem) -> Schedule:
        """The best schedule of such a problem without a margin. Raises InfeasibleError."""
        return self._search_of(problem).best(problem.constraint.latency_s, has_margin=False)

    def _watched(self) -> Watch:
        if self._resets:
            self._watch.reset()
        return self._watch

    def _like(self, problem: Problem) -> Planner:
        """The planner of the problem under any limit, perhaps without its number of requests."""
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
            schedule = initial_or_raise(problem, self.timing, refused)
        schedule = best_for_job(problem, self._evaluator, schedule, self._own.all_cells,
                                cuts=self._watch.cuts, has_margin=self.options.has_margin,
                                is_rough=self.options.is_rough)
        return with_threshold(problem, self._evaluator, best_in_time(
            problem, self._evaluator, schedule, self._own.all_cells,
            has_margin=self.options.has_margin, cuts=self._watch.cuts))

    def _steady(self, problem: Problem) -> Schedule:
        bound_s = problem.constraint.latency_s
        if bound_s not in self._known:
            self._known[bound_s] = (
                plan_untimed(problem, self.timing, self.options.untimed) if self.options.untimed
                else self._own.best(bound_s, has_margin=self.options.has_margin))
        return self._known[bound_s]

    @cached_property
    def _is_placed(self) -> bool:
        """Whether bytes of the model must lie below its devices, or the job says where they lie."""
        return is_placed(self._narrowed, lambda: bool(self._own.all_cells))

    @property
    def _narrowed(self) -> Problem:
        """The problem that is searched. If lengths are yet to be observed, only the policy that can
        be changed in place is allowed."""
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


def _with_limit(problem: Problem, latency_bound_s: float | None) -> Problem:
    if latency_bound_s is None:
        return problem
    return replace(problem, constraint=problem.constraint.with_latency(limit_s=latency_bound_s))


def _with_idle_note(problem: Problem, schedule: Schedule) -> Schedule:
    """The schedule with a note on devices that no replica uses, unless few are wanted."""
    is_few = problem.arrivals is not None and problem.constraint.objective != "throughput"
    note = "" if is_few else idle_note(problem.cluster, schedule.estimate)
    return schedule.changed(notes=(*schedule.estimate.notes, note)) if note else schedule
