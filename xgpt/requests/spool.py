"""The spool: a job's requests as its launcher read and tokenised them, in the output folder. Ranks,
report and resume read these files; nobody opens the file of requests again. Requests that can run
are called queries here, and have indices of their own.

    `spool/spool.json`     version; numbers of queries and of error records; names of several files;
                           the time given to chat templates. A digest of all tokens, by which a run
                           that is continued knows its prompts.
    `spool/records.jsonl`  a JSON object per request: id, line and options; for the first ones the
                           prompt, which the report shows.
    `spool/tokens.bin`     token ids of all requests in order, 4 bytes each, little-endian.
    `spool/places.npy`     int64 [requests + 1, 2]: begin of each request in records.jsonl (in
                           bytes) and in tokens.bin (in tokens).
    `spool/queries.npy`    int64 [queries, 2]: request of each query, and its most output tokens.
    `spool/deadlines.npy`  float64 [queries]: seconds from the job's start; absent without any.
    `spool/arrivals.npy`   float64 [queries]: seconds from the job's start; absent in a batch job.
    `spool/prefixes.npy`   prefixes that queries share (xgpt.requests.prefixes); absent without any.
    `spool/columns/`       columns for the results (xgpt.requests.spool_columns), if any."""

import hashlib
import json
import os
import shutil
import sys
import weakref
from array import array
from collections.abc import Collection, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import IO, Any

import numpy as np

from xgpt.core.lengths import FloatArray, IntArray
from xgpt.core.prefixes import Prefixes
from xgpt.core.system.whole_file import read_object, sync_files, sync_folder
from xgpt.requests.prefixes import find_prefixes, load_prefixes, save_prefixes
from xgpt.requests.request import Asked
from xgpt.requests.spool_columns import ColumnsWriter, temporary_file

SPOOL_VERSION = 1
NUM_PROMPTS = 200  # chosen: first requests whose texts are kept
_TOKEN = np.dtype("<i4")
_PLACE_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Record(Asked):
    """A request without its tokens. `prompt`: its text, for the first requests."""

    is_forced: bool = False  # whether its output has exactly its most tokens, ignoring EOS
    is_chat: bool = False  # whether it was given as messages
    sample: int = 0  # index among several answers to one request
    targets: tuple[int, ...] = ()  # token ids to score; all but the last also end the input

    def to_json(self) -> bytes:
        values = {name: value for name, default in _DEFAULTS.items()
                  if (value := getattr(self, name)) != default}
        return json.dumps(values).encode() + b"\n"


_DEFAULTS = {one.name: None if one.default is MISSING else one.default for one in fields(Record)}


def _record(line: bytes) -> Record:
    values = json.loads(line)
    return Record(**{**values, "stop": tuple(values.get("stop", ())),
                     "targets": tuple(values.get("targets", ()))})


class SpoolWriter:
    """Collects requests one by one in temporary files, and saves them as a spool."""

    def __init__(self, columns: ColumnsWriter | None = None, now: datetime | None = None) -> None:
        """`columns`: columns of the requests for the results, saved beside them. `now`: time given
        to chat templates."""
        self.columns, self._now, self._prompts = columns, now or datetime.now(), hashlib.sha256()
        self._records, self._tokens, self._places = (temporary_file(self) for _ in range(3))
        self._end = array("q", (0, 0))  # of records and tokens
        self._limits = array("i")  # tokens that each request may share with others
        self._places.write(self._end.tobytes())

    def add(self, record: Record, ids: Sequence[int] | IntArray) -> None:
        """Adds a request with its token ids."""
        self._end[0] += self._records.write(record.to_json())
        raw = np.asarray(ids, _TOKEN).tobytes()
        self._tokens.write(raw)
        self._prompts.update(raw + b"%d" % len(ids) + repr(record.targets).encode())
        self._end[1] += len(ids)
        self._places.write(self._end.tobytes())
        # not the first whose last hidden state is needed, nor any after it
        self._limits.append(0 if record.pooled == "mean" else max(
            len(ids) - max(len(record.targets), 1), 0))

    def find_prefixes(self, left_out: Collection[int] = ()) -> Prefixes | None:
        """The prefixes that the requests share, but for those left out; None if there are none.
        Call it only after the last `add`."""
        limits, num_tokens = np.array(self._limits, np.int64), self._end[1]
        limits[list(left_out)] = 0
        if not limits.any():
            return None
        self._tokens.flush()
        self._places.seek(0)
        begins = np.frombuffer(self._places.read(), np.int64)[1:-2:2]
        return find_prefixes(np.memmap(self._tokens, _TOKEN, "r", shape=num_tokens), begins, limits)

    @property
    def prompts_digest(self) -> str:
        """16 hexadecimal digits of all tokens so far."""
        return self._prompts.hexdigest()[:16]

    def record(self, request: int) -> Record:
        """The record of a request; call it only after the last `add`."""
        self._places.seek(_PLACE_BYTES * request)
        self._records.seek(int.from_bytes(self._places.read(8), sys.byteorder))
        return _record(self._records.readline())

    def save(self, output: Path, queries: IntArray, num_errors: int, files: Sequence[str] = (),
             deadlines_s: FloatArray | None = None, prefixes: Prefixes | None = None,
             arrival_s: FloatArray | None = None) -> None:
        """Writes or replaces the spool in the folder `output`. `queries`: [queries, 2], as in
        queries.npy. `files`: names of the files of requests, if there are several. `deadlines_s`:
        [queries], as in deadlines.npy. `prefixes`: of the queries. `arrival_s`: [queries], as in
        arrivals.npy."""
        folder, new = output / "spool", output / f".spool.{os.getpid()}.tmp"
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        for source, name in ((self._records, "records.jsonl"), (self._tokens, "tokens.bin")):
            source.seek(0)
            with (new / name).open("wb") as file:
                shutil.copyfileobj(source, file)
        _save_pairs(self._places, new / "places.npy")
        np.save(new / "queries.npy", queries)
        if deadlines_s is not None:
            np.save(new / "deadlines.npy", deadlines_s)
        if arrival_s is not None:
            np.save(new / "arrivals.npy", arrival_s)
        if prefixes is not None:
            save_prefixes(new / "prefixes.npy", prefixes)
        if self.columns is not None:
            self.columns.save(new)
        header = {"version": SPOOL_VERSION, "queries": len(queries), "errors": num_errors,
                  "files": list(files), "prompts": self.prompts_digest,
                  "now": self._now.isoformat()}
        (new / "spool.json").write_text(json.dumps(header) + "\n", encoding="utf-8")
        sync_files(new)
        shutil.rmtree(folder, ignore_errors=True)
        new.rename(folder)
        sync_folder(output)


def _save_pairs(source: IO[bytes], path: Path) -> None:
    """Copies int64 [rows, 2] from a raw file to a .npy file, not all in memory at once."""
    rows = source.seek(0, os.SEEK_END) // _PLACE_BYTES
    source.seek(0)
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {
            "descr": np.lib.format.dtype_to_descr(np.dtype(np.int64)), "fortran_order": False,
            "shape": (rows, 2)})
        shutil.copyfileobj(source, file)


class _TokenFile:
    """The file of all token ids, open while an object refers to it. It is read, not mapped: mapped
    pages would stay in the process's memory."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)

    def read(self, first: int, length: int) -> list[int]:
        size = _TOKEN.itemsize
        ids: list[int] = np.frombuffer(
            os.pread(self._descriptor, size * length, size * first), _TOKEN).tolist()
        return ids


class Tokens(Sequence[int]):
    """Token ids of one query, read from the disk at each access."""

    __slots__ = ("_file", "_first", "_length")

    def __init__(self, file: _TokenFile, first: int, length: int) -> None:
        self._file, self._first, self._length = file, first, length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        yield from self._list()

    def __getitem__(self, index: Any) -> Any:
        return self._list()[index]

    def _list(self) -> list[int]:
        return self._file.read(self._first, self._length)


class Spool:
    """Reads the spool of an output folder. `query`: index among the requests that can run."""

    def __init__(self, output: Path) -> None:
        """Raises OSError if there is no spool, ValueError if it has another version or is not
        whole, and EOFError, TypeError or LookupError if it is no spool."""
        folder = output / "spool"
        header = json.loads((folder / "spool.json").read_text(encoding="utf-8"))
        if header["version"] != SPOOL_VERSION:
            raise ValueError(f"{folder} is of version {header['version']}, not {SPOOL_VERSION}")
        self.num_errors: int = header["errors"]
        self.files: tuple[str, ...] = tuple(header.get("files", ()))
        # elements of a memmap itself are read ten times slower
        self._places = np.asarray(np.load(folder / "places.npy", mmap_mode="r"))
        self._queries = np.asarray(np.load(folder / "queries.npy", mmap_mode="r"))
        self._tokens = _TokenFile(folder / "tokens.bin")
        # [queries] seconds from the job's start, infinite for none; None: no query has one
        self.deadlines_s: FloatArray | None = None
        if (path := folder / "deadlines.npy").exists():
            self.deadlines_s = np.load(path)
        # [queries] seconds from the job's start; None: all queries are there then
        self.arrival_s: FloatArray | None = None
        if (path := folder / "arrivals.npy").exists():
            self.arrival_s = np.load(path)
        self._folder = folder
        self._records_path = folder / "records.jsonl"
        ends = self._records_path.stat().st_size, (folder / "tokens.bin").stat().st_size
        if ends != (self._places[-1, 0], self._places[-1, 1] * _TOKEN.itemsize) or (
                header["queries"] != len(self._queries)):
            raise ValueError(f"{folder} is not whole")
        self._records: IO[bytes] | None = None

    def __len__(self) -> int:
        return len(self._queries)

    def most_output_tokens(self, query: int) -> int:
        return int(self._queries[query, 1])

    def tokens(self, query: int) -> Tokens:
        """The token ids of a query."""
        request = self._queries[query, 0]
        first, end = self._places[request:request + 2, 1].tolist()
        return Tokens(self._tokens, first, end - first)

    @property
    def input_tokens(self) -> IntArray:
        """Input tokens of each query, [queries]."""
        requests = np.asarray(self._queries[:, 0])
        tokens: IntArray = np.diff(self._places[:, 1])[requests]
        return tokens

    @property
    def prefixes(self) -> Prefixes | None:
        """The prefixes that the queries share; None if there are none. Raises XgptError for a file
        that does not fit them."""
        return load_prefixes(self._folder / "prefixes.npy", self.input_tokens)

    @property
    def most_outputs(self) -> IntArray:
        """Most output tokens of each query, [queries]."""
        return np.asarray(self._queries[:, 1])

    def record(self, query: int) -> Record:
        return _record(self._line(query))

    def is_named(self, query: int, name: bytes) -> bool:
        """Whether the query's id is `name` (as JSON); null matches every query."""
        line = self._line(query)
        return name == b"null" or line.startswith(b'{"id": ' + name + b",") or (
            json.loads(line).get("id") == json.loads(name))

    def _line(self, query: int) -> bytes:
        if self._records is None:  # kept open, as more lines are usually read
            self._records = self._records_path.open("rb")
            weakref.finalize(self, self._records.close)
        self._records.seek(self._places[self._queries[query, 0], 0])
        return self._records.readline()

    def records(self, most: int | None = None) -> Iterator[Record]:
        """Yields the records of all queries in order, or of the first `most`."""
        with self._records_path.open("rb") as file:
            for request in self._queries[:most, 0].tolist():
                file.seek(self._places[request, 0])
                yield _record(file.readline())

    def prompts(self, most: int) -> list[str | None]:
        """The first `most` prompts as texts; None where no text was kept."""
        requests = self._queries[:most, 0].tolist()
        return [f"{len(self.tokens(query))} token ids" if record.prompt is None
                and request < NUM_PROMPTS else record.prompt
                for query, (request, record) in enumerate(zip(requests, self.records(most),
                                                              strict=True))]


def saved_header(output: Path) -> dict[str, Any]:
    """The object in spool.json; {} before the requests of the job in `output` were read."""
    return read_object(output / "spool" / "spool.json")


def num_queries(output: Path) -> int | None:
    """Number of requests of the job in `output` that can run; None before they were read."""
    try:
        return int(saved_header(output)["queries"])
    except (KeyError, TypeError, ValueError):
        return None
