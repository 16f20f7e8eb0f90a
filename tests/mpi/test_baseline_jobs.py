"""Baselines by the whole command: `xgpt submit` with the policy that the job names."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="runs need the extra `run`")
import job_folder  # noqa: E402
import toys  # noqa: E402
from job_folder import XGPT, as_requests, read_lines  # noqa: E402

from xgpt.core.schedule_file import load_schedule  # noqa: E402

pytestmark = pytest.mark.mpi


@pytest.mark.slow  # test_family_runs.py has real ranks under what `auto` chooses of these
@pytest.mark.parametrize(("policy", "family", "more"), [
    ("vllm", "llama", "max_active: 6, token_budget: 64"),
    ("vllm", "opt", "max_active: 6, token_budget: 64"),
    ("orca", "llama", "max_active: 5"),
    ("orca", "opt", "tp_degree: 2, tp_gpus: 2"),
    ("sarathi", "gpt2", "max_active: 8, token_budget: 16"),
    ("ft", "llama", "encode_batch: 6"),
    ("ft", "t5", "encode_batch: 6"),
    ("dsi", "opt", "encode_batch: 8, encode_micro_batches: 4"),
    ("dsi", "t5", "")])
def test_submit_runs_a_baseline(tmp_path, profiled, policy, family, more):
    directory = tmp_path / "model"
    reference = toys.make_model(family, directory)
    queries = toys.random_queries(24, seed=9)
    job = job_folder.write_job(tmp_path, directory, as_requests(queries), ranks=2,
                               schedule="policy: rra")
    more += "" if "tp_degree" in more else f"{', ' if more else ''}tp_degree: 1"
    wanted = f"schedule={{policy: {policy}, {more}}}"
    done = submit(job, wanted, profiled(family))
    assert done.returncode == 0, done.stderr
    out = tmp_path / "out"
    assert {r["id"]: r["output_ids"] for r in read_lines(out / "results.jsonl")} == {
        q.id: toys.generate(reference, q) for q in queries}
    metrics: dict[str, Any] = json.loads(done.stdout)
    assert metrics["status"] == "done" and metrics["queries"] == 24
    assert all(metrics[key]["predicted"] > 0 for key in ("throughput_qps", "latency_p99_s"))
    estimate = load_schedule(out / "schedule.json").estimate
    assert estimate.policy == policy
    for name, value in (pair.split(": ") for pair in more.split(", ") if pair):
        assert estimate.variables[name] == int(value)
    for stage in metrics["stages"]:
        assert 0 < stage["kv_peak_bytes"] <= stage["kv_bytes"] and stage["kv_planned_bytes"] > 0
        assert stage["rows_compacted"] == 0
    steps = [s for s in read_lines(out / "steps.jsonl") if s["stage"] == 0]
    kinds = {s["kind"] for s in steps} - {"cross_kv"}
    assert kinds <= {"encode", "decode", "mixed"} and "decode" in kinds
    assert ("mixed" in kinds) == (policy in ("orca", "sarathi"))
    latencies = {(round(r["encode_start_s"] + r["latency_s"], 5))
                 for r in read_lines(out / "results.jsonl")}
    assert (len(latencies) <= 8) == (policy in ("ft", "dsi")), "results come batch by batch"
    assert (out / "report.html").stat().st_size > 10_000


def submit(job: Path, wanted: str, cache: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*XGPT, "submit", str(job), "--json", "--set", wanted],
                          capture_output=True, text=True, env=cache, timeout=240, check=False)
