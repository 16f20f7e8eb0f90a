"""Closed forms of the scheduling policies, by name. A new policy is one file and one row here.

A policy is made of (problem, timing); it has `estimate(config)` for one configuration of
its own kind and `evaluate(configs)` for many.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from importlib import import_module
from typing import Any, Protocol

from xgpt.core.errors import UnknownNameError
from xgpt.core.job import FixedSchedule
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate
from xprofiler.timing import TimingSource

# name -> (module, class, class of its configurations, which the module has or imports)
POLICIES = {
    "rra": ("rra.closed_form", "Rra", "RraConfig"),
    "waa-c": ("waa.divisions", "WaaC", "WaaConfig"),
    "waa-m": ("waa.divisions", "WaaM", "WaaConfig"),
    "ft": ("static.closed_form", "ft", "StaticConfig"),
    "dsi": ("static.closed_form", "dsi", "StaticConfig"),
    "orca": ("continuous.closed_form", "orca", "ContinuousConfig"),
    "vllm": ("continuous.closed_form", "vllm", "ContinuousConfig"),
    "sarathi": ("continuous.closed_form", "sarathi", "ContinuousConfig"),
}
BASELINES = ("ft", "dsi", "orca", "vllm", "sarathi")


class Policy(Protocol):
    """What all closed forms share."""

    def estimate(self, config: Any) -> Estimate:
        """One configuration's figures."""
        ...

    def evaluate(self, configs: Sequence[Any]) -> Any:
        """EstimateArrays of many."""
        ...


def policy_class(name: str) -> Any:
    """The class behind a policy's name, imported on demand."""
    return _attribute(name, 1)


def make_policy(name: str, problem: Problem, timing: TimingSource) -> Policy:
    """The policy's closed form for a problem."""
    made: Policy = policy_class(name)(problem, timing)
    return made


def make_config(name: str, source: Estimate | FixedSchedule) -> tuple[Any, list[str]]:
    """(configuration, names of control variables that are missing) from the attributes of
    `source` (an Estimate, a FixedSchedule); the configuration is None where any is missing."""
    config = _attribute(name, 2)
    values = source.variables if isinstance(source, Estimate) else {
        field.name: getattr(source, field.name) for field in fields(source)}
    given, missing = {}, []
    for field in fields(config):
        # 0 in an Estimate, and None in a job, stand for a variable that is not set
        value = (_encode_parts(name, values) if field.name == "encode_parts"
                 else values.get(field.name))
        if value or (field.name == "tp_gpus" and value is not None):
            given[field.name] = value
        elif field.default is MISSING:
            missing.append(field.name)
    return (None if missing else config(**given)), missing


def _encode_parts(name: str, values: Mapping[str, Any]) -> int | None:
    """DSI's encode steps of each decode group; FT has no such variable."""
    parts = values.get("encode_micro_batches")
    groups = values.get("decode_micro_batches")
    return max(parts // groups, 1) if name == "dsi" and parts and groups else None


def _attribute(name: str, place: int) -> Any:
    if name not in POLICIES:
        raise UnknownNameError("policy", name, POLICIES)
    row = POLICIES[name]
    return getattr(import_module(f"xsimulator.policies.{row[0]}"), row[place])
