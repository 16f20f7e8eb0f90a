"""The catalog's figures of accuracy: one that is not computed so is named; without measurements the
check passes. Points and pages of others' measurements."""

import copy
import json
import re

import numpy as np
import pytest
import validated
import yaml
from published.compared import Compared
from published.offline import BUDGETS, offline_rows, offline_times
from published.page import write_page
from published.runs import serving_points
from published.table import validation_table

from xgpt.core import catalog

needs_data = pytest.mark.skipif(not validated.DATA.is_dir(), reason="needs ../shared/data")


def test_a_figure_that_is_not_computed_so_is_named_with_both():
    figures = catalog.accuracy()
    assert yaml.safe_load(validated.written(figures)) == figures
    other = copy.deepcopy(figures)
    assert validated.differing(other, figures) == []
    other["rows"][0]["mean"] *= 1.01
    assert validated.differing(other, figures) == []
    other["rows"][0]["mean"] *= 1.1
    (said,) = validated.differing(other, figures)
    assert said.startswith("Vidur | A100-80 | xgpt | products |  | mean: 0.09") and "found" in said
    del other["choosers"][0]
    assert len(validated.differing(other, figures)) == 1 + 5


def test_where_there_are_no_measurements_it_says_so_and_passes(tmp_path, capsys):
    assert validated.check(tmp_path / "none") == 0
    assert "NOT COMPARED" in capsys.readouterr().out


def compared(half: str) -> Compared:
    seconds = np.geomspace(1e-3, 1.0, 6)
    return Compared(source="own", model="a model", gpu="H100", engine="vllm", operator="TPOT",
                    predicted_s=1.1 * seconds, measured_s=seconds, half=half, left_out=3,
                    why="too long")


def test_the_page_draws_every_point_beside_the_diagonal(tmp_path):
    path = tmp_path / "page.html"
    write_page([compared("fit"), compared("test")], [], [(0.9, 0.89)], path)
    text = path.read_text(encoding="utf-8")
    found = re.search(r'<script[^>]*application/json[^>]*>(.*?)</script>', text, re.DOTALL)
    assert found is not None
    figures = json.loads(found.group(1))
    dots = [trace for name, plot in figures.items() if name.startswith("compared")
            for trace in plot["data"] if trace.get("mode") == "markers"]
    assert sum(len(trace["x"]) for trace in dots) == 12 and "calibration" in figures
    assert all(trace["y"] == pytest.approx([1.1 * x for x in trace["x"]]) for trace in dots)


def test_the_table_says_what_a_row_is_of_and_what_was_left_out():
    shown = validation_table([compared("fit"), compared("test")])
    assert "TPOT, fit" in shown and "H100, vllm" in shown and "10.0%" in shown
    assert "left out: 6 (too long)" in shown


@needs_data
def test_a_version_of_an_engine_with_a_row_of_its_own_is_compared_with_that():
    """And stays in the half that it was in: the halves do not hang on rows."""
    points = serving_points(validated.DATA / "silicon" / "serving_points.csv")
    rows = {(p.engine, p.version): p.row for p in points}
    assert rows["tensorrt-llm", "1.0.0rc3"] == "tensorrt-llm-1.0"
    assert rows["tensorrt-llm", ""] == "tensorrt-llm" and rows["vllm", "0.12.0"] == "vllm-0.12"
    assert rows["sglang", "0.5.6.post2"] == "sglang"
    assert sum(p.is_fitted for p in points) == 125 and len(points) == 236


@needs_data
def test_an_offline_job_is_replayed_with_all_its_requests_and_its_cache():
    """Of the published row of most tokens/s on one H200: fp8 weights and entries."""
    rows = offline_rows(validated.DATA / "trtllm-perf")
    assert len(rows) == 141 and {row.kind for row in rows} == {"dense", "mixtures"}
    row = max((row for row in rows if row.tp == 1), key=lambda row: row.output_tokens_per_s)
    assert (row.gpu, row.weights, row.input_tokens, row.output_tokens) == ("H200", "fp8", 128, 128)
    assert row.measured_s == pytest.approx(30_000 * 128 / 27_778.9)
    times = offline_times(row)
    assert 0.5 < times.job_s / row.measured_s < 2 and times.token_budget in BUDGETS
    assert times.kv_tokens == pytest.approx(1.96e6, rel=0.1)  # of 141 GB nine tenths, 65.5 kB each
