"""The functions of `import xgpt`: one a use case, each with what it needs by default."""

import json
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from xgpt.app.opened_job import OpenedJob, open_job
from xgpt.app.running.run import execute, open_to_run
from xgpt.app.schedule import Plan, default_horizon, job_with_times, plan_from, plan_job
from xgpt.app.simulate import Simulation, simulate_job
from xgpt.app.sweeps.sweep import Swept, sweep_points
from xgpt.app.teller import CallbackTeller, LogTeller, Teller
from xgpt.job.job import Job
from xgpt.job.job_file import load_job
from xgpt.job.sweep_file import load_sweep
from xgpt.report.notebook import Printed, frame
from xgpt.report.page import write_report as write_page
from xgpt.report.results_file import write_results
from xgpt.run_folder.files import RESULTS_FILE, no_run_error
from xgpt.run_folder.state import has_begun
from xscheduler.planner import Horizon, PlanOptions


def load(source: str | PathLike[str] | Mapping[str, object],
         overrides: Mapping[str, object] | None = None, *,
         tell: Teller | Callable[[str], None] | None = None) -> OpenedJob:
    """Loads a job file, or a mapping of what one would hold, in the current folder. overrides:
    values for its keys, as `--set` takes them. tell: takes notes and progress as lines; None: the
    logger `xgpt` does. Raises InputError with every mistake of the file."""
    sets = [f"{key}={_as_yaml(value)}" for key, value in (overrides or {}).items()]
    teller = CallbackTeller(tell) if callable(tell) else tell or LogTeller()
    if isinstance(source, Mapping):
        text = json.dumps(source, default=str)
        return open_job(load_job(Path("job.yaml"), sets, text), teller, "lengths")
    return open_job(load_job(Path(source), sets), teller, "lengths")


def plan(job: OpenedJob, *, horizon: Horizon | None = None, gap: float | None = None,
         max_nodes: int | None = None, max_seconds: float | None = None) -> Plan:
    """Plans the job: the schedule of highest throughput within its latency bound. `horizon`: "job",
    for its own queries (by default, where it has any), or "steady", for a job without end. `gap`:
    share by which a schedule may be better than the one found, however long that takes (by default
    0.005, and more after 4,000 boxes of one policy). `max_nodes`, `max_seconds`: where the search
    ends, with what it has proved until then. Raises InfeasibleError."""
    options = PlanOptions(gap=gap, max_nodes=max_nodes, max_seconds=max_seconds,
                          horizon=horizon or default_horizon(job.job))
    return plan_job(job, options=options)


def simulate(job: OpenedJob, plan: Plan | None = None) -> Simulation:
    """Estimates a plan's schedule, and replays it with other queries as a check; by default the
    control variables of the job's `schedule:`."""
    if plan is None:
        return simulate_job(*job_with_times(job))
    return simulate_job(plan.opened, plan.timing, plan.schedule.estimate)


def sweep(path: str | PathLike[str], bounds_s: Sequence[float] | None = None, *,
          over: Mapping[str, Sequence[object]] | None = None,
          out: str | PathLike[str] | None = None, cores: int = 1,
          tell: Teller | None = None) -> Swept:
    """Plans every point of a job file or a sweep file, as `xgpt sweep` does (docs/sweep.md): under
    each latency bound, by default of a job file under shares of the latency at the highest
    throughput. `over`: values, or a single one, by the name of an axis or a key of the job file.
    Points that the folder `out` has are not planned again. `cores`: processes that plan side by
    side; more than one needs a script whose start is guarded by `if __name__ == "__main__"`.
    Raises InputError, and StoppedEarly where it was interrupted: the same call goes on."""
    spec = load_sweep(
        Path(path), over=[f"{axis}={','.join(map(_as_yaml, values))}"
                          for axis, values in (over or {}).items()],
        bounds=None if bounds_s is None else ",".join(map(_as_yaml, bounds_s)),
        out=None if out is None else Path(out))
    return sweep_points(spec, tell or LogTeller(), cores=cores)


def run(job: OpenedJob, plan: Plan | None = None) -> dict[str, Any]:
    """Runs a plan of the job, by default its best, and returns what metrics.json holds. Fetches the
    model where it is not there. Raises StoppedEarly where it was asked to stop: the same call goes
    on."""
    opened = open_to_run(job.job, job.tell)
    chosen = plan_job(opened) if plan is None else plan_from(opened, plan.schedule, job.job.source)
    return execute(chosen)


class Results(list[dict[str, Any]], Printed):
    """The lines of results.jsonl, in their order."""

    def to_pandas(self) -> Any:
        """A pandas.DataFrame, a row for each request. Raises MissingExtraError without pandas."""
        return frame(self)


def results(job: OpenedJob | Job) -> Results:
    """The answers so far of a job. Raises XgptError where no run has started."""
    path = _begun(job).output / RESULTS_FILE
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return Results(map(json.loads, lines))


def write_report(job: OpenedJob | Job) -> Path:
    """Writes report.html from what the job's output folder holds, and returns its path; and, where
    the job asks for one, the table of its results so far. Raises XgptError where no run has
    started."""
    asked = _begun(job)
    if asked.results is not None:
        write_results(asked.output, asked.results)
    return write_page(asked.output)


def _begun(job: OpenedJob | Job) -> Job:
    asked = job.job if isinstance(job, OpenedJob) else job
    if not has_begun(asked.output):
        raise no_run_error(asked.output)
    return asked


def _as_yaml(value: object) -> str:
    # floats as they are: JSON has another word for infinity than a job file
    return str(value) if isinstance(value, (str, float, PathLike)) else json.dumps(value)
