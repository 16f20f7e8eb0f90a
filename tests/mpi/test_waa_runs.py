"""WAA by the whole command: `xgpt run` and `xgpt submit` over two pools of ranks."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="runs need the extra `run`")
import job_folder  # noqa: E402
import toys  # noqa: E402
from given_runs import given  # noqa: E402
from job_folder import XGPT, as_requests, read_lines  # noqa: E402

from xgpt.app.opened import open_file  # noqa: E402
from xgpt.core.job import FixedSchedule
from xgpt.core.schedule_file import load_schedule  # noqa: E402
from xprofiler.roofline import Roofline  # noqa: E402
from xsimulator.rough.forms import fixed_estimate

pytestmark = pytest.mark.mpi


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    directory = tmp_path_factory.mktemp("llama")
    return directory, toys.make_model("llama", directory)


def write_job(folder: Path, model: Path, requests: list[dict[str, Any]]) -> Path:
    return job_folder.write_job(folder, model, requests, ranks=2,
                                schedule="policy: waa-c, encode_batch: 1, encode_chunk: 0")


def give_schedule(folder: Path, job: Path, config: FixedSchedule) -> Path:
    """What the simulator makes of `config`, as a schedule to run."""
    problem = open_file(job).problem
    timing = Roofline(problem.model, problem.cluster.device, problem.dtype)
    path = folder / "given.json"
    given(fixed_estimate("waa-c", problem, timing, config), problem, path)
    return path


def call(*arguments: str, cache: dict[str, str]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*XGPT, *arguments], capture_output=True, text=True, env=cache,
                          timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done


def check_run(out: Path, reference: Any, queries: list[Any]) -> None:
    results = read_lines(out / "results.jsonl")
    assert [r["id"] for r in results] == [q.id for q in queries]
    assert {r["id"]: r["output_ids"] for r in results} == {
        q.id: toys.generate(reference, q) for q in queries}
    measured = json.loads((out / "measured.json").read_text())
    estimate = load_schedule(out / "schedule.json").estimate
    assert [(s["role"], s["ranks"]) for s in measured["stages"]] == [
        (p.role, list(s.ranks)) for p in estimate.deployment.pools for s in p.stages]
    encode, decode = ([s for s in measured["stages"] if s["role"] == role]
                      for role in ("encode", "decode"))
    sent = sum(s["handover_bytes"] for s in encode)
    assert sent == sum(s["handover_bytes"] for s in decode) > 0
    assert all(s["handover_s"] > 0 for s in encode)
    steps = read_lines(out / "steps.jsonl")
    assert all(s["kind"] == s["role"] for s in steps)
    assert {s["stage"] for s in steps} == {s.index for s in estimate.deployment.stages}
    assert sum(s["queries"] for s in steps if s["stage"] == 0) == len(queries)
    assert (out / "report.html").stat().st_size > 10_000


def test_submit_runs_the_policy_that_the_job_fixes(llama, tmp_path, profiled):
    directory, reference = llama
    queries = toys.random_queries(40, seed=6)
    job = write_job(tmp_path, directory, as_requests(queries))
    # in blocks, as on GPUs: tests/mpi/test_exact_runs.py has WAA in rows
    done = call("submit", str(job), "--json", "--set", "run.kv_layout=blocks",
                cache=profiled("llama"))
    metrics = json.loads(done.stdout)
    assert metrics["status"] == "done" and metrics["queries"] == 40
    assert metrics["throughput_qps"]["predicted"] > 0
    assert load_schedule(tmp_path / "out" / "schedule.json").estimate.policy == "waa-c"
    assert json.loads((tmp_path / "out" / "run.json").read_text())["kv_in_blocks"] is True
    check_run(tmp_path / "out", reference, queries)


@pytest.mark.slow  # test_exact_runs.py has such pools on ranks
def test_a_decode_pool_that_encodes_inputs_as_well(llama, tmp_path, profiled):
    directory, reference = llama
    queries = toys.random_queries(60, seed=7)
    job = write_job(tmp_path, directory, as_requests(queries))
    path = tmp_path / "given.json"
    problem = open_file(job).problem
    estimate = fixed_estimate("waa-m", problem, Roofline(
        problem.model, problem.cluster.device, problem.dtype),
            FixedSchedule(encode_batch=2, encode_chunk=7))
    given(estimate.changed(max_in_system=20, planned_active=16, kv_tokens=2000), problem, path)
    call("run", str(job), "--schedule", str(path), cache=profiled("llama"))
    out = tmp_path / "out"
    assert {r["id"]: r["output_ids"] for r in read_lines(out / "results.jsonl")} == {
        q.id: toys.generate(reference, q) for q in queries}
    steps = read_lines(out / "steps.jsonl")
    encode, decode = ([s for s in steps if s["stage"] == stage] for stage in (0, 1))
    assert {s["kind"] for s in encode} == {"encode"}
    assert {"mixed", "decode"} <= {s["kind"] for s in decode}
    assert 0 < sum(s["queries"] for s in encode) < len(queries), "both encode"
    handed = json.loads((out / "measured.json").read_text())["stages"][1]["handover_bytes"]
    assert handed > 0


@pytest.mark.slow
def test_a_stopped_run_ends_in_good_order_and_goes_on(llama, tmp_path, profiled):
    directory, reference = llama
    environment = profiled("llama")
    requests = [{"id": f"q{i}", "tokens": [7, 8, 9], "forced_tokens": 40} for i in range(200)]
    job = write_job(tmp_path, directory, requests)
    given = give_schedule(tmp_path, job, FixedSchedule(encode_batch=2))
    command = [*XGPT, "run", str(job), "--schedule", str(given)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                               text=True, env=environment)
    path = tmp_path / "out" / "results.jsonl"
    deadline = time.monotonic() + 200
    while not (path.is_file() and path.read_bytes().count(b"\n") >= 12):
        assert process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, messages = process.communicate(timeout=60)
    assert process.returncode == 75, messages
    before = len(read_lines(path))
    assert 12 <= before < 200
    assert json.loads((tmp_path / "out" / "measured.json").read_text())["state"] == "stopped"
    done = call(*command[len(XGPT):], cache=environment)
    assert f"going on after the {before} queries" in done.stderr
    results = read_lines(path)
    assert [r["id"] for r in results] == [f"q{i}" for i in range(200)]
    expected = toys.generate(reference, toys.PreparedQuery(
        index=0, id="q0", input_ids=(7, 8, 9), max_new_tokens=40, is_forced=True))
    assert all(r["output_ids"] == expected for r in results)
