"""Timelines of a replay: boxes where the steps were, gaps where none was."""

import json
import re

import numpy as np
import pytest
from fake_run import HOSTILE, write_fake_sweep

from xgpt.core.problem import QueryTimes
from xgpt.report.html_page import figure, write_chart_page
from xgpt.report.lanes import read_expected, thinned, write_expected
from xgpt.report.output import read_output
from xgpt.report.run_charts import draw, replay_lanes
from xgpt.report.sweep_page import NO_BOUND_AT, sweep_charts, write_sweep_page
from xgpt.report.sweep_rows import line_of, read_sweep, winners
from xrunner.rules.steps import Step, StepKind
from xsimulator.replay.records import PoolRecords, ReplayResult

pytest.importorskip("jinja2", reason="a page needs jinja2 (extra: run)")


def test_a_sweep_over_copies_draws_a_line_for_each_policy_and_number():
    rows = [{"status": "ok", "scenario": "toy", "policy": policy, "copies": copies,
             "bound_s": bound_s, "bound": f"{bound_s} s", "throughput_qps": bound_s * copies,
             "latency_s": bound_s, "replicas": copies}
            for policy in ("rra", "sarathi") for copies in (1, 4) for bound_s in (2.0, 8.0)]
    assert line_of(rows[0]) == "RRA, 1 copy" and line_of({"policy": "auto"}) == "best of all"
    (chart,) = [one for one in sweep_charts(rows) if one.name == "scenario-0"]
    assert [own.label for own in chart.series] == [
        "RRA, 1 copy", "RRA, 4 copies", "Sarathi, 1 copy", "Sarathi, 4 copies"]
    assert list(chart.series[1].columns["replicas"]) == [4, 4]


KINDS = {"E": StepKind.ENCODE, "D": StepKind.DECODE, "M": StepKind.MIXED}


def pool(starts_s, ends_s, steps, name="both", first_stage=0):
    """steps: 'E0.1' is the encoding of group 0 in phase 1; starts_s, ends_s: [steps, stages]."""
    made = [Step(kind=KINDS[text[0]], group=int(text[1:].split(".")[0]),
                 phase=int(text.split(".")[1]), iteration=int(text[0] != "E")) for text in steps]
    starts_s, ends_s = np.array(starts_s, float), np.array(ends_s, float)
    count = len(made)
    return PoolRecords(
        name=name, role=name, stages=tuple(range(first_stage, first_stage + starts_s.shape[1])),
        steps=tuple(made), decoded=np.full(count, 4), encoded=np.full(count, 2),
        tokens=np.full(count, 100), context=np.full(count, 50.0), start_s=starts_s, end_s=ends_s,
        memory_s=starts_s[:, 0], memory_tokens=np.arange(count) % 90, kv_tokens=100)


def result(*pools):
    end_s = max(p.end_s.max() for p in pools)
    times = QueryTimes(arrival_s=np.zeros(1), start_s=np.zeros(1), first_token_s=np.ones(1),
                       last_token_s=np.full(1, end_s))
    return ReplayResult(pools=pools, handovers=(), times=times,
                        output_tokens=np.ones(1, int), preemptions=0)


def rra(phases=20, groups=2, iterations=3, stages=2, pause_s=0.0):
    """Encodings of 0.2 s and decodings of 0.1 s, each stage one step behind the one before."""
    steps = [f"{'D' if u else 'E'}{g}.{p}" for p in range(phases) for u in range(iterations + 1)
             for g in range(groups)]
    lengths = np.array([0.2 if step[0] == "E" else 0.1 for step in steps])
    ends = np.cumsum(lengths + pause_s)[:, None] + 0.2 * np.arange(stages)
    return result(pool(ends - lengths[:, None], ends, steps))


def boxes(chart):
    """(series, lane, start, length) of every box."""
    return [(series.label, lane, start, length) for series in chart.series
            if series.kind == "boxes"
            for lane, start, length in zip(series.y, series.base, series.x, strict=True)]


def test_a_box_lies_where_its_step_was_cut_at_the_window_with_its_micro_batch():
    chart = draw(result(pool([[0.0], [3.0], [4.0]], [[2.0], [4.0], [5.0]],
                             ["E0.0", "D0.0", "M0.0"])), 0.0, 5.0)
    assert boxes(chart) == [("encode", "stage 0", 0, 2), ("decode", "stage 0", 3, 1),
                            ("both in one step", "stage 0", 4, 1)]
    assert [series.colour for series in chart.series][:2] == ["encode", "decode"]
    cut = draw(rra(), 1.0, 2.0)
    assert all(start >= 1 and start + length <= 2 + 1e-9 for _, _, start, length in boxes(cut))
    assert {text for series in cut.series for text in series.inside} == {"0", "1"}


@pytest.mark.parametrize("pause_s", [0.0, 0.1])
def test_thousands_of_steps_become_few_boxes_of_the_same_total_and_the_first_view_is_exact(pause_s):
    replay = rra(phases=4000, stages=1, pause_s=pause_s)  # 32,000 steps
    chart = draw(replay, 0.0, replay.makespan_s)
    assert len(boxes(chart)) <= 4000
    steps = replay.pools[0]
    length_s = (steps.end_s - steps.start_s)[:, 0]
    for kind, is_decode in (("encode", False), ("decode", True)):
        drawn_s = sum(length for label, _, _, length in boxes(chart) if label == kind)
        is_own = [(step.kind is StepKind.DECODE) == is_decode for step in steps.steps]
        assert drawn_s == pytest.approx(length_s[is_own].sum())
    (lane,) = thinned(replay_lanes(replay), exact=(100.0, 110.0))
    is_inside = (lane.start_s >= 100) & (lane.end_s <= 110)
    assert len(lane.kinds) < 4500 and (lane.groups[is_inside] >= 0).all()
    assert is_inside.sum() == ((steps.start_s >= 100) & (steps.end_s <= 110)).sum()
    assert (lane.start_s[1:] >= lane.start_s[:-1]).all()


def two_pools(count=40):
    starts = 0.5 * np.arange(count)[:, None]
    encode = pool(starts, starts + 0.5, [f"E0.{i}" for i in range(count)], "encode")
    decode = pool(starts + 0.6, starts + 1.0, [f"D0.{i}" for i in range(count)], "decode", 1)
    return result(encode, decode)


def test_names_are_text_not_markup(tmp_path):
    chart = draw(rra(stages=1), 1.0, 2.0, ["<script>&"])
    write_chart_page([chart], tmp_path / "timeline.html", "<b>x")
    page = (tmp_path / "timeline.html").read_text("utf-8")
    assert "<script>&" not in page and "<b>x" not in page
    assert figure(chart)["layout"]["yaxis"]["categoryarray"] == ["&lt;script&gt;&amp;"]


def test_a_measured_run_is_drawn_the_same_way(tmp_path):
    def lanes(*pools):
        rows = [{"stage": stage, "pool": pool, "kind": kind, "start_s": at + stage,
                 "end_s": at + stage + 1, "group": 1} for stage, pool in enumerate(pools)
                for at, kind in ((12.0, "decode"), (10.0, "encode"), (13.0, "?"))]
        (tmp_path / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return read_output(tmp_path).lanes

    first, second = lanes("both", "both")
    assert (first.label, second.label) == ("stage 0", "stage 1")
    assert first.start_s.tolist() == [0, 2] and second.end_s.tolist() == [2, 4]
    assert first.kinds.tolist() == [0, 1] and first.groups.tolist() == [1, 1]
    assert [lane.label for lane in lanes("encode", "decode")] == [
        "stage 0 · encode", "stage 1 · decode"]


def test_what_is_expected_is_read_as_it_was_written(tmp_path):
    replay = two_pools()
    write_expected(tmp_path / "expected.json", replay_lanes(replay), replay.times)
    read = read_expected(tmp_path / "expected.json")
    assert read is not None and [lane.label for lane in read.lanes] == [
        "stage 0 · encode", "stage 1 · decode"]
    for lane, pool_ in zip(read.lanes, replay.pools, strict=True):
        assert lane.start_s == pytest.approx(pool_.start_s[:, 0])
        assert lane.end_s == pytest.approx(pool_.end_s[:, 0])
    assert read.done == [(replay.times.last_token_s[0], 1)]
    assert read.latency_s.max() == pytest.approx(replay.latency_s.max())


# A sweep's page: a curve a policy, where the best policy changes and why.


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_fake_sweep(tmp_path_factory.mktemp("sweep") / "out")


@pytest.fixture(scope="module")
def charts(folder):
    return {chart.name: chart for chart in sweep_charts(read_sweep(folder).rows)}


def test_a_scenario_has_a_curve_for_each_policy_and_either_axis_shows_others(charts):
    curves = {series.label: series for series in charts["scenario-0"].series}
    assert list(curves) == ["RRA", "WAA-C", "FT"]
    assert list(curves["WAA-C"].x) == [2, 10, None, 10 * NO_BOUND_AT]
    assert list(curves["WAA-C"].y) == [12, 24, None, 26]
    assert list(curves["RRA"].y) == [30, None, 45]
    assert "RRA: encode 2 together; limit 10.0 s; latency 4.50 s" in curves["RRA"].notes[0]
    assert [mark.label for mark in charts["scenario-0"].marks] == ["no limit"]
    assert list(charts["scenario-0"].x.ticks) == [0, 2, 10]  # and none where no bound is
    chart = charts["scenario-0"]
    assert chart.x_choices[:2] == ["latency limit, seconds", "expected latency, seconds"]
    assert "devices" not in chart.x_choices, "all have four"
    assert {"device-seconds per request", "memory of the fullest rank, GiB"} <= set(chart.y_choices)
    assert "time of the job, seconds" not in chart.y_choices, "none is known"
    waa = next(series for series in chart.series if series.label == "WAA-C")
    assert [value for value in waa.columns["device-seconds per request"]
            if value is not None] == pytest.approx([4 / 12, 4 / 24, 4 / 26])


def test_it_is_told_where_the_best_policy_changes_and_why(folder):
    rows = [row for row in read_sweep(folder).rows if row["model"] == "opt-13b"]
    first, second, third = winners("opt-13b", rows)
    assert (first.policy, second.policy, third.policy) == ("WAA-C", "RRA", "RRA")
    assert first.why == third.why == ""
    assert second.why == (
        "no RRA schedule was found at the tighter limit; WAA-C from 12.0 to 24.0")
    assert second.others == "WAA-C 24.0, FT 10.0" and second.controls == "encode 2 together"
    rows = [row | {"policy": "auto"} for row in read_sweep(folder).rows
            if row["model"] == "opt-13b" and row["status"] == "ok"]
    chosen = {2.0: "waa-c", 10.0: "rra"}
    changes = winners("opt-13b", [row for row in rows
                                  if chosen.get(row["bound_s"]) == row["chosen"]])
    assert changes[1].why == ("RRA was not compared at the tighter limit; WAA-C was not compared "
                              "here (--over policy=all compares)")


def test_a_limit_has_its_best_with_upper_bound_devices_and_runner_up(folder, tmp_path):
    rows = [row | {"bound_qps": 50.0 + place} for place, row in enumerate(read_sweep(folder).rows)
            if row["model"] == "opt-13b"]
    first, second, third = winners("opt-13b", rows)
    assert [one.second for one in (first, second, third)] == ["4.00 FT", "24.0 WAA-C", "26.0 WAA-C"]
    assert [one.upper for one in (first, second, third)] == ["56.0", "57.0", "58.0"]
    assert {one.devices for one in (first, second, third)} == {"4"} and not third.is_tie
    near = [row | {"throughput_qps": 44.5} if row["policy"] == "ft" else row for row in rows]
    assert winners("opt-13b", near)[2].is_tie
    unknown = [row | {"bound_qps": None} if row["policy"] == "ft" else row for row in rows]
    assert {one.upper for one in winners("opt-13b", unknown)} == {"-"}
    page = write_sweep_page(write_fake_sweep(tmp_path / "a", bound_qps=60)).read_text("utf-8")
    assert ">upper bound</th>" in page and ">60.0</td>" in page and ">runner-up</th>" in page
    page = write_sweep_page(write_fake_sweep(tmp_path / "b", policy="auto", chosen="rra"))
    assert not re.search(">upper bound<|>runner-up<", page.read_text("utf-8")), "none is empty"


def test_the_page_holds_all_of_it_and_escapes_and_goes_on(folder, tmp_path):
    assert write_sweep_page(folder) == folder / "report.html"
    page = write_sweep_page(folder, tmp_path / "x.html").read_text("utf-8")
    assert page == (folder / "report.html").read_text("utf-8")
    for said in ("2 scenarios, ", "no RRA schedule was found at", "no schedule of it keeps"):
        assert said in page
    assert HOSTILE not in page and "&lt;img src=x onerror=alert(1)&gt;" in page
    assert "is not done" not in page
    running = write_fake_sweep(tmp_path / "a", state="running")
    assert "not done (running)" in write_sweep_page(running).read_text("utf-8")
    nothing = write_fake_sweep(tmp_path / "b", status="refused", reason="not planned")
    page = write_sweep_page(nothing).read_text("utf-8")
    assert "not planned" in page and 'data-chart="' not in page
    (running / "sweep.jsonl").unlink()
    assert "0 points" in write_sweep_page(running).read_text("utf-8")
