"""One configuration of a static batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


def _parts_of(values: Mapping[str, int | None]) -> int | None:
    """The encode steps of each decode group, where steps are a variable (DSI)."""
    steps, groups = values.get("encode_micro_batches"), values.get("decode_micro_batches")
    return max(steps // groups, 1) if steps and groups else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticConfig:
    """One point of the space; each decode group has `encode_parts` encode steps. None stands for
    one, and says that it is no variable (FT)."""

    encode_batch: int
    decode_micro_batches: int
    encode_parts: int | None = field(default=None, metadata={"derived": _parts_of})
    tp_degree: int = 1
    tp_gpus: int = 0
