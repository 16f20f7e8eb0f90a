"""Reads a sweep file (docs/sweep.md): a base job, cases and a grid, expanded to the jobs of all
points, with every mistake at once. A job file is a sweep of itself, over the axes that flags name.

An axis has a short name or is a dotted key of a job file. Each value is a Field of the file that
gives it, so that a message about it names its place."""

import itertools
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args

from xgpt.core.errors import InputError, Mistake, nearest, wrong
from xgpt.core.policies import policies
from xgpt.core.units import parse_share
from xgpt.job.job import Job
from xgpt.job.job_file import SWEEP_KEYS, job_of, job_tree
from xgpt.job.typed import CONFIG, Flag, Reading, Text, any_keys, choice, read, text, that
from xgpt.job.yaml_tree import (
    Field,
    apply_override,
    data_of,
    parse_tree,
    read_tree,
    with_value,
    without_lines,
)

MAX_POINTS = 100_000  # chosen
SWEEP_FOLDER = "sweep"  # in a job's output folder
DEFAULT_BOUNDS = "10%,20%,30%,50%,70%,100%,inf"
DEFAULT_SCALES = "scale=0.5,1,2"  # of a job whose requests arrive over time
Horizon = Literal["steady", "job"]
ALL, AUTO = "all", "auto"  # policy: every one of a batch job; the one searched
OVER, BOUNDS = "--over", "--bounds"
FT = "ft"  # before a percentile of the latencies of FasterTransformer's batches
_FT_BOUND = re.compile(rf"{FT}[1-9]\d?")
ARRIVALS = "workload.arrivals"
_SECTIONS = ("workload", "constraint", "schedule", "run", "plan")
_FORM = f"{OVER} takes AXIS=VALUE,VALUE,...; for example policy=rra,waa-c"


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepAxis:
    """An axis of a sweep. `name`: as in rows and tables. `key`: dotted key of the job file. `also`:
    another key that gets the same value. `is_number`: whether rows have its values as numbers."""

    name: str
    key: str
    title: str
    also: str = ""
    is_number: bool = False


POLICY = SweepAxis(name="policy", key="schedule.policy", title="policy")
COPIES = SweepAxis(name="copies", key="schedule.replicas", title="replicas", is_number=True)
BOUND = SweepAxis(name="bound", key="constraint.latency_s", title="latency limit")
AXES = (SweepAxis(name="model", key="model", title="model"),
        SweepAxis(name="cluster", key="cluster", title="cluster"),
        SweepAxis(name="gpus", key="run.ranks", title="GPUs (or ranks)", is_number=True),
        SweepAxis(name="task", key="workload.task", title="task"),
        SweepAxis(name="lengths", key="workload.input_tokens", also="workload.output_tokens",
                  title="lengths"),
        SweepAxis(name="engine", key="run.engine", title="engine"),
        SweepAxis(name="profile", key="profile", title="profile"), COPIES, POLICY, BOUND,
        *(SweepAxis(name=name, key=key, title=title, is_number=True) for name, key, title in (
            ("rate", "workload.arrivals.rate", "requests/s"),
            ("scale", "constraint.scale", "scale of the limits"),
            ("price", "price_per_hour", "price of a device per hour"),
            ("tp", "schedule.tp_degree", "tensor-parallel degree"),
            ("slots", "schedule.max_active", "concurrent requests"),
            ("budget", "schedule.token_budget", "tokens per step"))))

# A value of a key removes the base's values of other keys: lengths are given by a task or by
# themselves, and a cluster is meant as a whole.
REPLACES: Mapping[str, tuple[str, ...]] = {
    "workload.task": ("workload.input_tokens", "workload.output_tokens"),
    "workload.input_tokens": ("workload.task",), "workload.output_tokens": ("workload.task",),
    "cluster": ("run.ranks",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisValue:
    """A value of an axis. `shown`: its form in rows. `is_relative`: a latency limit such as `50%`
    or `ft10`, whose seconds follow from the job; its `field` is then no limit (inf)."""

    shown: str | float
    field: Field
    is_relative: bool = False


Setting = dict[SweepAxis, list[AxisValue]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPoint:
    """One combination of values. `values`: value of each axis as rows show it. `relative_bound`:
    `50%` of the latency at the highest throughput, or `ft10`, the tenth percentile of FT's
    latencies; None: the job has its own limit."""

    job: Job
    values: Mapping[str, str | float]
    relative_bound: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSpec:
    """A sweep to execute. `axes`: the axes with more than one value, each with its values in the
    order of the file. `points` are in the order of the grid."""

    name: str
    source: Path
    output: Path
    horizon: Horizon
    has_margin: bool
    axes: tuple[tuple[SweepAxis, tuple[str | float, ...]], ...]
    points: tuple[SweepPoint, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepFile:
    """Keys of a sweep file."""

    __pydantic_config__ = CONFIG
    name: Annotated[str | None, text("a name of printable characters")] = None
    base: Any = None
    grid: Annotated[Any, any_keys("a mapping of axes to lists")] = None
    cases: Annotated[Any, that(lambda value: isinstance(value, list) and value, "a list of "
                               "mappings, for example [{model: opt-13b, cluster: a40-4}]")] = None
    horizon: Annotated[Horizon, choice(get_args(Horizon))] = "steady"
    output: Text | None = None
    margin: Flag = True


def load_sweep(path: Path, *, overrides: Sequence[str] = (), over: Sequence[str] = (),
               bounds: str | None = None, out: Path | None = None,
               horizon: str | None = None) -> SweepSpec:
    """The SweepSpec of a file and the command line. `overrides`: `--set` of the base job. `over`,
    `bounds`: axes that replace the file's own. Raises InputError with every mistake, in the order
    of the lines."""
    mistakes = list[Mistake]()
    tree = read_tree(path, mistakes)
    if not isinstance(tree.value, dict):
        raise wrong(path, "sweep file", None, "not a mapping of keys to values; a job file, or one "
                    f"with the keys {', '.join(SWEEP_KEYS)}", tree.line)
    own, base_path = SweepFile(), path
    if any(key in tree.value for key in SWEEP_KEYS):
        reading = Reading(tree, mistakes)
        own = read(SweepFile, tree, "", mistakes)
        name, folder = own.name or path.stem, Path(os.path.abspath(path)).parent
        output = folder / (own.output or f"out/{name}")
        base, base_path = _base(reading, path, folder, overrides)
        settings = _settings(reading, own, setting_of_flags(over, bounds, mistakes))
    else:
        base = job_tree(path, overrides, mistakes)
        job = job_of(base, path, [])
        name, output = job.name, job.output / SWEEP_FOLDER
        given = setting_of_flags(over, bounds, mistakes)
        if not given and not mistakes:
            given = setting_of_flags((DEFAULT_SCALES,), None, mistakes) if Reading(
                base, mistakes).has(ARRIVALS) else setting_of_flags((), DEFAULT_BOUNDS, mistakes)
        settings = [given]
    if horizon not in (None, *get_args(Horizon)):
        mistakes.append(Mistake(file="--horizon", line=None, key="horizon", value=horizon,
                                allowed="steady or job"))
    points = _points(settings, base, base_path, mistakes)
    if mistakes:
        raise InputError(sorted(dict.fromkeys(mistakes), key=lambda m: (
            m.line is None, m.file, m.line or 0)))
    return SweepSpec(
        name=name, source=Path(os.path.abspath(path)), output=Path(os.path.abspath(
            out or output)), horizon=cast(Horizon, horizon or own.horizon),
        has_margin=own.margin, axes=_axes(settings), points=tuple(points))


def _base(reading: Reading, path: Path, folder: Path,
          overrides: Sequence[str]) -> tuple[Field, Path]:
    """(tree of the base job, file that its paths start from). Raises InputError."""
    field, mistakes = reading.at("base"), reading.mistakes
    if field is not None and isinstance(field.value, str):
        other = folder / field.value
        if other.is_file():
            return job_tree(other, overrides, mistakes), other
        reading.reject("base", f"no such file: {other}")
    elif field is not None and isinstance(field.value, dict):
        for override in overrides:
            field = apply_override(field, override, mistakes)
        return field, path
    else:
        reading.reject("base", "required: a job file's path, or the keys of a job")
    raise InputError(mistakes)


def _settings(reading: Reading, own: SweepFile, given: Setting) -> list[Setting]:
    """The axes of each case with their values. Policies vary faster than other axes, and latency
    limits fastest, so that rows to compare stand together."""
    grid_field, case_field = reading.at("grid"), reading.at("cases")
    grid: Setting = {} if own.grid is None or grid_field is None else read_setting(
        grid_field, "grid.", reading.mistakes)
    cases: list[Setting] = [{}]
    if own.cases is not None and case_field is not None and isinstance(case_field.value, list):
        cases = []
        for number, one in enumerate(case_field.value):
            if not isinstance(one.value, dict):
                _reject(reading.mistakes, replace(one, value=None), f"cases[{number}]",
                        "a mapping of axes to values")
                continue
            cases.append(read_setting(one, f"cases[{number}].", reading.mistakes))
            for axis in cases[-1].keys() & grid.keys():
                _reject(reading.mistakes, one, f"cases: {axis.name}",
                        "also an axis of the grid: give it once")
    merged = [{**case, **grid, **given} for case in cases]
    # an axis without a value is a mistake, which must not hide others
    return [{axis: one[axis] for axis in _ordered(one) if one[axis]} for one in merged]


def _ordered(axes: Mapping[SweepAxis, Any]) -> list[SweepAxis]:
    return sorted(axes, key=lambda axis: (axis == POLICY) + 2 * (axis == BOUND))


def _axes(settings: Sequence[Setting]) -> tuple[tuple[SweepAxis, tuple[str | float, ...]], ...]:
    values: dict[SweepAxis, dict[str | float, None]] = {}
    for setting in settings:
        for axis, own in setting.items():
            values.setdefault(axis, {}).update((one.shown, None) for one in own)
    return tuple((axis, tuple(values[axis])) for axis in _ordered(values) if len(values[axis]) > 1)


def _points(settings: Sequence[Setting], base: Field, base_path: Path,
            mistakes: list[Mistake]) -> list[SweepPoint]:
    count = sum(math.prod(map(len, setting.values())) for setting in settings)
    if count > MAX_POINTS:
        raise wrong(base_path, "grid", count, f"at most {MAX_POINTS:,} points")
    return [_point(base, base_path, dict(zip(setting, chosen, strict=True)), mistakes)
            for setting in settings for chosen in itertools.product(*setting.values())]


def _point(tree: Field, base_path: Path, chosen: Mapping[SweepAxis, AxisValue],
           mistakes: list[Mistake]) -> SweepPoint:
    for axis in chosen:
        for key in REPLACES.get(axis.key, ()):
            if Reading(tree, mistakes).has(key):
                tree = with_value(tree, key.split("."), Field(value=None, file="", line=None))
    for axis, value in chosen.items():
        for key in filter(None, (axis.key, axis.also)):
            tree = with_value(tree, key.split("."), value.field)
    own = list[Mistake]()  # mistakes of one point must not hide those of another
    bound, job = chosen.get(BOUND), job_of(tree, base_path, own)
    mistakes += own
    if bound and bound.is_relative and Reading(tree, mistakes).has(ARRIVALS):
        _reject(mistakes, replace(bound.field, value=bound.shown), BOUND.name, "seconds or inf "
                "where requests arrive over time")
    if job.workload.requests is not None and job.workload.requests.is_stdin:
        mistakes.append(Mistake(
            file=str(base_path), line=None, key="workload.requests", value="-",
            allowed="a file: a sweep reads requests more than once"))
    return SweepPoint(job=job,
                      values={axis.name: value.shown for axis, value in chosen.items()},
                      relative_bound=str(bound.shown) if bound and bound.is_relative else None)


def axis_of(name: str) -> SweepAxis | None:
    """The axis with this short name or dotted key; None if there is none."""
    for axis in AXES:
        if name == axis.name or (name == axis.key and not axis.also):
            return axis
    first, dot, rest = name.partition(".")
    is_known = dot and rest and first in _SECTIONS
    return SweepAxis(name=name, key=name, title=name) if is_known else None


def read_setting(field: Field, prefix: str, mistakes: list[Mistake]) -> Setting:
    """The axes of a mapping with their values, each given as a value or a list of them."""
    setting: Setting = {}
    assert isinstance(field.value, dict), f"{field = }"
    for name, own in field.value.items():
        axis = axis_of(name)
        if axis is None:
            _reject(mistakes, own, f"{prefix}{name}", (
                f"unknown axis; {nearest(name, [axis.name for axis in AXES])}; or a dotted key of "
                "the job file, such as run.dtype"))
        elif axis in setting:
            _reject(mistakes, own, f"{prefix}{name}", f"given twice: {axis.name} is {axis.key}")
        else:
            setting[axis] = read_values(axis, own, f"{prefix}{name}", mistakes)
    return setting


def read_values(axis: SweepAxis, field: Field, key: str,
                mistakes: list[Mistake]) -> list[AxisValue]:
    """The values of an axis; the reader of the job file checks them later."""
    fields = field.value if isinstance(field.value, list) else [field]
    if not fields:
        _reject(mistakes, field, key, "at least one value")
    if axis == POLICY:
        every = [row.name for row in policies() if row.formula is not None]  # of batch jobs
        fields = [replace(one, value=name) for one in fields
                  for name in (every if one.value == ALL else (one.value,))]
    read = [_read_value(axis, one, key, mistakes) for one in fields]
    unique = {value.shown: value for value in read if value is not None}
    return list(unique.values())


def setting_of_flags(over: Sequence[str], bounds: str | None,
                     mistakes: list[Mistake]) -> Setting:
    """The axes that `--over AXIS=V,V` and `--bounds V,V` name."""
    setting: Setting = {}
    for flag, said in [*((OVER, one) for one in over),
                       *([] if bounds is None else [(BOUNDS, f"{BOUND.name}={bounds}")])]:
        name, equals, values = said.partition("=")
        place = Field(value=None, file=flag, line=None)
        if not equals:
            _reject(mistakes, place, said, _FORM)
            continue
        listed = {name.strip(): _listed(values, flag, mistakes)}
        own = read_setting(replace(place, value=listed), "", mistakes)
        for axis in own.keys() & setting.keys():
            _reject(mistakes, place, axis.name, "given twice: all its values go behind one =")
        setting |= own
    return setting


def _listed(values: str, flag: str, mistakes: list[Mistake]) -> Field:
    try:
        return without_lines(parse_tree(f"[{values}]", flag, mistakes))
    except InputError as cause:
        mistakes.extend(replace(mistake, line=None) for mistake in cause.mistakes)
        return Field(value=values, file=flag, line=None)


def _read_value(axis: SweepAxis, field: Field, key: str,
                mistakes: list[Mistake]) -> AxisValue | None:
    value = field.value
    if isinstance(value, list):
        _reject(mistakes, field, key, "a value, not a list within the list")
        return None
    if axis == POLICY and value in (None, AUTO):
        return AxisValue(shown=AUTO, field=replace(field, value=None))
    if axis == BOUND and isinstance(value, str) and (
            value.strip().endswith("%") or value.strip().startswith(FT)):
        return _read_relative(field, key, mistakes)
    if axis == BOUND and isinstance(value, (int, float)) and not isinstance(value, bool):
        return AxisValue(shown="inf" if math.isinf(value) else f"{value:g} s", field=field)
    if axis.is_number and isinstance(value, (int, float)) and not isinstance(value, bool):
        return AxisValue(shown=value, field=field)
    if isinstance(value, dict) and [*value] == ["file"]:
        return AxisValue(shown=str(value["file"].value), field=field)
    shown = value if isinstance(value, str) else json.dumps(data_of(field), sort_keys=True)
    return AxisValue(shown=shown, field=field)


def _read_relative(field: Field, key: str, mistakes: list[Mistake]) -> AxisValue | None:
    text = str(field.value).strip()
    try:
        is_right = _FT_BOUND.fullmatch(text) or 0 < parse_share(text) < math.inf
    except ValueError:
        is_right = False
    if not is_right:
        _reject(mistakes, field, key, "seconds, inf, a share above 0 % of the latency at the "
                                      "highest throughput, for example 50%, or a percentile of "
                                      "FT's latencies, ft1 to ft99")
        return None
    return AxisValue(shown=text, field=replace(field, value=math.inf), is_relative=True)


def _reject(mistakes: list[Mistake], field: Field, key: str, allowed: str) -> None:
    is_scalar = not isinstance(field.value, (list, dict))
    mistakes.append(Mistake(file=field.file, line=field.line, key=key,
                            value=field.value if is_scalar else None, allowed=allowed))
