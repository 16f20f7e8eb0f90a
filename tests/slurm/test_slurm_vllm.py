"""vLLM through a real Slurm of two nodes: a replica on each, a warning of the time limit, a
requeue, and every line once."""

import json
import os
import time

import pytest

pytest.importorskip("torch", reason="runs need the extra `run`")
import toys  # noqa: E402
from conftest import answers  # noqa: E402
from job_folder import as_requests, read_lines  # noqa: E402

pytestmark = [pytest.mark.slurm, pytest.mark.vllm, pytest.mark.mpi, pytest.mark.slow,
              pytest.mark.timeout(1800)]
QUERIES = toys.random_queries(400, seed=7)
JOB = """
model: {model}
cluster: local
workload: {{requests: requests.jsonl, output_tokens: {{mean: 15, std: 8, max: 40}}}}
schedule: {{policy: rra, encode_batch: 3, decode_iterations: 4, tp_degree: 1, replicas: 2}}
run: {{engine: vllm, engine_python: {python}, dtype: float32, threads_per_rank: 1}}
slurm: {{nodes: 2, ntasks_per_node: 1, time: 30, requeue: 1, env: {{UCX_TLS: "tcp,self"}}}}
output: out
"""


def test_a_replica_a_node_answers_every_line_once_over_a_requeue(slurm, folder, tmp_path):
    if (python := os.environ.get("XGPT_VLLM_PYTHON")) is None:
        pytest.skip("XGPT_VLLM_PYTHON names the Python of an environment that has vLLM")
    model = toys.make_modern("llama", tmp_path, hidden_size=128, intermediate_size=192,
                             num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    (folder / "requests.jsonl").write_text("".join(
        json.dumps(request) + "\n" for request in as_requests(QUERIES)))
    job, out = folder / "job.yaml", folder / "out"
    job.write_text(JOB.format(model=tmp_path, python=python))
    asked = slurm.xgpt("doctor", "--slurm", job, "--json")
    assert asked.returncode == 0, asked.stderr
    assert all(own["facts"]["engine"].startswith("vllm")
               for own in json.loads(asked.stdout)["nodes"].values())
    (job_id,) = slurm.submit(job)
    results, log = out / "results.jsonl", out / f"slurm-{job_id}.log"
    until = time.monotonic() + 900
    while not results.is_file() or results.read_bytes().count(b"\n") < 20:
        assert time.monotonic() < until and slurm.slurm_state(job_id) in ("PENDING", "RUNNING"), (
            log.read_text())
        time.sleep(0.1)
    slurm.call("scancel", "--batch", "--signal=USR1", job_id)  # as Slurm itself warns
    slurm.await_state(job_id, "PENDING")
    before = answers(job)
    assert 20 <= len(before) < len(QUERIES) and "back to the queue" in log.read_text()
    time.sleep(3)  # a node starts no job again within the second in which it ended it
    slurm.call("scontrol", "update", f"jobid={job_id}", "StartTime=now", "TimeLimit=30")
    assert slurm.await_state(job_id, "COMPLETED", "FAILED", "TIMEOUT",
                             timeout_s=900) == "COMPLETED", log.read_text()
    assert answers(job) == {q.id: toys.generate(model, q) for q in QUERIES}
    assert len(read_lines(results)) == len(QUERIES)
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["status"] == "done" and len(metrics["replicas"]) == 2
