"""One configuration of a static batch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticConfig:
    """One point of the space; each decode group has `encode_parts` encode steps. None stands for
    one, and says that it is no variable (FT)."""

    encode_batch: int
    decode_micro_batches: int
    encode_parts: int | None = None
    tp_degree: int = 1
    tp_gpus: int = 0
