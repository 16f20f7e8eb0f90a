"""DeepSpeed-Inference on two real ranks: the tokens of transformers' `generate` and of the own
engine, in the same files."""

import importlib.util
import json
from pathlib import Path

import pytest
import toys
from job_folder import as_requests, read_lines, write_job
from mpi_runs import call, json_of, sets

from xrunner.checkpoint.source import cache_dir

pytestmark = [pytest.mark.mpi, pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs the extra `deepspeed`")]
GROUP = ("schedule.tp_degree=2", "schedule.tp_gpus=2")


def shared_memory():
    return set(Path("/dev/shm").glob("deepspeed_allreduce_buffer_*"))


@pytest.mark.timeout(1200)
def test_two_ranks_of_a_tiny_opt_answer_as_generate_and_as_the_own_engine_do(tmp_path, cache):
    # its compiled all-reduce is kept where a run keeps it: it takes half a minute
    env = {"TORCH_EXTENSIONS_DIR": str(cache_dir() / "torch_extensions"), **cache}
    directory, out = tmp_path / "model", tmp_path / "out"
    reference, queries = toys.make_model("opt", directory), toys.random_queries(14)
    requests = as_requests(queries)
    requests.insert(3, {"id": "bad", "tokens": []})
    requests.append({"id": "drawn", "tokens": [7, 8, 9], "forced_tokens": 12, "temperature": 0.9,
                     "seed": 3})
    job = write_job(tmp_path, directory, requests, schedule="policy: ft, encode_batch: 4", ranks=2)
    call("profile", job, *sets(*GROUP), env=env)
    before = shared_memory()
    metrics = json.loads(call("submit", job, "--json", *sets("run.engine=deepspeed"),
                              env=env).stdout)
    answers = read_lines(out / "results.jsonl")
    expected = {q.id: toys.generate(reference, q) for q in queries}
    assert {r["id"]: r["output_ids"] for r in answers if r["id"] != "drawn"} == expected
    assert [r["id"] for r in answers] == [*expected, "drawn"]
    assert [e["id"] for e in read_lines(out / "errors.jsonl")] == ["bad"]
    assert (metrics["engine"], metrics["queries"], metrics["status"]) == ("deepspeed", 15, "done")
    assert metrics["throughput_qps"]["measured"] > 0
    assert metrics["throughput_qps"]["predicted"] is None
    assert [s["ranks"] for s in json_of(out / "measured.json")["stages"]] == [[0, 1]]
    encoded = [s["queries"] for s in read_lines(out / "steps.jsonl") if s["kind"] == "encode"]
    assert encoded == [4, 4, 4, 3]
    assert (out / "report.html").stat().st_size > 10_000
    assert shared_memory() <= before, "left in shared memory"

    call("submit", job, "--json", *sets("schedule.policy=rra", *GROUP, "schedule.encode_batch=2",
                                        "schedule.decode_iterations=30"), env=env)
    own = read_lines(out / "results.jsonl")
    assert [(r["id"], r["output_ids"], r["text"]) for r in own] == [
        (r["id"], r["output_ids"], r["text"]) for r in answers]
    assert len(list(out.glob("results-*.jsonl"))) == 1  # DeepSpeed's, kept
