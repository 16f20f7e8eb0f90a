"""A sweep's rows as a table for other programs: CSV, and Parquet where pyarrow is installed."""

import csv
import importlib
import importlib.util
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from xgpt.core.errors import MissingExtraError
from xgpt.core.whole_file import write_atomically
from xgpt.report.sweep_rows import Row, SweepColumn, columns_with, number_of

FORMATS = ("csv", "parquet")


def check_formats(formats: Sequence[str]) -> None:
    """Raises MissingExtraError before anything is planned."""
    if "parquet" in formats and importlib.util.find_spec("pyarrow") is None:
        raise MissingExtraError("pyarrow", "parquet", "a sweep in Parquet")


def write_formats(folder: Path, axes: Sequence[Mapping[str, Any]], rows: Sequence[Row],
                  formats: Sequence[str]) -> list[Path]:
    """Writes sweep.csv and sweep.parquet, as asked for; every column, in the order of sweep.json.
    """
    columns, paths = columns_with(axes), []
    for name in formats:
        paths.append(folder / f"sweep.{name}")
        (_write_csv if name == "csv" else _write_parquet)(paths[-1], columns, rows)
    return paths


def _write_csv(path: Path, columns: Sequence[SweepColumn], rows: Sequence[Row]) -> None:
    """Nothing stands for None; infinity is inf, as most readers take it."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([column.name for column in columns])
    writer.writerows([[row.get(column.name) for column in columns] for row in rows])
    write_atomically(path, text.getvalue())


def _write_parquet(path: Path, columns: Sequence[SweepColumn], rows: Sequence[Row]) -> None:
    arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    types = {"text": arrow.string(), "whole": arrow.int64(), "number": arrow.float64()}
    table = arrow.table({column.name: arrow.array(
        [_value(row, column) for row in rows], types[column.kind]) for column in columns})
    temporary = path.with_name(f".{path.name}.tmp")
    parquet.write_table(table, temporary)
    temporary.replace(path)


def _value(row: Row, column: SweepColumn) -> str | float | int | None:
    value = row.get(column.name)
    if column.kind == "text":
        return None if value is None else str(value)
    number = number_of(row, column.name)
    return int(number) if column.kind == "whole" and number is not None else number
