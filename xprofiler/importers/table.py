"""A CSV file of a known layout as named numpy arrays; every fault of the file at once.

Times are milliseconds in the files of all the sources read here and seconds once read."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xgpt.core.errors import InputError, Mistake, wrong

_MS = 1e-3
_SHOWN = 20  # faults of one column that are listed; the rest are counted


class Column(NamedTuple):
    """One column that is read. `least`: of a count. `allowed`: of a text. `may_lack`: files
    without the column are good; with a `default`, they read as if every row had it. `may_blank`:
    an empty cell is good, and reads as NaN. `is_work`: rows with 0 here timed nothing; they are
    left out and counted."""

    name: str
    kind: Literal["ms", "count", "flag", "text"]
    least: int = 0
    allowed: tuple[str, ...] = ()
    may_lack: bool = False
    may_blank: bool = False
    default: int | str | None = None
    is_work: bool = False


class Fault(NamedTuple):
    """What becomes a Mistake once the file is known. `line` None: of the file as a whole."""

    line: int | None
    key: str
    value: object
    allowed: str


_Read = tuple[NDArray[Any], list[Fault]]  # a column's values, and what is wrong with its cells


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Table:
    """`lines` [rows]: where in the file each row is."""

    path: Path
    lines: NDArray[np.int64]
    columns: Mapping[str, NDArray[Any]]
    num_empty: int = 0  # rows that timed nothing, left out

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    def __getitem__(self, name: str) -> NDArray[Any]:
        """[rows] a column: seconds, whole numbers, flags or texts, by its kind."""
        return self.columns[name]


def read_table(path: Path, columns: Sequence[Column], unused: str = "") -> Table:
    """The rows of `path`. `unused`: pattern of columns that belong to the layout and are not read.
    Raises InputError naming every missing or unknown column and every bad cell."""
    header, lines, rows = _rows(path)
    kept = _with_work(header, rows, columns)
    num_empty = len(rows) - len(kept)
    lines, rows = [lines[i] for i in kept], [rows[i] for i in kept]
    wanted = {column.name: column for column in columns}
    faults = [Fault(1, name, None, "missing column") for name, column in wanted.items()
              if name not in header and not column.may_lack]
    faults += [Fault(1, name, None, f"unknown column; known: {', '.join(wanted)}")
               for name in header if name not in wanted and not re.fullmatch(unused, name)]
    faults += [Fault(1, name, None, "a column that is there twice") for name in wanted
               if header.count(name) > 1]
    short = [n for n, row in zip(lines, rows, strict=True) if len(row) != len(header)]
    faults += [Fault(n, "cells", None, f"as many as the header has: {len(header)}")
               for n in short[:_SHOWN]]
    if short:
        fail(path, faults)
    read = {column.name: np.full(len(rows), column.default) for column in columns
            if column.default is not None and column.name not in header}
    for at, name in enumerate(header):
        if name in wanted:
            read[name], bad = _column(wanted[name], [row[at] for row in rows], lines)
            faults += bad
    fail(path, faults)
    return Table(path=path, lines=np.array(lines), columns=read, num_empty=num_empty)


def _with_work(header: list[str], rows: list[list[str]], columns: Sequence[Column]) -> list[int]:
    """Indices of the rows that timed something; all of them, if none did."""
    at = [header.index(column.name) for column in columns
          if column.is_work and column.name in header]
    kept = [i for i, row in enumerate(rows)
            if not any(index < len(row) and _number(row[index]) == 0 for index in at)]
    return kept or list(range(len(rows)))


def fail(path: Path, faults: Iterable[Fault]) -> None:
    """Raises InputError if there are any faults."""
    mistakes = [Mistake(file=str(path), line=f.line, key=f.key, value=f.value, allowed=f.allowed)
                for f in faults]
    if mistakes:
        raise InputError(mistakes)


def one_value(table: Table, name: str) -> Any:
    """The value that all rows of a column share. Raises InputError if they differ."""
    values = np.unique(table[name])
    if len(values) > 1:
        shown = ", ".join(str(v) for v in values[:5])
        raise wrong(table.path, name, shown, "one value in the whole file")
    return values[0].item()


def _rows(path: Path) -> tuple[list[str], list[int], list[list[str]]]:
    """(header, line numbers, cells)."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file)
            header = [name.strip() for name in next(reader, [])]
            numbered = [(reader.line_num, row) for row in reader if row]
    except (OSError, UnicodeDecodeError, csv.Error) as cause:
        raise wrong(path, "file", None, f"a readable CSV file: {cause}") from None
    if not numbered:
        raise wrong(path, "rows", None, "a header and at least one row; the file is empty")
    return header, [n for n, _ in numbered], [row for _, row in numbered]


def _column(column: Column, cells: list[str], lines: Sequence[int]) -> _Read:
    if column.kind in ("ms", "count"):
        return _numbers(column, cells, lines)
    texts = np.array([cell.strip() for cell in cells])
    allowed = ("True", "False") if column.kind == "flag" else column.allowed
    bad = ~np.isin(texts, allowed) if allowed else np.zeros(len(texts), bool)
    known = f"one of {', '.join(filter(None, allowed))}" + " or nothing" * ("" in allowed)
    faults = _listed(column, cells, lines, np.flatnonzero(bad), known)
    return (texts == "True" if column.kind == "flag" else texts), faults


def _numbers(column: Column, cells: list[str], lines: Sequence[int]) -> _Read:
    values = np.array([_number(cell) for cell in cells])
    if column.kind == "count":
        bad = ~(np.isfinite(values) & (values >= column.least) & (values == np.floor(values)))
        faults = _listed(column, cells, lines, np.flatnonzero(bad),
                         f"a whole number of at least {column.least}")
        return np.where(bad, 0, values).astype(np.int64), faults
    bad = ~(np.isfinite(values) & (values >= 0))
    if column.may_blank:
        bad &= np.array([bool(cell.strip()) for cell in cells])
    faults = _listed(column, cells, lines, np.flatnonzero(bad), "a time in milliseconds, 0 or more")
    return values * _MS, faults


def _number(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return float("nan")


def _listed(column: Column, cells: list[str], lines: Sequence[int], bad: NDArray[np.intp],
            allowed: str) -> list[Fault]:
    faults = [Fault(lines[i], column.name, cells[i], allowed) for i in bad[:_SHOWN]]
    if len(bad) > _SHOWN:
        faults.append(Fault(None, column.name, None, f"{len(bad) - _SHOWN} more such cells"))
    return faults
