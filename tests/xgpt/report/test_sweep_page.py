"""A sweep's page: a curve a policy, where the best policy changes and why."""

import pytest
from fake_run import HOSTILE, write_fake_sweep

from xgpt.report.sweep_page import NO_BOUND_AT, sweep_charts, write_sweep_page
from xgpt.report.sweep_rows import read_sweep, winners

pytest.importorskip("jinja2", reason="a page needs jinja2 (extra: run)")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_fake_sweep(tmp_path_factory.mktemp("sweep") / "out")


@pytest.fixture(scope="module")
def charts(folder):
    return {chart.name: chart for chart in sweep_charts(read_sweep(folder).rows)}


def test_a_scenario_has_a_curve_for_each_policy_over_the_bounds(charts):
    curves = {series.label: series for series in charts["scenario-0"].series}
    assert list(curves) == ["RRA", "WAA-C", "FT"]
    assert list(curves["WAA-C"].x) == [2, 10, None, 10 * NO_BOUND_AT]
    assert list(curves["WAA-C"].y) == [12, 24, None, 26]
    assert list(curves["RRA"].y) == [30, None, 45]
    assert "RRA: encode 2 together; bound 10.0 s; latency 4.50 s" in curves["RRA"].notes[0]
    assert [mark.label for mark in charts["scenario-0"].marks] == ["no bound"]
    assert list(charts["scenario-0"].x.ticks) == [0, 2, 10]  # and none where no bound is


def test_either_axis_can_show_cost_memory_and_latency(charts):
    chart = charts["scenario-0"]
    assert chart.x_choices[:2] == ["latency bound, seconds", "expected latency, seconds"]
    assert "devices" not in chart.x_choices, "all have four"
    assert {"device-seconds a query", "memory of the fullest rank, GiB"} <= set(chart.y_choices)
    assert "time of the job, seconds" not in chart.y_choices, "none is known"
    waa = next(series for series in chart.series if series.label == "WAA-C")
    assert [value for value in waa.columns["device-seconds a query"]
            if value is not None] == pytest.approx([4 / 12, 4 / 24, 4 / 26])


def test_it_is_told_where_the_best_policy_changes_and_why(folder):
    rows = [row for row in read_sweep(folder).rows if row["model"] == "opt-13b"]
    first, second, third = winners("opt-13b", rows)
    assert (first.policy, second.policy, third.policy) == ("WAA-C", "RRA", "RRA")
    assert first.why == third.why == ""
    assert second.why == "RRA keeps no tighter bound; WAA-C from 12.0 to 24.0"
    assert second.others == "WAA-C 24.0, FT 10.0" and second.controls == "encode 2 together"


def test_a_policy_that_was_not_asked_for_is_not_one_without_a_schedule(folder):
    """Of a sweep of `auto` the row of a bound names the one policy that was chosen."""
    rows = [row | {"policy": "auto"} for row in read_sweep(folder).rows
            if row["model"] == "opt-13b" and row["status"] == "ok"]
    chosen = {2.0: "waa-c", 10.0: "rra"}
    changes = winners("opt-13b", [row for row in rows
                                  if chosen.get(row["bound_s"]) == row["chosen"]])
    assert changes[1].why == ("RRA was not compared at the tighter bound; WAA-C was not compared "
                              "here")


def test_the_page_holds_all_of_it_and_escapes(folder, tmp_path):
    assert write_sweep_page(folder) == folder / "report.html"
    page = write_sweep_page(folder, tmp_path / "x.html").read_text("utf-8")
    assert page == (folder / "report.html").read_text("utf-8")
    for said in ("2 scenarios, ", "RRA keeps no tighter bound", "no schedule of it keeps"):
        assert said in page
    assert HOSTILE not in page and "&lt;img src=x onerror=alert(1)&gt;" in page
    assert "is not done" not in page


def test_a_sweep_that_goes_on_and_one_without_any_schedule_have_pages(tmp_path):
    running = write_fake_sweep(tmp_path / "a", state="running")
    assert "not done (running)" in write_sweep_page(running).read_text("utf-8")
    nothing = write_fake_sweep(tmp_path / "b", status="refused", reason="not planned")
    page = write_sweep_page(nothing).read_text("utf-8")
    assert "not planned" in page and 'data-chart="' not in page
    (running / "sweep.jsonl").unlink()
    assert "0 points" in write_sweep_page(running).read_text("utf-8")
