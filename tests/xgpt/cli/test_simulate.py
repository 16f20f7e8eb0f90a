"""`xgpt simulate`: every policy, the replay beside the closed form, pictures."""

import gzip
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from begun_runs import CONFIG, roofline
from click.testing import CliRunner

from jobs import job_file
from xgpt.app.opened_job import open_file
from xgpt.app.schedule import executable, plan_job
from xgpt.app.teller import LogTeller
from xgpt.cli.schedule import schedule, simulate
from xgpt.core.policies import policy as row_of
from xgpt.core.schedule_file import to_json

CONTROLS = {
    "rra": {"encode_batch": 30, "decode_iterations": 9},
    "waa-c": {"encode_batch": 6, "decode_micro_batches": 3},
    "waa-m": {"encode_batch": 6},
    "ft": {"encode_batch": 90, "decode_micro_batches": 4},
    "dsi": {"encode_batch": 90, "decode_micro_batches": 4, "encode_micro_batches": 12},
    "orca": {"max_active": 90},
    "vllm": {"max_active": 90},
    "sarathi": {"max_active": 90, "token_budget": 700},
}


@pytest.fixture
def job(tmp_path):
    return job_file(tmp_path, workload="{requests: {count: 1500}, task: S}",
                    constraint="{latency_s: 11.5, confidence: 0.5}")


def run(job: Path, *arguments: str, **controls: object):
    sets = [f"--set=schedule.{key}={value}" for key, value in controls.items()]
    return CliRunner().invoke(simulate, [str(job), *sets, *arguments], catch_exceptions=False)


@pytest.mark.parametrize("policy", CONTROLS)
def test_every_policy_agrees_with_its_replay_and_stays_within_80_columns(job, policy):
    done = run(job, policy=policy, **CONTROLS[policy])
    assert done.exit_code == 0
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert f"{row_of(policy).title}: " in done.stdout and "requests/s" in done.stdout
    found = json.loads(run(job, "--json", policy=policy, **CONTROLS[policy]).stdout)
    estimate, replayed = found["estimate"], found["replay"]
    assert estimate["controls"]["policy"] == policy
    figures = estimate["figures"]
    assert figures["throughput_qps"] == pytest.approx(replayed["steady_throughput_qps"], rel=0.1)
    assert figures["latency_s"] == pytest.approx(replayed["steady_latency_s"], rel=0.1)
    assert replayed["kv_peak_tokens"] > 0 and all(0 < s <= 1 for s in replayed["utilisation"])
    assert len(replayed["utilisation"]) == sum(
        len(pool["stages"]) for pool in estimate["deployment"]["pools"])


def test_the_timeline_is_drawn_and_traced(job, tmp_path):
    done = run(job, "--timeline", str(tmp_path / "pictures" / "t.svg"), policy="waa-c",
               **CONTROLS["waa-c"])
    assert done.exit_code == 0
    picture = ElementTree.fromstring((tmp_path / "pictures" / "t.svg").read_text("utf-8"))
    assert picture.tag.endswith("svg")
    words = "".join(picture.itertext())
    assert "encode" in words and "decode" in words and "GPU 0" in words
    with gzip.open(tmp_path / "pictures" / "t.trace.json.gz", "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    kinds = {event["ph"] for event in events}
    assert {"X", "M", "C"} <= kinds
    threads = {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"}
    assert len(threads) == 4, "one for each stage"


@pytest.mark.parametrize("policy", [pytest.param("ft", marks=pytest.mark.slow), "waa-c"])
def test_a_policy_without_variables_is_the_best_within_the_bound(job, policy):
    best = json.loads(run(job, "--json", policy=policy).stdout)["estimate"]["figures"]
    assert best["latency_s"] <= 11.5 and best["fits"]
    for batch in (5, 40, 200):
        other = json.loads(run(job, "--json", policy=policy, encode_batch=batch,
                               decode_micro_batches=4).stdout)["estimate"]["figures"]
        assert other["throughput_qps"] <= best["throughput_qps"] or other["latency_s"] > 11.5


@pytest.mark.parametrize(("controls", "engine", "policy"), [
    ("", "xgpt", None), ("policy: ft", "xgpt", "ft"), ("", "deepspeed", "ft"),
    pytest.param("policy: rra", "xgpt", "rra", marks=pytest.mark.slow),
    pytest.param("policy: orca", "xgpt", "orca", marks=pytest.mark.slow)])
def test_schedule_prints_what_submit_runs(tmp_path, monkeypatch, controls, engine, policy):
    monkeypatch.setattr("xgpt.app.schedule.timing_of", roofline)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "requests.jsonl").write_text("".join(json.dumps(
        {"tokens": [7, 8, 9] * (1 + i % 5), "max_tokens": 30 if i % 5 == 2 else 5}) + "\n"
        for i in range(24)))
    path = job_file(
        tmp_path, model=str(tmp_path), cluster="local", schedule=f"{{{controls}}}", output="out",
        workload="{requests: requests.jsonl, output_tokens: {mean: 9, std: 6, max: 40}}",
        run=f"{{ranks: 2, dtype: float32, threads_per_rank: 1, engine: {engine}}}")
    done = CliRunner().invoke(schedule, [str(path), "--json"], catch_exceptions=False)
    printed = json.loads(done.stdout)
    submitted = plan_job(executable(open_file(path, (), LogTeller(), "run"))).schedule
    ran: dict[str, Any] = json.loads(json.dumps(to_json(submitted)))
    assert printed["horizon"] == "job" and policy in (None, printed["policy"])
    for found in (printed, ran):
        del found["figures"]["memory_capacity_bytes"]  # which moves from second to second
    for key in ("policy", "controls", "deployment", "figures"):
        assert printed[key] == ran[key], key
    assert printed["proof"]["status"] == ran["proof"]["status"]


def test_systems_are_compared_on_one_screen_with_each_of_their_batches(tmp_path):
    job = job_file(tmp_path, workload="{requests: {count: 300}, task: T}")
    options = ("--systems", "fifo,s3,uellm-length", "--set=schedule.forecast=known",
               "--set=constraint.deadline_s=40")
    lines = run(job, *options).stdout.splitlines()
    assert len(lines) <= 25 and max(map(len, lines)) <= 80
    fifo, s3, by_length, *beside = json.loads(run(job, *options, "--json").stdout)["systems"]
    assert [row["name"] for row in beside] == ["RRA", "Sarathi"]
    for row in (fifo, s3, by_length):
        batches = row["batches"]
        assert sum(batch["requests"] for batch in batches) == 300
        assert sum(batch["late"] for batch in batches) == row["late"] > 0
        assert max(batch["requests"] for batch in batches) <= (20 if row is s3 else 10)
    assert not any(row["batches"] for row in beside)
    superfluous = [sum(batch["superfluous_tokens"] for batch in row["batches"])
                   for row in (fifo, by_length)]
    assert by_length["makespan_s"] < 0.8 * fifo["makespan_s"]
    assert superfluous[1] < 0.2 * superfluous[0]


@pytest.mark.parametrize(("options", "words"), [
    (["--systems", "s4"], "known: fifo, s3"),
    (["--systems", "s3", "--timeline", "a.html"], "leave")])
def test_systems_that_are_unknown_or_beside_a_timeline_are_refused(job, options, words):
    done = run(job, *options)
    assert done.exit_code == 2 and words in " ".join(done.output.split())


def test_the_level_of_doubt_stands_beside_every_form_of_a_plan(job):
    sets = [f"--set={one}" for one in (
        "plan.engine=vllm", "schedule.policy=orca", "constraint.latency_s=inf")]
    printed = json.loads(CliRunner().invoke(
        schedule, [str(job), *sets, "--json"], catch_exceptions=False).stdout)
    shown = " ".join(run(job, *sets).stdout.split())
    assert "computed; far: " in printed["times"] and printed["times"] in shown
