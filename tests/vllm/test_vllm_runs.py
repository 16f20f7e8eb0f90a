"""vLLM executes our schedules: greedy float32 tokens are `generate`'s, steps are the replay's, and
a killed engine loses nothing."""

import json
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import by_data_sheets
import pytest
import toys
from given_runs import given, toy_plan
from job_folder import XGPT, as_requests, read_lines
from mpi_runs import call, sets, stopped_under_way
from replays import estimated, problem_for, replayed, whole_steps
from vllm_jobs import engine_of, vllm_job

from xgpt.app.opened import open_file
from xgpt.core.problem import Problem
from xgpt.core.schedule_file import load_schedule
from xprofiler.profile import TableKey
from xprofiler.profile_file import load_profile

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
QUERIES = toys.random_queries(30)


def written(folder: Path, model: Path, python: str, schedule: str, ranks: int = 1) -> Path:
    requests: list[dict[str, Any]] = as_requests(QUERIES)
    requests.insert(3, {"id": "bad", "tokens": []})
    return vllm_job(folder, model, python, requests, schedule, ranks=ranks)


def submit(job: Path, environment: dict[str, str], xgpt: Sequence[str] = XGPT) -> dict[str, Any]:
    done = call("submit", job, "--json", env=environment, timeout_s=800, xgpt=xgpt)
    return json.loads(done.stdout)


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
    assert logged(out) == steps_of_replay(open_file(job).problem, out)


def ranks_alone(asked: Any, folder: Path, out: Path, policy: str, variables: dict[str, int],
                outputs: Sequence[int], **request: Any) -> Problem:
    """Runs the queries without the command around the engine's process."""
    out.mkdir()
    problem = problem_for(folder, QUERIES, outputs)
    given(estimated(policy, problem, **variables), problem, out / "schedule.json")
    requests = out.with_suffix(".jsonl")
    requests.write_text("".join(json.dumps(line | request) + "\n"
                                for line in as_requests(QUERIES)))
    plan = replace(toy_plan(folder, out, query_kv_tokens=100), engine="vllm")
    toys.write_spool(plan, requests)
    assert asked(run=str(plan.save())) == {}
    return problem


@pytest.mark.parametrize(("policy", "variables"), [
    ("sarathi", {"max_active": 7, "token_budget": 16}),
    ("vllm", {"max_active": 6, "token_budget": 24}), ("orca", {"max_active": 6})])
def test_a_schedule_is_executed_exactly(tmp_path, toy, asked, policy, variables):
    expected = {q.id: toys.generate(toy[1], q) for q in QUERIES}
    problem = ranks_alone(asked, toy[0], tmp_path / "out", policy, variables,
                          [len(expected[q.id]) for q in QUERIES])
    assert answers(tmp_path / "out") == expected
    assert logged(tmp_path / "out") == steps_of_replay(problem, tmp_path / "out")


def test_what_is_drawn_does_not_depend_on_chunks(tmp_path, toy, asked):
    """vLLM draws after each chunk and gives it up; its CPU generators cannot be set back."""
    found = []
    for name, budget in (("chunks", 5), ("whole", 500)):
        ranks_alone(asked, toy[0], tmp_path / name, "sarathi",
                    {"max_active": 4, "token_budget": budget},
                    [q.max_new_tokens for q in QUERIES], temperature=1.0, seed=7)
        found.append(answers(tmp_path / name))
    assert found[0] == found[1] and len(found[0]) == len(QUERIES)
    assert found[0] != {q.id: toys.generate(toy[1], q) for q in QUERIES}, "drawn, not greedy"


def test_two_processes_divide_each_layer(tmp_path, toy, vllm_python, cache):
    """Its own tensor parallelism: what its processes tell each other is in the steps' times."""
    folder, model = toy
    job = written(tmp_path, folder, vllm_python, "policy: rra, encode_batch: 5, "
                  "decode_iterations: 4, decode_micro_batches: 1, encode_chunk: 0", ranks=2)
    metrics, out = submit(job, cache), tmp_path / "out"
    assert metrics["status"] == "done" and metrics["throughput_qps"]["predicted"] > 0
    assert answers(out) == {q.id: toys.generate(model, q) for q in QUERIES}
    assert logged(out) == steps_of_replay(open_file(job).problem, out)
    deployment = load_schedule(out / "schedule.json").deployment
    assert [stage.tp_degree for stage in deployment.stages] == [2]
    profile = load_profile(out / "profile.json")
    assert profile.tp_degrees == (2,)
    assert TableKey("all_reduce", 2, "shared-memory") in profile.tables  # of no time


def logged(out: Path) -> list[tuple[Any, ...]]:
    """The steps that the engine took."""
    return [(s["kind"], s["group"], s["phase"], s["iteration"], s["queries"], s["tokens"])
            for s in read_lines(out / "steps.jsonl")]


def steps_of_replay(problem: Problem, out: Path) -> list[tuple[Any, ...]]:
    """The steps of a replay of a run's schedule, with the lengths that it had."""
    outputs = [line["output_tokens"] for line in read_lines(out / "results.jsonl")]
    estimate = load_schedule(out / "schedule.json").estimate
    return whole_steps(replayed(problem, estimate, QUERIES, outputs).pools[0])


def test_a_killed_engine_loses_nothing(tmp_path, toy, vllm_python, cache):
    folder, model = toy
    job = written(tmp_path, folder, vllm_python, "policy: sarathi, max_active: 2, token_budget: 8")
    results = tmp_path / "out" / "results.jsonl"
    started, _, told = stopped_under_way(
        ["submit", job, "--json", *sets("run.restarts=0")], results, cache, count=3,
        number=signal.SIGKILL, whom=lambda pid: engine_of(pid) or 0, xgpt=by_data_sheets.COMMAND)
    assert started.returncode != 0 and "Traceback" not in told
    first = results.read_bytes()
    again = submit(job, cache, by_data_sheets.COMMAND)
    assert again["status"] == "done" and results.read_bytes().startswith(first)
    assert answers(tmp_path / "out") == {q.id: toys.generate(model, q) for q in QUERIES}


def test_arguments_are_held_to_those_of_the_installed_version(tmp_path, toy, vllm_python, cache):
    job = written(tmp_path, toy[0], vllm_python, "policy: rra")
    done = call("submit", job, "--json", *sets(
        "run.engine_args={enforce_eagr: true, block_size: 32}"), env=cache, code=2)
    assert "run.engine_args.enforce_eagr" in done.stderr
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
