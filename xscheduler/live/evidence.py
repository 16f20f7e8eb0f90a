"""Evidence for re-planning: output lengths, or step times, that differ from the plan."""

from dataclasses import dataclass
from typing import Any

from xscheduler.live.observations import Drift, Observation, ObservedLengths
from xscheduler.live.step_monitor import KINDS, StepDrift


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeEvidence:
    """Step times that differ from the plan. done, left: requests done, and still to do."""

    drift: StepDrift
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
        return (f"after {self.done} requests steps{self.drift.where} are "
                f"{'slower' if is_slower else 'quicker'} than planned ({self.drift.words} of the "
                "profile's times)")


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthEvidence:
    """Output lengths that differ from the plan. done, left: requests done, and still to do.
    admitted: requests admitted so far."""

    observation: Observation
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
                "quantile_output_tokens": {"planned": drift.planned_quantile,
                                           "observed": drift.observed_quantile}}

    @property
    def sentence(self) -> str:
        drift = self.drift
        figures = f"mean {_figure(drift.planned_mean)} -> {_figure(drift.observed_mean)}"
        if drift.is_quantile_off or not drift.is_mean:
            figures += (f", {drift.quantile * 100:g} % within {drift.planned_quantile} -> "
                        f"{drift.observed_quantile}")
        what = "observed" if self.is_observing else "drifted"
        return f"output lengths {what}: {figures} after {self.done} requests"


def _figure(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"
