"""Schedules as readable JSON.

A file of version 3 has a section for each part: controls, deployment, figures, bounds, proof,
margin. `flat` is the one object that `--json` prints (design.md section 5).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from xgpt.core.constraint import Bound
from xgpt.core.controls import EvenBatches
from xgpt.core.errors import UnknownNameError, wrong
from xgpt.core.policies import policy
from xgpt.core.schedule import (
    Deployment,
    Estimate,
    Figures,
    Margin,
    Pool,
    Proof,
    Rejected,
    Schedule,
    StageAssignment,
)
from xgpt.core.whole_file import write_atomically

# History of the file format.
#   1: first version (no longer read)
#   2: pruned, margin, explanation; one flat object
#   3: a section for each part
SCHEDULE_VERSION = 3


def save_schedule(schedule: Schedule, path: Path) -> None:
    write_atomically(path, json.dumps(to_json(schedule), indent=1) + "\n")


def load_schedule(path: Path) -> Schedule:
    """Raises InputError for a file that is no schedule of a known version."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as cause:
        raise wrong(path, "schedule", None, f"not a readable schedule file: {cause}") from None
    version = raw.get("version") if isinstance(raw, dict) else None
    readers = {2: _of_flat, SCHEDULE_VERSION: from_json}
    if isinstance(version, bool) or version not in readers:
        raise wrong(path, "version", version,
                   f"this xgpt reads versions {', '.join(map(str, readers))}")
    try:
        return readers[version](raw)
    except UnknownNameError as cause:
        raise wrong(path, "policy", cause.name, f"one of {', '.join(cause.known)}") from None
    except (KeyError, TypeError, ValueError, AttributeError) as cause:
        raise wrong(path, "schedule", None, f"missing or wrong key: {cause}") from None


def to_json(schedule: Schedule) -> dict[str, Any]:
    """A section for each part. Infinity is the string "inf"."""
    parts = asdict(schedule)
    sections = {"version": SCHEDULE_VERSION, "policy": schedule.controls.policy,
                **parts.pop("estimate"), **parts}
    return {key: _infinities_to_text(value) for key, value in sections.items()}


def from_json(raw: Mapping[str, Any]) -> Schedule:
    """Inverse of `to_json`. Raises KeyError/TypeError on missing or foreign keys."""
    data = {key: _text_to_infinities(value) for key, value in raw.items() if key != "version"}
    name, deployment = data.pop("policy"), data.pop("deployment")
    if data["controls"]["policy"] != name:
        raise ValueError(f"policy is {name}, but the controls are {data['controls']['policy']}'s")
    pools = tuple(Pool(**{**pool, "stages": tuple(map(_stage, pool["stages"]))})
                  for pool in deployment.pop("pools"))
    figures = data.pop("figures")
    estimate = Estimate(
        controls=_controls(name, data.pop("controls")), notes=tuple(data.pop("notes")),
        deployment=Deployment(pools=pools, **deployment),
        figures=Figures(**{**figures, "memory_bytes": tuple(figures["memory_bytes"])}))
    proof = data.pop("proof")
    return Schedule(
        estimate=estimate, bounds=tuple(Bound(**bound) for bound in data.pop("bounds")),
        proof=Proof(**{**proof, "pruned": _pruned(proof["pruned"])}),
        margin=Margin(**data.pop("margin")),
        rejected=tuple(Rejected(**row) for row in data.pop("rejected")),
        explanation=tuple(map(str, data.pop("explanation"))), **data)


def flat(schedule: Schedule) -> dict[str, Any]:
    """One flat object: the keys of an Estimate, then the schedule's own. Infinity is "inf"."""
    bound, margin = schedule.bound, schedule.margin
    own = {
        **estimate_keys(schedule.estimate), "latency_bound_s": bound.limit_s,
        "constraint_kind": bound.kind, "quantile": bound.quantile, **asdict(schedule.proof),
        "fingerprint": schedule.fingerprint, "rejected": [asdict(row) for row in schedule.rejected],
        "margin": margin.factor, "margin_cost": margin.cost, "margin_note": margin.note,
        "explanation": schedule.explanation}
    return {key: _infinities_to_text(value) for key, value in own.items()}


def estimate_keys(estimate: Estimate) -> dict[str, Any]:
    """The keys of an Estimate in `--json` (design.md section 5)."""
    controls = asdict(estimate.controls)  # type: ignore[call-overload]
    deployment = estimate.deployment
    figures = asdict(estimate.figures)
    flat_keys = {
        **figures, "decode_micro_batches": deployment.num_groups,
        **controls.pop("even", {}), **controls, "kv_tokens": deployment.kv_tokens,
        "tp_degree": deployment.tp_degree, "tp_gpus": deployment.tp_gpus,
        "pools": [{"name": pool.name, "role": pool.role, "kv_tokens": pool.kv_tokens,
                   "num_groups": pool.num_groups, "stages": len(pool.stages)}
                  for pool in deployment.pools],
        "stages": [asdict(stage) for stage in deployment.stages], "notes": estimate.notes}
    return {key: flat_keys[key] for key in sorted(flat_keys, key=lambda key: key != "policy")}


def _controls(name: str, raw: Mapping[str, Any]) -> Any:
    values = {**raw, **({"even": EvenBatches(**raw["even"])} if "even" in raw else {})}
    return policy(name).load("controls")(**values)


def _stage(raw: Mapping[str, Any]) -> StageAssignment:
    return StageAssignment(**{**raw, "ranks": tuple(raw["ranks"])})


def _pruned(raw: Any) -> tuple[tuple[str, int], ...]:
    return tuple((str(reason), int(count)) for reason, count in raw)


def estimate_from_flat(**values: Any) -> Estimate:
    """An Estimate from the flat keys of version 2, where 0 stood for "not this policy's"."""
    row = policy(values["policy"])
    controls = row.load("controls")
    names = {field.name for field in fields(controls)}
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
        figures=Figures(**{field.name: values[field.name] for field in fields(Figures)}))


def _pools(roles: tuple[Any, ...], values: Mapping[str, Any]) -> tuple[Pool, ...]:
    if len(roles) == 1:
        return (Pool(name="all", role="both", stages=tuple(values["stages"]),
                     num_groups=values["decode_micro_batches"], kv_tokens=values["kv_tokens"]),)
    pools = []
    for role in roles:
        stages = tuple(stage for stage in values["stages"] if stage.role == role)
        is_encode = role == "encode"
        # two groups more than stages: one waits for its tokens, one is handed over
        groups = len(stages) + 2 if is_encode else values["decode_micro_batches"]
        tokens = values.get("encode_kv_tokens", 0) if is_encode else values["kv_tokens"]
        pools.append(Pool(name=role, role=role, stages=stages, num_groups=groups, kv_tokens=tokens))
    return tuple(pools)


_FLAT_ONLY = {"encode_kv_tokens", "adjustment", "mean_input_tokens", "steered_to", "policy",
              "encode_micro_batches", "token_budget", "max_active", "max_in_system", "stages",
              "kv_tokens", "tp_degree", "tp_gpus", "decode_micro_batches", "notes"}


def schedule_from_flat(*, estimate: Estimate, **values: Any) -> Schedule:
    """A Schedule from `estimate` and the schedule's own flat keys of version 2."""
    data = dict(values)
    bound = Bound(limit_s=data.pop("latency_bound_s"), kind=data.pop("constraint_kind"),
                  quantile=data.pop("quantile"))
    margin = Margin(factor=data.pop("margin", 1.0), cost=data.pop("margin_cost", 0.0),
                    note=data.pop("margin_note", ""))
    proof = {field.name: data.pop(field.name) for field in fields(Proof) if field.name in data}
    return Schedule(estimate=estimate, bounds=(bound,), margin=margin, proof=Proof(**proof), **data)


def _of_flat(raw: Mapping[str, Any]) -> Schedule:
    """A schedule of file version 2. Raises KeyError/TypeError on missing or foreign keys."""
    data = {key: _text_to_infinities(value) for key, value in raw.items() if key != "version"}
    data["stages"] = tuple(map(_stage, data["stages"]))
    data["memory_bytes"] = tuple(data["memory_bytes"])
    figures = {field.name for field in fields(Figures)}
    estimate = {key: data.pop(key) for key in tuple(data) if key in _FLAT_ONLY | figures}
    data |= {"pruned": _pruned(data["pruned"]),
             "rejected": tuple(Rejected(**row) for row in data["rejected"]),
             "explanation": tuple(map(str, data["explanation"]))}
    return schedule_from_flat(estimate=estimate_from_flat(**estimate), **data)


def _infinities_to_text(value: Any) -> Any:
    # NOTE: JSON has no infinity, and json.dumps would write a token other readers refuse.
    if isinstance(value, dict):
        return {k: _infinities_to_text(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_infinities_to_text(v) for v in value]
    return "inf" if isinstance(value, float) and math.isinf(value) else value


def _text_to_infinities(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _text_to_infinities(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_text_to_infinities(v) for v in value]
    return math.inf if value == "inf" else value
