"""The file of requests, here a CSV file, is opened by the launcher, once, and by nobody else; its
results are a CSV file too."""

from __future__ import annotations

import csv
import json
import subprocess
from collections import Counter

import pytest

pytest.importorskip("torch", reason="runs need the extra `run`")
import toys  # noqa: E402
from job_folder import XGPT, as_requests, read_lines, write_job  # noqa: E402

pytestmark = pytest.mark.mpi
# every process of the run imports this
HOOK = """
import os, sys
_log = os.open(os.environ["OPENED"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
def _opened(event, arguments):
    if event == "open" and isinstance(arguments[0], (str, bytes, os.PathLike)):
        name = os.fsdecode(arguments[0])
        if name.endswith(("requests.csv", "tokens.bin")):
            os.write(_log, f"{os.getpid()} {os.path.basename(name)}\\n".encode())
    if event == "import" and arguments[0] == "torch._dynamo":
        os.write(_log, f"{os.getpid()} compiler\\n".encode())
sys.addaudithook(_opened)
"""


def test_requests_are_opened_once_and_the_spool_by_those_who_need_it(tmp_path, profiled):
    directory, out, opened = tmp_path / "model", tmp_path / "out", tmp_path / "opened"
    reference, queries = toys.make_model("llama", directory), toys.random_queries(12)
    requests = [*as_requests(queries), {"id": "bad"}]
    job = write_job(tmp_path, directory, requests, ranks=2,
                    schedule="policy: rra, encode_batch: 3, decode_iterations: 4, tp_degree: 1, "
                             "replicas: 1")
    job.write_text(job.read_text().replace("requests.jsonl", "requests.csv"))
    with (tmp_path / "requests.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, ["id", "tokens", "max_tokens", "topic, in words"])
        table.writeheader()
        table.writerows({"topic, in words": f"\"{r['id']}\",\n", **r} for r in requests)
    env = profiled("llama")
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "sitecustomize.py").write_text(HOOK)
    env = {**env, "OPENED": str(opened),
           "PYTHONPATH": f"{tmp_path / 'hook'}:{env.get('PYTHONPATH', '')}"}
    done = subprocess.run([*XGPT, "submit", str(job)], capture_output=True, text=True, env=env,
                          timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    names = Counter(line.split()[1] for line in opened.read_text().splitlines())
    pids = Counter(line.split()[0] for line in opened.read_text().splitlines())
    assert names["requests.csv"] == 1, opened.read_text()
    assert not names["compiler"], "torch's own takes a rank a second to import"
    assert len(pids) == 2, "the launcher and rank 0, and no other rank"
    results = read_lines(out / "results.jsonl")
    assert {r["id"]: r["output_ids"] for r in results} == {
        q.id: toys.generate(reference, q) for q in queries}
    assert all(r["ttft_s"] > 0 and r["ttft_s"] <= r["encode_start_s"] + r["latency_s"] + 1e-6
               for r in results)
    assert [e["id"] for e in read_lines(out / "errors.jsonl")] == ["bad"]
    with (out / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["id"], row["topic, in words"]) for row in rows] == [
        (r["id"], f"\"{r['id']}\",\n") for r in requests]
    assert [int(row["output_tokens"]) for row in rows[:-1]] == [
        len(r["output_ids"]) for r in results]
    assert rows[-1]["error"] == "tokens is null: the cell is empty" and not rows[-1]["text"]
    metrics = json.loads((out / "metrics.json").read_text())
    assert 0 < metrics["ttft_p50_s"]["measured"] <= metrics["ttft_p99_s"]["measured"]
    assert metrics["tpot_p50_s"]["measured"] > 0
