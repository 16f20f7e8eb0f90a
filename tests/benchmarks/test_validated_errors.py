"""The catalog's figures of accuracy: one that is not computed so is named; without measurements the
check passes. Points and pages of others' measurements."""

import copy
import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import validated
import yaml
from published.compared import Compared
from published.left_out import HostFit, LeftOut, kept, level_rows
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


def compared(left_out: str) -> Compared:
    seconds = np.geomspace(1e-3, 1.0, 6)
    return Compared(source="own", model="a model", gpu="H100", engine="vllm", operator="TPOT",
                    predicted_s=1.1 * seconds, measured_s=seconds, left_out=left_out, skipped=3,
                    why="too long")


def test_the_page_draws_every_point_beside_the_diagonal(tmp_path):
    path = tmp_path / "page.html"
    write_page([compared(""), compared("shape")], [], {"shape": [(0.9, 0.89)]}, path)
    text = path.read_text(encoding="utf-8")
    found = re.search(r'<script[^>]*application/json[^>]*>(.*?)</script>', text, re.DOTALL)
    assert found is not None
    figures = json.loads(found.group(1))
    dots = [trace for name, plot in figures.items() if name.startswith("compared")
            for trace in plot["data"] if trace.get("mode") == "markers"]
    assert sum(len(trace["x"]) for trace in dots) == 12 and "calibration" in figures
    assert all(trace["y"] == pytest.approx([1.1 * x for x in trace["x"]]) for trace in dots)


def test_the_table_says_what_a_row_is_of_and_what_was_not_compared():
    shown = validation_table([compared(""), compared("shape")])
    assert "TPOT, shape left out" in shown and "H100, vllm" in shown and "10.0%" in shown
    assert "not compared: 6 (too long)" in shown


@needs_data
def test_a_version_of_an_engine_with_a_row_of_its_own_is_compared_with_that():
    points = serving_points(validated.DATA / "silicon" / "serving_points.csv")
    rows = {(p.engine, p.version): p.row for p in points}
    assert rows["tensorrt-llm", "1.0.0rc3"] == "tensorrt-llm-1.0"
    assert rows["tensorrt-llm", ""] == "tensorrt-llm" and rows["vllm", "0.12.0"] == "vllm-0.12"
    assert rows["sglang", "0.5.6.post2"] == "sglang"
    assert len(points) == 236


@needs_data
def test_an_offline_job_is_replayed_with_all_its_requests_and_its_cache():
    """The row is an 8B model on one H200, with fp8 weights and entries."""
    rows = offline_rows(validated.DATA / "trtllm-perf")
    assert len(rows) == 141 and {row.kind for row in rows} == {"dense", "mixtures"}
    (row,) = (row for row in rows if (row.gpu, row.tp, row.input_tokens, row.output_tokens) == (
        "H200", 1, 1000, 1000))
    assert row.measured_s == pytest.approx(3000 * 1000 / 16_414.7)
    times = offline_times(row)
    assert 0.8 < times.job_s / row.measured_s < 1.25 and times.token_budget in BUDGETS
    held = 149e9 - 9.1e9  # beside weights of 8 bits, and an embedding of 16
    assert times.kv_tokens == pytest.approx(0.9 * held / (2 * 32 * 1024), rel=0.02)


def error(table: str, group: str, level: str, log: float) -> LeftOut:
    return LeftOut(table, (group,), level, log, log / 2)


def test_a_promise_is_judged_by_runs_of_other_groups():
    """One group's runs take twice as long as planned: nothing of theirs may widen their promise."""
    errors = [error("shape", "a", "neighbour", 0.001 * place) for place in range(100)]
    errors += [error("shape", "b", "neighbour", math.log(2)) for _ in range(100)]
    ((_, share),) = kept(errors, "shape", (0.9,))
    assert share == 0.5, "those of a, by the errors of b; none of b, by those of a"
    again = [one._replace(run=place) for place, one in enumerate(errors)]
    again += [one._replace(table="degree") for one in again]
    assert kept(again, "shape", (0.9,)) == kept(errors, "shape", (0.9,)), "nor from another table"


def test_a_promise_is_never_below_the_computed_time_nor_above_it_at_a_half():
    errors = [error("shape", str(place), "neighbour", log)
              for place, log in enumerate((-0.3, -0.2, -0.1, -0.05, 0.1))]
    assert kept(errors, "shape", (0.5, 0.6)) == [(0.5, 0.8), (0.6, 0.8)]


def test_a_level_is_never_surer_than_a_nearer_one():
    errors = [error("t", str(place), "same cell", log) for place, log in enumerate((-0.2, 0, 0.2))]
    errors += [error("t", "far", level, 0.1) for level in ("neighbour", "far")]
    rows = level_rows(errors, (0.5, 0.99))
    assert rows["far"]["quantiles"][1] == rows["same cell"]["quantiles"][1]
    assert rows["far"]["mean"] == rows["same cell"]["mean"] >= rows["same cell"]["fitted"]


@needs_data
def test_constants_fitted_without_a_shape_do_not_depend_on_its_runs():
    points = serving_points(validated.DATA / "silicon" / "serving_points.csv")[::8]
    fit = HostFit(points)
    used = np.array([point.model != "qwen3-32b" for point in points])
    assert 0 < used.sum() < len(points)
    values = fit.fitted(used)
    other = HostFit([replace(point, tpot_s=point.tpot_s * (1 if one else 3))
                     for point, one in zip(points, used, strict=True)])
    assert other.fitted(used) == pytest.approx(values)
    assert not np.allclose(other.fitted(np.ones(len(points), bool)), values, rtol=0.05)
