"""Closed forms of the scheduling policies, by name. A new policy is one file and one row here."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from xgpt.errors import UnknownNameError

POLICIES = {"rra": "xsimulator.policies.rra:Rra"}


def policy_class(name: str) -> Any:
    """The class behind a policy's name, imported on demand."""
    if name not in POLICIES:
        raise UnknownNameError("policy", name, POLICIES)
    module, _, attribute = POLICIES[name].partition(":")
    return getattr(import_module(module), attribute)
