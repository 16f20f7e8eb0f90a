"""Planning a job: within what its engine executes, by the one planner there is."""

from dataclasses import dataclass, replace

from xgpt.app.opened import OpenedJob
from xgpt.app.timing import timing_of
from xgpt.core.job import Job
from xgpt.core.schedule import Schedule
from xgpt.report.table import choice_table, fact, schedule_table, stage_table
from xgpt.report.words import counted
from xprofiler.timing import TimingSource
from xrunner.engines.engine import engine_of
from xscheduler.planner import Horizon, Planner, PlanOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A schedule, what it was planned for, and the times it was planned with. As text it is the
    table that `xgpt schedule` prints."""

    schedule: Schedule
    opened: OpenedJob
    timing: TimingSource
    horizon: Horizon

    def __str__(self) -> str:
        problem, cluster = self.opened.problem, self.opened.problem.cluster
        head = (f"{problem.model.name} on {cluster.name} ({cluster.num_devices} x "
                f"{cluster.device.name}), {problem.dtype}\ntimes: {self.timing.provenance()}")
        count = problem.num_queries
        horizon = fact("horizon", f"this job's {counted(count, 'query')}"
                       if self.horizon == "job" and count else "steady state, a job without end")
        tables = (head, horizon, schedule_table(self.schedule),
                  choice_table(self.schedule), stage_table(self.schedule))
        return "\n".join(filter(None, tables))


def executable(opened: OpenedJob, schedule: Schedule | None = None) -> OpenedJob:
    """The job as its engine executes it: over every policy and tensor-parallel degree that the
    engine has and the job, or the `schedule` it is to execute, leaves open. Raises InputError for
    what the engine does not execute."""
    engine = engine_of(opened.job)
    problem = engine.restricted(opened.job, opened.problem, schedule)
    return replace(opened, problem=replace(
        problem, is_revised=problem.is_revised and engine.is_changeable))


def planner_of(opened: OpenedJob, timing: TimingSource,
               options: PlanOptions | None = None) -> Planner:
    """The planner of a job that is executable."""
    options = replace(options or PlanOptions(), untimed=engine_of(opened.job).note)
    return Planner(opened.problem, timing, options, tell=opened.tell.say)


def plan_job(opened: OpenedJob, timing: TimingSource | None = None,
             options: PlanOptions | None = None) -> Plan:
    """The plan of a job, the very one that `xgpt submit` runs where its horizon is the job. Raises
    InfeasibleError."""
    opened = executable(opened)
    timing = timing or timing_of(opened)
    options = options or PlanOptions(horizon=default_horizon(opened.job))
    return Plan(schedule=planner_of(opened, timing, options).plan(), opened=opened, timing=timing,
                horizon=options.horizon)


def default_horizon(job: Job) -> Horizon:
    """What is planned for unless the user says so: the job where it has requests."""
    has_requests = job.workload.requests is not None or job.workload.count is not None
    return "job" if has_requests else "steady"
