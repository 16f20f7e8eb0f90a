"""Seconds, bytes and memory that working below the device took, for measured.json, metrics.json and
the report. Free of torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xgpt.core.placement import TIERS, PlacedFigures

TERMS = ("up", "down", "read", "write", "compute")


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadReport:
    """Totals of one rank's run, or of several ranks. `seconds`: by term of TERMS, that its copies
    or its computing took; they overlap. `waited_s`: of computing for copies. `num_bytes`: copied,
    by term. `peaks`: most bytes held at a time, by tier. `io`: how the page cache was passed."""

    seconds: Mapping[str, float]
    num_bytes: Mapping[str, int]
    peaks: Mapping[str, int]
    waited_s: float = 0.0
    io: str = ""


def offload_figures(reports: Sequence[OffloadReport], budgets: Sequence[Sequence[int]],
                    figures: PlacedFigures | None, periods: float | None) -> dict[str, Any]:
    """The key `offload` of metrics.json: seconds and bytes by term, of all ranks, beside predicted
    ones, and the fullest rank's peak by tier beside its budget.

    budgets: planned bytes by rank and tier. figures, periods: of the schedule, and how often a
    rank of all ran it; None: there is no prediction."""
    steps = () if figures is None or periods is None else figures.steps

    def predicted(name: str) -> float | None:
        return sum(step.count * getattr(step, name) for step in steps) * (
            periods or 0.0) if steps and hasattr(steps[0], name) else None

    return {
        "terms": [{
            "term": term,
            "measured_s": sum(one.seconds.get(term, 0.0) for one in reports),
            "predicted_s": predicted(f"{term}_s"),
            "measured_bytes": sum(one.num_bytes.get(term, 0) for one in reports),
            "predicted_bytes": predicted(f"{term}_bytes")} for term in TERMS],
        "waited_s": sum(one.waited_s for one in reports),
        "tiers": [{
            "tier": tier, "peak_bytes": max((one.peaks.get(tier, 0) for one in reports), default=0),
            "planned_bytes": max((of[index] for of in budgets), default=0)}
            for index, tier in enumerate(TIERS)],
        "io": "; ".join(dict.fromkeys(one.io for one in reports if one.io))}
