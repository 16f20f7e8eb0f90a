"""What was made of output lengths that differ from the plan, as rows of the report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xgpt.report.figures import plain
from xgpt.report.output import number, text_at
from xgpt.report.words import counted

_DONE = {"keep": "kept as it is", "redeploy": "re-deployment recommended"}


def change_rows(metrics: Mapping[str, Any]) -> list[dict[str, str]]:
    """Makes a row of each decision in metrics.json's `rescheduling`, whatever it lacks."""
    decisions = metrics.get("rescheduling")
    return [_row(row) for row in decisions if isinstance(row, Mapping)] if isinstance(
        decisions, list) else []


def _row(row: Mapping[str, Any]) -> dict[str, str]:
    after, phase = number(row, "after_queries"), number(row, "phase")
    mean = [number(row, "mean_output_tokens", key) for key in ("planned", "observed")]
    choice = text_at(row, "choice") or ""
    what = _DONE.get(choice, "no schedule does")
    if choice == "adjust":
        what = _changed(row.get("from"), row.get("to"))
    elif choice == "redeploy":
        what = f"{what}: {_changed(row.get('from'), row.get('to'))}"
    return {"after": "-" if after is None else counted(after, "query"),
            "mean": " to ".join("-" if value is None else plain(value) for value in mean),
            "what": what, "why": text_at(row, "reason") or "",
            # a change that came after the last phase was taken up by none
            "phase": "-" if phase is None else f"{phase:.0f}"}


def _changed(old: object, new: object) -> str:
    if not isinstance(old, Mapping) or not isinstance(new, Mapping):
        return "-"
    return ", ".join(f"{str(key).replace('_', ' ')} {old.get(key, '-')} to {value}"
                     for key, value in new.items() if old.get(key) != value)
