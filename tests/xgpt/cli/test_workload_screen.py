"""`xgpt workload`: lengths and arrivals of a job or of a trace."""

import json
from pathlib import Path

import pytest
from job_folder import xgpt

from xgpt.app.teller import LogTeller
from xgpt.app.workload import workload_figures

DATA = Path(__file__).resolve().parents[4] / "shared/data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="needs ../shared/data")


def figures(path, *overrides):
    return workload_figures(path, overrides, LogTeller())


def test_a_trace_has_lengths_and_arrivals(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n"
                    "0,10,5\n30,20,5\n60,30,5\n90,40,5\n180,50,10\n")
    found = figures(path)
    assert found["requests"] == 5
    assert found["lengths"]["input_tokens"] == {
        "mean": 30, "median": 30, "p90": 46, "deviation": pytest.approx(200**0.5)}
    assert found["lengths"]["ratio"]["median"] == 5
    assert found["lengths"]["correlation"] == pytest.approx(0.70711, abs=1e-4)
    own = found["arrivals"]
    assert (own["seconds"], own["rate"]) == (180, pytest.approx(4 / 180))
    assert own["cv"] == pytest.approx(3**-0.5)
    assert (own["least_per_minute"], own["most_per_minute"]) == (0, 2)  # the fourth is a part


def test_a_trace_may_lack_times_or_lengths(tmp_path):
    (tmp_path / "l.csv").write_text("num_prefill_tokens,num_decode_tokens\n5,5\n7,5\n")
    found = figures(tmp_path / "l.csv")
    assert found["arrivals"] is None and found["lengths"]["correlation"] is None
    (tmp_path / "t.csv").write_text("TIMESTAMP\n2023-11-16 18:17:03\n2023-11-16 18:17:05\n")
    found = figures(tmp_path / "t.csv")
    assert found["lengths"] is None and found["arrivals"]["rate"] == 0.5


def test_a_job_has_those_of_its_requests(tmp_path):
    (tmp_path / "t.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n0,9,2\n1,7,4\n")
    path = tmp_path / "job.yaml"
    path.write_text("model: opt-125m\ncluster: a40-4\nworkload: {arrivals: {file: t.csv}}\n")
    assert figures(path) == {**figures(tmp_path / "t.csv")}
    drawn = figures(path, "workload={task: S, arrivals: {rate: 4}}")
    assert drawn["requests"] == 10_000 and drawn["arrivals"]["rate"] == pytest.approx(4, rel=0.05)
    assert drawn["arrivals"]["cv"] == pytest.approx(1, abs=0.1)
    screen = xgpt("workload", path).stdout.splitlines()
    assert screen[0] == "requests     2 in 1.00 s" and max(map(len, screen)) <= 80
    printed = xgpt("workload", path, "--set", "workload={task: S, requests: {count: 9}}", "--json")
    assert json.loads(printed.stdout)["requests"] == 9


@needs_data
def test_published_traces_have_their_published_figures():
    code = figures(DATA / "azure/AzureLLMInferenceTrace_code.csv")["arrivals"]
    assert (round(code["rate"], 3), round(code["cv"], 2)) == (2.566, 13.15)
    assert (code["least_per_minute"], code["most_per_minute"]) == (0, 632)
    (arxiv,) = (DATA / "vidur/traces").glob("arxiv_*.csv")
    found = figures(arxiv)
    own = found["lengths"]
    assert found["requests"] == 28_257 and round(own["correlation"], 2) == -0.46
    assert [round(own["input_tokens"][key], 1) for key in ("mean", "median", "p90")] == [
        2588.1, 2730, 3702]
    assert [round(own["output_tokens"][key], 1) for key in ("mean", "median", "p90")] == [
        291.4, 167, 372]
    assert round(own["ratio"]["median"], 2) == 15.69
