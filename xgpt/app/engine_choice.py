"""One job on every engine: each with the schedule that is best for it, or why it does not execute
the job."""

from dataclasses import replace

from xgpt.app.opened import OpenedJob
from xgpt.app.plan import JobPlanner, Plan
from xgpt.core import catalog
from xgpt.core.engines import ONE_PROCESS, OWN_ENGINE, engine_names
from xgpt.core.errors import InfeasibleError, InputError, XgptError
from xgpt.core.job import Job
from xgpt.core.local import usable_cores
from xgpt.core.problem import resolve
from xgpt.report.engine_table import EngineRow
from xprofiler.profile_timing import ProfileTiming
from xprofiler.roofline import Roofline
from xprofiler.timing import TimingSource
from xrunner.engines.engine import Engine, engine_of, mistake
from xscheduler.planner import PlanOptions


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
