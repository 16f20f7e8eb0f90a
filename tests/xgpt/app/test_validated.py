"""Predictions against the open measurements do not get worse: no group's mean error by more than a
tenth of what the committed page has (skips where the measurements are absent)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from xgpt.app.validate import SERVING, SOURCES, validate
from xprofiler.compared import errors_of

ROOT = Path(__file__).resolve().parents[3]
DATA = ROOT.parent / "shared" / "data"
PAGE = ROOT / "benchmarks" / "results" / "validate-2026-11-23.json"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="needs ../shared/data")


class Silent:
    def say(self, message: str) -> None: ...

    def progress(self, line: str, *, is_last: bool = False) -> None: ...

    def end_progress(self) -> None: ...


@needs_data
@pytest.mark.parametrize("source", [
    pytest.param(name, marks=[] if name in (SERVING, "fastertransformer") else [pytest.mark.slow])
    for name in SOURCES])
def test_no_group_is_predicted_worse_than_the_committed_page_by_a_tenth(source: str) -> None:
    committed = dict(json.loads(PAGE.read_text(encoding="utf-8")))
    found = validate(DATA, Silent(), sources=[source])
    groups = {" | ".join((c.source, c.model, c.gpu, c.engine, c.operator, c.half)):
              errors_of(c).mean for c in found.compared if len(c.measured_s)}
    assert groups and groups.keys() <= committed.keys()
    worse = {name: (mean, committed[name]) for name, mean in groups.items()
             if mean > 1.1 * committed[name] + 1e-4}
    assert not worse


@needs_data
def test_serving_points_that_were_not_fitted_are_within_the_promised_errors() -> None:
    """The half `test`: TPOT and request latency within 14 %, time to first token within 35 %; nine
    of ten latencies within the margin of a confidence of 0.9, give or take a tenth."""
    found = validate(DATA, Silent(), sources=[SERVING])
    means = {}
    for name in ("TPOT", "request", "TTFT"):
        parts = [c for c in found.compared if c.operator == name and c.half == "test"]
        errors = [errors_of(c) for c in parts]
        means[name] = sum(e.mean * e.cases for e in errors) / sum(e.cases for e in errors)
    assert means["TPOT"] < 0.14 and means["request"] < 0.14 and means["TTFT"] < 0.35
    assert dict(found.calibration)[0.9] == pytest.approx(0.9, abs=0.1)
    chosen = {c.margin: c.choices for c in found.choosers if c.half == "all"}
    assert chosen["confidence 0.9"].broken < 0.1 and chosen["confidence 0.9"].regret < 0.1
