"""Seconds, bytes and memory that working below the device took, for measured.json, metrics.json and
the report. Free of torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from xgpt.core.placement import TIERS
from xgpt.core.schedule import Schedule

TERMS = ("up", "down", "read", "write", "compute")


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadReport:
    """Totals of one rank's run. `seconds`: by term of TERMS, that its copies or its computing took;
    they overlap. `waited_s`: of computing for copies. `num_bytes`: copied, by term. `peaks`: most
    bytes held at a time, by tier. `io`: how the page cache was passed."""

    seconds: Mapping[str, float]
    num_bytes: Mapping[str, int]
    peaks: Mapping[str, int]
    waited_s: float = 0.0
    io: str = ""


def offload_figures(measured: Mapping[str, Any], schedule: Schedule | None) -> dict[str, Any]:
    """The key `offload` of metrics.json: seconds and bytes by term, of all ranks, beside predicted
    ones (of a whole job by one schedule, as if all periods were full), and the fullest rank's peak
    by tier beside its budget. None for a run in memory. `measured`: content of measured.json."""
    ranks = [row["offload"] for row in measured["ranks"] if "offload" in row]
    if not ranks:
        return {}
    is_whole = measured["state"] == "done" and not measured["queries_before"]
    placed = schedule.placed if schedule and is_whole and not measured["changes"] else None
    pools = [pool for pool in schedule.estimate.all_pools if pool.placement] if schedule else []
    periods = 0.0  # of all groups together, on each stage
    if schedule is not None:
        encoded = schedule.deployment.replicas * getattr(schedule.controls, "encode_batch", 1)
        periods = measured["queries"] / encoded * sum(
            len(pool.stages) for pool in pools)

    def predicted(name: str) -> float | None:
        return None if placed is None else periods * sum(
            step.count * getattr(step, name, 0) for step in placed.steps)

    return {"offload": {
        "terms": [{
            "term": term, "measured_s": sum(one["seconds"].get(term, 0.0) for one in ranks),
            "predicted_s": predicted(f"{term}_s"),
            "measured_bytes": sum(one["num_bytes"].get(term, 0) for one in ranks),
            "predicted_bytes": predicted(f"{term}_bytes")} for term in TERMS],
        "tiers": [{
            "tier": tier, "peak_bytes": max(one["peaks"].get(tier, 0) for one in ranks),
            "planned_bytes": max((budget[index] for pool in pools if pool.placement
                                  for budget in pool.placement.budgets), default=0)}
            for index, tier in enumerate(TIERS)],
        "waited_s": sum(one["waited_s"] for one in ranks),
        "io": "; ".join(sorted({one["io"] for one in ranks} - {""}))}}
