"""Plans every point of a sweep's grid by several processes, runs the points if wanted, and
continues a stopped sweep."""

import csv
import io
import json
import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from xgpt.app.running.prepare import refuse_what_cannot_run
from xgpt.app.submit import submit
from xgpt.app.sweeps.points import Unit, common_key, fingerprint, key_of, rows_of
from xgpt.app.teller import LogTeller, Teller, bar
from xgpt.core.errors import (
    InfeasibleError,
    InputError,
    MissingExtraError,
    Mistake,
    StoppedEarly,
    XgptError,
    refuse,
    wrong,
)
from xgpt.core.schedule_file import write_json
from xgpt.core.system.machine import usable_cores
from xgpt.core.system.whole_file import json_text, why_no_folder, write_atomically
from xgpt.core.units import format_seconds
from xgpt.job.job import LOCAL_CLUSTER, Job
from xgpt.job.sweep_file import ARRIVALS, SweepPoint, SweepSpec
from xgpt.launch.stop_signals import stopping_in_order
from xgpt.report import sweep_served as service
from xgpt.report.notebook import Printed, frame
from xgpt.report.sweep_page import write_sweep_page
from xgpt.report.sweep_rows import (
    EARLIER_FILE,
    GIVEN_UP,
    MEASURED,
    OK,
    ROWS_FILE,
    SWEEP_FILE,
    VERSION,
    Row,
    columns_with,
    number_of,
    read_rows,
    sweep_details,
    sweep_text,
)
from xrunner.files.lock import output_lock
from xscheduler.planner import PlanOptions

Worths = Callable[[], Mapping[str, float]]  # the highest so far of each workload of services
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Swept(Printed):
    """A finished sweep. `rows`: a mapping per point, in the order of the grid (docs/sweep.md);
    `files`: paths written. As text the table that `xgpt sweep` prints."""

    name: str
    folder: Path
    rows: Sequence[Row]
    files: tuple[Path, ...] = ()

    def __repr__(self) -> str:
        return f"<Swept {self.name}: {len(self.rows)} points in {self.folder}>"

    def to_pandas(self) -> Any:
        """A pandas.DataFrame of the rows. Raises MissingExtraError without pandas."""
        return frame(self.rows)

    def __str__(self) -> str:
        return (service.served_text if service.are_served(self.rows) else sweep_text)(
            self.rows)

    @property
    def details(self) -> str:
        """Settings and the other policies at each limit, as `xgpt sweep --verbose` prints them."""
        return sweep_details(self.rows)


def sweep_points(spec: SweepSpec, tell: Teller, *, cores: int | None = None,
                 runs: bool = False, is_best: bool = False) -> Swept:
    """Plans every point that is not yet in the folder; `cores`: number of processes, by default one
    per core; `runs`: then runs each point, too; `is_best`: gives up services that cannot be a
    workload's best. Raises StoppedEarly where it was asked to stop: the same call goes on."""
    if runs:
        _check_runs(spec, tell)
    if is_best and any(point.job.workload.arrivals is None for point in spec.points):
        raise wrong("command line", "--best", None, f"only with {ARRIVALS}")
    if (allowed := why_no_folder(spec.output)) is not None:
        raise wrong(spec.source, "output", str(spec.output), allowed)
    folder, began = spec.output, time.monotonic()
    with output_lock(folder), stopping_in_order():
        points = {key_of(point, spec): point for point in spec.points}
        known = _take_up(folder, points, tell)
        _describe(spec, list(known.values()), "running", began, is_run=runs)
        state = "stopped"
        try:
            for worths in (lambda: {name: service.worth_of(row) for name, row in (
                    service.best_points(known.values()).items())}, dict)[not is_best:]:
                # hashes mix the axes, so that the best so far soon is a good one
                order = sorted(points) if is_best else points
                left = _units({key: points[key] for key in order if key not in known})
                with closing(_planned(left, spec, cores, _Once(tell), worths)) as planned:
                    _keep(planned, known, len(points), folder, tell)
                for key in service.bests_elsewhere(known.values()):
                    del known[key]  # that the next round plans to the end
            if runs:
                _run_points(points, known, folder, tell)
            state = "done"
        except (KeyboardInterrupt, StoppedEarly):
            raise StoppedEarly(f"stopped after {len(known)} of {len(points)} points; the same "
                               "command goes on from there") from None
        finally:
            tell.end_progress()
            rows = [known[key] for key in points if key in known]
            _write(folder / ROWS_FILE, rows)
            _describe(spec, rows, state, began, is_run=runs)
        files = [folder / ROWS_FILE, _write_csv(spec, rows)]
        try:
            files.append(write_sweep_page(folder))
        except MissingExtraError as why:
            tell.say(f"note: no page was written: {why}")
    return Swept(name=spec.name, folder=folder, rows=rows, files=tuple(files))


def refusal_of(swept: Swept) -> InfeasibleError | None:
    """An InfeasibleError where no point has a schedule; None where one has."""
    if any(row["status"] == OK for row in swept.rows):
        return None
    return InfeasibleError(f"no point of {len(swept.rows)} has a schedule; the reasons are above "
                           f"and in {swept.folder / ROWS_FILE}")


class _Once:
    """A Teller that shows each message once, since every point reports the same profile."""

    def __init__(self, tell: Teller) -> None:
        self.say, self.detail = cache(tell.say), cache(tell.detail)
        self.progress, self.end_progress = tell.progress, tell.end_progress


def _take_up(folder: Path, points: Mapping[str, SweepPoint], tell: Teller) -> dict[str, Row]:
    """Rows of earlier sweeps for these points, by key, but for points that were given up. Other
    rows move to earlier.jsonl, and come back with their point."""
    before = {**read_rows(folder / EARLIER_FILE), **read_rows(folder / ROWS_FILE)}
    known = {key: before[key] for key, point in points.items() if key in before
             and before[key].get("fingerprint") == fingerprint(point.job)
             and before[key].get("status") != GIVEN_UP}
    if left := [row for key, row in before.items() if key not in known]:
        _write(folder / EARLIER_FILE, left)
    _write(folder / ROWS_FILE, known.values())
    if known:
        tell.say(f"continuing: {len(known)} of {len(points)} points are planned")
    if outdated := sum(row["key"] in points and row.get("status") != GIVEN_UP for row in left):
        tell.say(f"note: {outdated} points were planned by another xgpt or from other files: "
                 "they are planned again, and kept in earlier.jsonl")
    return known


def _write(path: Path, rows: Iterable[Row]) -> None:
    write_atomically(path, "".join(map(_line, rows)))


def _line(row: Row) -> str:
    return json_text(row, ensure_ascii=False, separators=(",", ":")) + "\n"


def _append(folder: Path, row: Row) -> None:
    """Appends a row, or a newer one of its point, in one write: a killed sweep loses at most the
    row that it was writing."""
    with (folder / ROWS_FILE).open("a", encoding="utf-8") as file:
        file.write(_line(row))


def _axes_of(spec: SweepSpec) -> list[dict[str, Any]]:
    return [{"name": axis.name, "key": axis.key, "title": axis.title, "values": values}
            for axis, values in spec.axes]


def _describe(spec: SweepSpec, rows: Sequence[Row], state: str, began: float, *,
              is_run: bool) -> None:
    """Writes the sweep's settings and progress to sweep.json."""
    axes = _axes_of(spec)
    write_json(spec.output / SWEEP_FILE, {
        "version": VERSION, "name": spec.name, "source": spec.source, "horizon": spec.horizon,
        "has_margin": spec.has_margin, "state": state, "points": len(spec.points),
        "done": len(rows), "ok": sum(row["status"] == OK for row in rows),
        "seconds": round(time.monotonic() - began, 3), "is_run": is_run, "axes": axes,
        "columns": [{"name": column.name, "group": column.group, "title": column.title,
                     "unit": column.unit} for column in columns_with(axes)]})


def _write_csv(spec: SweepSpec, rows: Sequence[Row]) -> Path:
    """Writes sweep.csv with the columns of sweep.json; an empty cell for None."""
    path, text = spec.output / "sweep.csv", io.StringIO()
    names = [column.name for column in columns_with(_axes_of(spec))]
    writer = csv.DictWriter(text, names, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(path, text.getvalue())
    return path


def _units(points: Mapping[str, SweepPoint]) -> list[Unit]:
    units: dict[str, dict[str, SweepPoint]] = {}
    for key, point in points.items():
        units.setdefault(common_key(point.job), {})[key] = point
    return list(units.values())


def _keep(planned: Iterator[Row], known: dict[str, Row], total: int, folder: Path,
          tell: Teller) -> None:
    """Writes rows as they are planned, and shows the sweep's progress."""
    before, began = len(known), time.monotonic()
    for row in planned:
        _append(folder, row)
        known[row["key"]] = row
        each_s = (time.monotonic() - began) / (len(known) - before)
        left_s = each_s * (total - len(known))
        left = f", {format_seconds(left_s)} left" if left_s > 0 else ""
        tell.progress(f"{bar(len(known), total)} {len(known)}/{total} points{left}: "
                      f"{row['scenario']}, {row['policy']}")


def _planned(units: Sequence[Unit], spec: SweepSpec, cores: int | None, tell: Teller,
             worths: Worths) -> Generator[Row]:
    options = PlanOptions(horizon=spec.horizon, has_margin=spec.has_margin, is_brief=True)
    count = min(cores or usable_cores(), len(units))
    # measuring on this machine needs one process and nothing beside it
    if count < 2 or any(point.job.cluster == LOCAL_CLUSTER for point in spec.points):
        for unit in units:
            yield from rows_of(unit, options, tell, worths())
    else:
        yield from _by_processes(units, options, count, worths)


def _by_processes(units: Sequence[Unit], options: PlanOptions, count: int,
                  worths: Worths) -> Generator[Row]:
    """Yields the rows of all units, of each when all its points are planned by one of `count`
    processes of one thread each. Raises XgptError where a process died."""
    context, others = multiprocessing.get_context("spawn"), {*multiprocessing.active_children()}
    with _one_thread_each(), ProcessPoolExecutor(count, context, initializer=_begin) as pool:
        try:
            running = set[Future[list[Row]]]()
            for unit in [*units, *[None] * count]:
                if unit is not None:
                    running.add(pool.submit(_all_rows, unit, options, worths()))
                if unit is None or len(running) == count:
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    for one in done:
                        yield from one.result()
        except BrokenProcessPool:
            raise XgptError("a process that planned points died; planned points are kept, and the "
                            "same command goes on from there") from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in {*multiprocessing.active_children()} - others:
                process.terminate()


def _begin() -> None:
    """Makes a planning process end with the sweep, however that ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the sweep gets it, too, and stops this
    threading.Thread(target=_end_with_sweep, daemon=True).start()


def _end_with_sweep() -> None:
    sweep = multiprocessing.parent_process()
    assert sweep is not None, "begun by a sweep"
    sweep.join()
    os._exit(1)


def _all_rows(unit: Unit, options: PlanOptions, worths: Mapping[str, float]) -> list[Row]:
    return list(rows_of(unit, options, LogTeller(), worths))


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Limits processes that its block starts to one thread for arithmetic."""
    before = {name: os.environ[name] for name in _THREADS if name in os.environ}
    os.environ.update(dict.fromkeys(_THREADS, "1"))
    try:
        yield
    finally:
        for name in _THREADS:
            os.environ.pop(name, None)
        os.environ.update(before)


def _check_runs(spec: SweepSpec, tell: Teller) -> None:
    """Raises InputError, with every mistake, where a point cannot be run on this machine."""
    mistakes: dict[Mistake, None] = {}
    for point in spec.points:
        try:
            refuse_what_cannot_run(point.job, tell)
        except InputError as refusal:
            mistakes.update(dict.fromkeys(refusal.mistakes))
    refuse(mistakes)


def _run_points(points: Mapping[str, SweepPoint], rows: dict[str, Row], folder: Path,
                tell: Teller) -> None:
    """Runs every point that has a schedule and has not been run, each in its own folder, and adds
    measured figures to its row. Raises StoppedEarly where it was asked to stop."""
    todo = [key for key in points
            if rows[key]["status"] == OK and rows[key]["measured_status"] != "done"]
    for number, key in enumerate(todo, 1):
        row, bound_s = rows[key], number_of(rows[key], "bound_s")
        what = f"{row['scenario']}, {row['policy']}"
        tell.end_progress()
        tell.say(f"run {number} of {len(todo)}: {what}, bound {row['bound']}")
        job = points[key].job
        constraint = job.constraint.with_latency(limit_s=math.inf if bound_s is None else bound_s)
        rows[key] = row | {"folder": f"points/{key}"} | _measured(replace(
            job, output=folder / "points" / key, constraint=constraint,
            name=f"{what}, {row['bound']}"), tell)
        _append(folder, rows[key])


def _measured(job: Job, tell: Teller) -> Row:
    """Runs a point; returns its measured columns, or why it failed."""
    try:
        submit(job, tell)
    except StoppedEarly:
        raise
    except XgptError as failure:
        tell.say(f"this point failed: {failure}")
        return {"measured_status": "failed", "measured_reason": str(failure)}
    metrics = json.loads((job.output / "metrics.json").read_text(encoding="utf-8"))
    return {"measured_status": "done", "measured_reason": None,
            **{column: metrics[key]["measured"] for column, key in MEASURED.items()}}
