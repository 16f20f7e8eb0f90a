"""The public functions of `import xgpt`."""

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
    """Loads a job file, or a mapping with the keys of one. Paths of a mapping start in the current
    folder. `overrides`: values by dotted key, as for `--set`. `tell`: takes messages and progress;
    None: the logger `xgpt`. Raises InputError with every mistake of the file."""
    sets = [f"{key}={_as_yaml(value)}" for key, value in (overrides or {}).items()]
    teller = CallbackTeller(tell) if callable(tell) else tell or LogTeller()
    if isinstance(source, Mapping):
        text = json.dumps(source, default=str)
        return open_job(load_job(Path("job.yaml"), sets, text), teller, "lengths")
    return open_job(load_job(Path(source), sets), teller, "lengths")


def plan(job: OpenedJob, *, horizon: Horizon | None = None, gap: float | None = None,
         max_nodes: int | None = None, max_seconds: float | None = None) -> Plan:
    """Finds the schedule with the highest throughput under the job's latency limit. `horizon`:
    "job", for its own requests (the default where it has any), or "steady", for a job that never
    ends. `gap`: optimality gap at which to stop (by default 0.005, more after 4,000 boxes of one
    policy). `max_nodes`, `max_seconds`: limits of the search, which then reports the gap that it
    reached. Raises InfeasibleError where no schedule meets the limits."""
    options = PlanOptions(gap=gap, max_nodes=max_nodes, max_seconds=max_seconds,
                          horizon=horizon or default_horizon(job.job))
    return plan_job(job, options=options)


def simulate(job: OpenedJob, plan: Plan | None = None) -> Simulation:
    """Estimates the throughput and latency of a plan's schedule (None: of the control variables in
    the job's `schedule:`), and replays it with random queries as a check."""
    if plan is None:
        return simulate_job(*job_with_times(job))
    return simulate_job(plan.opened, plan.timing, plan.schedule.estimate)


def sweep(path: str | PathLike[str], bounds_s: Sequence[float] | None = None, *,
          over: Mapping[str, Sequence[object]] | None = None,
          out: str | PathLike[str] | None = None, cores: int = 1,
          tell: Teller | None = None) -> Swept:
    """Plans every point of a job file or a sweep file, as `xgpt sweep` does (docs/sweep.md).
    `bounds_s`: latency limits in seconds; None: shares of the latency at the highest throughput.
    `over`: values by the name of an axis or a key of the job file. `out`: folder of the results;
    points that it has are not planned again. `cores`: number of processes; more than one needs a
    script guarded by `if __name__ == "__main__"`. Raises InputError, and StoppedEarly where it was
    interrupted: the same call goes on."""
    spec = load_sweep(
        Path(path), over=[f"{axis}={','.join(map(_as_yaml, values))}"
                          for axis, values in (over or {}).items()],
        bounds=None if bounds_s is None else ",".join(map(_as_yaml, bounds_s)),
        out=None if out is None else Path(out))
    return sweep_points(spec, tell or LogTeller(), cores=cores)


def run(job: OpenedJob, plan: Plan | None = None) -> dict[str, Any]:
    """Runs a plan of the job, by default its best, and returns the content of metrics.json.
    Downloads the model if it is missing. Raises StoppedEarly where it was asked to stop: the same
    call goes on."""
    opened = open_to_run(job.job, job.tell)
    chosen = plan_job(opened) if plan is None else plan_from(opened, plan.schedule, job.job.source)
    return execute(chosen)


class Results(list[dict[str, Any]], Printed):
    """The objects of results.jsonl, in the order of the requests."""

    def to_pandas(self) -> Any:
        """A pandas.DataFrame, a row for each request. Raises MissingExtraError without pandas."""
        return frame(self)


def results(job: OpenedJob | Job) -> Results:
    """The answers of a job so far. Raises XgptError where no run has started."""
    path = _begun(job).output / RESULTS_FILE
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return Results(map(json.loads, lines))


def write_report(job: OpenedJob | Job) -> Path:
    """Writes report.html of the job's output folder, and the table of results so far where the job
    has the key `results`. Returns the report's path. Raises XgptError where no run has started."""
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
    # floats as they are: JSON writes infinity in another way than a job file
    return str(value) if isinstance(value, (str, float, PathLike)) else json.dumps(value)
