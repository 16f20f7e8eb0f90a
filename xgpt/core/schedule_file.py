"""Schedules as readable JSON.

A file of version 4 has a section for each part: controls, deployment, figures, bounds, proof,
margin."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from xgpt.core.constraint import Bound
from xgpt.core.errors import InputError, UnknownNameError, wrong
from xgpt.core.json_values import plain, write_json
from xgpt.core.policies import policy
from xgpt.core.schedule import Estimate, Margin, Proof, Schedule
from xgpt.core.schedule_check import mistakes_in
from xgpt.core.whole_file import read_text

# Version 5 has copies of another shape beside them (`others`), or a line on such in `over_copies`;
# without those a file is of version 4. Older ones are no longer read.
SCHEDULE_VERSION, WITH_OTHERS = 4, 5


def save_schedule(schedule: Schedule, path: Path) -> None:
    write_json(path, to_json(schedule))


def load_schedule(path: Path) -> Schedule:
    """Raises InputError for a file that is no schedule of a known version."""
    try:
        raw = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as cause:
        raise wrong(path, "schedule", None, f"not a readable schedule file: {cause}") from None
    version = raw.get("version") if isinstance(raw, dict) else None
    if type(version) is not int or version not in (SCHEDULE_VERSION, WITH_OTHERS):
        raise wrong(path, "version", version,
                    f"this xgpt reads versions {SCHEDULE_VERSION}, {WITH_OTHERS}")
    try:
        schedule = from_json(raw)
    except UnknownNameError as cause:
        raise wrong(path, "policy", cause.name, f"one of {', '.join(cause.known)}") from None
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError,
            RecursionError) as cause:
        raise wrong(path, "schedule", None, f"missing or wrong key: {cause}") from None
    if mistakes := mistakes_in(schedule, path):
        raise InputError(mistakes)
    return schedule


def to_json(schedule: Schedule) -> dict[str, Any]:
    """A section for each part. Infinity is the string "inf"."""
    parts = asdict(schedule)
    estimate, version = parts.pop("estimate"), WITH_OTHERS
    if not estimate["others"] and not any(row["devices"] for row in parts["over_copies"]):
        version = SCHEDULE_VERSION
        del estimate["others"]
        for row in parts["over_copies"]:
            del row["devices"]
    for other in estimate.get("others", ()):
        del other["others"]
    if not parts["proof"]["covers"]:
        del parts["proof"]["covers"]
    sections: dict[str, Any] = plain({
        "version": version, "policy": schedule.controls.policy, **estimate, **parts})
    return sections


def from_json(raw: Mapping[str, Any]) -> Schedule:
    """Inverse of `to_json`. Raises KeyError, TypeError or ValueError on missing, foreign or wrong
    keys."""
    data = {key: _text_to_infinities(value) for key, value in raw.items() if key != "version"}
    name = data.pop("policy")
    estimate = {key: data.pop(key) for key in _names(Estimate) - {"others"}}
    if raw.get("version") == WITH_OTHERS:
        estimate["others"] = tuple(Estimate(**_parts(Estimate, _with_controls(other)))
                                   for other in data.pop("others"))
    if (other := estimate["controls"]["policy"]) != name:
        raise ValueError(f"policy is {name}, but the controls are {other}'s")
    estimate = _with_controls(estimate)
    own = {key: data.pop(key) for key in _names(Schedule) & data.keys()}
    return Schedule(**_parts(Schedule, {**own, "estimate": estimate}), **data)


def _with_controls(estimate: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of an estimate, with the controls of its policy."""
    kind = policy(estimate["controls"]["policy"]).load("controls")
    return {**estimate, "controls": _built(kind, estimate["controls"])}


def _names(part: Any) -> set[str]:
    return {field.name for field in fields(part)}


def _parts(kind: Any, raw: Mapping[str, Any]) -> dict[str, Any]:
    """What a dataclass of this kind is made of. Keys that it does not have stay as they are."""
    kinds = get_type_hints(kind)
    return {key: _built(kinds.get(key), value) for key, value in raw.items()}


def _built(kind: Any, value: Any) -> Any:
    """The value of that kind (a type) that JSON holds as `value`: mappings of dataclasses, lists
    of tuples."""
    if isinstance(kind, type) and is_dataclass(kind) and not isinstance(value, kind):
        return kind(**_parts(kind, value))
    if get_origin(kind) is tuple:
        first, *others = get_args(kind)
        kinds = [first] * len(value) if others == [...] else (first, *others)
        return tuple(_built(each, one) for each, one in zip(kinds, value, strict=True))
    return value


def schedule_from_flat(*, estimate: Estimate, **values: Any) -> Schedule:
    """A Schedule from `estimate` and what else it has by name, all in one."""
    data = dict(values)
    bound = Bound(limit_s=data.pop("latency_bound_s"), kind=data.pop("constraint_kind"),
                  quantile=data.pop("quantile"))
    margin = Margin(factor=data.pop("margin", 1.0), cost=data.pop("margin_cost", 0.0),
                    note=data.pop("margin_note", ""))
    proof = {key: data.pop(key) for key in _names(Proof) & data.keys()}
    return Schedule(estimate=estimate, bounds=(bound,), margin=margin, proof=Proof(**proof), **data)


def _text_to_infinities(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _text_to_infinities(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_text_to_infinities(v) for v in value]
    return math.inf if value == "inf" else value
