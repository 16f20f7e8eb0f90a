"""Several jobs of one command: the same ranks take them one after another, with the weights they
have, and give each job's own tokens."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="runs need the extra `run`")
import toys  # noqa: E402
from job_folder import XGPT, as_requests, read_lines, write_job  # noqa: E402

pytestmark = pytest.mark.mpi

STAGES, HALVES = "tp_degree: 1", "tp_degree: 2, tp_gpus: 2"
QUERIES = {"first": toys.random_queries(7, seed=1), "long": toys.random_queries(180, seed=2),
           "last": toys.random_queries(8, seed=3), "halves": toys.random_queries(6, seed=4)}


def test_jobs_of_one_model_load_it_once_and_a_stop_ends_all_until_the_same_command_goes_on(
        tmp_path, profiled):
    (tmp_path / "model").mkdir()
    reference = toys.make_model("llama", tmp_path / "model")
    jobs = [job_of(tmp_path, name) for name in ("first", "long")]
    jobs += [job_of(tmp_path, "never", bound="1 us"), job_of(tmp_path, "last"),
             job_of(tmp_path, "halves", layout=HALVES)]
    command, environment = [*XGPT, "submit", *map(str, jobs), "--json"], profiled("llama", 2)

    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          env=environment) as process:
        await_results(tmp_path / "long" / "out" / "results.jsonl", process)
        process.send_signal(signal.SIGINT)
        out, told = process.communicate(timeout=120)
    assert process.returncode == 75, told  # the first that did not come to its end was stopped
    assert states(out) == ["done", "stopped", "failed", "not started", "not started"], told
    assert told.index("planning job 5 of 5") < told.index("running job 1 of 5"), told
    kept = (tmp_path / "long" / "out" / "results.jsonl").read_bytes()
    assert 0 < kept.count(b"\n") < 180
    assert metrics(tmp_path, "first")["loaded_bytes"] > 0 == metrics(tmp_path, "long")[
        "loaded_bytes"]

    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280,
                          check=False)
    assert done.returncode == 3, done.stderr  # that no schedule keeps the bound
    assert states(done.stdout) == ["already done", "done", "failed", "done", "done"], done.stderr
    loaded = {name: metrics(tmp_path, name)["loaded_bytes"] for name in QUERIES}
    assert loaded["long"] > 0 and loaded["last"] == 0 and loaded["halves"] > 0, loaded
    anew = "ranks: started anew, for the job has another layout of ranks and stages\n"
    assert done.stderr.count("those of the job before") == 1 and done.stderr.count(anew) == 1
    assert (tmp_path / "long" / "out" / "results.jsonl").read_bytes().startswith(kept)
    for name, queries in QUERIES.items():
        answers = {r["id"]: r["output_ids"] for r in read_lines(
            tmp_path / name / "out" / "results.jsonl")}
        assert len(answers) == len(queries)
        for query in queries[:8]:
            assert answers[query.id] == toys.generate(reference, query), (name, query.id)


def job_of(folder: Path, name: str, *, layout: str = STAGES, bound: str = "inf") -> Path:
    own = folder / name
    own.mkdir()
    job = write_job(own, folder / "model", as_requests(QUERIES.get(name, QUERIES["first"])),
                    ranks=2,
                    schedule=f"policy: rra, encode_batch: 3, decode_iterations: 4, {layout}")
    job.write_text(f"{job.read_text()}name: {name}\nconstraint: {{latency_s: {bound}}}\n")
    return job


def await_results(path: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not path.is_file() or path.stat().st_size < 2000:
        assert process.poll() is None and time.monotonic() < deadline, "the job ran to its end"
        time.sleep(0.02)


def states(out: str) -> list[str]:
    return [job["status"] for job in json.loads(out)["jobs"]]


def metrics(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / name / "out" / "metrics.json").read_text())
    return found
