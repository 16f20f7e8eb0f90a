"""A sweep: every point of a grid planned, by several processes, and gone on with where it was
stopped."""

import time
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from xgpt.app.sweeps.folder import SweepFolder
from xgpt.app.sweeps.formats import check_formats, write_formats
from xgpt.app.sweeps.identity import common_key, key_of
from xgpt.app.sweeps.points import Unit, fingerprint_here, rows_of
from xgpt.app.sweeps.runs import check_runs, run_points
from xgpt.app.sweeps.workers import planned_by_processes
from xgpt.app.telling import Teller, bar
from xgpt.core.errors import InfeasibleError, MissingExtraError, StoppedEarly
from xgpt.core.local import usable_cores
from xgpt.core.run_section import LOCAL_CLUSTER
from xgpt.core.sweep_file import SweepSpec
from xgpt.core.units import format_seconds
from xgpt.launch.asked import warned_in_good_order
from xgpt.report.sweep_page import write_sweep_page
from xgpt.report.sweep_rows import OK, ROWS_FILE, Row
from xgpt.report.sweep_table import sweep_text
from xrunner.io.lock import output_lock


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
        check_runs(spec, tell)
    folder = SweepFolder(spec)
    with output_lock(folder.path), warned_in_good_order():
        progress, once = _SweepProgress(spec, tell), _Once(tell)
        keys = [key_of(point, spec) for point in spec.points]
        fingerprints = _fingerprints(spec, keys, once)
        known, outdated = folder.take_up(fingerprints)
        began = time.monotonic() - (folder.spent_s() if known else 0.0)
        progress.begin(known, outdated)
        folder.describe("running", list(known.values()), time.monotonic() - began, is_run=runs)
        try:
            with closing(_planned(spec, keys, known, cores, once)) as planned:
                for row in planned:
                    folder.append(row)
                    known[row["key"]] = row
                    progress.tell(row)
            if runs:
                run_points(spec, keys, known, folder, tell)
        except (KeyboardInterrupt, StoppedEarly):
            tell.end_progress()
            rows = folder.put_in_order(keys)
            folder.describe("stopped", rows, time.monotonic() - began, is_run=runs)
            raise StoppedEarly(
                f"stopped after {len(rows)} of {len(fingerprints)} points; the same command goes "
                "on from there") from None
        tell.end_progress()
        rows = folder.put_in_order(keys)
        folder.describe("done", rows, time.monotonic() - began, is_run=runs)
        axes = [{"name": axis.name, "title": axis.title} for axis, _ in spec.axes]
        files = write_formats(folder.path, axes, rows, formats)
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


def _fingerprints(spec: SweepSpec, keys: Sequence[str], tell: Teller) -> dict[str, str]:
    """Of each point, in the order of the grid; one for those that share a planner."""
    shared: dict[str, str] = {}
    own = {}
    for key, point in zip(keys, spec.points, strict=True):
        common = common_key(point)
        if common not in shared:
            shared[common] = fingerprint_here(point, tell)
        own[key] = shared[common]
    return own


def _planned(spec: SweepSpec, keys: Sequence[str], known: dict[str, Row], cores: int | None,
             tell: Teller) -> Generator[Row]:
    units = _units(spec, keys, known)
    count = min(cores or usable_cores(), len(units))
    # what has to be measured on this machine is measured by one process, and by nothing beside it
    if count < 2 or any(point.job.cluster == LOCAL_CLUSTER for point in spec.points):
        for unit in units:
            yield from rows_of(unit, tell)
    else:
        yield from planned_by_processes(units, count)


def _units(spec: SweepSpec, keys: Sequence[str], known: dict[str, Row]) -> list[Unit]:
    """Points that are still to be planned, together where they differ in their bound alone."""
    units: dict[str, Unit] = {}
    taken = set(known)
    for key, point in zip(keys, spec.points, strict=True):
        if key in taken:
            continue
        taken.add(key)
        unit = units.get(common := common_key(point))
        units[common] = Unit(points=(point,), keys=(key,), horizon=spec.horizon,
                             has_margin=spec.has_margin) if unit is None else replace(
            unit, points=(*unit.points, point), keys=(*unit.keys, key))
    return list(units.values())


class _Once:
    """Says nothing twice: every point that is planned tells of the same profile."""

    def __init__(self, tell: Teller) -> None:
        self._tell, self._said = tell, set[str]()

    def say(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            self._tell.say(message)

    def progress(self, line: str, *, is_last: bool = False) -> None:
        self._tell.progress(line, is_last=is_last)

    def end_progress(self) -> None:
        self._tell.end_progress()


class _SweepProgress:
    """How far the sweep is, in one line."""

    def __init__(self, spec: SweepSpec, tell: Teller) -> None:
        self._tell, self._total = tell, len({key_of(point, spec) for point in spec.points})
        self._before = self._done = 0
        self._began = time.monotonic()

    def begin(self, known: dict[str, Row], outdated: int) -> None:
        """Tells what is there already."""
        self._before = self._done = len(known)
        self._began = time.monotonic()
        if known:
            self._tell.say(f"going on: {len(known)} of {self._total} points are there")
        if outdated:
            self._tell.say(f"note: {outdated} points were planned by another xgpt or with other "
                           "times: they are planned again, and kept in earlier.jsonl")

    def tell(self, row: Row) -> None:
        """One more point is done."""
        self._done += 1
        spent = time.monotonic() - self._began
        left_s = spent / (self._done - self._before) * (self._total - self._done)
        left = f", {format_seconds(left_s)} left" if left_s > 0 else ""
        self._tell.progress(
            f"{bar(self._done, self._total)} {self._done}/{self._total} points{left}: "
            f"{row['scenario']}, {row['policy']}", is_last=self._done == self._total)
