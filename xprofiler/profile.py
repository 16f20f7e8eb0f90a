"""The Profile: measured seconds per operator, tensor-parallel degree and link.

A profile that was measured on this machine is kept in a file that is named after everything that
makes one differ from another. Torch-free: xprofiler.measure measures."""

import ast
import fcntl
import hashlib
import json
import math
import os
import re
import statistics
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Annotated, NamedTuple, get_args

import numpy as np
from pydantic import Field

from xgpt.core.model import ModelSpec
from xprofiler.timing import MessageKind, Operator

# A point whose quartiles lie further apart than this share of its median is measured again.
NOISE_LIMIT = 0.25
# A point during which more of the machine than this was missing is measured again, at the next run
# too.
DISTURBED_LIMIT = 0.10

# Tables that are no Operator. Their x is bytes, and they belong to a link; a step's overhead has
# one point.
ALL_REDUCE, TRANSFER = MessageKind.ALL_REDUCE.value, MessageKind.TRANSFER.value
HANDOVER = MessageKind.HANDOVER.value  # through hosts' memory
HANDOVER_DIRECT = "kv_handover_direct"
STEP_OVERHEAD = "step_overhead"
_EVERY_LAYER = Operator.LAYER_REST.value  # a degree without this table was not timed


class Decides(Enum):
    """What a field of a profile's metadata decides, where it is not that of what is to run. Apart
    from labels all are of the profile's identity."""

    REFUSED = "it is a profile of something else"
    MARKED = "it may still be near: it is used, and marked"
    MARKED_ON_CPU = "the same where ranks share a host's memory"
    MARKED_HERE = "the same where the run is on this machine"
    APART = "nothing but which profile it is"
    LABEL = "nothing: it says when and from what the profile came"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileMetadata:
    """What must be equal for a profile to speak of a run: device, dtype, kernels, and how many
    ranks shared the machine while it was measured (they compete for its memory)."""

    model: Annotated[str, Decides.LABEL]  # its name; what counts is the shape
    model_shape: Annotated[str, Decides.REFUSED]  # fingerprint of the layer's shape
    device: Annotated[str, Decides.REFUSED]
    dtype: Annotated[str, Decides.REFUSED]
    ranks: Annotated[int, Decides.MARKED_ON_CPU]
    threads_per_rank: Annotated[int, Decides.MARKED_ON_CPU]
    kernels: Annotated[str, Decides.MARKED]  # fingerprint of the timed code
    # versions that decide kernels: torch, MPI, CUDA and driver
    libraries: Annotated[str, Decides.MARKED_HERE]
    # or "drawn": the output head's share of it
    sampling: Annotated[str, Decides.MARKED] = "greedy"
    # as which weights were multiplied; "": as `dtype`
    weight_dtype: Annotated[str, Decides.REFUSED] = ""
    # decode attention reads every query up to the longest context
    is_padded: Annotated[bool, Decides.APART] = True
    # threads a core where ranks outnumber the cores, else 1: operators are then timed with no more
    # ranks at work than there are cores, and take so many times as long while all work
    sharing: Annotated[float, Decides.APART] = 1.0
    nodes: Annotated[int, Decides.APART] = 1  # that the ranks lay on, evenly
    origin: Annotated[str, Decides.MARKED] = "measured"  # or whose numbers these are
    clock: Annotated[str, Decides.LABEL] = ""  # core clock while measuring, where it can be read
    date: Annotated[str, Decides.LABEL] = ""
    commit: Annotated[str, Decides.LABEL] = ""

    def __post_init__(self) -> None:
        if not self.weight_dtype:
            object.__setattr__(self, "weight_dtype", self.dtype)

    @classmethod
    def deciding(cls, what: Decides) -> list[str]:
        """Names of the fields that decide this."""
        return [one.name for one in fields(cls) if get_args(one.type)[1] is what]

    @property
    def identity(self) -> dict[str, object]:
        """The fields that must be equal for two profiles to be of the same thing."""
        labels = self.deciding(Decides.LABEL)
        return {key: value for key, value in asdict(self).items() if key not in labels}


class TableKey(NamedTuple):
    """One table: an operator's or message's name, the degree it is a shard of, and the link it
    went over (messages only)."""

    name: str
    tp_degree: int = 1
    link: str = ""

    def __str__(self) -> str:
        return f"{self.name} tp={self.tp_degree}" + (f" link={self.link}" if self.link else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One measured point: raw seconds, each the mean over one repetition's layers. `date`: of the
    day; `missing`: share of the machine that others had meanwhile
    (xprofiler.measure.ranks); `tries`: sessions that measured it, of a point that
    each found disturbed or noisy, of which the best is kept."""

    x: float
    y: float = 0.0
    samples_s: tuple[float, ...]
    date: str = ""
    missing: float = 0.0
    tries: int = 1

    @property
    def median_s(self) -> float:
        return statistics.median(self.samples_s)

    @property
    def spread(self) -> float:
        """Interquartile range over the median."""
        if len(self.samples_s) < 3 or self.median_s == 0:
            return 0.0
        low, high = np.quantile(self.samples_s, (0.25, 0.75))
        return float(high - low) / self.median_s

    @property
    def is_disturbed(self) -> bool:
        """Whether so much of the machine was missing that it is to be measured again."""
        return self.missing > DISTURBED_LIMIT

    @property
    def is_noisy(self) -> bool:
        """Whether its repeats are so far apart that it says little."""
        return self.spread > NOISE_LIMIT

    @property
    def standard_error(self) -> float:
        """The median's standard error, relative: 1.25 / sqrt(n) times the deviation of a normal
        with this interquartile range (1.35 deviations). It is infinite where too few samples
        tell."""
        if len(self.samples_s) < 3:
            return math.inf
        return 1.25 * self.spread / 1.35 / math.sqrt(len(self.samples_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedSteps:
    """What a run's steps of one kind took against the profile's own times: `factor` times as long
    in all, without the extreme tenth, at `rows` tokens; the quartiles of single steps' ratios lie
    `spread` of it apart."""

    kind: str  # encode, decode, mixed
    rows: Annotated[float, Field(ge=0, le=1e18)]
    factor: Annotated[float, Field(gt=0, le=1e3)]
    spread: Annotated[float, Field(ge=0, le=1e3)]
    steps: int
    date: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """The most that one rank's device can do with all ranks at work: the roofline's two lines."""

    flops_per_s: Annotated[float, Field(gt=0)]
    bandwidth_bytes_per_s: Annotated[float, Field(gt=0)]
    source: str  # "measured", or the data sheet


Tables = Mapping[TableKey, tuple[Sample, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Measured points by table. `refused`: tensor-parallel degrees this model cannot be split by,
    with the reason. `spent_s`: seconds of measuring that went into it. `model` and `peaks`, where
    known, let a reader say what share of the device a time reaches. `learned`: what runs on this
    machine measured since, the latest last."""

    metadata: ProfileMetadata
    tables: Tables
    refused: Mapping[int, str] = field(default_factory=dict)
    spent_s: float = 0.0
    model: ModelSpec | None = None
    peaks: Peaks | None = None
    learned: tuple[LearnedSteps, ...] = ()

    @property
    def tp_degrees(self) -> tuple[int, ...]:
        """Degrees whose layers were timed."""
        return tuple(sorted(key.tp_degree for key in self.tables if key.name == _EVERY_LAYER))

    def table(self, name: str, tp_degree: int = 1, link: str = "") -> tuple[Sample, ...]:
        """The points of a table; none where it is not in this profile."""
        return self.tables.get(TableKey(name, tp_degree, link), ())


class Match(NamedTuple):
    """`refusals`: why a profile cannot be used. `marks`: how it differs from what will run."""

    refusals: tuple[str, ...]
    marks: tuple[str, ...]


def match(measured: ProfileMetadata, wanted: ProfileMetadata, *, is_cpu: bool,
          is_here: bool) -> Match:
    """Compares what was measured with what is to run, on CPU workers or not, here or elsewhere."""
    marked = [Decides.MARKED, *[Decides.MARKED_ON_CPU] * is_cpu, *[Decides.MARKED_HERE] * is_here]
    refusals = tuple(
        f"it is of {key.removesuffix('_shape')} {_shown(measured, key)!r}, the job's is "
        f"{_shown(wanted, key)!r}" for key in measured.deciding(Decides.REFUSED)
        if getattr(measured, key) != getattr(wanted, key))
    marks = tuple(
        f"{key} {getattr(measured, key)!r} instead of {getattr(wanted, key)!r}"
        for decides in marked for key in measured.deciding(decides)
        if getattr(measured, key) != getattr(wanted, key))
    return Match(refusals, marks)


def _shown(metadata: ProfileMetadata, key: str) -> object:
    """A model's name says more than its fingerprint; the same name may have two shapes."""
    if key != "model_shape":
        return getattr(metadata, key)
    return f"{metadata.model} (shape {metadata.model_shape})"


# What a layer takes: a profile is of other code where this differs. What the rest of a step takes
# (deciding, sending) its runs tell it.
_TIMED_CODE = ("xrunner/models", "xrunner/ops", "csrc/ops")
_TIMED_SUFFIXES = (".py", ".cpp", ".cu", ".h")
_C_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


def model_shape(spec: ModelSpec) -> str:
    """Fingerprint of what a layer's cost depends on; names and sources do not."""
    # norm_eps: a checkpoint's config rounds it differently, and it costs nothing
    labels = ("name", "hub_id", "wheel", "source", "norm_eps", "not_used")
    # stored_as: weights of fewer bits are executed as any others
    shape = {k: v for k, v in asdict(replace(spec, stored_as="")).items() if k not in labels}
    # what came later counts where it says something: profiles of before stay
    if shape["decoder"]["latent"] is None:
        del shape["decoder"]["latent"]
    if (experts := shape["decoder"]["experts"]) is not None:
        for later in ("shared", "dense_layers", "dense_inner"):
            if not experts[later]:
                del experts[later]
    return _digest(json.dumps(shape, sort_keys=True))


@cache
def kernels_fingerprint() -> str:
    """Fingerprint of the layers' code and that of their operators, without comments and docstrings:
    a profile of other code is none of this one."""
    root = Path(__file__).resolve().parent.parent
    # an installed package may lack csrc
    files = [file for name in _TIMED_CODE for file in sorted((root / name).rglob("*"))]
    return _digest("".join(timed_text(file.read_text(encoding="utf-8"), file.suffix)
                           for file in files if file.suffix in _TIMED_SUFFIXES))


def timed_text(source: str, suffix: str) -> str:
    """What of a source file changes what it takes: of Python the syntax tree, else its words."""
    if suffix != ".py":
        return " ".join(_C_COMMENT.sub(" ", source).split())
    tree = ast.parse(source)
    _strip_docstrings(tree)
    return ast.dump(tree)


def _strip_docstrings(scope: ast.Module | ast.ClassDef | ast.FunctionDef) -> None:
    scope.body = [own for own in scope.body if not (
        isinstance(own, ast.Expr) and isinstance(own.value, ast.Constant))]
    for own in scope.body:
        if isinstance(own, (ast.ClassDef, ast.FunctionDef)):
            _strip_docstrings(own)


def cached_profile_path(folder: Path, metadata: ProfileMetadata) -> Path:
    """Where the profile of this identity lies, existing or not."""
    digest = _digest(json.dumps(metadata.identity, sort_keys=True))
    machine = f"{metadata.ranks}x{metadata.threads_per_rank}"
    return folder / f"{metadata.dtype}-{machine}-{digest}.json"


@contextmanager
def changing(folder: Path) -> Iterator[None]:
    """Of processes that add to a profile of the folder, which they read, change and write, one at a
    time does: of two at once one's would be lost. Where the file system has no locks, or the lock
    is another user's, nobody waits. Not for measuring, which takes longer
    (xgpt.app.profile.alone)."""
    with ExitStack() as held:
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(folder / ".changing.lock", os.O_RDWR | os.O_CREAT, 0o666)
            held.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
