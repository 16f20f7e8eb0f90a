"""One job on every engine: each with the schedule that is best for it, or why it does not execute
the job."""

from dataclasses import replace

from xgpt.app.opened import OpenedJob
from xgpt.app.plan import JobPlanner, Plan
from xgpt.core import catalog
from xgpt.core.engines import ONE_PROCESS, OWN_ENGINE, engine_names
from xgpt.core.errors import InfeasibleError, InputError, XgptError
from xgpt.core.problem import resolve
from xgpt.report.engine_table import EngineRow
from xprofiler.profile_timing import ProfileTiming
from xprofiler.roofline import Roofline
from xprofiler.timing import TimingSource
from xrunner.engines.engine import Engine, engine_of
from xscheduler.planner import PlanOptions


def on_every_engine(opened: OpenedJob, options: PlanOptions,
                    own: Plan | InfeasibleError) -> tuple[EngineRow, ...]:
    """Ours first. `own`: what the job's own engine comes to, which is not planned again."""
    rows = []
    for name in engine_names():
        if name != opened.job.run.engine:
            opened.tell.say(f"engine {name}:")
            rows.append(_row(opened, name, options))
        elif isinstance(own, InfeasibleError):
            rows.append(EngineRow(engine=name, infeasible=str(own)))
        else:
            rows.append(_planned(own, engine_of(opened.job)))
    return tuple(rows)


def _row(opened: OpenedJob, name: str, options: PlanOptions) -> EngineRow:
    job = replace(opened.job, run=replace(opened.job.run, engine=name),
                  plan_engine=name if name in catalog.names("engine") else OWN_ENGINE)
    if name not in ONE_PROCESS:
        job = replace(job, run=replace(job.run, engine_python=None, engine_args={}))
    try:
        engine = engine_of(job)
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
                              engine=job.plan_engine, weight_dtype=problem.weight_dtype)
        row = _planned(JobPlanner(own, options, timing).plan(), engine)
        return replace(row, missing=missing)
    except InfeasibleError as why:
        return EngineRow(engine=name, infeasible=str(why))
    except InputError as error:
        return EngineRow(engine=name, refused=tuple(
            f"{mistake.key}: {mistake.allowed}" for mistake in error.mistakes))
    except XgptError as error:
        return EngineRow(engine=name, refused=(str(error),))


def _missing(engine: Engine, opened: OpenedJob) -> str:
    """What keeps the engine from running on this machine; of another cluster nothing is known."""
    if not opened.is_local:
        return ""
    try:
        engine.check_installed(opened.job)
    except XgptError as error:
        return str(error)
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
