"""Values as JSON can hold them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from xgpt.core.schedule import Estimate
from xgpt.core.schedule_file import estimate_keys


def plain(value: Any) -> Any:
    """`value` with paths as text, infinity as "inf" and dataclasses as mappings; an estimate as the
    flat one that files hold."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Estimate):
        return plain(estimate_keys(value))
    if hasattr(value, "__dataclass_fields__"):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    return value
