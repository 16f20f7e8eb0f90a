"""One configuration of a continuously batching engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ContinuousConfig:
    """`max_active` is the most queries at a time over all groups, `token_budget` the most tokens of
    one step (vLLM, Sarathi; 0 stands for the engine's default)."""

    max_active: int
    tp_degree: int = 1
    tp_gpus: int = 0
    token_budget: int = 0
