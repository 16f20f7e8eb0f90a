"""Estimates of tests, made of their values by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from xgpt.core.controls import EvenBatches
from xgpt.core.deployment import Deployment, Pool
from xgpt.core.policies import policy
from xgpt.core.schedule import Estimate, Figures


def _names(part: Any) -> set[str]:
    return {field.name for field in fields(part)}


def estimate_from_flat(**values: Any) -> Estimate:
    """An Estimate from the names of its parts' fields."""
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
