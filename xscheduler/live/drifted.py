"""What leads to a decision where outputs have other lengths than planned."""

from dataclasses import dataclass
from typing import Any

from xscheduler.live.observed import Drift, Observation, ObservedLengths


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What leads to a decision: lengths seen of queries, `admitted` so far."""

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
