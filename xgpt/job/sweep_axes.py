"""What a sweep may vary: axes by a short name or by the dotted key of a job file, and their values.

A value is a Field of the file that gives it, so that whatever is wrong with it names its place."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from xgpt.core.errors import InputError, Mistake, nearest
from xgpt.core.policies import policy_names
from xgpt.core.units import parse_share
from xgpt.job.yaml_tree import Field, parse_tree

ALL, AUTO = "all", "auto"  # as policies: every one there is; the one that the search chooses
OVER, BOUNDS = "--over", "--bounds"
_SECTIONS = ("workload", "constraint", "schedule", "run")
_FORM = f"{OVER} takes AXIS=VALUE,VALUE,...; for example policy=rra,waa-c"


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepAxis:
    """`name` is what tables and rows call it, `key` the dotted key of the job file."""

    name: str
    key: str
    title: str


POLICY = SweepAxis(name="policy", key="schedule.policy", title="policy")
COPIES = SweepAxis(name="copies", key="schedule.replicas", title="copies of the model")
BOUND = SweepAxis(name="bound", key="constraint.latency_s", title="latency bound")
AXES = (SweepAxis(name="model", key="model", title="model"),
        SweepAxis(name="cluster", key="cluster", title="cluster"),
        SweepAxis(name="gpus", key="run.ranks", title="GPUs (or ranks)"),
        SweepAxis(name="task", key="workload.task", title="task"),
        SweepAxis(name="engine", key="run.engine", title="engine"),
        SweepAxis(name="profile", key="profile", title="profile"), COPIES, POLICY, BOUND)

# A value of the one key takes the place of what the base says under the others: lengths are given
# by a task or by themselves, and a cluster is meant as a whole.
REPLACES: Mapping[str, tuple[str, ...]] = {
    "workload.task": ("workload.input_tokens", "workload.output_tokens"),
    "workload.input_tokens": ("workload.task",), "workload.output_tokens": ("workload.task",),
    "cluster": ("run.ranks",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisValue:
    """One value of an axis. `shown` is what rows hold; `share`: of a bound given as a share of the
    latency at the highest throughput, whose `field` is no bound at all."""

    shown: str | int
    field: Field
    share: float | None = None


Setting = dict[SweepAxis, list[AxisValue]]


def axis_of(name: str) -> SweepAxis | None:
    """The axis of a short name or of a dotted key; None for a name that is neither."""
    for axis in AXES:
        if name in (axis.name, axis.key):
            return axis
    first, dot, rest = name.partition(".")
    is_known = dot and rest and first in _SECTIONS
    return SweepAxis(name=name, key=name, title=name) if is_known else None


def read_setting(field: Field, prefix: str, mistakes: list[Mistake]) -> Setting:
    """The axes of a mapping, each with a value or a list of them."""
    setting: Setting = {}
    assert isinstance(field.value, dict), f"{field = }"
    for name, own in field.value.items():
        axis = axis_of(name)
        if axis is None:
            _reject(mistakes, own, f"{prefix}{name}", _unknown(name))
        elif axis in setting:
            _reject(mistakes, own, f"{prefix}{name}", f"given twice: {axis.name} is {axis.key}")
        else:
            setting[axis] = read_values(axis, own, f"{prefix}{name}", mistakes)
    return setting


def read_values(axis: SweepAxis, field: Field, key: str,
                mistakes: list[Mistake]) -> list[AxisValue]:
    """The values of an axis; whether the job file takes them is for its reader to say."""
    fields = field.value if isinstance(field.value, list) else [field]
    if not fields:
        _reject(mistakes, field, key, "at least one value")
    if axis == POLICY:
        fields = [each for one in fields for each in _policies(one)]
    read = [_read_value(axis, one, key, mistakes) for one in fields]
    unique = {value.shown: value for value in read if value is not None}
    return list(unique.values())


def setting_of_flags(over: Sequence[str], bounds: str | None,
                     mistakes: list[Mistake]) -> Setting:
    """The axes that `--over AXIS=V,V` and `--bounds V,V` name."""
    setting: Setting = {}
    flags = [(OVER, text) for text in over]
    if bounds is not None:
        flags.append((BOUNDS, f"{BOUND.name}={bounds}"))
    for flag, text in flags:
        name, equals, values = text.partition("=")
        axis, place = axis_of(name.strip()), Field(value=None, file=flag, line=None)
        if not equals:
            _reject(mistakes, place, text, _FORM)
        elif axis is None:
            _reject(mistakes, place, name.strip(), _unknown(name.strip()))
        elif axis in setting:
            _reject(mistakes, place, axis.name, "given twice: all its values go behind one =")
        else:
            setting[axis] = read_values(axis, _listed(values, flag, mistakes), axis.name, mistakes)
    return setting


def _listed(values: str, flag: str, mistakes: list[Mistake]) -> Field:
    try:
        tree = parse_tree(f"[{values}]", flag, mistakes)
    except InputError as cause:
        mistakes.extend(replace(mistake, line=None) for mistake in cause.mistakes)
        return Field(value=values, file=flag, line=None)
    return _without_lines(tree)


def _without_lines(field: Field) -> Field:
    value = field.value
    if isinstance(value, list):
        value = [_without_lines(one) for one in value]
    elif isinstance(value, dict):
        value = {key: _without_lines(one) for key, one in value.items()}
    return replace(field, value=value, line=None)


def _policies(field: Field) -> list[Field]:
    names = policy_names() if field.value == ALL else (field.value,)
    return [replace(field, value=name) for name in names]


def _read_value(axis: SweepAxis, field: Field, key: str,
                mistakes: list[Mistake]) -> AxisValue | None:
    value = field.value
    if isinstance(value, list):
        _reject(mistakes, field, key, "a value, not a list within the list")
        return None
    if axis == POLICY and value in (None, AUTO):
        return AxisValue(shown=AUTO, field=replace(field, value=None))
    if axis == BOUND and isinstance(value, str) and value.strip().endswith("%"):
        return _read_share(field, key, mistakes)
    if axis == BOUND and isinstance(value, (int, float)) and not isinstance(value, bool):
        return AxisValue(shown="inf" if math.isinf(value) else f"{value:g} s", field=field)
    counts = axis.name in ("gpus", COPIES.name)
    if counts and isinstance(value, int) and not isinstance(value, bool):
        return AxisValue(shown=value, field=field)
    shown = value if isinstance(value, str) else json.dumps(_plain(field), sort_keys=True)
    return AxisValue(shown=shown, field=field)


def _read_share(field: Field, key: str, mistakes: list[Mistake]) -> AxisValue | None:
    text = str(field.value).strip()
    try:
        share = parse_share(text)
    except ValueError:
        share = math.nan
    if not 0 < share < math.inf:
        _reject(mistakes, field, key, "seconds, inf, or a share above 0 % of the latency at the "
                                      "highest throughput, for example 50%")
        return None
    return AxisValue(shown=text, field=replace(field, value=math.inf), share=share)


def _plain(field: Field) -> Any:
    if isinstance(field.value, dict):
        return {key: _plain(one) for key, one in field.value.items()}
    return [_plain(one) for one in field.value] if isinstance(field.value, list) else field.value


def _unknown(name: str) -> str:
    return (f"unknown axis; {nearest(name, [axis.name for axis in AXES])}; or a dotted key of the "
            "job file, such as run.dtype")


def _reject(mistakes: list[Mistake], field: Field, key: str, allowed: str) -> None:
    is_scalar = not isinstance(field.value, (list, dict))
    mistakes.append(Mistake(file=field.file, line=field.line, key=key,
                            value=field.value if is_scalar else None, allowed=allowed))
