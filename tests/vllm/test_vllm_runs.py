"""vLLM executes our schedules: greedy float32 tokens are `generate`'s, steps are the replay's, and
a killed engine loses nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the reference needs the extra `run`")
import by_data_sheets  # noqa: E402
import toys  # noqa: E402
from given_runs import given, toy_plan  # noqa: E402
from job_folder import XGPT, as_requests, read_lines, write_job  # noqa: E402
from replayed import problem_of  # noqa: E402

from xgpt.app.opened import open_file  # noqa: E402
from xgpt.core.job import FixedSchedule
from xgpt.core.problem import Problem  # noqa: E402
from xgpt.core.queries import QueryLengths  # noqa: E402
from xgpt.core.schedule_file import load_schedule  # noqa: E402
from xprofiler.profile import TableKey  # noqa: E402
from xprofiler.profile_file import load_profile  # noqa: E402
from xprofiler.roofline import Roofline  # noqa: E402
from xsimulator.replay.job import replay_job  # noqa: E402
from xsimulator.rough.forms import fixed_estimate

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
QUERIES = toys.random_queries(30)


def written(folder: Path, model: Path, python: str, schedule: str, **more: Any) -> Path:
    requests: list[dict[str, Any]] = as_requests(QUERIES)
    requests.insert(3, {"id": "bad", "tokens": []})
    job = write_job(folder, model, requests, schedule=schedule, ranks=1)
    text = job.read_text().replace("run: {", f"run: {{engine: vllm, engine_python: {python}, ")
    job.write_text(text)
    return job


def command(job: Path, *overrides: str, xgpt: Sequence[str] = XGPT) -> list[str]:
    return [*xgpt, "submit", str(job), "--json",
            *(part for override in overrides for part in ("--set", override))]


def submit(job: Path, environment: dict[str, str], xgpt: Sequence[str] = XGPT) -> dict[str, Any]:
    done = subprocess.run(command(job, xgpt=xgpt), capture_output=True, text=True,
                          env=environment, timeout=800, check=False)
    assert done.returncode == 0, done.stderr
    metrics: dict[str, Any] = json.loads(done.stdout)
    return metrics


def answers(out: Path) -> dict[str, list[int]]:
    return {line["id"]: line["output_ids"] for line in read_lines(out / "results.jsonl")}


def test_a_job_is_executed_exactly(tmp_path, toy, vllm_python, cache):
    folder, model = toy
    job = written(tmp_path, folder, vllm_python, "policy: rra, encode_batch: 5, "
                  "decode_iterations: 4, decode_micro_batches: 2, encode_chunk: 0")
    metrics, out = submit(job, cache), tmp_path / "out"
    assert metrics["status"] == "done" and metrics["engine"] == "vllm"
    assert answers(out) == {q.id: toys.generate(model, q) for q in QUERIES}
    assert [line["id"] for line in read_lines(out / "errors.jsonl")] == ["bad"]
    assert metrics["throughput_qps"]["predicted"] > 0  # by times that were measured of vLLM
    assert load_schedule(out / "schedule.json").controls.policy == "rra"
    profile = json.loads((out / "profile.json").read_text())
    assert profile["metadata"]["kernels"].startswith("vllm")
    assert logged(out) == replayed(open_file(job).problem, out)


@pytest.mark.parametrize(("policy", "config"), [
    ("sarathi", FixedSchedule(max_active=7, token_budget=16)),
    ("vllm", FixedSchedule(max_active=6, token_budget=24)),
    ("orca", FixedSchedule(max_active=6))], ids=["sarathi", "vllm", "orca"])
def test_a_schedule_is_executed_exactly(tmp_path, toy, asked, policy, config):
    """Without the command around the engine's process."""
    (folder, model), out = toy, tmp_path / "out"
    out.mkdir()
    expected = {q.id: toys.generate(model, q) for q in QUERIES}
    problem = problem_of(folder, np.array([[len(q.input_ids), len(expected[q.id])]
                                           for q in QUERIES]), devices=1)
    estimate = fixed_estimate(policy, problem, roofline(problem), config)
    given(estimate, problem, out / "schedule.json")
    requests = tmp_path / "requests.jsonl"
    requests.write_text("".join(json.dumps(line) + "\n" for line in as_requests(QUERIES)))
    plan = replace(toy_plan(folder, out, query_kv_tokens=100), engine="vllm")
    toys.write_spool(plan, requests)
    assert asked(run=str(plan.save())) == {}
    assert answers(out) == expected
    assert logged(out) == replayed(problem, out)


def test_what_is_drawn_does_not_depend_on_chunks(tmp_path, toy, asked):
    """vLLM draws after each chunk and gives it up; its CPU generators cannot be set back."""
    found = []
    for name, budget in (("chunks", 5), ("whole", 500)):
        out = tmp_path / name
        out.mkdir()
        problem = problem_of(toy[0], np.array([[len(q.input_ids), q.max_new_tokens]
                                               for q in QUERIES]), devices=1)
        estimate = fixed_estimate("sarathi", problem, roofline(problem),
            FixedSchedule(max_active=4, token_budget=budget))
        given(estimate, problem, out / "schedule.json")
        requests = tmp_path / f"{name}.jsonl"
        requests.write_text("".join(json.dumps(line | {"temperature": 1.0, "seed": 7}) + "\n"
                                    for line in as_requests(QUERIES)))
        plan = replace(toy_plan(toy[0], out, query_kv_tokens=100), engine="vllm")
        toys.write_spool(plan, requests)
        assert asked(run=str(plan.save())) == {}
        found.append(answers(out))
    assert found[0] == found[1] and len(found[0]) == len(QUERIES)
    assert found[0] != {q.id: toys.generate(toy[1], q) for q in QUERIES}, "drawn, not greedy"


def test_two_processes_divide_each_layer(tmp_path, toy, vllm_python, cache):
    """Its own tensor parallelism: what its processes tell each other is in the steps' times."""
    folder, model = toy
    job = written(tmp_path, folder, vllm_python, "policy: rra, encode_batch: 5, "
                  "decode_iterations: 4, decode_micro_batches: 1, encode_chunk: 0")
    job.write_text(job.read_text().replace("ranks: 1", "ranks: 2"))
    metrics, out = submit(job, cache), tmp_path / "out"
    assert metrics["status"] == "done" and metrics["throughput_qps"]["predicted"] > 0
    assert answers(out) == {q.id: toys.generate(model, q) for q in QUERIES}
    assert logged(out) == replayed(open_file(job).problem, out)
    deployment = load_schedule(out / "schedule.json").deployment
    assert [stage.tp_degree for stage in deployment.stages] == [2]
    profile = load_profile(out / "profile.json")
    assert profile.tp_degrees == (2,)
    assert TableKey("all_reduce", 2, "shared-memory") in profile.tables  # of no time


def logged(out: Path) -> list[tuple[Any, ...]]:
    """The steps that the engine took."""
    return [(s["kind"], s["group"], s["phase"], s["iteration"], s["queries"], s["tokens"])
            for s in read_lines(out / "steps.jsonl")]


def replayed(problem: Problem, out: Path) -> list[tuple[Any, ...]]:
    """The steps of a replay of a run's schedule, with the lengths that it had."""
    results = read_lines(out / "results.jsonl")
    estimate = load_schedule(out / "schedule.json").estimate
    pool, = replay_job(problem, roofline(problem), estimate, QueryLengths(
        inputs=np.array([line["input_tokens"] for line in results]),
        outputs=np.array([line["output_tokens"] for line in results]),
        most_outputs=np.array([q.max_new_tokens for q in QUERIES]))).pools
    return [(step.kind.value, step.group, step.phase, step.iteration, encoded + decoded,
             tokens + decoded) for step, encoded, decoded, tokens in zip(
        pool.steps, pool.encoded.tolist(), pool.decoded.tolist(), pool.tokens.tolist(),
        strict=True)]


def roofline(problem: Problem) -> Roofline:
    return Roofline(problem.model, problem.cluster.device, problem.dtype)


def test_a_killed_engine_loses_nothing(tmp_path, toy, vllm_python, cache):
    folder, model = toy
    job = written(tmp_path, folder, vllm_python, "policy: sarathi, max_active: 2, token_budget: 8")
    started = subprocess.Popen(command(job, "run.restarts=0", xgpt=by_data_sheets.COMMAND),
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               env=cache)
    results = tmp_path / "out" / "results.jsonl"
    while not results.is_file() or len(results.read_bytes().splitlines()) < 3:
        assert started.poll() is None, started.communicate()
        time.sleep(0.01)
    os.kill(_engine_of(started.pid), signal.SIGKILL)
    _, said = started.communicate(timeout=120)
    assert started.returncode != 0 and "Traceback" not in said
    first = results.read_bytes()
    again = submit(job, cache, by_data_sheets.COMMAND)
    assert again["status"] == "done" and results.read_bytes().startswith(first)
    assert answers(tmp_path / "out") == {q.id: toys.generate(model, q) for q in QUERIES}


def _engine_of(launcher: int) -> int:
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().split(b"\0")
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        if parent == launcher and b"xrunner.engines.vllm.worker" in words:
            return int(path.name)
    raise AssertionError("no engine under way")


def test_arguments_are_held_to_those_of_the_installed_version(tmp_path, toy, vllm_python, cache):
    job = written(tmp_path, toy[0], vllm_python, "policy: rra")
    done = subprocess.run(command(job, "run.engine_args={enforce_eagr: true, block_size: 32}"),
                          capture_output=True, text=True, env=cache, timeout=300, check=False)
    assert done.returncode == 2 and "run.engine_args.enforce_eagr" in done.stderr
    assert "did you mean 'enforce_eager'?" in done.stderr and "block_size" not in done.stderr


def test_exported_flags_are_those_of_its_own_parser(tmp_path, vllm_python):
    job = tmp_path / "job.yaml"
    job.write_text("""
model: opt-13b
cluster: a40-4
workload: {requests: {count: 1500}, task: S}
constraint: {latency_s: 11.5}
schedule: {policy: sarathi}
plan: {engine: vllm}
""")
    done = subprocess.run([*XGPT, "schedule", str(job), "--export", "vllm", "--json"], check=True,
                          capture_output=True, text=True)
    found = json.loads(done.stdout)
    words = found["export"]["words"]
    parsed = subprocess.run(
        [vllm_python, "-c", _PARSE, *words[2:]], check=True, capture_output=True, text=True)
    told = json.loads(parsed.stdout.splitlines()[-1])
    assert told["data_parallel_size"] == found["replicas"]
    assert told["tensor_parallel_size"] == found["tp_degree"]
    assert told["max_num_seqs"] == found["max_active"]
    assert told["max_num_batched_tokens"] == found["token_budget"]
    assert told["enable_chunked_prefill"] is True and told["dtype"] == "bfloat16"


_PARSE = """
import json, sys
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
parser.add_argument("model_tag")
told = vars(parser.parse_args(sys.argv[1:]))
print(json.dumps({key: told[key] for key in (
    "data_parallel_size", "tensor_parallel_size", "max_num_seqs", "max_num_batched_tokens",
    "enable_chunked_prefill", "dtype")}))
"""
