"""Screens of a service: what keeps its limits at which rate, and what binds."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from screens import check_screen
from served import SERVED, served_schedule, service

from xgpt.cli.main import cli
from xgpt.core.constraint import Bound, deadline_bound
from xgpt.core.schedule_file import from_json, to_json
from xgpt.report.plan_screen import PlanTimes, plan_screen
from xgpt.report.service_words import percentile_rows, service_facts
from xgpt.report.table import schedule_details

SCREENS = Path(__file__).with_name("screens.txt")


def shown(**changes):
    return plan_screen(served_schedule(**changes), service(),
                       PlanTimes(source="vLLM on A40, computed", expected=None), "job.yaml",
                       is_here=False)


def facts(**changes):
    found, label = dict[str, str](), ""
    for name, text in service_facts(served_schedule(**changes)):
        label = name or label
        found[label] = " ".join(filter(None, (found.get(label), text)))
    return found


def test_a_service_has_its_figures_and_none_of_a_batch_job():
    explained = schedule_details(served_schedule())
    for screen in (shown(), explained):
        assert max(map(len, screen.splitlines())) <= 80 and "steady" not in screen
    assert "FT                     -        -        -  no rate keeps ttft_s 0.4" in explained
    assert "3     1,012  22,143   41.3  62.0     155  93 %  61 %         12  31 %" in explained
    check_screen(SCREENS, "a service", shown())


def test_what_was_not_proved_or_not_settled_or_not_asked_is_said():
    own = SERVED.search
    assert own is not None
    assert "; gap 3 % to the bound" in facts()["search"]
    assert facts(search=replace(own, by_estimate=0))["search"].endswith("none can be better")
    assert "NOT SETTLED" in facts(capacity=replace(SERVED.capacity, is_settled=False))["capacity"]
    assert "price" in facts()["capacity"] and "price" not in facts(price_per_hour=0.0)["capacity"]
    assert facts(attainment=None, wanted=None)["attainment"].startswith("no limit was set")
    # without a joint share each limit has its quantile beside it
    assert "400 ms P90" in shown(wanted=None) and "400 ms P90" not in shown()


def test_a_deadline_is_a_limit_on_the_latency_with_its_own_quantile():
    late = replace(SERVED.metrics[0], metric="latency", limit_s=6.0)
    rows = percentile_rows(replace(SERVED, wanted=None, metrics=(late,)), [
        Bound(limit_s=math.inf, kind="queries"), deadline_bound(6.0)])
    assert rows[0][6] == "6.00 s P95"


def test_an_attainment_is_never_rounded_up_to_what_was_asked_for():
    assert facts(attainment=0.8999)["attainment"].startswith("89.9 % of the requests")


def test_the_file_of_a_service_has_all_of_it():
    found = served_schedule()
    assert from_json(to_json(found)) == found and math.isinf(found.bound.limit_s)


@pytest.mark.slow
def test_simulate_tells_a_schedules_figures_at_a_rate_and_beyond_its_capacity(tmp_path):
    job, file = tmp_path / "job.yaml", tmp_path / "s.json"
    job.write_text("""{model: opt-125m, cluster: 1xA40, search: {queries: 200},
        workload: {task: S, arrivals: {rate: 2}}, constraint: {ttft_s: 1, attainment: 0.9},
        schedule: {policy: sarathi, max_active: 8, token_budget: 256}}""")
    xgpt = CliRunner()
    planned = xgpt.invoke(cli, ["schedule", str(job), "--out", str(file), "--json"])
    simulated = [json.loads(xgpt.invoke(cli, [
        "simulate", str(job), "--schedule", str(file), "--json", "--set",
        f"workload.arrivals.rate={rate}"]).stdout)["served"] for rate in (2, 5000)]
    assert json.loads(planned.stdout)["served"]["attainment"] == 1.0
    assert [one["attainment"] > 0.9 for one in simulated] == [True, False]
    assert simulated[0]["capacity"]["qps"] == simulated[1]["capacity"]["qps"] > 2
    refused = xgpt.invoke(cli, ["schedule", str(job), "--price"])
    assert refused.exit_code == 2 and "for batch jobs" in refused.stderr
