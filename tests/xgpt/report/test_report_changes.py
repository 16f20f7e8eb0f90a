"""The report of a run whose output lengths were not those planned for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_run import write_fake_run

from xgpt.report.page import change_rows, write_report

pytest.importorskip("jinja2", reason="the report needs jinja2 (extra: run)")
ADJUSTED = {
    "cause": "drift", "after_queries": 300, "choice": "adjust", "reason": "12% more queries/s",
    "mean_output_tokens": {"planned": 32.0, "observed": 47.1}, "phase": 31,
    "from": {"encode_batch": 49, "decode_iterations": 7, "decode_micro_batches": 2},
    "to": {"encode_batch": 40, "decode_iterations": 11, "decode_micro_batches": 2}}
KEPT = {"after_queries": 600, "choice": "keep", "phase": None, "reason": "<b>no more</b>",
        "mean_output_tokens": {"planned": 47.1, "observed": 55.0}}


def page_of(folder: Path, rows: Any) -> str:
    out = write_fake_run(folder / "out", num_queries=12)
    metrics = json.loads((out / "metrics.json").read_text())
    (out / "metrics.json").write_text(json.dumps({**metrics, "rescheduling": rows}))
    return write_report(out).read_text()


def test_a_row_says_when_what_and_why() -> None:
    changed, kept = change_rows({"rescheduling": [ADJUSTED, KEPT]})
    assert changed == {
        "after": "300 queries", "mean": "32.0 to 47.1", "phase": "31", "why": "12% more queries/s",
        "what": "encode batch 49 to 40, decode iterations 7 to 11"}
    assert kept["what"] == "kept as it is" and kept["phase"] == "-"
    (asked,) = change_rows({"rescheduling": [{**ADJUSTED, "choice": "redeploy", "phase": None}]})
    assert asked["what"].startswith("re-deployment recommended: encode batch 49 to 40")


def test_the_page_has_the_rows_and_no_section_without(tmp_path: Path) -> None:
    page = page_of(tmp_path / "a", [ADJUSTED, KEPT])
    assert "Changes while it ran" in page and "decode iterations 7 to 11" in page
    assert "&lt;b&gt;no more&lt;/b&gt;" in page and "<b>no more</b>" not in page
    assert "Changes while it ran" not in page_of(tmp_path / "b", [])


@pytest.mark.parametrize("rows", [3, None, "x", [1, None], [{}], [{"choice": 7, "from": 1}],
                                  [{**ADJUSTED, "to": None, "mean_output_tokens": [1]}]])
def test_foreign_values_do_not_stop_the_page(tmp_path: Path, rows: Any) -> None:
    assert page_of(tmp_path, rows)
