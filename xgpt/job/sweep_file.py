"""Reading a sweep file (docs/sweep.md): a base job, cases and a grid -> the jobs of all points,
with every mistake at once. A job file is a sweep of itself, over the axes that flags name."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args

from xgpt.core.errors import InputError, Mistake, wrong
from xgpt.job.job import Job
from xgpt.job.job_file import SWEEP_KEYS, job_of, job_tree
from xgpt.job.sweep_axes import (
    BOUND,
    POLICY,
    REPLACES,
    AxisValue,
    Setting,
    SweepAxis,
    read_setting,
    setting_of_flags,
)
from xgpt.job.typed import CONFIG, Flag, Of, Reading, Text, any_keys, choice, read, text
from xgpt.job.yaml_tree import Field, apply_override, read_tree, with_value

MAX_POINTS = 100_000
SWEEP_FOLDER = "sweep"  # of a job, in its own
DEFAULT_BOUNDS = "10%,20%,30%,50%,70%,100%,inf"
Horizon = Literal["steady", "job"]


def _cases_of(value: Any) -> list[Any]:
    if isinstance(value, list) and value:
        return value
    raise ValueError


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepFlags:
    """What the command line adds to a file. `overrides`: `--set` of the base job; `over`, `bounds`:
    axes that take the place of the file's own."""

    overrides: tuple[str, ...] = ()
    over: tuple[str, ...] = ()
    bounds: str | None = None
    out: Path | None = None
    horizon: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPoint:
    """One combination. `values`: of each axis that the sweep sets, as rows show it. `share`: of the
    latency at the highest throughput, which is to be the job's bound; None: the job has its own."""

    job: Job
    values: tuple[tuple[str, str | int], ...]
    share: float | None

    def shown(self, axis: str) -> str | int | None:
        """The value of an axis; None for one that the sweep leaves to the base job."""
        return dict(self.values).get(axis)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSpec:
    """A sweep as it is asked for. `axes`: those with more than one value, each with all of them in
    the order of the file; `points` are in the order of the grid."""

    name: str
    source: Path
    output: Path
    horizon: Horizon
    has_margin: bool
    axes: tuple[tuple[SweepAxis, tuple[str | int, ...]], ...]
    points: tuple[SweepPoint, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """A file with the flags put in, before the points are made."""

    name: str
    base: Field
    base_path: Path
    output: Path
    horizon: Horizon
    has_margin: bool
    settings: tuple[Setting, ...]  # a case each, with the grid


def load_sweep(path: Path, flags: SweepFlags | None = None) -> SweepSpec:
    """The sweep of a file. Raises InputError that carries every mistake, in the order of the lines.
    """
    flags, mistakes = flags or SweepFlags(), list[Mistake]()
    tree = read_tree(path, mistakes)
    if not isinstance(tree.value, dict):
        raise wrong(path, "sweep file", None, "not a mapping of keys to values; a job file, or one "
                    f"with the keys {', '.join(SWEEP_KEYS)}", tree.line)
    is_sweep = any(key in tree.value for key in SWEEP_KEYS)
    asked = _asked(tree, path, flags, mistakes) if is_sweep else _of_job(path, flags, mistakes)
    points = _points(asked, mistakes)
    if mistakes:
        raise InputError(sorted(dict.fromkeys(mistakes), key=lambda m: (
            m.line is None, m.file, m.line or 0)))
    return SweepSpec(
        name=asked.name, source=Path(os.path.abspath(path)),
        output=Path(os.path.abspath(flags.out)) if flags.out else asked.output,
        horizon=asked.horizon, has_margin=asked.has_margin,
        axes=_axes(asked.settings), points=tuple(points))


def _of_job(path: Path, flags: SweepFlags, mistakes: list[Mistake]) -> _Asked:
    base = job_tree(path, flags.overrides, mistakes)
    setting = setting_of_flags(flags.over, flags.bounds, mistakes)
    if not setting and not mistakes:
        setting = setting_of_flags((), DEFAULT_BOUNDS, mistakes)
    job = job_of(base, path, [])
    return _Asked(name=job.name, base=base, base_path=path, output=job.output / SWEEP_FOLDER,
                  horizon=_horizon(flags.horizon, "steady", mistakes), has_margin=True,
                  settings=(setting,))


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepFile:
    """The keys of a sweep file."""

    __pydantic_config__ = CONFIG
    name: Annotated[str | None, text("a name of printable characters")] = None
    base: Any = None
    grid: Annotated[Any, any_keys("a mapping of axes to lists")] = None
    cases: Annotated[Any, Of(_cases_of, "a list of mappings, for example [{model: opt-13b, "
                             "cluster: a40-4}]")] = None
    horizon: Annotated[Horizon, choice(get_args(Horizon))] = "steady"
    output: Text | None = None
    margin: Flag = True


def _asked(tree: Field, path: Path, flags: SweepFlags, mistakes: list[Mistake]) -> _Asked:
    folder, reading = Path(os.path.abspath(path)).parent, Reading(tree, mistakes)
    own: SweepFile = read(SweepFile, tree, "", mistakes)
    name = own.name or path.stem
    base, base_path = _base(reading, path, folder, flags.overrides)
    grid_field = reading.at("grid")
    grid = Setting() if own.grid is None or grid_field is None else read_setting(
        grid_field, "grid.", mistakes)
    cases = [(Setting(), tree)] if own.cases is None else _cases(reading.at("cases"), mistakes)
    given = setting_of_flags(flags.over, flags.bounds, mistakes)
    for case, place in cases:
        for axis in case.keys() & grid.keys():
            mistakes.append(Mistake(file=place.file, line=place.line, key=f"cases: {axis.name}",
                                    value=None, allowed="also an axis of the grid: give it once"))
    return _Asked(
        name=name, base=base, base_path=base_path,
        output=Path(os.path.abspath(folder / (own.output or f"out/{name}"))),
        horizon=_horizon(flags.horizon, own.horizon, mistakes), has_margin=own.margin,
        settings=tuple(_merged(case, grid, given) for case, _ in cases))


def _base(reading: Reading, path: Path, folder: Path,
          overrides: Sequence[str]) -> tuple[Field, Path]:
    """The base job's tree, and the file that its paths start from."""
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


def _cases(field: Field | None, mistakes: list[Mistake]) -> list[tuple[Setting, Field]]:
    """Each case, and where it stands."""
    assert field is not None and isinstance(field.value, list), f"{field = }"
    cases = []
    for number, one in enumerate(field.value):
        if isinstance(one.value, dict):
            cases.append((read_setting(one, f"cases[{number}].", mistakes), one))
        else:
            mistakes.append(Mistake(file=one.file, line=one.line, key=f"cases[{number}]",
                                    value=None, allowed="a mapping of axes to values"))
    return cases


def _merged(case: Setting, grid: Setting, given: Setting) -> Setting:
    """All axes of a case, scenario by scenario: policies change faster than what they are compared
    on, and bounds fastest."""
    merged = {**case, **grid, **given}
    # an axis without a value is a mistake, which is to hide no other
    return {axis: merged[axis] for axis in _ordered(merged) if merged[axis]}


def _ordered(axes: Iterable[SweepAxis]) -> list[SweepAxis]:
    return sorted(axes, key=lambda axis: (axis == POLICY) + 2 * (axis == BOUND))


def _horizon(given: str | None, own: str, mistakes: list[Mistake]) -> Horizon:
    if given not in (None, "steady", "job"):
        mistakes.append(Mistake(file="--horizon", line=None, key="horizon", value=given,
                                allowed="steady or job"))
    return cast(Horizon, given or own)


def _axes(settings: Sequence[Setting]) -> tuple[tuple[SweepAxis, tuple[str | int, ...]], ...]:
    values: dict[SweepAxis, dict[str | int, None]] = {}
    for setting in settings:
        for axis, own in setting.items():
            values.setdefault(axis, {}).update((one.shown, None) for one in own)
    return tuple((axis, tuple(values[axis])) for axis in _ordered(values) if len(values[axis]) > 1)


def _points(asked: _Asked, mistakes: list[Mistake]) -> list[SweepPoint]:
    count = 0
    for setting in asked.settings:
        sizes = 1
        for values in setting.values():
            sizes *= len(values)
        count += sizes
    if count > MAX_POINTS:
        raise wrong(asked.base_path, "grid", count, f"at most {MAX_POINTS:,} points")
    return [_point(asked, dict(zip(setting, chosen, strict=True)), mistakes)
            for setting in asked.settings for chosen in itertools.product(*setting.values())]


def _point(asked: _Asked, chosen: Mapping[SweepAxis, AxisValue],
           mistakes: list[Mistake]) -> SweepPoint:
    tree = asked.base
    for axis in chosen:
        for keys in (key.split(".") for key in REPLACES.get(axis.key, ())):
            if _has(tree, keys):
                tree = with_value(tree, keys, Field(value=None, file="", line=None))
    for axis, value in chosen.items():
        tree = with_value(tree, axis.key.split("."), value.field)
    own = list[Mistake]()  # what is wrong of one point hides nothing of another
    bound, job = chosen.get(BOUND), job_of(tree, asked.base_path, own)
    mistakes += own
    if job.workload.requests is not None and job.workload.requests.is_stdin:
        mistakes.append(Mistake(
            file=str(asked.base_path), line=None, key="workload.requests", value="-",
            allowed="a file: a sweep reads requests more than once"))
    return SweepPoint(job=job,
                      values=tuple((axis.name, value.shown) for axis, value in chosen.items()),
                      share=None if bound is None else bound.share)


def _has(tree: Field, keys: Sequence[str]) -> bool:
    for key in keys:
        if not isinstance(tree.value, dict) or key not in tree.value:
            return False
        tree = tree.value[key]
    return True
