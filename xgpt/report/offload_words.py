"""Words and tables for a run whose bytes lay partly below its devices."""

from collections.abc import Callable, Mapping
from typing import Any

from xgpt.core.units import format_bytes, format_seconds
from xgpt.report.output import number, text_at


def offload_rows(metrics: Mapping[str, Any]) -> list[dict[str, str]]:
    """Cells of each term of a run below its devices, by column; empty for a run in memory. A cell
    of two figures is measured / predicted."""
    def pair(row: Mapping[str, Any], unit: str, words: Callable[[float], str]) -> str:
        found = [number(row, f"{of}_{unit}") for of in ("measured", "predicted")]
        return " / ".join(words(one) for one in found if one is not None) if any(found) else "-"

    offload = metrics.get("offload")
    terms = offload.get("terms") if isinstance(offload, Mapping) else None
    return [{"term": text_at(row, "term") or "", "time": pair(row, "s", format_seconds),
             "bytes": pair(row, "bytes", format_bytes)}
            for row in terms or () if isinstance(row, Mapping)]


def offload_words(metrics: Mapping[str, Any]) -> str:
    """`up 3.2 s, read 8.1 s / 7.9 s, ...; peaks ...`; "" for a run in memory."""
    rows = offload_rows(metrics)
    if not rows:
        return ""
    tiers = [f"{row['tier']} {format_bytes(row['peak_bytes'])} of "
             f"{format_bytes(row['planned_bytes'])}" for row in metrics["offload"]["tiers"]
             if row["planned_bytes"] and row["peak_bytes"]]  # a file of weights is no arena's
    times = ", ".join(f"{row['term']} {row['time']}" for row in rows if row["time"] != "-")
    kinds = " (measured / predicted)" if " / " in times else ""  # none is predicted of a part
    return "; ".join((times + kinds, f"peaks: {', '.join(tiers)}", metrics["offload"]["io"]))
