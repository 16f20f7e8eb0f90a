"""What leads to a decision where steps take other times than planned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from xscheduler.live.pace import KINDS, PaceDrift


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLook:
    """Step times that have left what was planned with, after `done` queries, with `left` more to
    do."""

    drift: PaceDrift
    left: int
    done: int

    is_observing = False  # lengths are not what this is about

    def record(self) -> dict[str, Any]:
        drift = self.drift
        return {"cause": "step times", "after_queries": self.done, "queries_left": self.left,
                **({"of": drift.where.strip()} if drift.where else {}),
                "step_times": {kind: {"planned": drift.before[kind],
                                      "observed": drift.now[kind].factor,
                                      "rows": drift.now[kind].rows,
                                      "stage": drift.stages[kind]}
                               for kind in KINDS if kind in drift.now},
                "steps": drift.steps}

    @property
    def sentence(self) -> str:
        is_slower = self.drift.slowed > 1
        return (f"steps{self.drift.where} are {'slower' if is_slower else 'quicker'} than planned "
                f"with: {self.drift.words} what the profile says, after {self.done} queries")
