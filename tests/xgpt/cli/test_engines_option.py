"""`xgpt schedule --engines`: every engine's best schedule side by side, by whose times, and what
each does not execute."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from jobs import job_file
from xgpt.app import what_if
from xgpt.app.opened import OpenedJob, open_file
from xgpt.cli import schedule as command
from xgpt.core.engines import engine_names
from xgpt.core.errors import InfeasibleError
from xgpt.job.job import Job
from xgpt.report.what_if_tables import EngineRow, engine_table
from xrunner.backends.engine import Engine
from xscheduler.planner import PlanOptions


@pytest.fixture
def job(tmp_path):
    return job_file(
        tmp_path, model="opt-1.3b", workload="{requests: {count: 300}, task: S}",
        cluster="{device: A40, num_nodes: 1, devices_per_node: 1, intra_link: pcie4-x16}",
        constraint="{latency_s: 8}",
        schedule="{policy: rra, encode_batch: 16, decode_iterations: 8, encode_chunk: 0}")


def run(job: Path, *arguments: str) -> Result:
    return CliRunner().invoke(command.schedule, [str(job), "--engines", *arguments])


def test_engines_stand_side_by_side_with_whose_times_they_were_planned(job):
    done = run(job)
    assert done.exit_code == 0 and max(map(len, done.stdout.splitlines())) <= 80
    table = done.stdout.partition("\nEngines, each")[2].splitlines()
    assert table[1].split() == ["engine", "queries/s", "latency", "within", "8.00", "s", "policy",
                                "times"]
    assert [line.split()[0] for line in table[3:6]] == list(engine_names()[:3])
    found = json.loads(run(job, "--json").stdout)
    rows = {row["engine"]: row for row in found["engines"]}
    own, vllm, deepspeed = rows["xgpt"], rows["vllm"], rows["deepspeed"]
    # ours is the plan that is printed above; the other's is by constants of its own
    assert own["throughput_qps"] == found["throughput_qps"] and own["times_of"] == "roofline"
    assert own["latency_s"] == found["latency_s"] <= own["bound_s"] == 8 and own["is_kept"]
    assert vllm["times_of"] == "roofline of vllm" and vllm["is_kept"]
    assert vllm["throughput_qps"] != own["throughput_qps"]
    assert vllm["policy"] == own["policy"] == "rra"
    alone = json.loads(CliRunner().invoke(command.schedule, [
        str(job), "--json", "--set=run.engine=vllm"]).stdout)
    assert vllm["throughput_qps"] == alone["throughput_qps"]
    # by its own reason, that of the policy named, and nothing else of the table
    (refused,) = deepspeed["refused"]
    assert refused.startswith("schedule.policy: ft or dsi")
    assert "throughput_qps" not in deepspeed and deepspeed["is_kept"] is None


def test_a_bound_that_no_engine_keeps_is_told_of_each(job):
    done = run(job, "--set=constraint.latency_s=0.01")
    assert isinstance(done.exception, InfeasibleError)
    rows = {row["engine"]: row for row in done.exception.details["engines"]}
    assert [rows[name]["is_kept"] for name in ("xgpt", "vllm")] == [False, False]
    assert "tightest" in rows["vllm"]["infeasible"]
    assert done.stdout.count("no schedule  ") == 2


def test_what_is_not_installed_is_planned_by_its_constants_and_says_so(job, monkeypatch):
    monkeypatch.setattr(what_if, "_missing", lambda engine, opened: "there is none here")
    opened = open_file(job, ["cluster=local", "run.ranks=1", "constraint.latency_s=inf"])
    row = what_if._row(opened, "vllm", PlanOptions(horizon="steady"))
    assert row.schedule is not None and row.times_of == "roofline of vllm"
    assert row.missing == "there is none here" and not row.note
    assert row.is_kept is None, "there is no bound"
    text = engine_table([row, EngineRow(engine="other", refused=("a: b",))],
                        replace(opened.problem.constraint.latency, limit_s=math.inf))
    assert "cannot run here as it is: there is none here" in text
    assert "does not execute this job: a: b" in text


def test_another_engine_is_found_by_its_python_and_has_the_cores_of_all_ranks(job, monkeypatch):
    monkeypatch.setattr(what_if, "usable_cores", lambda: 6)
    seen: list[Job] = []

    def missing(engine: Engine, opened: OpenedJob) -> str:
        seen.append(opened.job)
        return "as it is"

    monkeypatch.setattr(what_if, "_missing", missing)
    opened = open_file(job, ["cluster=local", "run.ranks=2", "run.threads_per_rank=2",
                             "constraint.latency_s=inf"])
    options = PlanOptions(horizon="steady")
    row = what_if._row(opened, "vllm", options, "/opt/vllm/bin/python")
    assert row.schedule is not None and not row.refused
    assert (seen[0].run.engine_python, seen[0].run.ranks, seen[0].run.threads_per_rank) == (
        "/opt/vllm/bin/python", None, 4)
    other = what_if._as_executed_by("deepspeed", opened, "/opt/vllm/bin/python").run
    assert (other.engine_python, other.ranks, other.threads_per_rank) == (None, 2, 2)


def test_few_devices_are_asked_of_our_own_engine_alone(job):
    """vLLM divides each layer over all of them: a row of it beside fewer would compare nothing."""
    job.write_text(job.read_text().replace("devices_per_node: 1", "devices_per_node: 2")
                   + "objective: devices\n")
    found = json.loads(run(job, "--json").stdout)
    rows = {row["engine"]: row for row in found["engines"]}
    assert rows["vllm"]["refused"] == ["objective: throughput with run.engine vllm"]
    assert rows["xgpt"]["is_kept"]
