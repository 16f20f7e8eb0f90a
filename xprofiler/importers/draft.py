"""Shared parts of importers: tables of files, and a Profile made of imported and analytic ones."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xgpt.core.cluster import Device
from xgpt.core.engines import OWN_ENGINE
from xgpt.core.errors import InputError, MissingExtraError, Mistake, wrong
from xgpt.core.lengths import FloatArray
from xgpt.core.model import ModelSpec
from xgpt.core.units import DTYPE_BYTES
from xprofiler.profile import (
    STEP_OVERHEAD,
    Peaks,
    Profile,
    ProfileMetadata,
    Sample,
    TableKey,
    model_shape,
)
from xprofiler.roofline import Roofline
from xprofiler.timing import Operator

_MS = 1e-3
_SHOWN = 20  # faults of one column that are listed; the rest are counted


class Column(NamedTuple):
    """A column to read. `least`: smallest count allowed. `allowed`: texts allowed. `may_lack`: the
    file may lack the column; every row then has `default`, if given. `is_work`: rows with 0 here
    timed nothing, and are left out. `is_choice`: rows with texts that are not allowed are left
    out, too, unless all have such ones."""

    name: str
    kind: Literal["ms", "count", "text"]
    least: int = 0
    allowed: tuple[str, ...] = ()
    may_lack: bool = False
    default: int | str | None = None
    is_work: bool = False
    is_choice: bool = False


class Fault(NamedTuple):
    """A Mistake without its file. `line` None: it concerns the whole file."""

    line: int | None
    key: str
    value: object
    allowed: str


_Read = tuple[NDArray[Any], list[Fault]]  # a column's values, and what is wrong with its cells


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Table:
    """Columns of a file by name, each [rows]. `lines` [rows]: the line of each row (in Parquet its
    number)."""

    path: Path
    lines: NDArray[np.int64]
    columns: Mapping[str, NDArray[Any]]

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    def __getitem__(self, name: str) -> NDArray[Any]:
        """The column `name`, [rows]: seconds, whole numbers or texts, by its kind."""
        return self.columns[name]

    def of(self, rows: NDArray[Any] | slice, **more: NDArray[Any]) -> Table:
        """A Table of `rows` alone (a mask or indices). `more`: columns to add, with all rows."""
        columns = {**self.columns, **more}
        return Table(path=self.path, lines=self.lines[rows],
                     columns={name: column[rows] for name, column in columns.items()})


def read_table(path: Path, columns: Sequence[Column], unused: str = "") -> Table:
    """The Table of a CSV or Parquet file. `unused`: pattern of known columns that are not read.
    Raises InputError naming every missing or unknown column and every bad cell."""
    header, lines, rows = _rows(path)
    kept = _with_work(header, rows, columns)
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
    return Table(path=path, lines=np.array(lines), columns=read)


def _with_work(header: list[str], rows: list[list[str]], columns: Sequence[Column]) -> list[int]:
    """Indices of the rows that timed something, with chosen texts; all rows, if none has both."""
    there = [column for column in columns if column.name in header]
    at = [header.index(column.name) for column in there if column.is_work]
    chosen = [(header.index(column.name), column.allowed) for column in there if column.is_choice]
    kept = [i for i, row in enumerate(rows) if len(row) != len(header) or not (
        any(_number(row[index]) == 0 for index in at)
        or any(row[index].strip() not in allowed for index, allowed in chosen))]
    return kept or list(range(len(rows)))


def fail(path: Path, faults: Iterable[Fault]) -> None:
    """Raises InputError with all of `faults`, if there are any."""
    mistakes = [Mistake(file=str(path), line=f.line, key=f.key, value=f.value, allowed=f.allowed)
                for f in faults]
    if mistakes:
        raise InputError(mistakes)


def _rows(path: Path) -> tuple[list[str], list[int], list[list[str]]]:
    """(header, line number of each row, cells of each row). Raises InputError, and
    MissingExtraError for Parquet without pyarrow."""
    try:
        if path.suffix == ".parquet":
            header, numbered = _parquet_rows(path)
        else:
            with path.open(encoding="utf-8-sig", newline="") as file:
                reader = csv.reader(file)
                header = [name.strip() for name in next(reader, [])]
                numbered = [(reader.line_num, row) for row in reader if row]
    except (OSError, ValueError, csv.Error) as cause:
        raise wrong(path, "file", None, f"a readable {path.suffix[1:].upper()} file (in a clone, "
                    f"after `git lfs pull`): {cause}") from None
    if not numbered:
        raise wrong(path, "rows", None, "a header and at least one row; the file is empty")
    return header, [n for n, _ in numbered], [row for _, row in numbered]


def _parquet_rows(path: Path) -> tuple[list[str], list[tuple[int, list[str]]]]:
    try:
        read = import_module("pyarrow.parquet").ParquetFile
    except ImportError:
        raise MissingExtraError("pyarrow", "parquet", f"reading {path.name}") from None
    with read(path) as file:
        table = file.read()
    cells = [["" if value is None else str(value) for value in column.to_pylist()]
             for column in table.columns]
    return table.column_names, list(enumerate(map(list, zip(*cells, strict=True)), 1))


def _column(column: Column, cells: list[str], lines: Sequence[int]) -> _Read:
    if column.kind in ("ms", "count"):
        return _numbers(column, cells, lines)
    texts = np.array([cell.strip() for cell in cells])
    bad = ~np.isin(texts, column.allowed) if column.allowed else np.zeros(len(texts), bool)
    known = f"one of {', '.join(filter(None, column.allowed))}" + (
        " or nothing" * ("" in column.allowed))
    return texts, _listed(column, cells, lines, np.flatnonzero(bad), known)


def _numbers(column: Column, cells: list[str], lines: Sequence[int]) -> _Read:
    values = np.array([_number(cell) for cell in cells])
    if column.kind == "count":
        bad = ~(np.isfinite(values) & (values >= column.least) & (values == np.floor(values)))
        faults = _listed(column, cells, lines, np.flatnonzero(bad),
                         f"a whole number of at least {column.least}")
        return np.where(bad, 0, values).astype(np.int64), faults
    bad = ~(np.isfinite(values) & (values >= 0))
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


# Of a decoder-only model; in this order in the file.
OPERATORS = (Operator.LAYER_REST, Operator.ENCODE_ATTENTION, Operator.DECODE_ATTENTION,
             Operator.EMBED, Operator.HEAD, Operator.KV_COMPACTION)
MAX_TOKENS, MAX_QUERIES, MAX_ROWS = 2**14, 2**10, 2**20  # where analytic parts end
_TOGETHER = np.array([1.0, 4.0, 16.0])  # queries encoded together
_DISTURBED = 1.5  # chosen


class Source(NamedTuple):
    """Origin of imported numbers: whose they are, of which kernels, commit, date and libraries."""

    name: str
    kernels: str
    commit: str
    date: str
    libraries: str

    def check(self, path: Path, model: ModelSpec, dtype: str) -> None:
        """Raises InputError unless the model is decoder-only and `dtype` has 16 bits."""
        fail(path, [
            *([Fault(None, "model", model.name, "a decoder-only model")]
              if model.is_encoder_decoder else []),
            *([Fault(None, "dtype", dtype,
                     f"float16 or bfloat16: {self.name} measured 16-bit kernels")]
              if DTYPE_BYTES.get(dtype) != 2 else [])])


class ProfileDraft:
    """Builds a Profile of imported tables, with the roofline's times for operators that nobody
    measured."""

    def __init__(self, model: ModelSpec, device: Device, dtype: str,
                 engine: str = OWN_ENGINE) -> None:
        """`engine`: the catalog engine whose constants compute the analytic tables."""
        self.roofline = Roofline(model, device, dtype, engine=engine)
        self.tables: dict[TableKey, tuple[Sample, ...]] = {}
        self.refused: dict[int, str] = {}
        self.notes: list[str] = []
        self._model, self._device, self._dtype = model, device, dtype
        self._analytic: dict[str, list[int]] = {}
        self._disturbed = 0

    @property
    def degrees(self) -> tuple[int, ...]:
        """Tensor-parallel degrees that have a LAYER_REST table."""
        return tuple(sorted(k.tp_degree for k in self.tables
                            if k.name == Operator.LAYER_REST.value))

    @property
    def peaks(self) -> Peaks:
        """The device's data-sheet peaks."""
        return Peaks(flops_per_s=self._device.peak_flops_per_s(self._dtype),
                     bandwidth_bytes_per_s=self._device.bandwidth_bytes_per_s,
                     source=self._device.source or "data sheet")

    def refuse(self, degree: int, reason: str | None) -> bool:
        """Records `reason` for leaving out `degree`; returns whether there is a reason."""
        if reason is not None:
            self.refused[degree] = reason
        return reason is not None

    def add(self, operator: Operator, degree: int, table: Iterable[Sample]) -> None:
        """Adds a table of measured points, unless it is empty."""
        if samples := in_order(table):
            self.tables[TableKey(operator.value, degree)] = samples

    def calm(self, operator: Operator, table: Sequence[Sample]) -> list[Sample]:
        """The points of an attention table that are not disturbed; counts the others."""
        kept = undisturbed(table, grows_with_y=operator is not Operator.ENCODE_ATTENTION)
        self._disturbed += len(table) - len(kept)
        return kept

    def fill_from_roofline(self) -> None:
        """Adds the roofline's times for every table that a degree lacks. Compaction costs 0: a
        paged cache moves no rows."""
        for degree in self.degrees:
            for operator in OPERATORS:
                key = TableKey(operator.value, degree)
                if key in self.tables:
                    continue
                if operator is Operator.KV_COMPACTION:
                    self.tables[key] = tuple(
                        Sample(x=x, samples_s=(0.0,)) for x in (1, MAX_ROWS))
                else:
                    self.tables[key] = in_order(self._analytic_points(operator, degree))
                    self._analytic.setdefault(operator.value, []).append(degree)
        overhead_s = self.roofline.facts.step_overhead_s
        self.tables[TableKey(STEP_OVERHEAD)] = (Sample(x=0, samples_s=(overhead_s,)),)
        self._analytic[STEP_OVERHEAD] = [1]

    def profile(self, source: Source, what: str) -> Profile:
        """The finished Profile. `what`: which of the source's tables it holds, for its origin."""
        assert self.degrees, f"no degree of {what}"
        disturbed = [f"{self._disturbed} disturbed points of attention left out"]
        text = "; ".join([f"imported from {source.name} ({source.commit}): {what}", *self.notes,
                          *(disturbed if self._disturbed else []), *self._analytic_note()])
        order = [TableKey(op.value, d) for d in self.degrees for op in OPERATORS]
        order += [key for key in self.tables if key not in order]
        return Profile(
            metadata=ProfileMetadata(
                model=self._model.name, model_shape=model_shape(self._model),
                device=self._device.name, dtype=self._dtype, ranks=1, threads_per_rank=1,
                kernels=source.kernels, libraries=source.libraries, is_padded=False, origin=text,
                date=source.date, commit=source.commit),
            tables={key: self.tables[key] for key in order},
            refused={d: self.refused[d] for d in sorted(self.refused)}, model=self._model,
            peaks=self.peaks)

    def _analytic_points(self, operator: Operator, degree: int) -> list[Sample]:
        positions = _ladder(self._model.max_positions or MAX_TOKENS)
        xs, ys = {Operator.ENCODE_ATTENTION: (positions, _TOGETHER),
                  Operator.DECODE_ATTENTION: (_ladder(MAX_QUERIES), positions),
                  Operator.HEAD: (_ladder(MAX_QUERIES), np.zeros(1)),
                  }.get(operator, (_ladder(MAX_TOKENS), np.zeros(1)))
        return [Sample(x=float(x), y=float(y), samples_s=(float(s),)) for y in ys for x, s in zip(
            xs, self.roofline.operator_s(operator, xs, y, tp_degree=degree), strict=True)]

    def _analytic_note(self) -> list[str]:
        if not self._analytic:
            return []
        names = [name if name == STEP_OVERHEAD or tuple(degrees) == self.degrees else
                 f"{name} (tp {', '.join(str(d) for d in degrees)})"
                 for name, degrees in self._analytic.items()]
        return [f"{', '.join(names)} from the analytic roofline"]


def in_order(table: Iterable[Sample]) -> tuple[Sample, ...]:
    """The samples sorted by (y, x), as in a profile's file."""
    return tuple(sorted(table, key=lambda p: (p.y, p.x)))


def samples_at(x: ArrayLike, seconds: ArrayLike, y: ArrayLike | None = None) -> list[Sample]:
    """One Sample per distinct (x, y), holding the `seconds` of all rows there. y defaults to 0."""
    xs = np.asarray(x, float)
    ys = np.zeros_like(xs) if y is None else np.asarray(y, float)
    places: dict[tuple[float, float], list[float]] = {}
    for at_x, at_y, s in zip(xs.tolist(), ys.tolist(), np.asarray(seconds, float).tolist(),
                             strict=True):
        places.setdefault((at_x, at_y), []).append(s)
    return [Sample(x=at_x, y=at_y, samples_s=tuple(s)) for (at_x, at_y), s in places.items()]


def undisturbed(table: Sequence[Sample], *, grows_with_y: bool) -> list[Sample]:
    """The points of `table` but those that took over `_DISTURBED` times as long as a point of more
    work: something else ran then. Such a point would raise all larger ones, as times must grow
    with size."""
    xs, column = np.unique([p.x for p in table], return_inverse=True)
    ys, row = np.unique([p.y for p in table], return_inverse=True)
    medians = np.full((len(ys), len(xs)), np.nan)
    medians[row, column] = [np.median(p.samples_s) for p in table]
    least = np.fmin.accumulate(medians[:, ::-1], axis=1)[:, ::-1]
    if grows_with_y:
        least = np.fmin.accumulate(least[::-1], axis=0)[::-1]
    is_good = medians <= _DISTURBED * least
    return [p for p, good in zip(table, is_good[row, column], strict=True) if good]


def _ladder(most: float) -> FloatArray:
    """1, 2, 3, 4, 6, 8, ... up to `most`."""
    doubles = 2.0 ** np.arange(np.floor(np.log2(most)) + 1)
    steps: Sequence[float] = sorted({1.0, *doubles, *(1.5 * doubles[1:]), float(most)})
    return np.array([s for s in steps if s <= most])
