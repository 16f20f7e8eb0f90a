"""Values as JSON can hold them: what `--json` prints, and what files hold."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from xgpt.core.schedule import Estimate, Schedule
from xgpt.core.system.whole_file import write_atomically


def plain(value: Any) -> Any:
    """`value` with paths as text, infinity as "inf" and dataclasses as mappings; an estimate as the
    flat one that files hold."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    # NOTE: JSON has no infinity, and json.dumps would write a token other readers refuse.
    if isinstance(value, Path) or (isinstance(value, float) and not math.isfinite(value)):
        return str(value)
    if isinstance(value, Estimate):
        return plain(estimate_keys(value))
    if hasattr(value, "__dataclass_fields__"):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    return value


def write_json(path: Path, value: object) -> None:
    """Writes `value` to a file that a reader finds whole."""
    write_atomically(path, json.dumps(plain(value), indent=1, allow_nan=False) + "\n")


def flat(schedule: Schedule) -> dict[str, Any]:
    """One flat object: the keys of an Estimate, then the schedule's own. Infinity is "inf"."""
    bound, margin = schedule.bound, schedule.margin
    keys: dict[str, Any] = plain({
        **estimate_keys(schedule.estimate), "latency_bound_s": bound.limit_s,
        "constraint_kind": bound.kind, "quantile": bound.quantile, **asdict(schedule.proof),
        "fingerprint": schedule.fingerprint, "rejected": schedule.rejected,
        "margin": margin.factor, "margin_cost": margin.cost, "margin_note": margin.note,
        "explanation": schedule.explanation, "over_copies": schedule.over_copies,
        "bounds": schedule.bounds, "prospects": schedule.prospects})
    return keys


def estimate_keys(estimate: Estimate) -> dict[str, Any]:
    """The keys of an Estimate in `--json` (docs/job-file.md)."""
    controls = asdict(estimate.controls)  # type: ignore[call-overload]
    deployment = estimate.deployment
    keys = {
        **asdict(estimate.figures), "decode_micro_batches": deployment.num_groups,
        **controls.pop("even", {}), **controls, "kv_tokens": deployment.kv_tokens,
        "tp_degree": deployment.tp_degree, "tp_gpus": deployment.tp_gpus,
        "replicas": deployment.replicas,
        "devices_per_replica": deployment.devices_per_replica,
        "pools": [{"name": pool.name, "role": pool.role, "kv_tokens": pool.kv_tokens,
                   "num_groups": pool.num_groups, "stages": len(pool.stages)}
                  for pool in deployment.pools],
        "stages": [{**asdict(stage), "role": pool.role} for pool in deployment.pools
                   for stage in pool.stages], "notes": estimate.notes,
        **({"others": [estimate_keys(other) for other in estimate.others]}
           if estimate.others else {})}
    return {"policy": keys.pop("policy"), **keys}
