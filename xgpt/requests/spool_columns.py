"""The columns of requests that their results take over as they are, kept in the spool: a row for
every row of the input, bad ones included, in its order.

    spool/columns/columns.json   the segments, one after another, and whether ids are whole numbers
    spool/columns/NNN.jsonl      a JSON object a row: of every format without types
    spool/columns/NNN.arrow      an Arrow stream, with the types of a Parquet file"""

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
ROWS_COLUMN = "\0rows"  # of an Arrow segment: nulls, a row each
_BYTES_IN_MEMORY = 2**26  # of what is not in a folder yet; more lies in a temporary file
_ROWS_AT_A_TIME = 1024
_MAX_INT64 = 2**63

# What a column of JSON values is, from the narrowest to what takes everything.
BOOLEAN, INTEGER, NUMBER, TEXT, JSON = "boolean", "integer", "number", "text", "json"


class ColumnsWriter:
    """Takes up the columns row by row, or batch by batch, before there is a folder for them."""

    def __init__(self) -> None:
        self._segments: list[_Rows | _Batches] = []
        self._has_whole_ids = True

    def add(self, values: Mapping[str, Any]) -> None:
        last = self._segments[-1] if self._segments else None
        if not isinstance(last, _Rows):
            last = _Rows()
            self._segments.append(last)
        last.add(values)
        self._has_whole_ids = False

    def add_batch(self, batch: Any, has_whole_ids: bool) -> None:
        """A pyarrow.RecordBatch, of which ROWS_COLUMN is one."""
        last = self._segments[-1] if self._segments else None
        if not isinstance(last, _Batches) or not last.schema.equals(batch.schema):
            if isinstance(last, _Batches):
                last.writer.close()
            last = _Batches(batch.schema)
            self._segments.append(last)
        last.writer.write_batch(batch)
        self._has_whole_ids &= has_whole_ids

    def save(self, spool: Path) -> None:
        """Writes the folder of a spool that has none yet."""
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
        self.kinds: dict[str, str | None] = {}  # of each column in the order of coming; None: nulls

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
    """A file of its own, in memory while it is small, which is closed when its owner goes."""
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
    """The kind of a column that holds values of both."""
    if known is None or new is None or known == new:
        return known or new
    return NUMBER if {known, new} == {INTEGER, NUMBER} else JSON


class Segment:
    """Rows of the spool that lie in one file. `kinds`: of each column; None where Arrow knows."""

    def __init__(self, path: Path, kinds: Mapping[str, str | None] | None) -> None:
        self.path, self.kinds = path, kinds

    def names(self) -> list[str]:
        """Of its columns."""
        names = self.schema().names if self.kinds is None else self.kinds
        return [name for name in names if name != ROWS_COLUMN]

    def schema(self) -> Any:
        """Of an Arrow segment."""
        with self.path.open("rb") as file:
            return _ipc().open_stream(file).schema

    def batches(self) -> Iterator[Any]:
        """Yields the record batches of an Arrow segment."""
        with self.path.open("rb") as file:
            yield from _ipc().open_stream(file)

    def rows(self) -> Iterator[list[dict[str, Any]]]:
        """Yields the rows of the other kind, many at a time."""
        with self.path.open("rb") as file:
            while lines := list(islice(file, _ROWS_AT_A_TIME)):
                yield [json.loads(line) for line in lines]


class Columns:
    """What the spool of an output folder keeps of the input's columns; no segment without."""

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
