"""Replicas of a run, measured beside predicted: for metrics.json, the report and the screen."""

from collections.abc import Mapping
from typing import Any

from xgpt.core.units import format_seconds
from xgpt.report.figures import plain
from xgpt.report.output import number, text_at
from xgpt.report.words import counted
from xsimulator.replay.prediction import JobPrediction

# keys with a prediction, and their columns
_PAIRS = {"queries": "requests", "output_tokens": "output tokens", "wall_s": "seconds",
          "output_tokens_per_s": "tokens/s"}


def replica_facts(measured: Mapping[str, Any], prediction: JobPrediction | None) -> dict[str, Any]:
    """The key of metrics.json on replicas; none for a run of one. A prediction is of a whole job.
    """
    is_whole = measured["state"] == "done" and not measured["queries_before"]
    known = dict(enumerate(prediction.replicas)) if prediction is not None and is_whole else {}
    rows = [{**row, **{key: {"measured": row[key], "predicted": known.get(row["replica"], {}).get(
        key)} for key in _PAIRS}} for row in measured.get("replicas", ())]
    return {"replicas": rows} if rows else {}


def replica_rows(metrics: Mapping[str, Any]) -> list[dict[str, str]]:
    """Cells of each replica by column, without columns that say nothing, from the slowest to the
    quickest, by their predictions if known. A cell of two numbers is measured / predicted. Empty
    for a run of one replica."""
    rows = [{"replica": f"{number(row, 'replica') or 0:.0f}", "node": text_at(row, "node") or "",
             "device": text_at(row, "devices") or "",
             **{name: _pair(row, key) for key, name in _PAIRS.items()},
             "load": format_seconds(number(row, "load_s") or 0.0),
             "restarts": f"{restarts:.0f}" if (restarts := number(row, "restarts")) else ""}
            for row in sorted(metrics.get("replicas") or (), key=_pace)]
    return [{name: cell or "-" for name, cell in row.items() if any(one[name] for one in rows)}
            for row in rows]


def replica_words(metrics: Mapping[str, Any]) -> str:
    """Words on the slowest and the quickest replica, and on restarts; empty for a run of one."""
    if not (rows := replica_rows(metrics)):
        return ""
    ends = [f"{word} {row['replica']} ({row.get('node', '-')}, {row.get('device', '-')}) "
            f"{row['tokens/s']}" for word, row in (("slowest", rows[0]), ("quickest", rows[-1]))]
    restarts = sum(number(row, "restarts") or 0 for row in metrics["replicas"])
    return "; ".join([f"tokens/s{', measured / predicted' * ('/' in ends[0])}: {ends[0]}", ends[1],
                      *[counted(restarts, "restart")] * bool(restarts)])


def _pair(row: Mapping[str, Any], key: str) -> str:
    values = [number(row, key, of) for of in ("measured", "predicted")]
    return " / ".join(f"{value:,.0f}" if key in ("queries", "output_tokens") else plain(value)
                      for value in values if value is not None)


def _pace(row: Mapping[str, Any]) -> float:
    measured, predicted = (number(row, "output_tokens_per_s", of) for of in (
        "measured", "predicted"))
    return (measured or 0.0) / (predicted or 1.0)
