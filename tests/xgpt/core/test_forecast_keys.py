"""Forecasts and admission as a job asks for them: keys, columns, entry points, earlier runs."""

import json

import pytest

from xgpt.app.opened_job import open_job
from xgpt.app.teller import LogTeller
from xgpt.core.controls import Admission, Forecasting
from xgpt.core.errors import InputError
from xgpt.job.job_file import load_job

JOB = ("model: opt-125m\ncluster: a40-4\n"
       "workload: {requests: FILE, output_tokens: {mean: 9, std: 1, max: 20}}\n")
LINES = [{"tokens": [1, 2], "forced_tokens": 7, "forecast_tokens": 5},
         {"tokens": [3], "forced_tokens": 3, "forecast_tokens": 900}, {"tokens": [4, 4, 4]}]


def opened(folder, *overrides, lines=LINES, text=JOB):
    (folder / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    (folder / "job.yaml").write_text(text.replace("FILE", "a.jsonl"))
    return open_job(load_job(folder / "job.yaml", overrides), LogTeller(), "lengths")


def mistakes(folder, *overrides, **keys):
    with pytest.raises(InputError) as refused:
        opened(folder, *overrides, **keys)
    return [(one.key, one.allowed) for one in refused.value.mistakes]


@pytest.mark.parametrize(("given", "asked"), [
    ({}, Admission()),
    ({"admission": "auto", "forecast": "cap"}, Admission()),
    ({"admission": "future-peak"}, Admission(rule="future-peak")),
    ({"admission": {"rule": "reserve-dynamic", "after_free": True}},
     Admission(rule="reserve-dynamic", after_free=True)),
    ({"forecast": "known"}, Admission(forecast=Forecasting(kind="known"))),
    ({"forecast": {"kind": "distribution", "use": "expected"}},
     Admission(forecast=Forecasting(kind="distribution", use="expected"))),
    ({"policy": "lightllm"}, Admission(forecast=Forecasting(kind="known"))),
    ({"policy": "lightllm", "forecast": "cap"}, Admission()),
    ({"forecast": {"kind": "class", "width": 100, "accuracy": 0.8, "bins": 2}},
     Admission(forecast=Forecasting(kind="class", width=100, accuracy=0.8, bins=2)))])
def test_what_a_job_asks_for(tmp_path, given, asked):
    (tmp_path / "job.yaml").write_text("model: opt-13b\ncluster: a40-4\nworkload: {task: S}\n"
                                       f"schedule: {json.dumps(given)}\n")
    job = load_job(tmp_path / "job.yaml")
    assert job.adjustment.admission == asked
    assert job.schedule.policies == (("lightllm",) if "policy" in given else () if (
        not asked.may_overflow) else ("rra", "ft", "dsi", "orca", "vllm", "sarathi"))


def test_a_column_has_forecasts_within_the_caps(tmp_path):
    found = opened(tmp_path, "schedule.forecast=column", lines=LINES[:2])
    assert found.problem.queries.forecasts.tolist() == [[5, 5, 5], [3, 3, 3]]
    table = 'tokens,forecast_tokens\n"[1,2]",4\n"[3]",2\n'
    (tmp_path / "b.csv").write_text(table)
    (tmp_path / "job.yaml").write_text(JOB.replace("FILE", "b.csv"))
    found = open_job(load_job(tmp_path / "job.yaml", ["schedule.forecast=column"]), LogTeller(),
                     "lengths")
    assert found.problem.queries.forecasts[:, 0].tolist() == [4, 2]


@pytest.mark.parametrize(("forecast", "needed"), [
    ("column", "forecast_tokens"), ("known", "forced_tokens"),
    ("{kind: class, accuracy: 0.8}", "forced_tokens")])
def test_lines_without_the_length_that_a_forecast_needs_are_counted(tmp_path, forecast, needed):
    (key, allowed), = mistakes(tmp_path, f"schedule.forecast={forecast}")
    assert key == "schedule.forecast"
    assert f"have {needed}: 1 of 3 do not, the first in " in allowed
    assert allowed.endswith("line 3")


def test_a_column_needs_a_file_and_lengths_that_are_made_are_known(tmp_path):
    made = JOB.replace("FILE", "{count: 5}, input_tokens: {mean: 9, std: 1, max: 20}")
    assert mistakes(tmp_path, "schedule.forecast=column", text=made)[0][0] == "schedule.forecast"
    assert opened(tmp_path, "schedule.forecast=known", text=made).problem.is_synthetic


def test_a_model_of_two_halves_evicts_nothing(tmp_path):
    model = JOB.replace("opt-125m", "t5-11b")
    assert mistakes(tmp_path, "schedule.admission=greedy", text=model)[0][0] == "schedule.admission"
    opened(tmp_path, "schedule.admission=future-peak", text=model)
    batches = "schedule={policy: ft, batches: {}, forecast: mean}"
    assert mistakes(tmp_path, batches, text=model)[0][0] == "schedule.forecast"
    opened(tmp_path, batches.replace("mean", "cap"), text=model)


def test_an_entry_point_forecasts_by_input_tokens_and_text(tmp_path, monkeypatch):
    package = tmp_path / "toy_forecasts-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Name: toy-forecasts\nVersion: 1\n")
    (package / "entry_points.txt").write_text(
        "[xgpt.forecasts]\ntoy = toy_forecasts:of\nodd = toy_forecasts:odd\n")
    (tmp_path / "toy_forecasts.py").write_text(
        "def of(tokens, text):\n    return (tokens, tokens + 1, 10 + len(text))\n"
        "def odd(tokens, text):\n    return 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = opened(tmp_path, "schedule.forecast=toy")
    assert found.problem.queries.forecasts.tolist() == [[2, 3, 7], [1, 2, 3], [3, 4, 10]]
    with pytest.raises(Exception, match="xgpt.forecasts odd: 0 is no forecast"):
        opened(tmp_path, "schedule.forecast=odd")


def test_forecasts_are_learned_of_what_the_latest_run_in_the_folder_finished(tmp_path):
    def pairs(*overrides):
        lengths = opened(tmp_path, "output=out", *overrides).problem.learned
        return None if lengths is None else lengths.pairs.tolist()

    assert pairs("schedule.forecast=mean") is None
    (tmp_path / "out" / "earlier-1").mkdir(parents=True)
    row = {"input_tokens": 3, "output_tokens": 5}
    batch = {"response": {"body": {"usage": {"prompt_tokens": 8, "completion_tokens": 9}}}}
    failed = {"input_tokens": 3, "output_tokens": 0}
    aside = tmp_path / "out" / "earlier-1" / "results.jsonl"
    aside.write_text("".join(json.dumps(one) + "\n" for one in (row, batch, failed)) + "{torn")
    assert pairs("schedule.forecast=mean") == [[3, 5], [8, 9]]
    assert pairs("schedule.forecast=class") == [[3, 5], [8, 9]]
    assert pairs() is None
    (tmp_path / "out" / "results.jsonl").write_text(json.dumps({**row, "output_tokens": 6}) + "\n")
    assert pairs("schedule.forecast=mean") == [[3, 6]]
