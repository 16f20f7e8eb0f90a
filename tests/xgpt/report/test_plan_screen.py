"""The screen of a plan: whose times, and comparisons of what was searched."""

import re
from dataclasses import replace
from functools import cache

import pytest

import xgpt
from xgpt.app.schedule import Plan
from xgpt.report.figures import plain
from xgpt.report.table import figures_of


@cache
def planned(cluster: str, engine: str | None = None) -> Plan:
    """A plan of a model that one GPU holds, by one of three policies."""
    return xgpt.plan(xgpt.load({
        "model": "opt-1.3b", "cluster": cluster, "schedule": {"policy": ["rra", "sarathi", "ft"]},
        "workload": {"task": "S", "requests": {"count": 400}}, "plan": {"engine": engine}}))


@pytest.mark.parametrize(("cluster", "engine", "words"), [
    ("1xH100", None, r"vLLM on H100, computed; far: .* were not measured; typical error \d+%"),
    ("1xH100", "xgpt", "xgpt's own runner on H100, computed; unknown engine: no run of xgpt was "
     "compared"),
    ("1xH100", "vllm-0.32", r"vLLM 0.32 on H100, computed; far: this version of the engine, .* "
     r"were not measured"),
    ("2xA40", None, "unknown engine")])
def test_a_plan_says_whose_times_it_has_and_how_far_off_those_were(cluster, engine, words):
    shown = " ".join(str(planned(cluster, engine)).split())
    assert re.search(words, shown), shown


def test_other_engines_times_of_the_same_schedule_are_shown_where_they_differ():
    plan = planned("1xH100")
    shown = dict(plan.by_engine)
    assert "vLLM with fp8 weights" in str(plan) and shown
    own = plan.prediction
    assert own is not None
    assert all(abs(seconds / own.wall_s - 1) > 0.05 for seconds in shown.values())


def test_alternatives_have_a_range_and_no_percentage():
    """Their searches end once they cannot win: what was found, and an upper bound."""
    screen = str(planned("2xA40"))
    table = screen[screen.index("alternative "):]
    assert "steady requests/s  upper bound" in table and "%" not in table
    for line in table.splitlines()[2:]:
        if found := re.match(r"(RRA|Sarathi|FT) +([\d.]+) +([\d.]+) ", line):
            assert float(found[2]) <= float(found[3])


def test_a_counted_job_shows_its_time_and_mean_rate_first_and_the_steady_rate_behind():
    """Start and end are much of 400 requests: the job never has what the steady rate promises."""
    plan = planned("2xA40")
    own, steady = plan.prediction, plan.schedule.figures
    assert own is not None and own.throughput_qps * own.wall_s == pytest.approx(400)
    assert own.throughput_qps < steady.throughput_qps
    for text in (str(plan), plan.details):
        rates = {line[:13].strip(): line[13:] for line in text.splitlines() if "tokens/s" in line}
        assert [*rates] == ["throughput", "steady rate"]
        assert rates["throughput"].startswith(f"{plain(own.throughput_qps)} requests/s")
        assert rates["steady rate"].startswith(f"{plain(steady.throughput_qps)} requests/s")
    figures = figures_of(own)
    assert figures is not None and figures["throughput_qps"] == own.throughput_qps


def test_a_plan_of_the_steady_state_has_no_figures_of_a_job():
    plan = replace(planned("2xA40"), horizon="steady")
    assert figures_of(plan.prediction) is None
    assert [line[:10] for line in str(plan).splitlines() if "tokens/s" in line] == ["throughput"]
    assert "in steady state" in str(plan)


@pytest.mark.parametrize(("dtype", "policy", "command"), [
    ("int8", "sarathi", "yaml --export vllm, with vLLM by itself"),
    ("fp8", "sarathi", "yaml --export vllm, with vLLM by itself"),
    ("fp8", "ft", "--set schedule.policy=sarathi --export vllm"),
    ("bfloat16", "sarathi", "xgpt submit")])
def test_weights_of_eight_bits_on_gpus_are_vllms_own(tmp_path, monkeypatch, dtype, policy, command):
    """No runner under xgpt multiplies them there, and vLLM has no batches of FT."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(
        f"{{model: opt-1.3b, cluster: 1xH100, run: {{weight_dtype: {dtype}}}, schedule: {{policy: "
        f"{policy}}}, workload: {{task: S, requests: {{count: 40}}}}, plan: {{engine: vllm}}}}\n")
    shown = str(xgpt.plan(xgpt.load(tmp_path / "job.yaml")))
    assert command in shown[shown.index("run it:"):].splitlines()[0]
