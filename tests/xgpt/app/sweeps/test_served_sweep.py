"""Sweeps of jobs whose requests arrive over time: the capacity of each point, its attainment at a
rate, and what giving up points leaves out."""

from pathlib import Path

import pytest

from xgpt.app.sweeps.sweep import Swept, sweep_points
from xgpt.app.teller import LogTeller
from xgpt.core.errors import InputError
from xgpt.job.sweep_file import load_sweep
from xgpt.report.sweep_page import sweep_charts
from xgpt.report.sweep_rows import GIVEN_UP
from xgpt.report.sweep_served import best_points, served_tables, worth_of

JOB = """
model: opt-13b
cluster: 2xA40
workload: {arrivals: {process: poisson}, task: S}
constraint: {ttft_s: 1, tpot_s: 0.1, attainment: 0.9}
schedule: {policy: sarathi, replicas: 1, tp_degree: 2, max_active: 32, token_budget: 256}
search: {queries: 100}
"""
FEW = "tp=1,2", "task=S,T"


@pytest.fixture
def job(tmp_path):
    path = tmp_path / "service.yaml"
    path.write_text(JOB)
    return path


def swept(job: Path, *over: str, is_best: bool = False, name: str = "all") -> Swept:
    spec = load_sweep(job, over=over, out=job.parent / name)
    return sweep_points(spec, LogTeller(), cores=1, is_best=is_best)


@pytest.fixture(scope="module")
def grids(tmp_path_factory):
    """A grid, searched to the end and with points given up."""
    path = tmp_path_factory.mktemp("grid") / "service.yaml"
    path.write_text(JOB + "price_per_hour: 0.5\n")
    return swept(path, *FEW), swept(path, *FEW, is_best=True, name="best")


def test_the_best_of_each_workload_is_the_same_where_points_are_given_up(grids):
    every, few = grids
    assert [row["status"] for row in every.rows] == ["ok"] * 4
    for name, row in best_points(every.rows).items():
        found = best_points(few.rows)[name]
        assert found["deployment"] == row["deployment"]
        assert found["capacity_qps"] == pytest.approx(row["capacity_qps"], rel=0.02)
    given_up = [row for row in few.rows if row["status"] == GIVEN_UP]
    assert given_up and all(row["capacity_qps"] is None for row in given_up)


def test_a_row_has_the_capacity_for_its_price_within_its_saturated_throughput(grids):
    for row in grids[0].rows:
        assert row["capacity_per_price"] == pytest.approx(row["capacity_qps"] / (2 * 0.5))
        assert 0 < row["capacity_qps"] < row["saturated_qps"]
        assert row["ttft_p90_s"] < 1 and row["attainment"] is None
        assert row["deployment"] == f"tp {row['tp']}" and row["stages"] == 2 / row["tp"]


def test_the_page_has_pareto_points_and_the_cost_of_anothers_best(grids):
    every, few = grids
    for swept in (every, few):  # the best of one workload is searched on the other one, too
        (_, header, rows) = served_tables(swept.rows)[1]
        assert header[1:] == ("that of S", "that of T")
        costs = {row[0]: [float(cell) for cell in row[1:]] for row in rows}
        assert costs["S"][0] == costs["T"][1] == 1 and min(min(costs.values())) >= 0.98
    charts = sweep_charts(every.rows)
    assert [chart.title for chart in charts] == [
        f"{task}: {figure}" for task in "ST" for figure in ("TTFT P90", "TPOT P99")]
    for chart in charts:
        points, pareto = chart.series
        assert (points.label, pareto.label) == ("Sarathi", "Pareto")
        assert list(pareto.y) == sorted({*pareto.y}) and max(points.y) == max(pareto.y)
    text = (every.folder / "report.html").read_text("utf-8")
    assert "that of S" in text and "per latency limit" not in text


def test_attainment_falls_with_the_rate_also_beyond_capacity(job):
    rows = swept(job, "rate=1,20,40").rows
    assert [row["status"] for row in rows] == ["ok", "infeasible", "infeasible"]
    shares = [row["attainment"] for row in rows]
    assert shares[0] > 0.9 > shares[1] >= shares[2]
    assert len({row["capacity_qps"] for row in rows}) == 1
    assert "keep the limits at 40" in rows[2]["reason"]
    (chart,) = sweep_charts(rows)
    assert chart.x_choices[0] == "requests/s that arrive" and [*chart.series[0].y] == shares


def test_without_an_axis_the_limits_are_scaled(job):
    rows = swept(job).rows
    assert [row["scale"] for row in rows] == [0.5, 1, 2]
    assert [row["capacity_qps"] for row in rows] == sorted(row["capacity_qps"] for row in rows)
    assert all(worth_of(row) == row["capacity_qps"] / 2 for row in rows), "A40 has no price"


def test_a_layout_without_room_for_the_weights_says_so(job):
    (row,) = swept(job, "model=opt-30b", "tp=1", "copies=2", is_best=True).rows
    assert row["status"] == "infeasible" and "does not fit into the memory" in row["reason"]


def test_lengths_are_of_both_sides_and_shares_of_a_latency_are_refused(job):
    (job.parent / "lengths.csv").write_text("input,output\n9,5\n8,7\n")
    (point,) = load_sweep(job, over=("lengths={file: lengths.csv}",)).points
    assert point.job.workload.input_tokens == point.job.workload.output_tokens
    assert point.values == {"lengths": "lengths.csv"}
    with pytest.raises(InputError, match="bound = '50%': seconds or inf where requests arrive"):
        load_sweep(job, bounds="50%")
    job.write_text("{model: opt-13b, cluster: a40-4, workload: {task: S}}")
    spec = load_sweep(job, bounds="5")
    with pytest.raises(InputError, match=r"--best: only with workload\.arrivals"):
        sweep_points(spec, LogTeller(), is_best=True)
