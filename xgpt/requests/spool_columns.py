"""Columns of requests that are copied into the results, kept in the spool: a row for every row of
the input, bad ones included, in order.

    `spool/columns/columns.json`   the segments in order, and whether ids are whole numbers.
    `spool/columns/NNN.jsonl`      a JSON object per row, from formats without types.
    `spool/columns/NNN.arrow`      an Arrow stream, with the types of a Parquet file."""

import importlib
import json
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import IO, Any

FOLDER = "columns"
ROWS_COLUMN = "\0rows"  # column of nulls in an Arrow segment, which keeps its number of rows
_BYTES_IN_MEMORY = 2**26  # chosen: more is written to a temporary file
_ROWS_AT_A_TIME = 1024
_MAX_INT64 = 2**63

# Kinds of a column of JSON values, from the narrowest to one that holds everything.
BOOLEAN, INTEGER, NUMBER, TEXT, JSON = "boolean", "integer", "number", "text", "json"


class ColumnsWriter:
    """Collects columns row by row, or batch by batch, and saves them in a spool's folder."""

    def __init__(self) -> None:
        self._segments: list[_Rows | _Batches] = []
        self._has_whole_ids = True

    def add(self, values: Mapping[str, Any]) -> None:
        """Adds a row of values by column."""
        last = self._segments[-1] if self._segments else None
        if not isinstance(last, _Rows):
            last = _Rows()
            self._segments.append(last)
        last.add(values)
        self._has_whole_ids = False

    def add_batch(self, batch: Any, has_whole_ids: bool) -> None:
        """Adds a pyarrow.RecordBatch, which has the column ROWS_COLUMN."""
        last = self._segments[-1] if self._segments else None
        if not isinstance(last, _Batches) or not last.schema.equals(batch.schema):
            if isinstance(last, _Batches):
                last.writer.close()
            last = _Batches(batch.schema)
            self._segments.append(last)
        last.writer.write_batch(batch)
        self._has_whole_ids &= has_whole_ids

    def save(self, spool: Path) -> None:
        """Writes the folder `columns` of a spool that has none yet."""
        folder, said = spool / FOLDER, []
        folder.mkdir()
        for place, segment in enumerate(self._segments):
            if isinstance(segment, _Batches):
                segment.writer.close()
                name, kinds = f"{place:03}.arrow", None
            else:
                name, kinds = f"{place:03}.jsonl", segment.kinds
            segment.file.seek(0)
            with (folder / name).open("wb") as file:
                shutil.copyfileobj(segment.file, file)
            said.append({"file": name, "kinds": kinds})
        header = {"segments": said, "whole_ids": self._has_whole_ids and bool(said)}
        (folder / "columns.json").write_text(json.dumps(header) + "\n", encoding="utf-8")


class _Rows:
    def __init__(self) -> None:
        self.file = temporary_file(self)
        self.kinds: dict[str, str | None] = {}  # by column, in order of appearance; None: nulls

    def add(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            self.kinds[name] = _wider(self.kinds.get(name), _kind(value))
        self.file.write(json.dumps(values).encode() + b"\n")


class _Batches:
    def __init__(self, schema: Any) -> None:
        self.file = temporary_file(self)
        self.schema = schema
        self.writer = importlib.import_module("pyarrow").ipc.new_stream(self.file, schema)


def temporary_file(owner: object) -> IO[bytes]:
    """A new temporary file, in memory while it is small; closed when `owner` is collected."""
    file = tempfile.SpooledTemporaryFile(_BYTES_IN_MEMORY)  # noqa: SIM115 (its owner keeps it)
    weakref.finalize(owner, file.close)
    return file


def _kind(value: object) -> str | None:
    if value is None:
        return None
    if isinstance(value, bool):
        return BOOLEAN
    if isinstance(value, int):
        return INTEGER if -_MAX_INT64 <= value < _MAX_INT64 else JSON
    return NUMBER if isinstance(value, float) else TEXT if isinstance(value, str) else JSON


def _wider(known: str | None, new: str | None) -> str | None:
    """The kind of a column that holds values of both kinds."""
    if known is None or new is None or known == new:
        return known or new
    return NUMBER if {known, new} == {INTEGER, NUMBER} else JSON


class Segment:
    """A file of rows. `kinds`: kind of each column; None for Arrow, which knows its types."""

    def __init__(self, path: Path, kinds: Mapping[str, str | None] | None) -> None:
        self.path, self.kinds = path, kinds

    def names(self) -> list[str]:
        """Names of its columns."""
        names = self.schema().names if self.kinds is None else self.kinds
        return [name for name in names if name != ROWS_COLUMN]

    def schema(self) -> Any:
        """The schema of an Arrow segment."""
        with self.path.open("rb") as file:
            return _ipc().open_stream(file).schema

    def batches(self) -> Iterator[Any]:
        """Yields the record batches of an Arrow segment."""
        with self.path.open("rb") as file:
            yield from _ipc().open_stream(file)

    def rows(self) -> Iterator[list[dict[str, Any]]]:
        """Yields the rows of a JSON segment, many at a time."""
        with self.path.open("rb") as file:
            while lines := list(islice(file, _ROWS_AT_A_TIME)):
                yield [json.loads(line) for line in lines]


class Columns:
    """Columns kept in the spool of an output folder, as segments; none if nothing was kept."""

    def __init__(self, output: Path) -> None:
        folder = output / "spool" / FOLDER
        try:
            header = json.loads((folder / "columns.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            header = {"segments": [], "whole_ids": False}
        self.segments = tuple(Segment(folder / one["file"], one["kinds"])
                              for one in header["segments"])
        self.has_whole_ids: bool = header["whole_ids"]


def _ipc() -> Any:
    return importlib.import_module("pyarrow").ipc
