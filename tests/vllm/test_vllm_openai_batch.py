"""A file of OpenAI's batch format through vLLM: what its own sampler has is passed to it, and comes
back in OpenAI's response objects."""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openai", reason="its types are in the extra `dev`")
import by_data_sheets  # noqa: E402
import openai_batch  # noqa: E402
from job_folder import read_lines  # noqa: E402
from mpi_runs import call, said, sets  # noqa: E402
from problems import roofline_of, schedule_of, toy_problem  # noqa: E402
from vllm_jobs import vllm_job  # noqa: E402

from xgpt.core.controls import FixedSchedule  # noqa: E402
from xgpt.launch.exports import vllm_command  # noqa: E402
from xsimulator.rough.formulas import fixed_estimate  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


def run(folder: Path, model: Path, python: str, cache: dict[str, str], *overrides: str,
        schedule: str, requests: list[dict[str, Any]] | None = None) -> None:
    job = vllm_job(folder, model, python, requests or [], schedule)
    if requests is None:
        openai_batch.write_lines(folder / "requests.jsonl")
    done = call("submit", job, "--json", *sets(*overrides), env=cache, timeout_s=800,
                xgpt=by_data_sheets.COMMAND)
    assert "start again" not in said(done), done.stderr


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bytes")
    openai_batch.write_model(folder)
    return folder


def test_every_line_is_what_openai_promises(tmp_path, model, vllm_python, cache):
    run(tmp_path, model, vllm_python, cache, "run.engine_args={tool_call_parser: hermes}",
        schedule="policy: rra, encode_batch: 4, decode_iterations: 4, encode_chunk: 16")
    by_name = openai_batch.checked(tmp_path / "out")
    openai_batch.check_plain(by_name)
    told = {name: openai_batch.choice_of(by_name[name]) for name in (
        "schema", "choice", "pattern", "bias", "call", "tools")}
    written = json.loads(told["schema"]["message"]["content"])
    assert written.keys() == {"colour", "is_big"} and written["colour"] in ("red", "blue")
    assert told["choice"]["message"]["content"] in ("yes", "no")
    first = told["choice"]["logprobs"]["content"][0]
    assert first["token"] in ("y", "n") and first["top_logprobs"] == [], "others ask for three"
    head, _, tail = told["pattern"]["message"]["content"].partition("-")
    assert head.isdecimal() and tail.isdecimal() and (len(head), len(tail)) == (3, 4)
    assert {told[name]["finish_reason"] for name in ("schema", "choice", "pattern")} == {"stop"}
    ids = by_name["bias"]["xgpt"]["output_ids"]
    assert set(ids) == {65}, "of logits of a few units, a bias of 100 decides"
    assert "tool_calls" not in told["tools"]["message"], "it wrote none"
    call, = told["call"]["message"]["tool_calls"]
    assert told["call"]["finish_reason"] == "tool_calls"
    assert told["call"]["message"]["content"] is None
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Oslo"}
    assert "vLLM" in openai_batch.why_not(by_name["no schema"])


@pytest.mark.slow
def test_the_exported_script_answers_every_line_in_order(tmp_path, model, vllm_python):
    """Two replicas on CPUs, by vLLM alone. Its package for CPUs has no command `vllm`."""
    asked = [{"custom_id": f"q{place}", "method": "POST", "url": openai_batch.CHAT, "body": {
        "model": str(model), "messages": [{"role": "user", "content": "x" * place}],
        "max_tokens": 8}} for place in range(1, 12)]
    files = tmp_path / "requests.jsonl", tmp_path / "out" / "vllm.jsonl"
    files[0].write_text("".join(json.dumps(line) + "\n" for line in asked))
    (tmp_path / "vllm").write_text(
        f'#!/bin/bash\nshift\nexec {vllm_python} -m vllm.entrypoints.openai.run_batch "$@" '
        "--enforce-eager\n")
    (tmp_path / "vllm").chmod(0o755)
    problem = replace(toy_problem(per_node=1), dtype="float32")
    one = fixed_estimate("sarathi", problem, roofline_of(problem),
                         FixedSchedule(max_active=8, token_budget=64))
    script = vllm_command(
        schedule_of(problem, one.in_copies(2)), model=str(model), times_of="vllm", files=files,
        problem=replace(problem, cluster=replace(problem.cluster, devices_per_node=2)))
    subprocess.run(["bash", "-c", str(script)], check=True, timeout=800, env={
        **os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "VLLM_CPU_KVCACHE_SPACE": "1"})
    given = read_lines(files[1])
    assert [line["custom_id"] for line in given] == [line["custom_id"] for line in asked]
    assert {line["response"]["status_code"] for line in given} == {200}


def test_likelihoods_and_forms_outlive_an_eviction(tmp_path, model, vllm_python, cache):
    """Short of KV blocks queries are put back and encoded again, with what they have written."""
    requests: list[dict[str, Any]] = [
        {"id": f"q{i}", "tokens": [65 + i, 66, 67], "max_tokens": 60, "logprobs": 2,
         "min_tokens": 60} for i in range(4)]
    requests += [{"id": f"f{i}", "tokens": [70 + i], "max_tokens": 60, "logprobs": 1,
                  "structured_outputs": {"regex": "[a-z]{20}-[0-9]{20}"}} for i in range(4)]
    out = {}
    for name, schedule in (("roomy", "policy: rra, encode_batch: 8, decode_iterations: 4"),
                           ("short", "policy: vllm, max_active: 8, token_budget: 32")):
        folder = tmp_path / name
        folder.mkdir()
        run(folder, model, vllm_python, cache, schedule=schedule, requests=requests)
        out[name] = {line["id"]: line for line in read_lines(folder / "out" / "results.jsonl")}
    for key, one in out["roomy"].items():
        other = out["short"][key]
        assert one["output_ids"] == other["output_ids"]
        assert len(one["logprobs"]) == len(one["output_ids"])
        assert one["logprobs"] == pytest.approx(other["logprobs"], abs=1e-4)
        if key.startswith("f"):
            assert one["finish_reason"] == "stop" and len(one["output_ids"]) == 42
