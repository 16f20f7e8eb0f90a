"""Plans a job: finds its best schedule that its engine can execute, and the best layout of this
machine's cores (ranks, threads per rank) or size of its cluster."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from xgpt.app.opened_job import OpenedJob, in_order_of
from xgpt.app.profile import timing_cost_s, timing_of
from xgpt.app.teller import elapsed_told
from xgpt.app.tiers import lack_memory, needs_tiers, with_measured_tiers
from xgpt.core.engines import OWN_ENGINE, VLLM
from xgpt.core.errors import InfeasibleError, InputError, Mistake, XgptError, refuse, wrong
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate, Schedule
from xgpt.core.system.machine import Layout, usable_cores
from xgpt.core.units import FP8, format_seconds
from xgpt.job.job import Job
from xgpt.job.resolve import open_layouts, resolve_cluster, resolve_weight_dtype, with_layout
from xgpt.launch.launcher import ranks_per_node, threads_per_rank
from xgpt.report.notebook import Printed, frame
from xgpt.report.plan_screen import ENGINE_WORDS, PlanTimes, plan_screen, source_words
from xgpt.report.prefix_words import prefix_lines
from xgpt.report.table import figures_of, schedule_details
from xprofiler.profile_file import load_profile
from xprofiler.roofline import Roofline
from xprofiler.timing import TimingSource
from xrunner.backends.engine import engine_of
from xscheduler.cluster_sizes import SizeCost, SizeSearch, size_cost
from xscheduler.evaluator import Evaluator, predict
from xscheduler.layouts import PlannedLayout, compare_layouts
from xscheduler.planner import Horizon, Planner, PlanOptions
from xscheduler.progress import Watch
from xscheduler.replicas import replica_sizes
from xsimulator.allocation import pool_layers
from xsimulator.replay.prediction import JobPrediction

# measured: 7 % with SmolLM2-135M on two cores
LAYOUT_GAIN = 0.1  # share of a job's time that another layout may save per doubling of its ranks
ANOTHER_ANSWER = 0.05  # chosen: times of another engine that differ by less are not shown


def layout_of(opened: OpenedJob) -> Layout:
    """The job's ranks and threads per rank."""
    return Layout(opened.problem.cluster.num_devices, threads_per_rank(opened.job, opened.problem))


def by_layout(opened: OpenedJob) -> dict[Layout, OpenedJob]:
    """The job on every layout that it leaves open, the fewest ranks first, or unchanged on its own.
    A job with a profile has the profile's layout; one that minimizes devices or cost leaves their
    number open."""
    if is_sized(opened.problem):
        return {layout_of(one): one for one in _on_sizes(opened)}
    layouts = open_layouts(opened.job)
    if layouts and opened.job.profile is not None:
        of = load_profile(opened.job.profile).metadata
        layouts = (Layout(of.ranks, of.threads_per_rank),)
    if not layouts:
        return {layout_of(opened): opened}
    return {layout: _on(opened, layout, is_one_of_many=len(layouts) > 1) for layout in layouts}


def with_ranks(opened: OpenedJob, ranks: int) -> OpenedJob:
    """The job on `ranks` ranks, where it leaves their number open; else unchanged."""
    if is_sized(opened.problem):
        return _on_size(opened, ranks)
    layouts = open_layouts(opened.job)
    if not layouts:
        return opened
    threads = opened.job.run.threads_per_rank or max(usable_cores() // ranks, 1)
    return _on(opened, Layout(ranks, threads))


def is_sized(problem: Problem) -> bool:
    """Whether the job's objective is to use few, or cheap, devices of its cluster."""
    return problem.constraint.objective != "throughput" and problem.arrivals is None


def _on_sizes(opened: OpenedJob) -> list[OpenedJob]:
    """The job on every part of its cluster that it may use, the smallest first. Raises InputError
    for this machine's cores, and for objective cost without a price."""
    job, cluster = opened.job, opened.problem.cluster
    objective = opened.problem.constraint.objective
    if opened.is_local and cluster.device.kind == "cpu":
        raise wrong(job.source, "objective", objective,
                    "only for a cluster of devices: of this machine all cores are used")
    if objective == "cost" and cluster.device.price_per_hour is None:
        raise wrong(job.source, "price_per_hour", None, "required for objective cost: the catalog "
                    f"has no price of {cluster.device.name}")
    return [_on_size(opened, size) for size in replica_sizes(cluster)]


def _on_size(opened: OpenedJob, devices: int) -> OpenedJob:
    if devices == opened.problem.cluster.num_devices:
        return opened
    job = replace(opened.job, run=replace(opened.job.run, ranks=devices))
    return replace(opened, job=job, problem=replace(opened.problem, cluster=resolve_cluster(job)))


def _on(opened: OpenedJob, layout: Layout, *, is_one_of_many: bool = False) -> OpenedJob:
    job, problem = with_layout(opened.job, layout), opened.problem
    cluster, fixed = resolve_cluster(job), problem.fixed
    if is_one_of_many and fixed.tp_degree is None and not fixed.tp_gpus:
        # instead of tensor parallelism over ranks, a layout of fewer ranks has more threads, which
        # need no messages
        fixed = replace(fixed, tp_degree=1, tp_gpus=0)
    return replace(opened, job=job, problem=replace(
        problem, cluster=cluster, fixed=fixed,
        weight_dtype=resolve_weight_dtype(job, problem.dtype, problem.model, cluster)))


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan(Printed):
    """A schedule, the job it was planned for, and the step times it was planned with. As text the
    screen that `xgpt schedule` prints."""

    schedule: Schedule
    opened: OpenedJob
    timing: TimingSource
    horizon: Horizon

    def __repr__(self) -> str:
        schedule = self.schedule
        return (f"<Plan of {self.opened.job.name}: {schedule.estimate.policy}, "
                f"{schedule.figures.throughput_qps:.4g} requests/s in steady state>")

    def to_pandas(self) -> Any:
        """A pandas.DataFrame of the chosen schedule and its alternatives: name, throughput_qps (of
        a service its capacity), latency_s, reason. Raises MissingExtraError without pandas."""
        figures, served = self.schedule.figures, self.schedule.served
        rate = figures.throughput_qps if served is None else served.capacity.qps
        chosen = {"name": self.schedule.estimate.policy, "throughput_qps": rate,
                  "latency_s": figures.latency_s, "reason": "chosen"}
        return frame([chosen, *(
            {"name": row.name, "throughput_qps": row.throughput_qps, "latency_s": row.latency_s,
             "reason": row.reason} for row in self.schedule.rejected)])

    def __str__(self) -> str:
        prediction, job, problem = self.prediction, self.opened.job, self.opened.problem
        return plan_screen(self.schedule, problem, PlanTimes(
            source=self.times, expected=prediction, by_engine=self.by_engine,
            sharing=prefix_lines(problem, self.schedule, prediction, self.timing)),
            str(job.source), is_here=self.opened.is_local or job.slurm is not None)

    @property
    def times(self) -> str:
        """Whose times these are, and how far off such times were, in words."""
        return source_words(self.timing, self.schedule.estimate, self.opened.problem.cluster,
                            self.opened.job.plan_engine)

    @cached_property
    def prediction(self) -> JobPrediction | None:
        """Prediction for the job's own queries without loading; None for the steady horizon, a
        service, or an unknown number of queries."""
        if self.horizon == "steady" or self.schedule.served is not None:
            return None
        return predict(self.opened.problem, self.timing, self.schedule.estimate, replays=1)

    @cached_property
    def by_engine(self) -> list[tuple[str, float]]:
        """Names of other engines, and the seconds that the job takes by their computed times."""
        own, problem = self.prediction, self.opened.problem
        if own is None or not isinstance(self.timing, Roofline) or problem.model.split.is_asked or (
                self.schedule.placed is not None):  # which other engines do not execute
            return []
        asked = [(engine, problem.weight_dtype) for engine in (VLLM, OWN_ENGINE)
                 if engine != self.opened.job.plan_engine]
        if FP8 in dict(problem.cluster.device.flops_per_s) and problem.weight_dtype != FP8:
            asked.append((VLLM, FP8))
        rows = []
        for engine, dtype in asked:
            found = predict(replace(problem, weight_dtype=dtype), Roofline(
                problem.model, problem.cluster.device, problem.dtype, engine=engine,
                weight_dtype=dtype, kv_dtype=problem.kv_dtype), self.schedule.estimate, replays=1)
            if found is not None and abs(found.wall_s / own.wall_s - 1) > ANOTHER_ANSWER:
                rows.append((f"{ENGINE_WORDS[engine]}{f' with {dtype} weights' * (dtype == FP8)}",
                             found.wall_s))
        return rows

    @property
    def details(self) -> str:
        """The text of `xgpt explain`: alternatives, bounds, pruned boxes, and each stage."""
        return schedule_details(self.schedule, figures_of(self.prediction))


class JobPlanner:
    """Plans one job under any number of latency limits, over the layouts of this machine's cores,
    or the sizes of its cluster, that it leaves open."""

    def __init__(self, opened: OpenedJob, options: PlanOptions | None = None,
                 timing: TimingSource | None = None) -> None:
        """Measures step times of this machine that are not known; `timing`: times to use instead,
        for a job with one layout. Raises InfeasibleError for weights that fit on no devices."""
        opened = executable(opened)
        self._objective = opened.problem.constraint.objective
        self._options = replace(options or PlanOptions(horizon=default_horizon(opened.job)),
                                requests=opened.job.search_queries)
        self._watch = Watch(self._options.max_seconds or opened.job.max_search_s)
        self._jobs = {layout_of(opened): opened} if timing is not None else by_layout(opened)
        self._is_timed = timing is not None or is_sized(opened.problem)  # whatever its tiers
        self._planners: dict[tuple[Layout, bool], Planner] = {}  # by layout and whether it is rough
        if timing is None and needs_tiers([*self._jobs.values()]):
            self._measure_tiers()
        layouts = [*self._jobs]
        if is_sized(opened.problem):  # parts of a cluster have its own times
            timing = timing or timing_of(self._jobs[layouts[-1]])
        for layout in layouts if is_sized(opened.problem) else layouts[:1]:
            self._planner(layout, timing)

    def plan(self, latency_bound_s: float | None = None) -> Plan:
        """The best plan of all layouts under the latency limit (by default the job's). Raises
        InfeasibleError, and InputError for a job that fits on no layout."""
        self._watch.reset()
        wide, *others = self._jobs
        if others and is_sized(self._jobs[wide].problem):
            return self._on_best_size(latency_bound_s)
        is_steady = self._options.horizon == "steady"
        tried = [self._tried(wide, latency_bound_s)]
        if others and self._is_worth_timing(others[0], tried[0], is_steady=is_steady):
            # a rough plan is enough for a layout that is not the best
            tried.append(self._tried(others[0], latency_bound_s,
                                     is_rough=isinstance(tried[0].planned, Schedule)))
            if tried[1].is_rough and (
                    compare_layouts(tried, is_steady=is_steady).may_be_best(tried[1])):
                tried[1] = self._tried(others[0], latency_bound_s)
        if lack_memory(one.planned for one in tried) and self._measure_tiers():
            return self.plan(latency_bound_s)
        found = compare_layouts(tried, is_steady=is_steady)
        schedule, best = found.chosen(), found.best
        opened = self._jobs[best.layout]
        if self._watch.has_cut:
            opened.tell.say(f"note: the search ended after {format_seconds(self._watch.seconds)} "
                            "(search.max_seconds): a better one may lie within the gap shown")
        return Plan(schedule=schedule, opened=in_order_of(opened, schedule), timing=best.timing,
                    horizon=self._options.horizon)

    def _measure_tiers(self) -> bool:
        """Gives the job this machine's memory below its devices; False if it has it, or may not use
        it."""
        before, known, self._planners = self._jobs, self._planners, {}
        self._jobs = {layout: with_measured_tiers(job) for layout, job in before.items()}
        for (layout, _), planner in known.items():
            self._planner(layout, planner.timing if self._is_timed else None)
        return any(self._jobs[layout] is not job for layout, job in before.items())

    def _on_best_size(self, latency_bound_s: float | None) -> Plan:
        """The plan on the number of devices that is best for the job's objective."""
        layouts = {layout.ranks: layout for layout in self._jobs}

        def planned(size: int, has_margin: bool) -> Schedule:
            one = self._tried(layouts[size], latency_bound_s, is_rough=not has_margin)
            if isinstance(one.planned, XgptError):
                raise one.planned
            return one.planned

        def takes(size: int, schedule: Schedule) -> SizeCost:
            planner = self._planner(layouts[size])
            return size_cost(planner.problem, schedule, Evaluator(planner.problem, planner.timing))

        search = SizeSearch(plan=planned, cost_of=takes,
                            problem=lambda size: self._jobs[layouts[size]].problem)
        best = search.choose(self._objective, sorted(layouts))
        layout = layouts[best]
        schedule = search.schedule_of(best)
        return Plan(schedule=schedule, opened=in_order_of(self._jobs[layout], schedule),
                    timing=self._planner(layout).timing, horizon=self._options.horizon)

    def of(self, plan: Plan | None) -> tuple[OpenedJob, Planner]:
        """The job on the layout of its `plan` (None: of fewest ranks), and that layout's planner.
        """
        layout = next(layout for layout, job in self._jobs.items()
                      if plan is None or job.job is plan.opened.job)
        return self._jobs[layout] if plan is None else plan.opened, self._planner(layout)

    def _is_worth_timing(self, layout: Layout, first: PlannedLayout, *, is_steady: bool) -> bool:
        """Whether to plan on this layout, too: where it was measured already, the first layout has
        no schedule, or the job is long enough to regain the time of measuring."""
        cost_s = 0.0 if (layout, False) in self._planners else timing_cost_s(
            self._jobs[layout], first.timing)
        if not cost_s or not isinstance(first.planned, Schedule):
            return True
        job_s = compare_layouts([first], is_steady=is_steady).seconds(first)
        if job_s * LAYOUT_GAIN * math.log2(layout.ranks / first.layout.ranks) >= cost_s:
            return True
        self._jobs[layout].tell.detail(
            f"layout: {first.layout.words}. {layout.words} is not measured: that would take "
            f"{format_seconds(cost_s)}, this job takes {format_seconds(job_s)} "
            f"(`--set run.ranks={layout.ranks}` measures it)")
        return False

    def _planner(self, layout: Layout, timing: TimingSource | None = None, *,
                 is_rough: bool = False) -> Planner:
        """The planner for a layout. `timing`: its step times, measured where None. `is_rough`:
        without margins, by few replays."""
        if (layout, is_rough) not in self._planners:
            job, options = self._jobs[layout], self._options
            if is_rough:
                timing = self._planner(layout).timing
                options = replace(options, has_margin=False, is_brief=True, is_rough=True)
            self._planners[layout, is_rough] = Planner(
                job.problem, timing or timing_of(job),
                replace(options, untimed=engine_of(job.job).note), tell=job.tell.say,
                watch=self._watch)
        return self._planners[layout, is_rough]

    def _tried(self, layout: Layout, latency_bound_s: float | None, *,
               is_rough: bool = False) -> PlannedLayout:
        planner = self._planner(layout, is_rough=is_rough)
        try:
            with self._watch, elapsed_told(self._jobs[layout].tell, "finding the best schedule",
                                         lambda: self._watch.words):
                planned: Schedule | XgptError = planner.plan(latency_bound_s)
        except (InfeasibleError, InputError) as refusal:
            planned = refusal
        return PlannedLayout(layout=layout, problem=planner.problem, timing=planner.timing,
                       planned=planned, is_rough=is_rough)


def job_with_times(opened: OpenedJob,
                   given: Estimate | None = None) -> tuple[OpenedJob, TimingSource]:
    """The job on one layout, and its step times: the layout of the estimate `given`, else of the
    job's plan, or of fewest ranks where it has no plan."""
    if given is not None:
        opened = with_ranks(with_measured_tiers(opened, given), given.num_devices)
        return opened, timing_of(opened)
    if len(by_layout(opened)) == 1:
        (opened,) = by_layout(opened).values()
        return opened, timing_of(opened)
    planner = JobPlanner(opened)
    try:
        plan: Plan | None = planner.plan()
    except (InfeasibleError, InputError):
        plan = None
    best, own = planner.of(plan)
    return replace(best, problem=replace(best.problem, fixed=opened.problem.fixed)), own.timing


def executable(opened: OpenedJob, schedule: Schedule | None = None) -> OpenedJob:
    """The job limited to the policies and tensor-parallel degrees that its engine executes, of
    those that the job, or the `schedule` to execute, leaves open. Raises InputError where none is
    left."""
    engine = engine_of(opened.job)
    problem = engine.restricted(opened.job, opened.problem, schedule)
    return replace(opened, problem=replace(
        problem, is_revised=problem.is_revised and engine.is_changeable))


def plan_from(opened: OpenedJob, schedule: Schedule, source: Path) -> Plan:
    """The plan that runs `schedule`, read from the file `source`, on the job. Raises InputError for
    a schedule of another job, or one that the engine does not execute."""
    opened = with_measured_tiers(opened, schedule.estimate)
    opened = with_ranks(opened, schedule.estimate.num_devices)
    if schedule.fingerprint != opened.problem.fingerprint:
        raise wrong(source, "fingerprint", schedule.fingerprint,
                    f"this job's is {opened.problem.fingerprint}: another model, dtype or number "
                    "of ranks; plan this job with `xgpt schedule`")
    each = opened.problem.cluster.devices_per_node
    if schedule.estimate.others and ranks_per_node(schedule.estimate, each) is None:
        raise wrong(source, "others", len(schedule.estimate.others),
                    f"shapes whose replicas each lie within a node of {each} devices, or on whole "
                    "nodes")
    refuse(_misfits(opened.problem, schedule.estimate, source))
    opened = in_order_of(executable(opened, schedule), schedule)
    return Plan(schedule=schedule, opened=opened, timing=timing_of(opened), horizon="job")


def _misfits(problem: Problem, estimate: Estimate, source: Path) -> Iterator[Mistake]:
    """Yields mistakes of a schedule for this problem: too many devices, other layers than the
    model's, or replicas that get no queries."""
    mistake, most = partial(Mistake, file=str(source), line=None), problem.cluster.num_devices
    if estimate.num_devices > most:
        yield mistake(key="deployment", value=estimate.num_devices,
                      allowed=f"on as many devices as the job has: {most}")
    for place, shape in enumerate(estimate.shapes):
        of = f"others[{place - 1}]." if place else ""
        for number, pool in enumerate(shape.deployment.pools):
            held = (sum(stage.num_layers for stage in pool.stages),
                    sum(stage.num_encoder_layers for stage in pool.stages))
            if held != (wanted := pool_layers(problem.model, pool.role)):
                yield mistake(key=f"{of}deployment.pools[{number}].stages", value=list(held),
                              allowed=f"decoder and encoder layers as the model has: {[*wanted]}")
        if estimate.others and not shape.figures.throughput_qps:
            yield mistake(key=f"{of}figures.throughput_qps", value=0,
                          allowed="more than 0: it decides the replicas' shares of the queries")


def plan_job(opened: OpenedJob, timing: TimingSource | None = None,
             options: PlanOptions | None = None) -> Plan:
    """Plans a job, as `xgpt submit` does (which uses the horizon job). `timing`: step times to use
    instead of the job's. Raises InfeasibleError."""
    return JobPlanner(opened, options, timing).plan()


def default_horizon(job: Job) -> Horizon:
    """The horizon unless the user gives one: "job" for a job with requests, else "steady"."""
    has_requests = job.workload.requests is not None or job.workload.count is not None
    return "job" if has_requests else "steady"
