"""DeepSpeed-Inference on two real ranks: the tokens of transformers' `generate` and of the own
engine, in the same files."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="ranks need the extra `run`")
import toys  # noqa: E402
from job_folder import XGPT, as_requests, read_lines, write_job  # noqa: E402

from xrunner.checkpoint.source import cache_dir  # noqa: E402

pytestmark = [pytest.mark.mpi, pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs the extra `deepspeed`")]


def submit(job: Path, environment: dict[str, str], *overrides: str) -> dict[str, Any]:
    command = [*XGPT, "submit", str(job), "--json"]
    for override in overrides:
        command += ["--set", override]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900,
                          check=False)
    assert done.returncode == 0, done.stderr
    metrics: dict[str, Any] = json.loads(done.stdout)
    return metrics


@pytest.fixture(scope="module")
def environment(cache):
    """DeepSpeed's compiled all-reduce is kept where a run keeps it: it takes half a minute."""
    return {"TORCH_EXTENSIONS_DIR": str(cache_dir() / "torch_extensions"), **cache}


@pytest.mark.timeout(1200)
def test_two_ranks_of_a_tiny_opt_answer_as_generate_and_as_the_own_engine_do(tmp_path, environment):
    directory, out = tmp_path / "model", tmp_path / "out"
    reference = toys.make_model("opt", directory)
    queries = toys.random_queries(14)
    requests: list[dict[str, Any]] = as_requests(queries)
    requests.insert(3, {"id": "bad", "tokens": []})
    requests.append({"id": "drawn", "tokens": [7, 8, 9], "forced_tokens": 12, "temperature": 0.9,
                     "seed": 3})
    job = write_job(tmp_path, directory, requests, schedule="policy: ft, encode_batch: 4", ranks=2)
    subprocess.run([*XGPT, "profile", str(job), "--budget", "1s", "--set",
                    "schedule.tp_degree=2", "--set", "schedule.tp_gpus=2"], env=environment,
                   capture_output=True, timeout=200, check=True)
    metrics = submit(job, environment, "run.engine=deepspeed")
    answers = read_lines(out / "results.jsonl")
    expected = {q.id: toys.generate(reference, q) for q in queries}
    assert {r["id"]: r["output_ids"] for r in answers if r["id"] != "drawn"} == expected
    assert [r["id"] for r in answers] == [*expected, "drawn"]
    assert [e["id"] for e in read_lines(out / "errors.jsonl")] == ["bad"]

    assert (metrics["engine"], metrics["queries"], metrics["status"]) == ("deepspeed", 15, "done")
    assert metrics["throughput_qps"]["measured"] > 0
    assert metrics["throughput_qps"]["predicted"] is None
    measured = json.loads((out / "measured.json").read_text())
    assert [s["ranks"] for s in measured["stages"]] == [[0, 1]]
    encoded = [s["queries"] for s in read_lines(out / "steps.jsonl") if s["kind"] == "encode"]
    assert encoded == [4, 4, 4, 3]
    assert (out / "report.html").stat().st_size > 10_000
    assert not list(Path("/dev/shm").glob("deepspeed_allreduce_buffer_*")), "left in shared memory"

    submit(job, environment, "schedule.policy=rra", "schedule.tp_degree=2", "schedule.tp_gpus=2",
           "schedule.encode_batch=2", "schedule.decode_iterations=30")
    own = read_lines(out / "results.jsonl")
    assert [(r["id"], r["output_ids"], r["text"]) for r in own] == [
        (r["id"], r["output_ids"], r["text"]) for r in answers]
    assert len(list(out.glob("results-*.jsonl"))) == 1  # DeepSpeed's, kept
