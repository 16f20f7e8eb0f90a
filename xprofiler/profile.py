"""The Profile: measured seconds per operator, tensor-parallel degree and link.

A profile measured on this machine is kept in a file named after its identity. Torch-free:
xprofiler.measure measures."""

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
NOISE_LIMIT = 0.25  # chosen
# A point is measured again, also by later runs, where others used more of the machine than this.
DISTURBED_LIMIT = 0.10  # chosen

# Tables that are no Operator. Those of messages have bytes as x and belong to a link; a step's
# overhead has one point.
ALL_REDUCE, TRANSFER = MessageKind.ALL_REDUCE.value, MessageKind.TRANSFER.value
HANDOVER = MessageKind.HANDOVER.value  # through hosts' memory
HANDOVER_DIRECT = "kv_handover_direct"
STEP_OVERHEAD = "step_overhead"
# a layer's products and the copies of its weights from the tier below, alone and at once
STREAMED, STREAMED_PARTS = "streamed", ("copies", "computing", "both")
COPY = "copy"  # between tiers; its link is a name of TimingFacts.copy_rates
ENGINE_START = "engine_start"  # of another engine, until it is ready; its x counts engines
_EVERY_LAYER = Operator.LAYER_REST.value  # a degree without this table was not timed


class Decides(Enum):
    """Consequence of a metadata field that differs between a profile and a run. All fields but
    labels belong to the profile's identity."""

    REFUSED = "the profile is not used: it is of something else"
    MARKED = "the profile is used and marked: it may still be near"
    MARKED_ON_CPU = "marked where ranks share a host's memory, else nothing"
    MARKED_HERE = "marked where the run is on this machine, else nothing"
    APART = "nothing; profiles that differ in it are kept in files apart"
    LABEL = "nothing: it says when and from what the profile came"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileMetadata:
    """Conditions under which a profile was measured: device, dtype, kernels, and how many ranks
    shared the machine (they compete for its memory). `match` compares them with those of a run."""

    model: Annotated[str, Decides.LABEL]  # its name; the shape counts
    model_shape: Annotated[str, Decides.REFUSED]  # fingerprint of the layer's shape
    device: Annotated[str, Decides.REFUSED]
    dtype: Annotated[str, Decides.REFUSED]
    ranks: Annotated[int, Decides.MARKED_ON_CPU]
    threads_per_rank: Annotated[int, Decides.MARKED_ON_CPU]
    kernels: Annotated[str, Decides.MARKED]  # fingerprint of the timed code
    # versions that decide kernels: torch, MPI, CUDA and driver
    libraries: Annotated[str, Decides.MARKED_HERE]
    # "greedy" or "drawn": how the output head chose tokens
    sampling: Annotated[str, Decides.MARKED] = "greedy"
    # dtype that weights were multiplied as; "": `dtype`
    weight_dtype: Annotated[str, Decides.REFUSED] = ""
    # whether decode attention read every request up to the longest context
    is_padded: Annotated[bool, Decides.APART] = True
    # threads per core where ranks outnumber the cores, else 1. Operators are timed with at most one
    # rank per core at work, and take `sharing` times as long while all work.
    sharing: Annotated[float, Decides.APART] = 1.0
    nodes: Annotated[int, Decides.APART] = 1  # nodes that the ranks were spread over, evenly
    origin: Annotated[str, Decides.MARKED] = "measured"  # or the source that it was imported from
    clock: Annotated[str, Decides.LABEL] = ""  # core clock while measuring, where it can be read
    date: Annotated[str, Decides.LABEL] = ""
    commit: Annotated[str, Decides.LABEL] = ""

    def __post_init__(self) -> None:
        if not self.weight_dtype:
            object.__setattr__(self, "weight_dtype", self.dtype)

    @classmethod
    def deciding(cls, what: Decides) -> list[str]:
        """Names of the fields whose difference has the consequence `what`."""
        return [one.name for one in fields(cls) if get_args(one.type)[1] is what]

    @property
    def identity(self) -> dict[str, object]:
        """Fields and values that tell this profile from others: all but labels."""
        labels = self.deciding(Decides.LABEL)
        return {key: value for key, value in asdict(self).items() if key not in labels}


class TableKey(NamedTuple):
    """Key of a table: name of the operator or message, tensor-parallel degree, and for messages
    the link."""

    name: str
    tp_degree: int = 1
    link: str = ""

    def __str__(self) -> str:
        return f"{self.name} tp={self.tp_degree}" + (f" link={self.link}" if self.link else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A measured point. `samples_s`: raw seconds, each the mean over one repetition's layers.
    `missing`: share of the machine that other programs used (xprofiler.measure.ranks).
    `tries`: sessions that measured it; repeated only while noisy or disturbed, the best is kept."""

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
        """Interquartile range over the median; 0 for fewer than three samples."""
        if len(self.samples_s) < 3 or self.median_s == 0:
            return 0.0
        low, high = np.quantile(self.samples_s, (0.25, 0.75))
        return float(high - low) / self.median_s

    @property
    def is_disturbed(self) -> bool:
        """Whether other programs used so much of the machine that it must be repeated."""
        return self.missing > DISTURBED_LIMIT

    @property
    def is_noisy(self) -> bool:
        """Whether its repeats lie too far apart to be relied on."""
        return self.spread > NOISE_LIMIT

    @property
    def standard_error(self) -> float:
        """Relative standard error of the median; infinite for fewer than three samples.
        It is 1.25 / sqrt(n) deviations of a normal, whose interquartile range is 1.35 of them."""
        if len(self.samples_s) < 3:
            return math.inf
        return 1.25 * self.spread / 1.35 / math.sqrt(len(self.samples_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedSteps:
    """Measured over profiled time of one run's steps of one kind. `factor`: ratio of the sums,
    without the extreme tenth of the steps. `rows`: tokens of a step. `spread`: distance between
    the quartiles of single steps' ratios, as a share of `factor`."""

    kind: str  # encode, decode, mixed
    rows: Annotated[float, Field(ge=0, le=1e18)]
    factor: Annotated[float, Field(gt=0, le=1e3)]
    spread: Annotated[float, Field(ge=0, le=1e3)]
    steps: int
    date: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """Peak rates of one rank's device with all ranks at work: the roofline's two lines."""

    flops_per_s: Annotated[float, Field(gt=0)]
    bandwidth_bytes_per_s: Annotated[float, Field(gt=0)]
    source: str  # "measured", or the data sheet


Tables = Mapping[TableKey, tuple[Sample, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Measured points by table.

    `refused`: reason by tensor-parallel degree that the model cannot be split by. `spent_s`:
    seconds spent measuring. `model`, `peaks`: where known, to tell the share of the peaks that a
    time reaches. `learned`: step times of later runs on this machine, the latest last."""

    metadata: ProfileMetadata
    tables: Tables
    refused: Mapping[int, str] = field(default_factory=dict)
    spent_s: float = 0.0
    model: ModelSpec | None = None
    peaks: Peaks | None = None
    learned: tuple[LearnedSteps, ...] = ()

    @property
    def tp_degrees(self) -> tuple[int, ...]:
        """Tensor-parallel degrees whose layers were timed, ascending."""
        return tuple(sorted(key.tp_degree for key in self.tables if key.name == _EVERY_LAYER))

    @property
    def serial_share(self) -> float | None:
        """See TimingFacts: by least squares over the layers streamed. None if none was, or if other
        programs disturbed all of them, so that no share explains their times."""
        copies, computing, both = (np.array([point.median_s for point in self.table(
            STREAMED, link=part)]) for part in STREAMED_PARTS)
        shorter, longer = np.minimum(copies, computing), np.maximum(copies, computing)
        shorter *= np.abs(both - longer - shorter / 2) < shorter / 2 + DISTURBED_LIMIT * longer
        total = shorter @ shorter
        return float(np.clip((both - longer) @ shorter / total, 0, 1)) if total else None

    def table(self, name: str, tp_degree: int = 1, link: str = "") -> tuple[Sample, ...]:
        """The points of a table; empty where the profile lacks it."""
        return self.tables.get(TableKey(name, tp_degree, link), ())


class Match(NamedTuple):
    """Result of `match`. `refusals`: reasons why a profile cannot be used. `marks`: differences
    from the run that it is used in spite of."""

    refusals: tuple[str, ...]
    marks: tuple[str, ...]


def match(measured: ProfileMetadata, wanted: ProfileMetadata, *, is_cpu: bool,
          is_here: bool) -> Match:
    """Compares the conditions of a measured profile with those of a run. `is_here`: the run is on
    this machine."""
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


# The code that a layer's time depends on: a profile taken with other code is another profile. The
# rest of a step (deciding, sending) is learned from runs.
_TIMED_CODE = ("xrunner/models", "xrunner/ops", "csrc/ops")
_TIMED_SUFFIXES = (".py", ".cpp", ".cu", ".h")
_C_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


def model_shape(spec: ModelSpec) -> str:
    """Fingerprint of the fields that a layer's cost depends on, without names and sources."""
    # norm_eps: a checkpoint's config rounds it differently, and it costs nothing
    labels = ("name", "hub_id", "wheel", "source", "norm_eps", "not_used", "split")
    # stored_as: weights of fewer bits are executed as any others
    shape = {k: v for k, v in asdict(replace(spec, stored_as="")).items() if k not in labels}
    # fields added later count only where they are set, so that older profiles stay valid
    if shape["decoder"]["latent"] is None:
        del shape["decoder"]["latent"]
    if (experts := shape["decoder"]["experts"]) is not None:
        for later in ("shared", "dense_layers", "dense_inner"):
            if not experts[later]:
                del experts[later]
    return _digest(json.dumps(shape, sort_keys=True))


@cache
def kernels_fingerprint() -> str:
    """Fingerprint of the code of layers and operators, without comments and docstrings."""
    root = Path(__file__).resolve().parent.parent
    # an installed package may lack csrc
    files = [file for name in _TIMED_CODE for file in sorted((root / name).rglob("*"))]
    return _digest("".join(timed_text(file.read_text(encoding="utf-8"), file.suffix)
                           for file in files if file.suffix in _TIMED_SUFFIXES))


def timed_text(source: str, suffix: str) -> str:
    """The parts of a source file that can change its speed: of Python the syntax tree without
    docstrings, of other languages the words without comments."""
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
    """Path of the profile with this identity in `folder`, whether it exists or not."""
    digest = _digest(json.dumps(metadata.identity, sort_keys=True))
    machine = f"{metadata.ranks}x{metadata.threads_per_rank}"
    return folder / f"{metadata.dtype}-{machine}-{digest}.json"


@contextmanager
def changing(folder: Path) -> Iterator[None]:
    """Holds a lock on `folder` while a profile in it is read, changed and written, so that no
    change is lost. Without file locks, or with another user's lock, it does not wait. Measuring,
    which takes longer, has a lock of its own (xgpt.app.profile.alone)."""
    with ExitStack() as held:
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(folder / ".changing.lock", os.O_RDWR | os.O_CREAT, 0o666)
            held.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
