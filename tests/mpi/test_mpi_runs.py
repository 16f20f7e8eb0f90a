"""Real mpiexec runs of the whole command on toy models: exact, complete, and stopped in order."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="runs need the extra `run`")
import job_folder  # noqa: E402
import toys  # noqa: E402
from faults import alive, below  # noqa: E402
from given_runs import given, toy_plan  # noqa: E402
from job_folder import XGPT, as_requests, read_lines  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from xgpt.app.opened import open_file  # noqa: E402
from xgpt.core.errors import XgptError  # noqa: E402
from xgpt.core.job import FixedSchedule
from xgpt.core.queries import QueryLengths  # noqa: E402
from xgpt.core.schedule_file import load_schedule  # noqa: E402
from xgpt.launch.launcher import RankProgram  # noqa: E402
from xgpt.launch.local import LocalLauncher  # noqa: E402
from xprofiler.roofline import Roofline  # noqa: E402
from xrunner.io.results import read_held  # noqa: E402
from xsimulator.replay.job import replay_job  # noqa: E402
from xsimulator.rough.forms import fixed_estimate

pytestmark = pytest.mark.mpi


def write_job(folder: Path, model: Path, requests: list[dict[str, Any]], *, ranks: int,
              encode_batch: int = 3, decode_iterations: int = 4, more: str = "") -> Path:
    """`more`: of the schedule's keys. Stages of single ranks, unless it says otherwise."""
    if "tp_degree" not in more:
        more += "tp_degree: 1, "
    schedule = (f"policy: rra, encode_batch: {encode_batch}, {more} "
                f"decode_iterations: {decode_iterations}")
    return job_folder.write_job(folder, model, requests, schedule=schedule, ranks=ranks)


@pytest.fixture(scope="module", params=["llama", pytest.param("opt", marks=pytest.mark.slow)])
def model(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    return request.param, directory, toys.make_model(request.param, directory)


@pytest.mark.slow  # test_exact_runs.py has every number of ranks, test_several_jobs.py the command
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_submit_answers_exactly_as_generate_does(model, ranks, tmp_path, profiled):
    family, directory, reference = model
    queries = toys.random_queries(14, seed=ranks)
    requests: list[dict[str, Any]] = as_requests(queries)
    requests.insert(3, {"id": "bad", "tokens": []})
    requests.insert(7, {"id": "alien", "tokens": [1, toys.VOCAB + 4]})
    job = write_job(tmp_path, directory, requests, ranks=ranks)
    done = subprocess.run([*XGPT, "submit", str(job), "--json"], capture_output=True, text=True,
                          env=profiled(family, ranks), timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    results = read_lines(tmp_path / "out" / "results.jsonl")
    assert [r["id"] for r in results] == [q.id for q in queries]
    assert {r["id"]: r["output_ids"] for r in results} == {
        q.id: toys.generate(reference, q) for q in queries}
    errors = read_lines(tmp_path / "out" / "errors.jsonl")
    assert [(e["line"], e["id"]) for e in errors] == [(4, "bad"), (8, "alien")]
    metrics = json.loads(done.stdout)
    assert metrics["queries"] == 14 and metrics["errors"] == 2 and metrics["status"] == "done"
    assert metrics["throughput_qps"]["predicted"] > 0
    stages = load_schedule(tmp_path / "out" / "schedule.json").deployment.stages
    assert len(stages) == ranks
    read = [s["bytes_read"] for s in metrics["stages"]]
    size = (directory / "model.safetensors").stat().st_size
    assert ranks == 1 or max(read) < size, "a rank loaded the whole model"
    assert (tmp_path / "out" / "report.html").stat().st_size > 10_000


@pytest.mark.slow  # test_several_jobs.py has a job in groups, test_exact_runs.py every layout
def test_tensor_parallel_stages_run_where_the_job_or_the_schedule_asks_for_them(tmp_path, profiled):
    directory, out = tmp_path / "model", tmp_path / "out"
    reference = toys.make_model("llama", directory)
    queries = toys.random_queries(20, seed=2)
    job = write_job(tmp_path, directory, as_requests(queries), ranks=2,
                    more="tp_degree: 2, encode_chunk: 0,")
    cache = profiled("llama")

    def run(*command: str) -> None:
        done = subprocess.run([*XGPT, *command], capture_output=True, text=True, env=cache,
                              timeout=240, check=False)
        assert done.returncode == 0, done.stderr
        check_layout(out, [[0, 1]], (directory / "model.safetensors").stat().st_size)
        check_against_replay(job, queries, out)
        assert {r["id"]: r["output_ids"] for r in read_lines(out / "results.jsonl")} == {
            q.id: toys.generate(reference, q) for q in queries}

    run("submit", str(job))
    (out / "schedule.json").rename(tmp_path / "given.json")
    job = write_job(tmp_path, directory, as_requests(queries), ranks=2)
    run("run", str(job), "--schedule", str(tmp_path / "given.json"))


@pytest.mark.slow  # as above
def test_the_ranks_run_a_pipeline_of_different_degrees(tmp_path):
    """Without the command around them: a group of two and a rank alone, encoder and decoder."""
    directory, out = tmp_path / "model", tmp_path / "out"
    reference = toys.make_model("t5", directory)
    queries = toys.random_queries(20, seed=3)
    job = write_job(tmp_path, directory, as_requests(queries), ranks=3)
    problem = open_file(job).problem
    timing = Roofline(problem.model, problem.cluster.device, problem.dtype)
    estimate = fixed_estimate("rra", problem, timing, FixedSchedule(
        encode_batch=6, decode_iterations=4, tp_degree=2, tp_gpus=2))
    out.mkdir()
    given(estimate, problem, out / "schedule.json")
    plan = toy_plan(directory, out, query_kv_tokens=estimate.deployment.group_kv_tokens)
    toys.write_spool(plan, tmp_path / "requests.jsonl")
    LocalLauncher().run(RankProgram(module="xrunner.worker", argument=plan.save(), count=3),
                        watch=lambda: None)
    check_layout(out, [[0, 1], [2]], (directory / "model.safetensors").stat().st_size)
    check_against_replay(job, queries, out)
    assert {r["id"]: r["output_ids"] for r in read_lines(out / "results.jsonl")} == {
        q.id: toys.generate(reference, q) for q in queries}
    with pytest.raises(XgptError, match="launcher started 1"):
        LocalLauncher().run(RankProgram(module="xrunner.worker", argument=plan.save(), count=1),
                        watch=lambda: None)


def check_layout(out: Path, layout: list[list[int]], model_bytes: int) -> None:
    """Schedule and measurement speak of these ranks, of which each read its slice."""
    measured = json.loads((out / "measured.json").read_text())
    stages = load_schedule(out / "schedule.json").estimate.deployment.stages
    assert [list(stage.ranks) for stage in stages] == layout
    assert [s["ranks"] for s in measured["stages"]] == layout
    assert [(r["rank"], r["stage"]) for r in measured["ranks"]] == [
        (rank, s) for s, group in enumerate(layout) for rank in group]
    assert max(r["bytes_read"] for r in measured["ranks"]) < 0.75 * model_bytes


def check_against_replay(job: Path, queries: list[Any], out: Path) -> None:
    """The run's steps are those of the simulator's replay with the lengths it recorded."""
    estimate = load_schedule(out / "schedule.json").estimate
    results = {r["id"]: r["output_tokens"] for r in read_lines(out / "results.jsonl")}
    problem = open_file(job).problem
    replayed = replay_job(
        problem, Roofline(problem.model, problem.cluster.device, problem.dtype), estimate,
        QueryLengths(inputs=np.array([len(q.input_ids) for q in queries]),
                     outputs=np.array([results[q.id] for q in queries]),
                     most_outputs=np.array([q.max_new_tokens for q in queries]))).pools[0]
    expected = [(step.kind.value, step.group, step.phase, step.iteration, int(encoded or decoded))
                for step, encoded, decoded in zip(replayed.steps, replayed.encoded,
                                                  replayed.decoded, strict=True)]
    for stage in estimate.deployment.stages:
        taken = [(r["kind"], r["group"], r["phase"], r["iteration"], r["queries"])
                 for r in read_lines(out / "steps.jsonl")
                 if r["stage"] == stage.index and r["kind"] != "cross_kv"]
        assert taken == expected


def start_long_run(folder: Path, directory: Path, cache: dict[str, str],
                   more: str = "") -> subprocess.Popen[str]:
    requests = [{"id": f"q{i}", "tokens": [7, 8, 9], "forced_tokens": 40} for i in range(400)]
    job = write_job(folder, directory, requests, ranks=2, more=more)
    process = subprocess.Popen([*XGPT, "submit", str(job), "--json", "--set", "run.restarts=0"],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               env=cache)
    results = folder / "out" / "results.jsonl"
    deadline = time.monotonic() + 200
    while not (results.is_file() and results.read_bytes().count(b"\n") >= 12):
        assert process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process


@pytest.mark.slow  # test_faults.py has ranks that die, and are started again by the same command
@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="finds ranks in /proc")
def test_a_killed_rank_ends_the_run_with_a_valid_prefix_and_the_rest_can_follow(
        tmp_path, tmp_path_factory, profiled):
    directory, cache = tmp_path_factory.mktemp("killed"), profiled("llama")
    reference = toys.make_model("llama", directory)
    # in random order within windows: results are a prefix of the input all the same
    process = start_long_run(tmp_path, directory, cache, more="shuffle: 20,")
    pids = below(process.pid)["rank"]
    assert len(pids) == 2
    os.kill(pids[-1], signal.SIGKILL)
    printed, messages = process.communicate(timeout=60)
    assert process.returncode == 1 and "Traceback" not in messages, messages
    assert not alive(pids), "ranks die together"
    text = (tmp_path / "out" / "results.jsonl").read_bytes()
    whole = text[:text.rfind(b"\n") + 1].splitlines()
    assert 12 <= len(whole) < 400
    assert [json.loads(line)["id"] for line in whole] == [f"q{i}" for i in range(len(whole))]
    held = read_held(tmp_path / "out" / "held.jsonl", len(whole))
    done = len(whole) + len(held)
    told = json.loads(printed)
    assert "the ranks failed" in told["error"]
    assert (told["queries"], told["queries_total"]) == (done, 400)
    state = subprocess.run([*XGPT, "status", str(tmp_path / "job.yaml"), "--json"], text=True,
                           capture_output=True, env=cache, timeout=60, check=True).stdout
    assert (json.loads(state)["state"], json.loads(state)["done"]) == ("died", done)

    again = subprocess.run([*XGPT, "submit", str(tmp_path / "job.yaml")], capture_output=True,
                           text=True, env=cache, timeout=240, check=False)
    assert again.returncode == 0, again.stderr
    assert f"going on after the {done} queries" in again.stderr
    results = read_lines(tmp_path / "out" / "results.jsonl")
    assert [r["id"] for r in results] == [f"q{i}" for i in range(400)]
    assert all(results[i] == json.loads(line) for i, line in [*enumerate(whole), *held.items()])
    measured = json.loads((tmp_path / "out" / "measured.json").read_text())
    assert (measured["queries_before"], measured["queries"]) == (done, 400 - done)
    query = toys.PreparedQuery(index=0, id="q0", input_ids=(7, 8, 9), max_new_tokens=40,
                               is_forced=True)
    expected = toys.generate(reference, query)
    assert all(r["output_ids"] == expected for r in results)


@pytest.mark.slow  # test_several_jobs.py has one, and what goes on after it
def test_an_interrupt_stops_in_good_order_with_exit_code_75(tmp_path, tmp_path_factory, profiled):
    directory = tmp_path_factory.mktemp("interrupted")
    toys.make_model("llama", directory)
    process = start_long_run(tmp_path, directory, profiled("llama"))
    process.send_signal(signal.SIGINT)
    printed, messages = process.communicate(timeout=60)
    assert process.returncode == 75, messages
    results = read_lines(tmp_path / "out" / "results.jsonl")
    assert 12 <= len(results) < 400
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert metrics["status"] == "stopped"
    assert metrics["queries"] == len(results) + metrics["queries_held"]
    assert metrics["throughput_qps"]["predicted"] is None
    told = json.loads(printed)
    assert told["exit_code"] == 75 and {key: told[key] for key in metrics} == metrics
    assert told["results"] == str(tmp_path / "out" / "results.jsonl")
    assert told["queries_total"] == 400
    assert (tmp_path / "out" / "report.html").is_file()


def test_a_model_that_lacks_a_layer_is_refused_before_anything_is_measured(
        tmp_path, cache, tmp_path_factory):
    directory = tmp_path_factory.mktemp("broken")
    toys.make_model("llama", directory)
    weights = directory / "model.safetensors"  # less by a layer than the config says
    save_file({name: tensor for name, tensor in load_file(weights).items()
               if not name.startswith("model.layers.4.")}, weights)
    job = write_job(tmp_path, directory, as_requests(toys.random_queries(14)), ranks=2)
    done = subprocess.run([*XGPT, "submit", str(job)], capture_output=True, text=True, env=cache,
                          timeout=240, check=False)
    assert done.returncode == 2 and "profile" not in done.stderr
    assert "model.layers.4" in done.stderr and "no such tensor" in done.stderr
