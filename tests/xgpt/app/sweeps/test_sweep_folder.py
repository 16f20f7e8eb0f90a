"""A sweep's points: planned as `xgpt schedule` plans them, kept, gone on with, and written out."""

import csv
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from xgpt.app.opened_job import open_file
from xgpt.app.schedule import plan_job
from xgpt.app.sweeps import sweep
from xgpt.app.sweeps.sweep import Swept, sweep_points
from xgpt.app.teller import LogTeller
from xgpt.core.errors import StoppedEarly, XgptError
from xgpt.job.sweep_file import load_sweep
from xgpt.report.sweep_rows import COLUMNS, MEASURED, read_sweep
from xscheduler.planner import PlanOptions

JOB = ("{model: opt-13b, cluster: a40-4, workload: {requests: {count: 60}, task: S}, "
       "schedule: {encode_chunk: 0}}\n")
EFFORT = ("nodes", "search_s")  # what planning took, which depends on what was planned before


@pytest.fixture
def job(tmp_path):
    """A sweep file of one job, without margins: quickly planned."""
    path = tmp_path / "sweep.yaml"
    path.write_text(f"base: {JOB}margin: false\n")
    return path


class Told(LogTeller):
    """Keeps what a sweep says, and counts the points that it plans; `after` so many it is asked to
    stop."""

    def __init__(self, after: int | None = None) -> None:
        self.lines: list[str] = []
        self.planned, self._after = 0, after

    def say(self, message: str) -> None:
        self.lines.append(message)

    def progress(self, line: str) -> None:
        self.planned += " points" in line
        if self.planned == self._after:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)


def swept(path: Path, *over: str, bounds: str = "5,inf", tell: Told | None = None,
          **more: Any) -> Swept:
    spec = load_sweep(path, over=over, bounds=bounds)
    return sweep_points(spec, tell or Told(), cores=1, **more)


def without_effort(rows: Any) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name not in EFFORT} for row in rows]


def test_a_point_is_what_schedule_says_of_it(tmp_path):
    job = tmp_path / "job.yaml"
    job.write_text(JOB)
    rows = swept(job, "policy=rra,ft", bounds="0.01,5").rows
    assert [(row["policy"], row["bound"], row["status"]) for row in rows] == [
        ("rra", "0.01 s", "infeasible"), ("rra", "5 s", "ok"),
        ("ft", "0.01 s", "infeasible"), ("ft", "5 s", "ok")]
    assert {*rows[0]} == {column.name for column in COLUMNS}
    assert "tightest" in rows[0]["reason"] and rows[0]["throughput_qps"] is None
    for row in (rows[1], rows[3]):
        plan = plan_job(open_file(job, ("constraint.latency_s=5",
                                        f"schedule.policy={row['policy']}")),
                        options=PlanOptions(horizon="steady"))
        figures = plan.schedule.figures
        # what was replayed for another bound serves the next, so that ties may end otherwise
        assert row["throughput_qps"] == pytest.approx(figures.throughput_qps, rel=0.03)
        assert row["latency_s"] <= 5 and row["gpus"] == 4
        assert row["gpu_s_per_query"] == pytest.approx(4 / row["throughput_qps"])
        assert row["margin"] >= 1
    assert rows[1]["decode_iterations"] and rows[3]["decode_iterations"] is None


def test_a_share_is_of_the_latency_at_the_highest_throughput_of_any_policy(job):
    rows = swept(job, "policy=auto,ft", bounds="50%,inf").rows
    free_s = rows[1]["latency_s"]
    assert rows[1]["bound_s"] == "inf"
    assert rows[0]["bound_s"] == rows[2]["bound_s"] == float(f"{free_s / 2:.3g}")


def test_the_paper_s_bounds_are_worked_out_and_named(job):
    """Its Table 6 has 3.1, 5.9 and 11.5 s for OPT-13B and task S on four A40."""
    done = swept(job, "policy=ft,dsi", bounds="ft10,ft30,ft70,inf")
    bounds_s = [row["bound_s"] for row in done.rows]
    assert bounds_s[:3] == pytest.approx([3.06, 6.53, 13.8], rel=0.02)
    assert bounds_s[4:] == bounds_s[:4] and bounds_s[3] == "inf"
    assert all(row["latency_s"] <= row["bound_s"] for row in done.rows[:3])
    for name, seconds in zip(("ft10", "ft30", "ft70"), bounds_s[:3], strict=True):
        assert f"{name} ({seconds:.3g} s)" in str(done)


def test_a_model_that_ft_does_not_divide_has_no_such_bound(job):
    rows = swept(job, "policy=ft", "gpus=3", bounds="ft10").rows
    assert rows[0]["status"] == "infeasible"
    assert "over 3 devices: give the latency limit in seconds" in rows[0]["reason"]


def test_a_combination_that_cannot_be_planned_is_a_row_with_the_reason(job):
    rows = swept(job, "policy=sarathi,ft", "cluster=a40-8", "model=t5-11b", bounds="inf").rows
    assert [row["status"] for row in rows] == ["refused", "ok"]
    assert "encoder" in rows[0]["reason"]
    again = Told()
    swept(job, "policy=sarathi,ft", "cluster=a40-8", "model=t5-11b", bounds="inf", tell=again)
    assert again.lines == ["continuing: 2 of 2 points are planned"]


def test_each_engine_is_planned_by_its_own_constants_or_refused(job):
    rows = swept(job, "engine=xgpt,vllm,deepspeed", "policy=rra", bounds="8").rows
    assert [row["status"] for row in rows] == ["ok", "ok", "refused"]
    assert "vllm" in rows[1]["times"] and rows[1]["throughput_qps"] != rows[0]["throughput_qps"]
    assert "own engine" in rows[2]["reason"]


def test_the_job_s_horizon_says_how_long_the_job_takes(job):
    spec = load_sweep(job, over=("policy=waa-c",), bounds="20", horizon="job")
    (row,) = sweep_points(spec, Told()).rows
    assert row["makespan_s"] > 0 and row["ttft_p99_s"] > 0
    assert row["job_throughput_qps"] == pytest.approx(60 / row["makespan_s"], rel=0.01)


def test_a_changed_grid_keeps_what_is_still_in_it(job):
    first, told = swept(job, "policy=ft,waa-c").rows, Told()
    assert swept(job, "policy=ft,waa-c", tell=told).rows == first and not told.planned
    second = swept(job, "policy=waa-c,waa-m", tell=told).rows
    assert told.planned == 2 and second[:2] == first[2:]
    third = swept(job, "policy=ft,waa-c", bounds="inf,5", tell=told)  # back from where it was kept
    assert told.planned == 2 and without_effort(third.rows) == without_effort(
        [first[1], first[0], first[3], first[2]])


def test_another_planner_s_points_are_planned_anew_and_kept(job):
    first, told = swept(job, "policy=ft"), Told()
    rows = first.folder / "sweep.jsonl"
    rows.write_text(rows.read_text().replace(first.rows[0]["fingerprint"], "of another"))
    second = swept(job, "policy=ft", tell=told)
    assert told.planned == 2 and "2 points were planned by another xgpt" in told.lines[0]
    assert without_effort(second.rows) == without_effort(first.rows)
    earlier = (first.folder / "earlier.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in earlier] == [
        row | {"fingerprint": "of another"} for row in first.rows]


def test_a_changed_file_of_lengths_is_another_point_s(job):
    lengths = job.parent / "lengths.csv"
    lengths.write_text("input,output\n8,8\n16,16\n")
    job.write_text("base: {model: opt-13b, cluster: a40-4, workload: {input_tokens: {file: "
                   "lengths.csv}, output_tokens: {file: lengths.csv}}}\nmargin: false\n")
    first = swept(job, "policy=ft", bounds="inf").rows[0]
    lengths.write_text("input,output\n80,80\n160,160\n")
    again = swept(job, "policy=ft", bounds="inf", tell=(told := Told())).rows[0]
    assert told.planned == 1 and again["throughput_qps"] < first["throughput_qps"]


def test_a_stopped_sweep_keeps_its_rows_and_half_a_line_counts_for_nothing(job):
    with pytest.raises(StoppedEarly, match="stopped after 1 of 2 points"):
        swept(job, "policy=ft", tell=Told(after=1))
    kept = read_sweep(job.parent / "out" / "sweep")
    assert kept.meta["state"] == "stopped" and kept.meta["done"] == len(kept.rows) == 1
    whole, told = swept(job, "policy=ft"), Told()
    lines = (whole.folder / "sweep.jsonl").read_text()
    (whole.folder / "sweep.jsonl").write_text(lines[:-40])
    assert len(read_sweep(whole.folder).rows) == 1
    again = swept(job, "policy=ft", tell=told)
    assert told.planned == 1 and without_effort(again.rows) == without_effort(whole.rows)


def started(path: Path, least_rows: int) -> subprocess.Popen[str]:
    """A sweep by two processes that has planned so many points. It hears SIGINT also where the
    tests do not: a shell's background command is started with that signal ignored."""
    process = subprocess.Popen(
        [sys.executable, "-m", "xgpt.cli.main", "sweep", str(path), "--cores", "2"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    rows, deadline = path.parent / "out" / "killed" / "sweep.jsonl", time.monotonic() + 100
    while time.monotonic() < deadline and process.poll() is None:
        if rows.is_file() and rows.read_text().count("\n") >= least_rows:
            break
        time.sleep(0.02)
    return process


@pytest.mark.parametrize("tasks", ["S", pytest.param("S, T", marks=pytest.mark.slow)])
def test_a_killed_sweep_goes_on_and_ends_as_an_undisturbed_one(tmp_path, tasks):
    count, path = 10 * len(tasks.split()), tmp_path / "killed.yaml"
    path.write_text("base: {model: opt-13b, cluster: a40-4, workload: {task: S}, "
                    "schedule: {encode_chunk: 0}}\nmargin: false\n"
                    f"grid: {{task: [{tasks}], policy: [rra, ft, dsi, orca, waa-c], "
                    "bound: [5, inf]}\n")
    interrupted = started(path, 1)
    interrupted.send_signal(signal.SIGINT)
    _, said = interrupted.communicate(timeout=60)
    assert interrupted.returncode == 75 and "the same command goes on" in said, said
    killed = started(path, read_sweep(tmp_path / "out" / "killed").meta["done"] + 2)
    killed.kill()
    killed.communicate(timeout=60)
    kept = len(read_sweep(tmp_path / "out" / "killed").rows)
    assert 4 <= kept < count
    ended = sweep_points(load_sweep(path), told := Told(), cores=1)
    assert told.lines[0] == f"continuing: {kept} of {count} points are planned"
    fresh = sweep_points(load_sweep(path, out=tmp_path / "fresh"), Told(), cores=1)
    assert [row["key"] for row in ended.rows] == [row["key"] for row in fresh.rows]
    for row, other in zip(ended.rows, fresh.rows, strict=True):  # ties may end otherwise
        assert row["throughput_qps"] == (None if other["throughput_qps"] is None else
                                         pytest.approx(other["throughput_qps"], rel=0.03))
    assert len({row["key"] for row in ended.rows}) == len(ended.rows) == count
    assert (ended.folder / "sweep.jsonl").read_text().count("\n") == count


def test_rows_go_through_csv(job):
    done = swept(job, "policy=ft", bounds="0.01,inf")
    assert [path.name for path in done.files] == ["sweep.jsonl", "sweep.csv", "report.html"]
    with done.files[1].open() as file:
        lines = list(csv.DictReader(file))
    assert [*lines[0]] == [column["name"] for column in read_sweep(done.folder).meta["columns"]]
    for row, line in zip(done.rows, lines, strict=True):
        for name, value in row.items():
            assert line[name] == ("" if value is None else str(value)), name


def test_points_are_run_once_each_and_measured_beside_predicted(job, monkeypatch):
    ran: list[tuple[str | None, float]] = []

    def submit(own: Any, tell: Any) -> None:
        ran.append((own.schedule.policy, own.constraint.latency_s))
        if len(ran) == 1:
            raise XgptError("no memory")
        own.output.mkdir(parents=True)
        (own.output / "metrics.json").write_text(json.dumps({
            key: {"measured": 2.5, "predicted": 2.0} for key in MEASURED.values()}))

    monkeypatch.setattr(sweep, "submit", submit)
    monkeypatch.setattr(sweep, "refuse_what_cannot_run", lambda own, tell: None)
    rows = swept(job, "policy=ft", bounds="0.01,20,inf", runs=True).rows
    assert ran == [("ft", 20.0), ("ft", math.inf)]  # none without a schedule
    assert rows[1]["measured_status"] == "failed" and rows[1]["measured_reason"] == "no memory"
    assert rows[2]["measured_qps"] == 2.5 and rows[2]["folder"] == f"points/{rows[2]['key']}"
    again = swept(job, "policy=ft", bounds="0.01,20,inf", runs=True).rows
    assert ran[2:] == [("ft", 20.0)] and again[1]["measured_status"] == "done"
