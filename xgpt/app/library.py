"""The functions of `import xgpt`: one a use case, each with what it needs by default."""

import json
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from xgpt.app.opened import OpenedJob, open_file
from xgpt.app.plan import Plan, default_horizon, plan_job, settled
from xgpt.app.run import execute, open_to_run, to_run
from xgpt.app.simulate import Simulation, simulate_job
from xgpt.app.sweep import Sweep, sweep_job
from xgpt.app.telling import Teller
from xgpt.core.errors import XgptError
from xgpt.core.job import Job
from xgpt.report.page import write_report as write_page
from xgpt.report.results_file import write_results
from xscheduler.planner import Horizon, PlanOptions
from xscheduler.search import GAP


def load(path: str | PathLike[str], overrides: Mapping[str, object] | None = None, *,
         tell: Teller | None = None) -> OpenedJob:
    """Loads a job file. `overrides`: values for keys of it, as `--set` takes them. `tell` takes
    notes and progress; by default they go to the logger `xgpt`. Raises InputError with every
    mistake of the file."""
    sets = [f"{key}={_as_yaml(value)}" for key, value in (overrides or {}).items()]
    return open_file(Path(path), sets, tell, "lengths")


def plan(job: OpenedJob, *, horizon: Horizon | None = None, gap: float = GAP,
         max_nodes: int | None = None) -> Plan:
    """Plans the job: the schedule of highest throughput within its latency bound. `horizon`: "job",
    for its own queries (by default, where it has any), or "steady", for a job without end. `gap`:
    share by which a schedule may be better than the one found. Raises InfeasibleError."""
    options = PlanOptions(gap=gap, max_nodes=max_nodes, horizon=horizon or default_horizon(job.job))
    return plan_job(job, options=options)


def simulate(job: OpenedJob, plan: Plan | None = None, *,
             with_baselines: bool = False) -> Simulation:
    """Estimates a plan's schedule by closed form, and replays it as a check; by default the control
    variables of the job's `schedule:`."""
    if plan is None:
        return simulate_job(*settled(job), with_others=with_baselines)
    return simulate_job(plan.opened, plan.timing, plan.schedule.estimate,
                        with_others=with_baselines)


def sweep(job: OpenedJob, bounds_s: Sequence[float] | None = None) -> Sweep:
    """Plans the job under each latency bound; by default under shares of the latency at the highest
    throughput."""
    return sweep_job(job, bounds_s)


def run(job: OpenedJob, plan: Plan | None = None) -> dict[str, Any]:
    """Runs a plan of the job, by default its best, and returns what metrics.json holds. Fetches the
    model where it is not there. Raises StoppedEarly where it was asked to stop: the same call goes
    on."""
    opened = open_to_run(job.job, job.tell)
    chosen = plan_job(opened) if plan is None else to_run(opened, plan.schedule, job.job.source)
    return execute(chosen.opened, chosen.timing, chosen.schedule)


def write_report(job: OpenedJob | Job) -> Path:
    """Writes report.html from what the job's output folder holds, and returns its path; and, where
    the job asks for one, the table of its results so far. Raises XgptError where no run has
    started."""
    asked = job.job if isinstance(job, OpenedJob) else job
    if not (asked.output / "schedule.json").is_file():
        raise XgptError(f"{asked.output}: no run has started there")
    if asked.results is not None:
        write_results(asked.output, asked.results)
    return write_page(asked.output)


def _as_yaml(value: object) -> str:
    # floats as they are: JSON has another word for infinity than a job file
    return str(value) if isinstance(value, (str, float, PathLike)) else json.dumps(value)
