"""Evidence for re-planning: output lengths, or step times, that differ from the plan."""

from dataclasses import dataclass
from typing import Any

from xscheduler.live.observations import Drift, Observation, ObservedLengths
from xscheduler.live.pace import KINDS, PaceDrift


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeEvidence:
    """Step times that differ from the plan, after `done` queries with `left` more to do."""

    drift: PaceDrift
    left: int
    done: int

    is_observing = False  # not about lengths

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


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthEvidence:
    """Observed output lengths that differ from the plan; `admitted`: queries admitted so far."""

    seen: Observation
    observed: ObservedLengths
    drift: Drift
    is_observing: bool
    left: int
    done: int
    admitted: int

    def record(self) -> dict[str, Any]:
        drift = self.drift
        return {"cause": "observe" if self.is_observing else "drift", "after_queries": self.done,
                "queries_left": self.left,
                "mean_output_tokens": {"planned": drift.planned_mean,
                                       "observed": drift.observed_mean},
                "quantile_output_tokens": {"planned": drift.planned_reach,
                                           "observed": drift.observed_reach}}

    @property
    def sentence(self) -> str:
        drift = self.drift
        figures = f"mean {_figure(drift.planned_mean)} -> {_figure(drift.observed_mean)}"
        if drift.is_reach or not drift.is_mean:
            figures += (f", {drift.quantile * 100:g} % within {drift.planned_reach} -> "
                        f"{drift.observed_reach}")
        what = "observed" if self.is_observing else "drifted"
        return f"output lengths {what}: {figures} after {self.done} queries"


def _figure(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"
