"""The control variables: as a schedule holds them, and as one point of the grid."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WavesControls:
    """What the rule is told."""

    policy: str = "waves"
    wave_queries: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WavesConfig:
    """One point of the grid. The number of queries comes first, and the tensor plan is named so."""

    wave_queries: int
    tp_degree: int = 1
    tp_gpus: int = 0
