"""vLLM executes our schedules: greedy float32 tokens are `generate`'s, steps are the replay's, a
killed engine loses nothing, an adapter changes every answer as it does when it is merged into the
weights, and a schedule changes while it runs, and no token does."""

import copy
import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import by_data_sheets
import numpy as np
import pytest
import torch
import toys
from given_runs import given, toy_plan
from job_folder import XGPT, as_requests, read_lines
from mpi_runs import call, sets, stopped_under_way
from replays import estimated, problem_for, replayed, whole_steps
from safetensors.torch import save_file
from vllm_answers import Asked
from vllm_jobs import engine_of, vllm_job

from xgpt.app.opened_job import open_file
from xgpt.core.prefixes import Prefixes, in_blocks
from xgpt.core.problem import Problem
from xgpt.core.schedule_file import load_schedule
from xgpt.requests.spool import Spool
from xprofiler.profile import TableKey
from xprofiler.profile_file import load_profile
from xrunner.backends.vllm.row import version_in
from xrunner.files.launcher_link import load_change_order, read_observed
from xrunner.files.sink import read_progress

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
                  "decode_iterations: 4, decode_micro_batches: 2, encode_chunk: 0, order: input")
    metrics, out = submit(job, cache), tmp_path / "out"
    assert metrics["status"] == "done" and metrics["engine"] == "vllm"
    assert answers(out) == {q.id: toys.generate(model, q) for q in QUERIES}
    assert [line["id"] for line in read_lines(out / "errors.jsonl")] == ["bad"]
    assert metrics["throughput_qps"]["predicted"] > 0  # by times that were measured of vLLM
    assert load_schedule(out / "schedule.json").controls.policy == "rra"
    profile = json.loads((out / "profile.json").read_text())
    assert profile["metadata"]["kernels"].startswith("vllm")
    assert logged(out) == steps_of_replay(open_file(job).problem, out)


def ranks_alone(asked: Asked, folder: Path, out: Path, policy: str, variables: dict[str, int],
                outputs: Sequence[int], **request: Any) -> Problem:
    """Runs the queries by one rank, without the command around it."""
    out.mkdir()
    problem = problem_for(folder, QUERIES, outputs)
    given(estimated(policy, problem, **variables), problem, out / "schedule.json")
    requests = out.with_suffix(".jsonl")
    requests.write_text("".join(json.dumps(line | request) + "\n"
                                for line in as_requests(QUERIES)))
    plan = replace(toy_plan(folder, out, query_kv_tokens=100), engine="vllm",
                   engine_python=asked.python, engine_version=" ".join(version_in(asked.python)))
    toys.write_spool(plan, requests)
    assert asked.run(plan.save()) == 0
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
                  "decode_iterations: 4, decode_micro_batches: 1, encode_chunk: 0, "
                  "order: input, tp_degree: 2", ranks=2)
    metrics, out = submit(job, cache), tmp_path / "out"
    assert metrics["status"] == "done" and metrics["throughput_qps"]["predicted"] > 0
    assert answers(out) == {q.id: toys.generate(model, q) for q in QUERIES}
    assert logged(out) == steps_of_replay(open_file(job).problem, out)
    deployment = load_schedule(out / "schedule.json").deployment
    assert [stage.tp_degree for stage in deployment.stages] == [2]
    profile = load_profile(out / "profile.json")
    assert 2 in profile.tp_degrees
    assert TableKey("all_reduce", 2, "shared-memory") in profile.tables  # of no time


def logged(out: Path) -> list[tuple[Any, ...]]:
    """The steps that the engine took."""
    return [(s["kind"], s["group"], s["phase"], s["iteration"], s["queries"], s["tokens"])
            for s in read_lines(out / "steps.jsonl")]


def steps_of_replay(problem: Problem, out: Path, queries: Sequence[toys.PreparedQuery] = QUERIES,
                    prefixes: Prefixes | None = None) -> list[tuple[Any, ...]]:
    """The steps of a replay of a run's schedule, with the lengths that it had."""
    outputs = [line["output_tokens"] for line in read_lines(out / "results.jsonl")]
    estimate = load_schedule(out / "schedule.json").estimate
    return whole_steps(replayed(problem, estimate, queries, outputs, prefixes).pools[0])


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


SHARED = tuple((5 * i) % 90 + 6 for i in range(68))
FEW_SHOT = [replace(query, input_ids=SHARED + query.input_ids) for query in QUERIES]


def few_shot(folder: Path, model: Path, python: str, schedule: str) -> Path:
    """A job of requests that share 68 tokens, two blocks of 32."""
    return vllm_job(folder, model, python, as_requests(FEW_SHOT), schedule + ", order: input",
                    "engine_args: {block_size: 32}, ")


@pytest.mark.parametrize("schedule", [
    "policy: sarathi, max_active: 7, token_budget: 40",
    "policy: rra, encode_batch: 5, decode_iterations: 4, encode_chunk: 0"])
def test_a_prefix_is_encoded_once_and_answers_stay(tmp_path, toy, vllm_python, cache, schedule):
    folder, model = toy
    job, out = few_shot(tmp_path, folder, vllm_python, schedule), tmp_path / "out"
    shared = submit(job, cache, by_data_sheets.COMMAND)["prefixes"]
    assert answers(out) == {q.id: toys.generate(model, q) for q in FEW_SHOT}
    forest, problem = Spool(out).prefixes, open_file(job).problem
    assert forest is not None and set(forest.shared) == {68}
    prefixes = in_blocks(forest, 32, is_whole=True)
    assert logged(out) == steps_of_replay(problem, out, FEW_SHOT, prefixes)
    every = sum(len(q.input_ids) for q in FEW_SHOT)
    assert set(shared["encoded_tokens"].values()) == {every - 64 * (len(FEW_SHOT) - 1)}


def test_a_kill_while_a_prefix_lives_loses_nothing(tmp_path, toy, vllm_python, cache):
    folder, model = toy
    job = few_shot(tmp_path, folder, vllm_python, "policy: sarathi, max_active: 2, token_budget: 8")
    results = tmp_path / "out" / "results.jsonl"
    stopped_under_way(
        ["submit", job, "--json", *sets("run.restarts=0")], results, cache, count=3,
        number=signal.SIGKILL, whom=lambda pid: engine_of(pid) or 0, xgpt=by_data_sheets.COMMAND)
    first = results.read_bytes()
    again = submit(job, cache, by_data_sheets.COMMAND)
    assert again["status"] == "done" and results.read_bytes().startswith(first)
    assert [line["id"] for line in read_lines(results)] == [q.id for q in FEW_SHOT]
    assert answers(tmp_path / "out") == {q.id: toys.generate(model, q) for q in FEW_SHOT}


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
    assert words[:2] == ["vllm", "run-batch"]
    files = ["-i", "requests.jsonl", "-o", "answers.jsonl"]  # the script has them, of each replica
    parsed = subprocess.run([vllm_python, "-c", _PARSE, *words[2:], *files], check=True,
                            capture_output=True, text=True)
    told = json.loads(parsed.stdout.splitlines()[-1])
    assert found["deployment"]["replicas"] > 1 == told["data_parallel_size"]
    assert told["tensor_parallel_size"] == found["deployment"]["tp_degree"]
    assert told["max_num_seqs"] == found["controls"]["max_active"]
    assert told["max_num_batched_tokens"] == found["controls"]["token_budget"]
    assert told["enable_chunked_prefill"] is True and told["dtype"] == "bfloat16"


_PARSE = """
import json, sys
from vllm.entrypoints.launchers.run_batch import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
told = vars(make_arg_parser(FlexibleArgumentParser()).parse_args(sys.argv[1:]))
print(json.dumps({key: told[key] for key in (
    "data_parallel_size", "tensor_parallel_size", "max_num_seqs", "max_num_batched_tokens",
    "enable_chunked_prefill", "dtype")}))
"""


ADAPTED = toys.random_queries(12)
RANK, SCALE = 4, 2.0


def write_adapter(folder: Path, model: Any) -> Any:
    """Writes one of two products of each layer; returns the model with it merged."""
    folder.mkdir()
    merged, generator, tensors = copy.deepcopy(model), torch.Generator().manual_seed(3), {}
    for name, weight in merged.state_dict().items():
        if name.endswith(("q_proj.weight", "down_proj.weight")):
            first = torch.randn(RANK, weight.shape[1], generator=generator) / 8
            second = torch.randn(weight.shape[0], RANK, generator=generator) / 8
            own = f"base_model.model.{name.removesuffix('.weight')}"
            tensors |= {f"{own}.lora_A.weight": first, f"{own}.lora_B.weight": second}
            weight += SCALE * second @ first
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({
        "peft_type": "LORA", "r": RANK, "lora_alpha": SCALE * RANK, "bias": "none",
        "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}))
    return merged


def test_every_answer_is_the_adapted_models(tmp_path, toy, vllm_python, cache):
    folder, model = toy
    merged = write_adapter(tmp_path / "adapter", model)
    job = vllm_job(tmp_path, folder, vllm_python, as_requests(ADAPTED),
                   "policy: rra, encode_batch: 5, decode_iterations: 4",
                   f"engine_args: {{lora_path: {tmp_path / 'adapter'}}}, ")
    call("submit", job, "--json", env=cache, timeout_s=800)
    results = read_lines(tmp_path / "out" / "results.jsonl")
    answers = {line["id"]: line["output_ids"] for line in results}
    assert answers == {q.id: toys.generate(merged, q) for q in ADAPTED}
    assert answers != {q.id: toys.generate(model, q) for q in ADAPTED}


KINDS, COUNT = 20, 600  # so many different queries, repeated
ENOUGH = 100  # queries done before the engine stands still until a change is planned
RUNS_S, STANDS_S = 0.05, 0.5  # until then: a state is written every half second of the clock
LIMIT_S = 600.0


def wait(launcher: subprocess.Popen[str], until_s: float, step_s: float = 0.02) -> None:
    assert launcher.poll() is None, launcher.communicate()
    assert time.monotonic() < until_s, "the run goes on for ever"
    time.sleep(step_s)


def hold_until_planned(launcher: subprocess.Popen[str], output: Path) -> None:
    """The engine runs in short bursts until enough queries are done, and then stands still until
    the launcher has planned a change: however quick the one and slow the other, the run is not
    over before."""
    until_s = time.monotonic() + LIMIT_S
    while (state := read_progress(output / "progress.json")) is None or state.state != "running":
        wait(launcher, until_s)
    engine = engine_of(launcher.pid)
    assert engine is not None
    try:
        while (seen := read_observed(output)) is None or len(seen.finished) < ENOUGH:
            os.kill(engine, signal.SIGSTOP)
            wait(launcher, until_s, STANDS_S)
            os.kill(engine, signal.SIGCONT)
            wait(launcher, until_s, RUNS_S)
        os.kill(engine, signal.SIGSTOP)
        while load_change_order(output) is None:
            wait(launcher, until_s)
    finally:
        os.kill(engine, signal.SIGCONT)


def test_a_running_schedule_changes_and_no_token_does(tmp_path, toy, vllm_python, cache):
    folder, reference = toy
    made = toys.random_queries(KINDS, seed=8, longest=6)
    queries = [toys.PreparedQuery(index=i, id=f"q{i}", input_ids=made[i % KINDS].input_ids,
                                  max_new_tokens=20 + i % KINDS, is_forced=True)
               for i in range(COUNT)]  # of 20 to 39 tokens, where the job plans with 15
    # the engine stands still now and then: neither are its steps slow for it, nor does it hang
    job = vllm_job(tmp_path, folder, vllm_python, [
        {"id": q.id, "tokens": list(q.input_ids), "forced_tokens": q.max_new_tokens}
        for q in queries], "policy: rra", f"step_times: off, stall_timeout: {LIMIT_S:.0f}, ")
    problem = open_file(job).problem
    given(estimated("rra", problem, encode_batch=3, decode_iterations=6), problem,
          tmp_path / "given.json")
    with (tmp_path / "said.json").open("w+") as out, (tmp_path / "said").open("w+") as err:
        launcher = subprocess.Popen(
            [*by_data_sheets.COMMAND, "run", str(job), "--schedule", str(tmp_path / "given.json"),
             "--json"],
            stdout=out, stderr=err, text=True, env=cache)
        try:
            hold_until_planned(launcher, tmp_path / "out")
            code = launcher.wait(timeout=LIMIT_S)
        finally:
            launcher.kill()
    assert code == 0, (tmp_path / "said").read_text()
    first = json.loads((tmp_path / "said.json").read_text())["rescheduling"][0]
    assert first["choice"] == "adjust" and first["phase"] > 0 and first["cause"] == "drift"
    assert first["to"] != first["from"]
    results = read_lines(tmp_path / "out" / "results.jsonl")
    assert [r["id"] for r in results] == [q.id for q in queries]
    answers = {k: toys.generate(reference, queries[k]) for k in range(KINDS)}
    assert all(r["output_ids"] == answers[r["index"] % KINDS] for r in results)
    assert first["mean_output_tokens"]["observed"] == pytest.approx(
        np.mean([q.max_new_tokens for q in queries]), rel=0.1)
