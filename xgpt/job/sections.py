"""Sections of a job file for the run. `slurm`: options of sbatch under its own names, refused here
where Slurm would refuse them only after a wait in the queue. `workload.requests` and `results`:
files of requests with their format, and a file for results besides results.jsonl."""

import glob
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from xgpt.core.errors import nearest
from xgpt.core.units import parse_seconds
from xgpt.job import typed
from xgpt.requests.request_files import COMPRESSED, STDIN, SUFFIXES, RequestFiles, format_of

LAUNCHES = ("srun", "mpiexec")
REQUEUES = 3  # chosen: after warnings of the time limit
WARNING_S = 120  # chosen
MAIL_TYPES = ("NONE", "BEGIN", "END", "FAIL", "REQUEUE", "ALL", "INVALID_DEPEND", "STAGE_OUT",
              "TIME_LIMIT", "TIME_LIMIT_90", "TIME_LIMIT_80", "TIME_LIMIT_50", "ARRAY_TASKS")
# Options that the batch script sets itself: of two, the later would count.
_OWN = ("array", "a", "chdir", "D", "error", "e", "job-name", "J", "no-requeue", "open-mode",
        "output", "o", "parsable", "requeue", "signal", "wait", "W", "wrap")

_TIME = r"\d+|\d+:\d+|\d+:\d+:\d+|\d+-\d+(:\d+){0,2}|infinite|unlimited"
_OPTION = re.compile(r"--([a-z][a-z-]*)(=.*)?|-([A-Za-z])( ?\S.*)?")
_ONE_DEPENDENCY = r"(singleton|after(any|ok|notok|corr)?(:\d+(_(\d+|\*))?(\+\d+)?)+)"
_VARIABLE = re.compile(r"[A-Za-z_]\w*")


def _texts(allowed: str, is_allowed: Callable[[str], object] = bool) -> typed.Of:
    """A check for a list of texts, or a single one, each of which `is_allowed` accepts."""
    return typed.that(lambda value: all(map(is_allowed, typed.texts_of(value))), allowed,
                      typed.texts_of)


def _mail_types(value: Any) -> tuple[str, ...]:
    types = tuple(one.strip().upper() for each in typed.texts_of(value) for one in each.split(","))
    if set(types) <= {*MAIL_TYPES}:
        return types
    raise ValueError


Nodes = Annotated[int, typed.whole(1, 100_000)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmSpec:
    """Options of sbatch under its own names (None: the cluster's default), and of the batch script
    that xgpt writes."""

    __pydantic_config__ = typed.CONFIG
    partition: typed.Text | None = None
    account: typed.Text | None = None
    qos: typed.Text | None = None
    constraint: typed.Text | None = None
    reservation: typed.Text | None = None
    dependency: Annotated[str | None, typed.matching(
        rf"{_ONE_DEPENDENCY}([,?]{_ONE_DEPENDENCY})*",
        "as sbatch takes it: 'afterok:123', 'afterany:1:2', 'singleton'")] = None
    nodes: Nodes | None = None
    ntasks_per_node: Nodes | None = None
    gpus_per_node: Annotated[str | None, typed.matching(
        r"([A-Za-z][\w.-]*:)?\d{1,3}", "a number, or 'a100:4'")] = None
    cpus_per_task: Nodes | None = None
    mem: Annotated[str | None, typed.matching(
        r"\d+[KMGT]?", "megabytes, or a number with K, M, G, T", re.IGNORECASE)] = None
    time: Annotated[str | None, typed.matching(
        _TIME, "minutes, 'HH:MM:SS' or 'D-HH:MM:SS'", re.IGNORECASE)] = None
    exclusive: typed.Flag = False
    mail_type: Annotated[tuple[str, ...], typed.Of(
        _mail_types, f"some of {', '.join(MAIL_TYPES)}")] = ()
    mail_user: typed.Text | None = None
    at_once: Nodes | None = None  # tasks of an array that may run at the same time
    extra: Annotated[tuple[str, ...], _texts(
        "a list of whole options of sbatch, such as '--comment=x'", _OPTION.fullmatch)] = ()
    modules: Annotated[tuple[str, ...], _texts("a list of names")] = ()
    venv: Annotated[str | None, typed.InFolder(  # absolute
        lambda value, folder: str(folder / Path(typed.text_of(value)).expanduser()),
        "the folder of a virtual environment on the nodes", type="string")] = None
    env: Annotated[tuple[tuple[str, str], ...], typed.that(
        lambda value: isinstance(value, dict) and all(
            _VARIABLE.fullmatch(name) and typed.is_one_of(own, str, int, float)
            and str(own).isprintable() for name, own in value.items()),
        "a mapping of variables to text, {UCX_NET_DEVICES: ib0}",
        lambda value: tuple((name, str(own)) for name, own in value.items()), type="object")] = ()
    prologue: Annotated[tuple[str, ...], _texts("a list of lines of bash")] = ()
    # words put before the command of every rank
    container: Annotated[tuple[str, ...], _texts(
        "a list of words: [apptainer, exec, image.sif]")] = ()
    launch: Annotated[Literal["srun", "mpiexec"], typed.choice(LAUNCHES)] = "srun"
    mpi: Annotated[str, typed.text("a word for `srun --mpi=`: pmi2, pmix, cray_shasta")] = "pmi2"
    requeue: Annotated[int, typed.whole(0, 1000)] = REQUEUES
    warning_s: Annotated[int, typed.amount(  # before the time limit; in the file: warning
        lambda value: round(parse_seconds(value)), lambda x: 30 <= x <= 65535,
        "seconds or '2 min', at least 30 s (a run has 20 s to stop) and at most 65535 s"),
        Field(alias="warning")] = WARNING_S

    @property
    def gpus_each(self) -> int | None:
        """Number of GPUs of each node; None if not given."""
        return None if self.gpus_per_node is None else int(self.gpus_per_node.rpartition(":")[2])

    @property
    def time_s(self) -> float | None:
        return None if self.time is None else seconds_of(self.time)


def check_slurm(spec: SlurmSpec, reading: typed.Reading) -> None:
    """Records keys of the section `slurm` that contradict each other."""
    keys = {field.name.replace("_", "-"): field.name for field in fields(SlurmSpec)}
    for option in spec.extra:
        match = _OPTION.fullmatch(option)
        name = match and (match[1] or match[3])
        if name in _OWN:
            reading.reject("slurm.extra", f"{option!r} is what the batch script says itself")
        elif name in keys:
            reading.reject("slurm.extra", f"{option!r} has a key of its own, slurm.{keys[name]}")
    if spec.time_s is not None and spec.time_s <= spec.warning_s:
        reading.reject("slurm.time", f"more than slurm.warning, {spec.warning_s} s: so long before "
                       "the limit a run is asked to stop")
    if spec.mail_user is None and set(spec.mail_type) - {"NONE"}:
        reading.reject("slurm.mail_type", "needs slurm.mail_user")
    if reading.has("slurm.mpi") and spec.launch != "srun":
        reading.reject("slurm.mpi", "only with launch: srun")


def seconds_of(time: str) -> float:
    """Seconds of a time in Slurm's form: `minutes`, `M:S`, `H:M:S`, `D-H`, `D-H:M`, `D-H:M:S`;
    infinite for infinite and unlimited."""
    if time.lower() in ("infinite", "unlimited"):
        return math.inf
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    else:
        hours, minutes, seconds = ((0, *parts, 0)[:3] if len(parts) < 3 else parts)
    return float(((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds)


def time_of(seconds: float) -> str:
    """`seconds` rounded up to whole minutes, in Slurm's form: `1-02:30:00`."""
    minutes = math.ceil(seconds / 60)
    hours, days = minutes // 60 % 24, minutes // 60 // 24
    return (f"{days}-" if days else "") + f"{hours:02d}:{minutes % 60:02d}:00"


MAX_COUNT = 10**8
RESULT_FORMATS = ("csv", "tsv", "parquet", "jsonl")
_OWN_FILES = ("results.jsonl", "held.jsonl", "errors.jsonl", "steps.jsonl")
_FILES = "a file of requests, a list of files, a pattern (prompts/*.jsonl), or - for standard input"
_ENDS = tuple(end + tail for ends in SUFFIXES.values() for end in ends for tail in ("", COMPRESSED))
_RESULTS = "a file whose name ends in .csv, .tsv, .parquet or .jsonl; or off"


def files_of(value: Any, folder: Path) -> tuple[Path, ...]:
    """Absolute paths of a name, a pattern, or a list of these; or standard input alone. Raises
    ValueError."""
    if value == [None]:
        return (STDIN,)  # `--set workload.requests=-`: to YAML a list of nothing
    texts = typed.texts_of(value)
    if not texts:
        raise ValueError
    if STDIN.name in texts:
        if len(texts) > 1:
            raise ValueError("- (standard input) stands alone")
        return (STDIN,)
    found = {name: _found(name, folder) for name in texts}
    if missing := [name for name in texts if not found[name]]:
        raise ValueError("; ".join(_not_found(name, folder) for name in missing))
    # a file that is named twice is read once
    return tuple(dict.fromkeys(path for name in texts for path in found[name]))


_Column = Annotated[str, typed.text("the name of a column")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """Keys of `workload.requests`, if it is a mapping."""

    file: Annotated[tuple[Path, ...] | None, typed.InFolder(files_of, _FILES)] = None
    count: Annotated[int, typed.whole(1, MAX_COUNT)] | None = None
    format: Annotated[str | None, typed.choice(tuple(SUFFIXES))] = None
    prompt: _Column | None = None
    messages: _Column | None = None
    id: _Column | None = None
    delimiter: Annotated[str | None, typed.that(
        lambda value: isinstance(value, str) and len(value) == 1 and value not in '"\r\n',
        "one character, for example ';' or \"\\t\"", type="string")] = None
    options: typed.Flag = True
    carry: Annotated[tuple[str, ...] | None, typed.that(
        lambda value: len(set(texts := typed.texts_of(value))) == len(texts),
        "a list of columns; [] carries none", typed.texts_of)] = None


AnyRequests = Annotated[Any, typed.OrMapping(
    Requests, typed.InFolder(files_of), _FILES + ", or {count: N}")]


def requests_of(own: Requests | tuple[Path, ...] | None,
                reading: typed.Reading) -> tuple[RequestFiles | None, int | None]:
    """(files of requests, number of synthetic requests), at least one of them None."""
    key = "workload.requests"
    if not isinstance(own, Requests):
        return (None if own is None else RequestFiles(paths=own)), None
    if not reading.has(f"{key}.file"):
        if not reading.has(f"{key}.count"):
            reading.reject(f"{key}.count", "required: a number of synthetic requests; or file: "
                           "where they are")
        return None, own.count
    if own.count is not None:
        reading.reject(f"{key}.count", "give either file or count")
    if own.prompt is not None and own.messages is not None:
        reading.reject(f"{key}.messages", "give either prompt or messages: a request has one of "
                       "them")
    if own.format in ("text", "json", "jsonl", "parquet") and own.delimiter is not None:
        reading.reject(f"{key}.delimiter", "only with CSV and TSV")
    return None if own.file is None else RequestFiles(
        paths=own.file, format=own.format, prompt=own.prompt, messages=own.messages, id=own.id,
        delimiter=own.delimiter, carry=own.carry, has_options=own.options), None


def _results(value: Any, folder: Path) -> Path | None:
    if value is False or value == "off":  # YAML 1.1 reads `off` as false
        return None
    path = absolute(typed.text_of(value), folder)
    if format_of(path) not in RESULT_FORMATS:
        raise ValueError
    if path.is_dir():
        raise ValueError("a file, not a folder")
    return path


Results = Annotated[Path | None, typed.InFolder(_results, _RESULTS, type=["string", "boolean"])]


def results_of(own: Path | None, files: RequestFiles | None, output: Path,
               reading: typed.Reading) -> Path | None:
    """Path of the results besides results.jsonl; None for none. By default requests in a table get
    results in a table of the same format."""
    if not reading.has("results"):
        table = files.table if files is not None else None
        return output / f"results.{table}" if table is not None else None
    if own is not None and own.parent == output and own.name in _OWN_FILES:
        reading.reject("results", f"{own.name} of the output folder is written in any case: give "
                       "another name")
    elif own is not None and files is not None and own in files.paths:
        reading.reject("results", "this file holds the requests: give another name")
    return own


def absolute(text: str, folder: Path) -> Path:
    """`text` as an absolute path; relative ones start at the job file's folder."""
    is_home = text == "~" or text.startswith("~/")
    # NOTE: abspath, not resolve: links keep the user's name, and a loop of links is no error
    return Path(os.path.abspath(folder / (Path(text).expanduser() if is_home else Path(text))))


def is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name too long, or one with a null byte
        return False


def _found(text: str, folder: Path) -> Sequence[Path]:
    """The file with this name, or else the files that match it as a pattern, sorted."""
    if is_file(path := absolute(text, folder)):
        return [path]
    if not glob.has_magic(text):
        return []
    # only `text` is a pattern: the folder's own name may have brackets
    matches = glob.glob(os.path.expanduser(text), root_dir=folder, recursive=True)
    return sorted(path for match in matches if is_file(path := absolute(match, folder)))


def _not_found(text: str, folder: Path) -> str:
    path = absolute(text, folder)
    if glob.has_magic(text):
        return f"no file matches {path}"
    try:
        if path.is_dir():
            return f"{path} is a folder: name its files, for example {path.name}/*.jsonl"
        beside = sorted(one.name for one in path.parent.iterdir()
                        if one.name.lower().endswith(_ENDS))
    except (OSError, ValueError):
        beside = []
    hint = f"; {nearest(path.name, beside[:20]).replace('known:', 'there:')}" if beside else ""
    return f"no such file: {path}{hint}"
