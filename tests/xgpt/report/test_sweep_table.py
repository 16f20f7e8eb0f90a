"""A sweep in the terminal: whole words in 80 columns, in full or the best of many."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from xgpt.core.errors import InputError
from xgpt.report.sweep_rows import COLUMNS, read_sweep, sweep_text

REASON = ("no schedule satisfies the bound of 10 ms for a query of 63 output tokens (quantile "
          "0.99); latency binds. The tightest that can be met is 1.226 s, by policy rra")


def row(policy: str, bound: str, qps: float | None, **more: Any) -> dict[str, Any]:
    known = {"scenario": "opt-13b, a40-4, S", "policy": policy, "bound": bound, "bound_s": 5.0,
             "status": "ok", "chosen": policy, "throughput_qps": qps, "latency_s": 4.5,
             "controls": "RRA: encode 4 together, then 12 decode iterations", "tp_degree": 2,
             "tp_gpus": 4, "margin": 1.0}
    if qps is None:
        known |= {"status": "infeasible", "reason": REASON, "chosen": None, "latency_s": None}
    return {column.name: None for column in COLUMNS} | known | more


def test_a_point_without_a_schedule_says_why_in_whole_words() -> None:
    text = sweep_text([row("rra", "5 s", None, bound_s=0.01), row("rra", "50%", 12.345),
                       row("ft", "inf", 9.0, bound_s="inf"),
                       row("vllm", "5 s", None, status="refused", reason="an encoder-decoder")])
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80 and "..." not in text
    assert lines[2].split() == ["10", "ms", "rra", "-", "-", "no", "schedule"]
    assert lines[3].startswith("5.00 s (50%)  rra         12.35   4.50 s  encode 4 together")
    assert "TP 2 on 4" in text and "margin" not in lines[0] and lines[5].startswith("none")
    assert " ".join(" ".join(lines).split()).endswith(
        f"rra at 10 ms: {REASON} vllm: an encoder-decoder")


def test_margins_and_measured_figures_have_columns_where_there_are_any() -> None:
    text = sweep_text([row("rra", "5 s", 12.0, margin=1.05, measured_status="done",
                           measured_qps=11.0),
                       row("ft", "5 s", 9.0, measured_status="failed")])
    assert text.splitlines()[0].split() == [
        "bound", "policy", "queries/s", "latency", "margin", "measured", "schedule"]
    assert " 5.0%        11  encode" in text and "failed" in text


def test_of_many_points_the_best_has_a_line_with_the_others_beside_it() -> None:
    rates = {"rra": 12.0, "ft": 9.0, "waa-c": 13.0, "orca": None}
    rows = [row(policy, f"{bound} s", rate, scenario=scenario, bound_s=float(bound))
            for scenario in ("small, S", "large, S") for policy, rate in rates.items()
            for bound in range(5, 10)]
    text = sweep_text(rows)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80 and len(rows) == 40
    assert lines[0] == "small, S"
    assert lines[3].split() == ["5.00", "s", "waa-c", "13", "4.50", "s", "rra", "12,", "ft", "9;",
                                "no", "schedule:", "orca"]
    assert "40 points, 30 with a schedule; the best is waa-c 10 times" in " ".join(text.split())


def test_a_folder_that_is_no_sweep_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="xgpt sweep"):
        read_sweep(tmp_path)
    (tmp_path / "sweep.json").write_text(json.dumps({"version": 9}))
    with pytest.raises(InputError, match="version"):
        read_sweep(tmp_path)
