"""Schedules as readable JSON files, with a section for each part (controls, deployment, figures,
bounds, proof, margin); and `plain`, which makes any value fit for JSON, as `--json` prints it."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from xgpt.core.controls import Controls, WaaControls
from xgpt.core.errors import InputError, Mistake, wrong
from xgpt.core.policies import Policy, policies, policy
from xgpt.core.schedule import Estimate, Schedule
from xgpt.core.system.whole_file import read_text, write_atomically

SCHEDULE_VERSION = 6  # of schedules on devices alone; others are refused
PLACED_VERSION = 7  # of schedules with a placement
SERVED_VERSION = 8  # of schedules for requests that arrive over time
_VERSIONS = SCHEDULE_VERSION, PLACED_VERSION, SERVED_VERSION


def save_schedule(schedule: Schedule, path: Path) -> None:
    write_json(path, to_json(schedule))


def load_schedule(path: Path) -> Schedule:
    """The Schedule in the file `path`. Raises InputError, naming every mistake, for a file that is
    no schedule of this version."""
    try:
        raw = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as cause:
        raise wrong(path, "schedule", None, f"not a readable schedule file: {cause}") from None
    version = raw.get("version") if isinstance(raw, dict) else None
    if type(version) is not int or version not in _VERSIONS:
        raise wrong(path, "version", version, f"this xgpt reads version {SCHEDULE_VERSION} to "
                    f"{SERVED_VERSION}: make the schedule anew, `xgpt schedule JOB --out FILE`")
    try:
        schedule = from_json(raw)
    except ValidationError as cause:
        raise InputError([
            Mistake(file=str(path), line=None, key=_key(one["loc"]), value=_shown(one),
                    allowed=one["msg"].removeprefix("Input should be "))
            for one in cause.errors(include_url=False)]) from None
    faults = [*_of_estimates(schedule)]
    if raw.get("policy") != schedule.controls.policy:
        faults.append(("policy", raw.get("policy"), f"{schedule.controls.policy}, as the controls"))
    if faults:
        raise InputError([Mistake(file=str(path), line=None, key=key, value=value, allowed=allowed)
                          for key, value, allowed in faults])
    return schedule


def to_json(schedule: Schedule) -> dict[str, Any]:
    """The schedule as a JSON object with a section for each part; infinity is "inf"."""
    parts = asdict(schedule)
    for name in ("reordered", "placed", "served"):
        if parts[name] is None:
            del parts[name]
    is_placed = any(pool.placement for pool in schedule.estimate.all_pools)
    if not is_placed:
        for shape in (parts["estimate"], *parts["estimate"]["others"]):
            for pool in shape["deployment"]["pools"]:
                del pool["placement"]
    sections: dict[str, Any] = plain({
        "version": SERVED_VERSION if schedule.served else (
            PLACED_VERSION if is_placed else SCHEDULE_VERSION),
        "policy": schedule.controls.policy, **parts.pop("estimate"), **parts})
    return sections


def from_json(raw: Mapping[str, Any]) -> Schedule:
    """The Schedule of `to_json`'s object. Raises pydantic's ValidationError for missing, unknown or
    wrong keys."""
    data = {key: value for key, value in raw.items() if key not in ("version", "policy")}
    estimate = {key: data.pop(key) for key in [*data] if key in _names(Estimate)}
    schedule: Schedule = _adapter(policies()).validate_python({**data, "estimate": estimate})
    return schedule


@cache
def _adapter(rows: tuple[Policy, ...]) -> TypeAdapter[Schedule]:
    """The type's adapter; `rows`: the policies whose controls it knows (the cache's key)."""
    return TypeAdapter(Schedule)


def _names(part: Any) -> set[str]:
    return {field.name for field in fields(part)}


def _key(loc: tuple[int | str, ...]) -> str:
    """The key of a part as the file has it, without the name of the policy's class."""
    own = [part for at, part in enumerate(loc) if at == 0 or loc[at - 1] != "controls" or (
        at + 1 == len(loc))]
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in own
                   ).removeprefix(".estimate").removeprefix(".")


def _shown(error: Any) -> object:
    value = error["input"]
    return None if isinstance(value, (dict, list)) or error["type"] == "missing" else value


def _of_estimates(schedule: Schedule) -> Iterator[tuple[str, object, str]]:
    """Yields (key, value, what is allowed) for parts of a schedule that contradict each other."""
    for place, shape in enumerate((schedule.estimate, *schedule.estimate.others), start=-1):
        of = "" if place < 0 else f"others[{place}]."
        for key, value, allowed in (*_of_deployment(shape), *_of_chunks(shape.controls)):
            yield f"{of}{key}", value, allowed
        if shape.others and place >= 0:
            yield f"{of}others", len(shape.others), "none: others stand beside the first copies"
    if not any(bound.metric == "latency" for bound in schedule.bounds):
        yield "bounds", None, "one of them on the latency"


def _of_chunks(controls: Controls) -> Iterator[tuple[str, object, str]]:
    """Yields a fault for a decode pool that shall encode inputs but never gets any."""
    if isinstance(controls, WaaControls) and controls.encode_chunk:
        for name in ("planned_active", "stock_tokens"):
            if not getattr(controls, name):
                yield f"controls.{name}", 0, "at least 1 where encode_chunk is not 0"


def _of_deployment(shape: Estimate) -> Iterator[tuple[str, object, str]]:
    """Yields faults: ranks named twice, roles of pools that are not the policy's, and layers left
    out or held twice in a pool."""
    deployment, wanted = shape.deployment, list(policy(shape.policy).pools)
    roles = [pool.role for pool in deployment.pools]
    if roles != wanted:
        yield "deployment.pools", roles, f"pools of the roles {wanted}, which {shape.policy} has"
    ranks = [rank for pool in deployment.pools for stage in pool.stages for rank in stage.ranks]
    if sorted(ranks) != list(range(len(ranks))) or ranks[:1] not in ([], [0]):
        yield "deployment.pools", ranks, "each rank from 0 on in one stage, and 0 the first"
    for number, pool in enumerate(deployment.pools):
        for first, count in (("first_layer", "num_layers"),
                             ("first_encoder_layer", "num_encoder_layers")):
            expected = 0
            for index, stage in enumerate(pool.stages):
                if getattr(stage, count) and getattr(stage, first) != expected:
                    yield (f"deployment.pools[{number}].stages[{index}].{first}",
                           getattr(stage, first),
                           f"{expected}: a stage begins where the one before it ends")
                expected += getattr(stage, count)


def plain(value: Any) -> Any:
    """`value` with paths as text, infinity as "inf" and dataclasses as mappings."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    # NOTE: JSON has no infinity, and json.dumps would write a token that other readers refuse.
    if isinstance(value, Path) or (isinstance(value, float) and not math.isfinite(value)):
        return str(value)
    if hasattr(value, "__dataclass_fields__"):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    return value


def write_json(path: Path, value: object) -> None:
    """Writes `value` as JSON; readers see the old file or the new one whole."""
    write_atomically(path, json.dumps(plain(value), indent=1, allow_nan=False) + "\n")
