"""A sweep's page: a curve a policy, gains, where the best policy changes and why."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from fake_run import HOSTILE, write_fake_sweep

from xgpt.core.errors import InputError
from xgpt.report.chart import Chart
from xgpt.report.sweep_page import (
    NO_BOUND_AT,
    gains,
    headline,
    lacking,
    sweep_charts,
    winners,
    write_sweep_page,
)
from xgpt.report.sweep_rows import read_sweep

pytest.importorskip("jinja2", reason="a page needs jinja2 (extra: run)")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fake_sweep(tmp_path_factory.mktemp("sweep") / "out")


@pytest.fixture(scope="module")
def charts(folder: Path) -> dict[str, Chart]:
    return {chart.name: chart for chart in sweep_charts(read_sweep(folder).rows)}


def test_a_scenario_has_a_curve_for_each_policy_over_the_bounds(charts: dict[str, Chart]) -> None:
    curves = {series.label: series for series in charts["scenario-0"].series}
    assert list(curves) == ["RRA", "WAA-C", "FT"]
    assert list(curves["WAA-C"].x) == [2, 10, None, 10 * NO_BOUND_AT]
    assert list(curves["WAA-C"].y) == [12, 24, None, 26]
    assert list(curves["RRA"].y) == [30, None, 45]
    assert "RRA: encode 2 together; bound 10.0 s; latency 4.50 s" in curves["RRA"].notes[0]
    assert [mark.label for mark in charts["scenario-0"].marks] == ["no bound"]
    assert list(charts["scenario-0"].x.ticks) == [0, 2, 10]  # and none where no bound is


def test_either_axis_can_show_cost_memory_and_latency(charts: dict[str, Chart]) -> None:
    chart = charts["scenario-0"]
    assert chart.x_choices[:2] == ["latency bound, seconds", "expected latency, seconds"]
    assert "devices" not in chart.x_choices, "all have four"
    assert {"device-seconds a query", "memory of the fullest rank, GiB"} <= set(chart.y_choices)
    assert "time of the job, seconds" not in chart.y_choices, "none is known"
    waa = next(series for series in chart.series if series.label == "WAA-C")
    assert [value for value in waa.columns["device-seconds a query"]
            if value is not None] == pytest.approx([4 / 12, 4 / 24, 4 / 26])


def test_the_gain_is_the_best_that_is_searched_over_the_best_baseline(
        folder: Path, charts: dict[str, Chart]) -> None:
    rows = [row for row in read_sweep(folder).rows if row["model"] == "opt-13b"
            and row["status"] == "ok"]
    assert gains(rows) == {2: 3, 10: 3, math.inf: 3}
    assert gains(rows, "ft") == gains(rows) and gains(rows, "vllm") == {}
    assert list(charts["gain"].series[0].x) == ["2.00 s", "10.0 s", "none"]
    assert charts["gain"].y_choices == ["times the best baseline's throughput", "times FT's"]


def test_it_is_told_where_the_best_policy_changes_and_why(folder: Path) -> None:
    rows = [row for row in read_sweep(folder).rows if row["model"] == "opt-13b"]
    first, second, third = winners("opt-13b", rows)
    assert (first.policy, second.policy, third.policy) == ("WAA-C", "RRA", "RRA")
    assert first.why == third.why == ""
    assert second.why == "RRA keeps no tighter bound; WAA-C from 12.0 to 24.0"
    assert second.ahead == "25.0 % (WAA-C)" and second.controls == "encode 2 together"


def test_the_headline_tells_what_is_best(folder: Path) -> None:
    rows = read_sweep(folder).rows
    one = [row for row in rows if row["model"] == "opt-13b"]
    assert headline(one) == ("RRA is best in 2 of 3 cases, WAA-C in 1: from 12.0 queries/s within "
                             "2.00 s to 45.0 without a bound")
    assert headline(rows).startswith("2 scenarios, ")


def test_points_without_a_schedule_are_told_by_reason(folder: Path) -> None:
    ((scenarios, policy, bound, why),) = lacking(read_sweep(folder).rows)
    assert (policy, bound, why) == ("rra", "2 s", "no schedule of it keeps 2 s")
    assert "opt-13b" in scenarios


def test_the_page_holds_all_of_it_and_escapes(folder: Path, tmp_path: Path) -> None:
    assert write_sweep_page(folder) == folder / "report.html"
    page = write_sweep_page(folder, tmp_path / "x.html").read_text("utf-8")
    assert page == (folder / "report.html").read_text("utf-8")
    assert "16" in page and "RRA keeps no tighter bound" in page
    assert HOSTILE not in page and "&lt;img src=x onerror=alert(1)&gt;" in page
    assert "is not done" not in page


def test_a_sweep_that_goes_on_and_one_without_any_schedule_have_pages(tmp_path: Path) -> None:
    running = write_fake_sweep(tmp_path / "a", state="running")
    assert "not done (running)" in write_sweep_page(running).read_text("utf-8")
    nothing = write_fake_sweep(tmp_path / "b", status="refused", reason="not planned")
    page = write_sweep_page(nothing).read_text("utf-8")
    assert "not planned" in page and 'data-chart="' not in page
    (running / "sweep.jsonl").unlink()
    assert "0 points" in write_sweep_page(running).read_text("utf-8")


def test_what_is_no_sweep_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="sweep"):
        write_sweep_page(tmp_path)
