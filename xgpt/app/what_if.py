"""A plan and what may be asked besides: what more of each limit would bring, what becomes of the
schedule when output lengths change, how to go on from one that is deployed, and what the job comes
to on other engines, each with the schedule that is best for it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from xgpt.app.opened import OpenedJob
from xgpt.app.schedule import JobPlanner, Plan
from xgpt.core import catalog
from xgpt.core.engines import ONE_PROCESS, OWN_ENGINE, engine_names
from xgpt.core.errors import InfeasibleError, InputError, XgptError
from xgpt.core.schedule import Schedule
from xgpt.core.schedule_file import flat
from xgpt.core.system.machine import usable_cores
from xgpt.job.job import Job
from xgpt.job.resolve import resolve
from xgpt.report.what_if_tables import (
    EngineRow,
    drift_table,
    engine_table,
    offers_table,
    reschedule_table,
)
from xprofiler.profile_timing import ProfileTiming
from xprofiler.roofline import Roofline
from xprofiler.timing import TimingSource
from xrunner.backends.engine import Engine, engine_of, mistake
from xscheduler.drift import DriftRow, drift_rows
from xscheduler.fallback import hint
from xscheduler.live.reschedule import Reschedule, reschedule
from xscheduler.planner import Horizon, Planner, PlanOptions
from xscheduler.price import AS_IT_IS, Offer, price
from xscheduler.room import with_room


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """A plan, or why there is none, and the answers to what was asked besides (None: it was not).
    As text they are the tables that `xgpt schedule` prints."""

    opened: OpenedJob
    horizon: Horizon
    plan: Plan | None
    infeasible: InfeasibleError | None
    hint: str  # at what a run would do all the same
    offers: Sequence[Offer] | None
    drift: Sequence[DriftRow] | None
    ways: Reschedule | None
    engines: Sequence[EngineRow] | None = None

    def __str__(self) -> str:
        parts = [] if self.plan is None else [str(self.plan)]
        if self.ways is not None:
            parts.append(reschedule_table(self.ways))
        if self.offers is not None:
            parts.append(offers_table(self.offers))
        if self.drift is not None:
            parts.append(drift_table(self.drift, self.opened.problem.constraint))
        if self.engines is not None:
            parts.append(engine_table(self.engines, self.opened.problem.constraint.latency))
        return "\n\n".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """One flat object: the schedule's keys, then those asked for."""
        keys: dict[str, Any] = {} if self.plan is None else flat(self.plan.schedule)
        keys["horizon"] = self.horizon
        if self.infeasible is not None:
            keys["infeasible"] = str(self.infeasible)
        asked = (("price", self.offers), ("drift", self.drift), ("reschedule", self.ways),
                 ("engines", None if self.engines is None else [
                     row.to_dict() for row in self.engines]))
        return keys | {key: value for key, value in asked if value is not None}

    @property
    def recommended(self) -> Schedule | None:
        """The schedule to deploy: the plan's or, of a deployed one that is to be kept or adjusted,
        what that comes to."""
        if self.plan is None or self.ways is None or self.ways.chosen is None or (
                self.ways.choice == "redeploy"):
            return None if self.plan is None else self.plan.schedule
        schedule, chosen = self.plan.schedule, self.ways.chosen
        return with_room(schedule.changed(
            estimate=chosen, gap=schedule.proof.bound_qps / chosen.figures.throughput_qps - 1,
            explanation=(), rejected=()), self.opened.problem)


def answers_for(opened: OpenedJob, options: PlanOptions, *, with_price: bool = False,
                with_drift: bool = False, with_engines: bool = False,
                engine_python: str | None = None, deployed: Schedule | None = None) -> Answers:
    """Plans the job, and answers what is asked about it. `engine_python`: see on_every_engine.
    `deployed`: the schedule to go on from."""
    plans = JobPlanner(opened, options)
    plan: Plan | None = None
    infeasible: InfeasibleError | None = None
    try:
        plan = plans.plan()
    except InfeasibleError as why:
        infeasible = why
    outcome = infeasible or plan
    assert outcome is not None, "a plan, or why there is none"
    engines = on_every_engine(opened, options, outcome, engine_python) if with_engines else None
    opened, planner = plans.of(plan)
    offers: Sequence[Offer] | None = None
    if with_price:
        offers = price(planner.problem, planner.of)
        # the first says why there is no schedule now, which the command does anyway
        offers = offers if offers[0].what != AS_IT_IS else offers[1:]
    return Answers(
        hint="" if infeasible is None else hint(opened.problem, planner.timing), opened=opened,
        horizon=options.horizon, plan=plan, infeasible=infeasible, offers=offers,
        engines=engines, ways=None if deployed is None else _ways(planner, deployed),
        drift=_drift(planner, plan) if with_drift and plan is not None else None)


def _ways(planner: Planner, deployed: Schedule) -> Reschedule:
    try:
        steady: Schedule | InfeasibleError = planner.steady()
    except InfeasibleError as why:
        steady = why
    limit_s = None if isinstance(steady, InfeasibleError) else (
        planner.problem.constraint.latency_s / steady.margin.factor)
    return reschedule(deployed, planner.problem, planner.timing, best=steady,
                      latency_limit_s=limit_s)


def _drift(planner: Planner, plan: Plan) -> Sequence[DriftRow]:
    plan.opened.tell.say(
        "replaying the schedule, and the best one, on 13 changed distributions ...")
    return drift_rows(
        planner.problem, planner.timing, plan.schedule.estimate,
        search=lambda problem: planner.without_margin(problem).estimate)


def on_every_engine(opened: OpenedJob, options: PlanOptions, own: Plan | InfeasibleError,
                    engine_python: str | None = None) -> tuple[EngineRow, ...]:
    """Ours first. `own`: what the job's own engine comes to, which is not planned again.
    `engine_python`: the Python of the environment that other engines of one process are in."""
    rows = []
    for name in engine_names():
        if name != opened.job.run.engine:
            opened.tell.say(f"engine {name}:")
            rows.append(_row(opened, name, options, engine_python))
        elif isinstance(own, InfeasibleError):
            rows.append(EngineRow(engine=name, infeasible=str(own)))
        else:
            rows.append(_planned(own, engine_of(opened.job)))
    return tuple(rows)


def _row(opened: OpenedJob, name: str, options: PlanOptions,
         engine_python: str | None = None) -> EngineRow:
    job = replace(_as_executed_by(name, opened, engine_python),
                  plan_engine=name if name in catalog.names("engine") else OWN_ENGINE)
    try:
        engine, objective = engine_of(job), opened.problem.constraint.objective
        if objective != "throughput" and name != OWN_ENGINE:
            raise InputError([mistake(job, "objective", objective,
                                      f"throughput with run.engine {name}")])
        if refused := tuple(engine.refusals(job)):
            raise InputError(refused)
        own = replace(opened, job=job, problem=resolve(
            job, model=opened.problem.model, requests=opened.requests))
        missing = _missing(engine, own)
        timing: TimingSource | None = None
        if missing and engine.identity is not None and job.profile is None:
            # nothing of it can be timed here
            problem = engine.restricted(job, own.problem, None)
            timing = Roofline(problem.model, problem.cluster.device, problem.dtype,
                              engine=job.plan_engine, weight_dtype=problem.weight_dtype,
                              kv_dtype=problem.kv_dtype)
        row = _planned(JobPlanner(own, options, timing).plan(), engine)
        return replace(row, missing=missing)
    except InfeasibleError as why:
        return EngineRow(engine=name, infeasible=str(why))
    except InputError as error:
        return EngineRow(engine=name, refused=tuple(
            f"{mistake.key}: {mistake.allowed}" for mistake in error.mistakes))
    except XgptError as error:
        return EngineRow(engine=name, refused=(str(error),))


def _as_executed_by(name: str, opened: OpenedJob, engine_python: str | None) -> Job:
    """The job with another engine, on the same devices: one of a single process has the cores of
    all ranks of this machine, or divides each layer over its GPUs."""
    job, ranks = opened.job, opened.job.run.ranks
    run = replace(job.run, engine=name, engine_args={},
                  engine_python=engine_python if name in ONE_PROCESS else None)
    if name in ONE_PROCESS and opened.is_local and opened.problem.cluster.device.kind == "gpu":
        return replace(job, run=replace(run, ranks=opened.problem.cluster.num_devices))
    if name in ONE_PROCESS and opened.is_local and ranks is not None and not run.hosts:
        threads = run.threads_per_rank
        run = replace(run, ranks=None, threads_per_rank=None if threads is None else min(
            ranks * threads, usable_cores()))
    return replace(job, run=run)


def _missing(engine: Engine, opened: OpenedJob) -> str:
    """What keeps the engine from running on this machine; of another cluster nothing is known."""
    if not opened.is_local:
        return ""
    try:
        engine.check_installed(opened.job)
    except XgptError as error:
        return str(error).replace("run.engine_python", "--engine-python")
    return ""


def _planned(plan: Plan, engine: Engine) -> EngineRow:
    return EngineRow(engine=engine.name, schedule=plan.schedule, note=engine.note,
                     times_of=_kind(plan, engine), times=plan.timing.provenance())


def _kind(plan: Plan, engine: Engine) -> str:
    """Which kind of times a plan is made with."""
    if not isinstance(plan.timing, ProfileTiming):
        constants = plan.opened.job.plan_engine
        return "roofline" if constants == OWN_ENGINE else f"roofline of {constants}"
    if plan.opened.job.profile is not None:
        origin = plan.timing.profile.metadata.origin
        return "profile given" if origin.startswith("measured") else "imported tables"
    return "own profile" if engine.is_predicted else f"{OWN_ENGINE}'s profile"
