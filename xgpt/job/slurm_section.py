"""The section `slurm` of a job file: what is asked of Slurm, in its own words. What Slurm itself
would refuse only after a wait in the queue is refused here."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from xgpt.core.units import parse_seconds
from xgpt.job import typed

LAUNCHES = ("srun", "mpiexec")
REQUEUES = 3  # after warnings of the time limit
WARNING_S = 120
MAIL_TYPES = ("NONE", "BEGIN", "END", "FAIL", "REQUEUE", "ALL", "INVALID_DEPEND", "STAGE_OUT",
              "TIME_LIMIT", "TIME_LIMIT_90", "TIME_LIMIT_80", "TIME_LIMIT_50", "ARRAY_TASKS")
# What the batch script says itself: twice, the later one would count.
_OWN = ("array", "a", "chdir", "D", "error", "e", "job-name", "J", "no-requeue", "open-mode",
        "output", "o", "parsable", "requeue", "signal", "wait", "W", "wrap")

_TIME = r"\d+|\d+:\d+|\d+:\d+:\d+|\d+-\d+(:\d+){0,2}|infinite|unlimited"
_OPTION = re.compile(r"--([a-z][a-z-]*)(=.*)?|-([A-Za-z])( ?\S.*)?")
_ONE_DEPENDENCY = r"(singleton|after(any|ok|notok|corr)?(:\d+(_(\d+|\*))?(\+\d+)?)+)"
_VARIABLE = re.compile(r"[A-Za-z_]\w*")


def _texts(allowed: str, is_allowed: Callable[[str], object] = bool) -> typed.Of:
    """A list of texts, or a single one."""
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
    """Options of sbatch under its own names (None: left to the cluster), and how the batch script
    goes about it."""

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
    at_once: Nodes | None = None  # tasks of an array that may run at a time
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
    # words before the command of every rank
    container: Annotated[tuple[str, ...], _texts(
        "a list of words: [apptainer, exec, image.sif]")] = ()
    launch: Annotated[Literal["srun", "mpiexec"], typed.choice(LAUNCHES)] = "srun"
    mpi: Annotated[str, typed.text("a word for `srun --mpi=`: pmi2, pmix, cray_shasta")] = "pmi2"
    requeue: Annotated[int, typed.whole(0, 1000)] = REQUEUES
    warning_s: Annotated[int, typed.amount(  # before the time limit
        lambda value: round(parse_seconds(value)), lambda x: 30 <= x <= 65535,
        "seconds or '2 min', at least 30 s (a run has 20 s to stop) and at most 65535 s"),
        Field(alias="warning")] = WARNING_S

    @property
    def gpus_each(self) -> int | None:
        """GPUs of each node."""
        return None if self.gpus_per_node is None else int(self.gpus_per_node.rpartition(":")[2])

    @property
    def time_s(self) -> float | None:
        return None if self.time is None else seconds_of(self.time)


def check_slurm(spec: SlurmSpec, reading: typed.Reading) -> None:
    """What of the section must agree."""
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
                       "the limit a run is told to stop")
    if spec.mail_user is None and set(spec.mail_type) - {"NONE"}:
        reading.reject("slurm.mail_type", "needs slurm.mail_user")
    if reading.has("slurm.mpi") and spec.launch != "srun":
        reading.reject("slurm.mpi", "only with launch: srun")


def seconds_of(time: str) -> float:
    """Slurm's `minutes`, `M:S`, `H:M:S`, `D-H`, `D-H:M`, `D-H:M:S`, or infinity."""
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
    """Whole minutes that hold so many seconds, as Slurm writes them: `1-02:30:00`."""
    minutes = math.ceil(seconds / 60)
    hours, days = minutes // 60 % 24, minutes // 60 // 24
    return (f"{days}-" if days else "") + f"{hours:02d}:{minutes % 60:02d}:00"
