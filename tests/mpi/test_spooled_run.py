"""The file of requests is opened by the launcher, once, and by nobody else."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path

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
        if name.endswith(("requests.jsonl", "tokens.bin")):
            os.write(_log, f"{os.getpid()} {os.path.basename(name)}\\n".encode())
sys.addaudithook(_opened)
"""


def test_requests_are_opened_once_and_the_spool_by_those_who_need_it(
        tmp_path: Path, profiled: Callable[..., dict[str, str]]) -> None:
    directory, out, opened = tmp_path / "model", tmp_path / "out", tmp_path / "opened"
    reference, queries = toys.make_model("llama", directory), toys.random_queries(12)
    requests = [*as_requests(queries), {"id": "bad"}]
    job = write_job(tmp_path, directory, requests, ranks=2,
                    schedule="policy: rra, encode_batch: 3, decode_iterations: 4, tp_degree: 1")
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
    assert names["requests.jsonl"] == 1, opened.read_text()
    # written by the launcher, read by rank 0 and the report
    assert names["tokens.bin"] == 3 and len(pids) == 2, opened.read_text()
    results = read_lines(out / "results.jsonl")
    assert {r["id"]: r["output_ids"] for r in results} == {
        q.id: toys.generate(reference, q) for q in queries}
    assert all(r["ttft_s"] > 0 and r["ttft_s"] <= r["encode_start_s"] + r["latency_s"] + 1e-6
               for r in results)
    assert [e["id"] for e in read_lines(out / "errors.jsonl")] == ["bad"]
    metrics = json.loads((out / "metrics.json").read_text())
    assert 0 < metrics["ttft_p50_s"]["measured"] <= metrics["ttft_p99_s"]["measured"]
    assert metrics["tpot_p50_s"]["measured"] > 0
