"""A sweep: every point of a grid planned, by several processes, run where that is asked, and gone
on with where it was stopped."""

import csv
import importlib
import importlib.util
import io
import json
import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

from xgpt.app.running.prepare import refuse_what_cannot_run
from xgpt.app.submit import submit
from xgpt.app.sweeps.points import Unit, common_key, fingerprint_here, key_of, rows_of
from xgpt.app.telling import Teller, bar
from xgpt.core.errors import (
    InfeasibleError,
    InputError,
    MissingExtraError,
    Mistake,
    StoppedEarly,
    XgptError,
    wrong,
)
from xgpt.core.schedule_file import write_json
from xgpt.core.system.machine import usable_cores
from xgpt.core.system.whole_file import json_text, temporary_of, why_no_folder, write_atomically
from xgpt.core.units import format_seconds
from xgpt.job.job import LOCAL_CLUSTER, Job
from xgpt.job.sweep_file import SweepPoint, SweepSpec
from xgpt.launch.asked import warned_in_good_order
from xgpt.report.sweep_page import write_sweep_page
from xgpt.report.sweep_rows import (
    EARLIER_FILE,
    MEASURED,
    OK,
    ROWS_FILE,
    SWEEP_FILE,
    VERSION,
    Row,
    SweepColumn,
    columns_with,
    number_of,
    read_rows,
    sweep_text,
)
from xrunner.files.lock import output_lock
from xscheduler.planner import PlanOptions

FORMATS = ("csv", "parquet")
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_LOOK_S = 0.1  # chosen: between looks for new rows, which take seconds each


class SweepFolder:
    """The files of one sweep. A row is written whole and at once: a killed sweep loses at most the
    one that it was writing."""

    def __init__(self, spec: SweepSpec, *, is_run: bool) -> None:
        """Makes the folder. Raises InputError where it cannot be written to."""
        self._spec, self.path, self._is_run = spec, spec.output, is_run
        self._axes = [{"name": axis.name, "key": axis.key, "title": axis.title, "values": values}
                      for axis, values in spec.axes]
        self._began = time.monotonic()
        if (allowed := why_no_folder(self.path)) is not None:
            raise wrong(spec.source, "output", str(self.path), allowed)

    def take_up(self, fingerprints: Mapping[str, str]) -> tuple[dict[str, Row], int]:
        """Rows of earlier sweeps for these points (key -> fingerprint), and how many there are of
        them that another xgpt or profile made. What is of no use now is kept in earlier.jsonl, and
        comes back with its point."""
        before = {**read_rows(self.path / EARLIER_FILE), **read_rows(self.path / ROWS_FILE)}
        kept = {key: before[key] for key in fingerprints if key in before
                and before[key].get("fingerprint") == fingerprints[key]}
        left = [row for key, row in before.items() if key not in kept]
        if left:
            self._write(EARLIER_FILE, left)
        self._write(ROWS_FILE, kept.values())
        path = self.path / SWEEP_FILE
        if kept and path.is_file():  # what earlier calls took, as far as these ended in good order
            self._began -= float(json.loads(path.read_text("utf-8"))["seconds"])
        return kept, sum(key in before and key not in kept for key in fingerprints)

    def append(self, row: Row) -> None:
        """Adds a row, or a newer one of its point."""
        with (self.path / ROWS_FILE).open("a", encoding="utf-8") as file:
            file.write(_line(row))

    def put_in_order(self, rows: Sequence[Row], state: str) -> None:
        """Writes all rows, one a point, and what the sweep is."""
        self._write(ROWS_FILE, rows)
        self.describe(rows, state)

    def describe(self, rows: Sequence[Row], state: str) -> None:
        """Writes what the sweep is, and how far."""
        spec = self._spec
        write_json(self.path / SWEEP_FILE, {
            "version": VERSION, "name": spec.name, "source": spec.source, "horizon": spec.horizon,
            "has_margin": spec.has_margin, "state": state, "points": len(spec.points),
            "done": len(rows), "ok": sum(row["status"] == OK for row in rows),
            "seconds": round(time.monotonic() - self._began, 3), "is_run": self._is_run,
            "axes": self._axes, "columns": [
                {"name": column.name, "group": column.group, "title": column.title,
                 "unit": column.unit} for column in columns_with(self._axes)]})

    def write_tables(self, rows: Sequence[Row], formats: Sequence[str]) -> list[Path]:
        """Writes sweep.csv and sweep.parquet, as asked for; every column, in the order of
        sweep.json."""
        columns = columns_with(self._axes)
        paths = [self.path / f"sweep.{name}" for name in formats]
        for path in paths:
            (_write_csv if path.suffix == ".csv" else _write_parquet)(path, columns, rows)
        return paths

    def _write(self, name: str, rows: Iterable[Row]) -> None:
        write_atomically(self.path / name, "".join(map(_line, rows)))


def check_formats(formats: Sequence[str]) -> None:
    """Raises MissingExtraError before anything is planned."""
    if "parquet" in formats and importlib.util.find_spec("pyarrow") is None:
        raise MissingExtraError("pyarrow", "parquet", "a sweep in Parquet")


def _line(row: Mapping[str, Any]) -> str:
    return json_text(row, ensure_ascii=False, separators=(",", ":")) + "\n"


def _write_csv(path: Path, columns: Sequence[SweepColumn], rows: Sequence[Row]) -> None:
    """Nothing stands for None; infinity is inf, as most readers take it."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [column.name for column in columns], lineterminator="\n",
                            extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(path, text.getvalue())


def _write_parquet(path: Path, columns: Sequence[SweepColumn], rows: Sequence[Row]) -> None:
    arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    types = {"text": arrow.string(), "whole": arrow.int64(), "number": arrow.float64()}
    table = arrow.table({column.name: arrow.array(
        [_value(row, column) for row in rows], types[column.kind]) for column in columns})
    temporary = temporary_of(path)
    parquet.write_table(table, temporary)
    temporary.replace(path)


def _value(row: Row, column: SweepColumn) -> str | float | int | None:
    value = row.get(column.name)
    if column.kind == "text":
        return None if value is None else str(value)
    number = number_of(row, column.name)
    return int(number) if column.kind == "whole" and number is not None else number


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """A sweep that is done. `rows`: one mapping a point, in the order of the grid (docs/sweep.md);
    `files`: what was written. As text it is the table that `xgpt sweep` prints."""

    name: str
    folder: Path
    rows: Sequence[Row]
    files: tuple[Path, ...] = ()

    def __str__(self) -> str:
        return sweep_text(self.rows)


def sweep_points(spec: SweepSpec, tell: Teller, *, cores: int | None = None,
                 formats: Sequence[str] = (), runs: bool = False) -> Swept:
    """Plans every point that is not yet in the folder; `cores`: processes, by default one for each
    core; `runs`: then runs each point, too. Raises StoppedEarly where it was asked to stop: the
    same call goes on."""
    check_formats(formats)
    if runs:
        _check_runs(spec, tell)
    folder = SweepFolder(spec, is_run=runs)
    with output_lock(folder.path), warned_in_good_order():
        once, points = _Once(tell), {key_of(point, spec): point for point in spec.points}
        fingerprints: dict[str, str] = {}
        for unit in _units(points):
            first = next(iter(unit.values()))
            fingerprints |= dict.fromkeys(unit, fingerprint_here(first.job, once))
        known, outdated = folder.take_up(fingerprints)
        if known:
            tell.say(f"going on: {len(known)} of {len(points)} points are there")
        if outdated:
            tell.say(f"note: {outdated} points were planned by another xgpt or with other times: "
                     "they are planned again, and kept in earlier.jsonl")
        folder.describe(list(known.values()), "running")
        left = _units({key: point for key, point in points.items() if key not in known})
        state = "stopped"
        try:
            with closing(_planned(left, spec, cores, once)) as planned:
                _keep(planned, known, len(points), folder, tell)
            if runs:
                _run_points(points, known, folder, tell)
            state = "done"
        except (KeyboardInterrupt, StoppedEarly):
            raise StoppedEarly(f"stopped after {len(known)} of {len(points)} points; the same "
                               "command goes on from there") from None
        finally:
            tell.end_progress()
            rows = [known[key] for key in points if key in known]
            folder.put_in_order(rows, state)
        files = folder.write_tables(rows, formats)
        try:
            files.append(write_sweep_page(folder.path))
        except MissingExtraError as why:
            tell.say(f"note: no page was written: {why}")
    return Swept(name=spec.name, folder=folder.path, rows=rows,
                 files=(folder.path / ROWS_FILE, *files))


def refusal_of(swept: Swept) -> InfeasibleError | None:
    """What to raise where no point has a schedule; None where one has."""
    if any(row["status"] == OK for row in swept.rows):
        return None
    return InfeasibleError(f"no point of {len(swept.rows)} has a schedule; why is told above, and "
                           f"in {swept.folder / ROWS_FILE}")


class _Once:
    """Says nothing twice: every point that is planned tells of the same profile."""

    def __init__(self, tell: Teller) -> None:
        self.say, self.progress, self.end_progress = cache(
            tell.say), tell.progress, tell.end_progress


def _units(points: Mapping[str, SweepPoint]) -> list[Unit]:
    units: dict[str, dict[str, SweepPoint]] = {}
    for key, point in points.items():
        units.setdefault(common_key(point.job), {})[key] = point
    return list(units.values())


def _keep(planned: Iterator[Row], known: dict[str, Row], total: int, folder: SweepFolder,
          tell: Teller) -> None:
    """Keeps rows as they are planned, and tells how far the sweep is, in one line."""
    before, began = len(known), time.monotonic()
    for row in planned:
        folder.append(row)
        known[row["key"]] = row
        each_s = (time.monotonic() - began) / (len(known) - before)
        left_s = each_s * (total - len(known))
        left = f", {format_seconds(left_s)} left" if left_s > 0 else ""
        tell.progress(f"{bar(len(known), total)} {len(known)}/{total} points{left}: "
                      f"{row['scenario']}, {row['policy']}", is_last=len(known) == total)


def _planned(units: Sequence[Unit], spec: SweepSpec, cores: int | None,
             tell: Teller) -> Generator[Row]:
    options = PlanOptions(horizon=spec.horizon, has_margin=spec.has_margin, is_brief=True)
    count = min(cores or usable_cores(), len(units))
    # what has to be measured on this machine is measured by one process, and by nothing beside it
    if count < 2 or any(point.job.cluster == LOCAL_CLUSTER for point in spec.points):
        for unit in units:
            yield from rows_of(unit, options, tell)
    else:
        yield from _by_processes(units, options, count)


def _by_processes(units: Sequence[Unit], options: PlanOptions, count: int) -> Generator[Row]:
    """Rows of all units as they are planned, by so many processes of one thread each. Raises
    XgptError where one of them died."""
    context = multiprocessing.get_context("spawn")
    rows: SimpleQueue[Row] = context.SimpleQueue()
    others = {*multiprocessing.active_children()}
    with (_one_thread_each(),
          ProcessPoolExecutor(count, context, initializer=_begin, initargs=(rows,)) as pool):
        try:
            left = {pool.submit(_plan, unit, options) for unit in units}
            while left:
                done, left = wait(left, timeout=_LOOK_S)
                while not rows.empty():
                    yield rows.get()
                for future in done:
                    future.result()
        except BrokenProcessPool:
            raise XgptError("a process that planned points died; what was planned is kept, and "
                            "the same command goes on from there") from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in {*multiprocessing.active_children()} - others:
                process.terminate()


_ROWS: "list[SimpleQueue[Row]]" = []  # in such a process: where its rows go


def _begin(rows: "SimpleQueue[Row]") -> None:
    """The process ends with the sweep, however that ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the sweep is asked to stop, and stops this
    threading.Thread(target=_end_with_sweep, daemon=True).start()
    _ROWS.append(rows)


def _end_with_sweep() -> None:
    sweep = multiprocessing.parent_process()
    assert sweep is not None, "begun by a sweep"
    sweep.join()
    os._exit(1)


def _plan(unit: Unit, options: PlanOptions) -> None:
    for row in rows_of(unit, options):
        _ROWS[0].put(row)


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Processes started within have one thread for arithmetic."""
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
    if mistakes:
        raise InputError(list(mistakes))


def _run_points(points: Mapping[str, SweepPoint], rows: dict[str, Row], folder: SweepFolder,
                tell: Teller) -> None:
    """Runs every point that has a schedule and has not been run, each in a folder of its own;
    measured figures join its row. Raises StoppedEarly where it was asked to stop."""
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
            job, output=folder.path / "points" / key, constraint=constraint,
            name=f"{what}, {row['bound']}"), tell)
        folder.append(rows[key])


def _measured(job: Job, tell: Teller) -> Row:
    """Of a run that failed only why: the sweep goes on with the next."""
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
