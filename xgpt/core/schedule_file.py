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
from xgpt.core.controls import EvenBatches
from xgpt.core.deployment import Deployment, Pool
from xgpt.core.errors import InputError, UnknownNameError, wrong
from xgpt.core.json_values import plain, write_json
from xgpt.core.policies import policy
from xgpt.core.schedule import Estimate, Figures, Margin, Proof, Schedule
from xgpt.core.schedule_check import mistakes_in
from xgpt.core.whole_file import read_text

# History of the file format.
#   1: first version (no longer read)
#   2: pruned, margin, explanation; one flat object
#   3: a section for each part
#   4: copies of the whole deployment (`deployment.replicas`), no longer of a pool
#   5: copies of another shape beside them (`others`), or a line on such in `over_copies`; without
#      those a file is of version 4
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
    readers = {2: _of_flat, 3: from_json, SCHEDULE_VERSION: from_json, WITH_OTHERS: from_json}
    if type(version) is not int or version not in readers:
        raise wrong(path, "version", version,
                   f"this xgpt reads versions {', '.join(map(str, readers))}")
    try:
        schedule = readers[version](raw)
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
    for pool in estimate["deployment"]["pools"]:
        if raw.get("version") == 3 and pool.pop("replicas", 1) != 1:
            raise ValueError("copies of a pool were never executed")
        for stage in pool["stages"]:
            stage.pop("role", None)  # its pool's, which files of before repeat
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


def estimate_from_flat(**values: Any) -> Estimate:
    """An Estimate from the flat keys of version 2, where 0 stood for "not this policy's"."""
    row = policy(values["policy"])
    controls = row.load("controls")
    names = _names(controls)
    own = {name: value for name, value in values.items() if name in names}
    if "even" in names:
        own["even"] = EvenBatches(
            adjustment=values.get("adjustment", 0.0),
            mean_input_tokens=values.get("mean_input_tokens", 0.0),
            target_active=values.get("steered_to", 0.0))
    if "token_budget" in names:
        own["token_budget"] = values.get("token_budget") or None
    if "encode_micro_batches" in names:
        own["encode_micro_batches"] = (values.get("encode_micro_batches")
                                       or values["decode_micro_batches"])
    return Estimate(
        controls=controls(**own), notes=tuple(values.get("notes", ())),
        deployment=Deployment(pools=_pools(row.pools, values), tp_degree=values["tp_degree"],
                              tp_gpus=values["tp_gpus"]),
        figures=Figures(**{key: values[key] for key in _names(Figures) & values.keys()}))


def _pools(roles: tuple[Any, ...], values: Mapping[str, Any]) -> tuple[Pool, ...]:
    if len(roles) == 1:
        return (Pool(name="all", role="both", stages=tuple(values["stages"]),
                     num_groups=values["decode_micro_batches"], kv_tokens=values["kv_tokens"]),)
    pools = []
    for role in roles:
        stages = tuple(stage for stage, own in zip(values["stages"], values["stage_roles"],
                                                   strict=True) if own == role)
        is_encode = role == "encode"
        # two groups more than stages: one waits for its tokens, one is handed over
        groups = len(stages) + 2 if is_encode else values["decode_micro_batches"]
        tokens = values.get("encode_kv_tokens", 0) if is_encode else values["kv_tokens"]
        pools.append(Pool(name=role, role=role, stages=stages, num_groups=groups, kv_tokens=tokens))
    return tuple(pools)


_FLAT_ONLY = {"encode_kv_tokens", "adjustment", "mean_input_tokens", "steered_to", "policy",
              "encode_micro_batches", "token_budget", "max_active", "max_in_system", "stages",
              "stage_roles", "kv_tokens", "tp_degree", "tp_gpus", "decode_micro_batches", "notes"}


def schedule_from_flat(*, estimate: Estimate, **values: Any) -> Schedule:
    """A Schedule from `estimate` and the schedule's own flat keys of version 2."""
    data = dict(values)
    bound = Bound(limit_s=data.pop("latency_bound_s"), kind=data.pop("constraint_kind"),
                  quantile=data.pop("quantile"))
    margin = Margin(factor=data.pop("margin", 1.0), cost=data.pop("margin_cost", 0.0),
                    note=data.pop("margin_note", ""))
    proof = {key: data.pop(key) for key in _names(Proof) & data.keys()}
    return Schedule(estimate=estimate, bounds=(bound,), margin=margin, proof=Proof(**proof), **data)


def _of_flat(raw: Mapping[str, Any]) -> Schedule:
    """A schedule of file version 2. Raises KeyError/TypeError on missing or foreign keys."""
    data = {key: _text_to_infinities(value) for key, value in raw.items() if key != "version"}
    data["stage_roles"] = [stage.pop("role", "both") for stage in data["stages"]]
    for part, key in ((Pool, "stages"), (Figures, "memory_bytes"), (Proof, "pruned"),
                      (Schedule, "rejected"), (Schedule, "explanation")):
        data[key] = _built(get_type_hints(part)[key], data[key])
    estimate = {key: data.pop(key) for key in data.keys() & (_FLAT_ONLY | _names(Figures))}
    return schedule_from_flat(estimate=estimate_from_flat(**estimate), **data)


def _text_to_infinities(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _text_to_infinities(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_text_to_infinities(v) for v in value]
    return math.inf if value == "inf" else value
