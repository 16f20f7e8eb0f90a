"""The control variables, as a schedule holds them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WavesControls:
    """What the rule is told."""

    policy: str = "waves"
    wave_queries: int
