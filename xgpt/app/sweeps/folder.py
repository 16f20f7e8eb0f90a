"""A sweep's folder: rows appended as points are planned, taken up again, put in order, and written
as a table for other programs: CSV, and Parquet where pyarrow is installed."""

import csv
import importlib
import importlib.util
import io
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from xgpt.core.errors import MissingExtraError, wrong
from xgpt.core.schedule_file import write_json
from xgpt.core.system.whole_file import json_text, temporary_of, why_no_folder, write_atomically
from xgpt.job.sweep_file import SweepSpec
from xgpt.report.sweep_rows import (
    EARLIER_FILE,
    OK,
    ROWS_FILE,
    SWEEP_FILE,
    VERSION,
    Row,
    SweepColumn,
    columns_with,
    number_of,
    read_rows,
)

FORMATS = ("csv", "parquet")


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
