"""`weights: random` by the whole command: no model files, no network, no text."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="runs need the extra `run`")
import job_folder  # noqa: E402
from given_runs import given  # noqa: E402
from job_folder import XGPT, read_lines  # noqa: E402

from xgpt.core.job import FixedSchedule
from xgpt.core.job_file import load_job  # noqa: E402
from xgpt.core.problem import resolve  # noqa: E402
from xgpt.core.spool import Record, Spool, SpoolWriter  # noqa: E402
from xgpt.launch.launcher import RankProgram  # noqa: E402
from xgpt.launch.local import LocalLauncher  # noqa: E402
from xprofiler.roofline import Roofline  # noqa: E402
from xrunner.checkpoint.source import SERVED_BY, write_random_model  # noqa: E402
from xrunner.plan import RunPlan  # noqa: E402
from xsimulator.rough.forms import fixed_estimate

JOB = """
model: {model}
cluster: local
workload:
  requests: {requests}
  input_tokens: {{mean: 12, std: 4, max: 24}}
  output_tokens: {{mean: 8, std: 3, max: 16}}
schedule: {{policy: rra, encode_batch: 4, decode_iterations: 4}}
run: {{ranks: {ranks}, weights: random, threads_per_rank: 1}}
"""
SHAPE = {"model_type": "opt", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4,
         "ffn_dim": 128, "vocab_size": 120, "max_position_embeddings": 64,
         "eos_token_id": 3}  # a shape alone is taken of it: the end of sequence is not


def job_of(folder: Path, *, model: str, ranks: int = 1, requests: str = "{count: 20}") -> Path:
    job = folder / "job.yaml"
    job.write_text(JOB.format(model=model, requests=requests, ranks=ranks))
    return job


def xgpt(*arguments: str, cache: dict[str, str]) -> subprocess.CompletedProcess[str]:
    # an empty hub cache, and a hub that answers nothing
    env = {**cache, "HF_HUB_CACHE": cache["XDG_CACHE_HOME"] + "/hub", "HF_HUB_OFFLINE": "1"}
    return subprocess.run([*XGPT, *arguments], capture_output=True, text=True, env=env,
                          timeout=280, check=False)


def check_run(out: Path, done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    metrics: dict[str, Any] = json.loads(done.stdout)
    assert metrics["queries"] == 20 and metrics["model_source"] == "random weights of its shape"
    results = read_lines(out / "results.jsonl")
    spool = Spool(out)
    assert [r["output_tokens"] for r in results] == [
        spool.most_output_tokens(query) for query in range(20)]
    assert [r["input_tokens"] for r in results] == [len(spool.tokens(q)) for q in range(20)]
    assert {r["text"] for r in results} == {""}
    assert not list((out / "model").glob("*.safetensors"))
    return metrics


@pytest.fixture
def toy_job(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    return job_of(tmp_path, model=".")


@pytest.mark.slow  # tests/xgpt/app/test_library.py runs such a job, test_second_job.py measures one
def test_a_shape_alone_runs(toy_job: Path, tmp_path: Path, cache: dict[str, str]) -> None:
    metrics = check_run(tmp_path / "out", xgpt("submit", str(toy_job), "--json", cache=cache))
    again = json.loads(xgpt("submit", str(toy_job), "--json", cache=cache).stdout)
    assert again["status"] == "already done" and again["date"] == metrics["date"]


@pytest.mark.slow
def test_requests_of_tokens_go_to_their_cap(toy_job: Path, tmp_path: Path,
                                            cache: dict[str, str]) -> None:
    (tmp_path / "tokens.jsonl").write_text("".join(
        json.dumps({"tokens": [i, 7], "max_tokens": 9}) + "\n" for i in range(30)))
    done = xgpt("submit", str(toy_job), "--set", "workload.requests=tokens.jsonl", "--set",
                "output=other", cache=cache)
    assert done.returncode == 0, done.stderr
    results = read_lines(tmp_path / "other" / "results.jsonl")
    assert {r["output_tokens"] for r in results} == {9}
    assert len({tuple(r["output_ids"]) for r in results}) > 1


def test_requests_of_text_and_unknown_shapes_are_refused(tmp_path: Path, cache: dict[str, str],
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", cache["XDG_CACHE_HOME"])
    monkeypatch.setenv("HF_HUB_CACHE", cache["XDG_CACHE_HOME"] + "/hub")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "texts.jsonl").write_text('{"tokens": [5]}\n{"prompt": "Hello"}\n')
    job = job_of(tmp_path, model="opt-125m", requests="texts.jsonl")
    done = job_folder.xgpt("submit", job)
    assert done.returncode == 2
    assert "run.weights = 'random'" in done.stderr and "line 2" in done.stderr
    done = job_folder.xgpt("submit", job_of(tmp_path, model="some/model"))
    assert done.returncode == 2 and "give a catalog name, or a folder" in done.stderr


@pytest.mark.slow
@pytest.mark.mpi
def test_a_catalog_shape_runs_over_two_ranks_without_any_file(tmp_path: Path) -> None:
    """Without the command around the ranks, which would measure the model for minutes."""
    job, out = load_job(job_of(tmp_path, model="opt-125m", ranks=2), ()), tmp_path / "out"
    problem = resolve(job)
    timing = Roofline(problem.model, problem.cluster.device, problem.dtype)
    estimate = fixed_estimate("rra", problem, timing,
        FixedSchedule(encode_batch=4, decode_iterations=4))
    write_random_model(out / "model", problem.model)
    given(estimate, problem, out / "schedule.json")
    plan = RunPlan(
        name="random", output=out, model_dir=out / "model", model_name="opt-125m",
        served_by=SERVED_BY, requests="test", is_chat=False, max_tokens=16,
        dtype="float32", weight_dtype="float32", seed=0, temperature=0.0, top_k=None, top_p=1.0,
        ignore_eos=False, threads_per_rank=1,
        query_kv_tokens=estimate.deployment.group_kv_tokens)
    spool = SpoolWriter()
    for i in range(20):
        spool.add(Record(id=str(i), line=i + 1, is_forced=True), (i, 7, 9))
    spool.save(out, np.array([(i, 3 + i % 5) for i in range(20)]), 0)
    LocalLauncher().run(RankProgram(module="xrunner.worker", argument=plan.save(), count=2),
                        watch=lambda: None)
    results = read_lines(out / "results.jsonl")
    assert [len(r["output_ids"]) for r in results] == [3 + i % 5 for i in range(20)]
    measured = json.loads((out / "measured.json").read_text())
    made = [rank["bytes_read"] for rank in measured["ranks"]]
    # each end has the table of tokens: the head is tied to it (OPT's positions begin at the third)
    spec = problem.model
    assert sum(made) == 4 * (spec.num_params + spec.head_params + 2 * spec.hidden_size)
    assert max(made) < 0.6 * sum(made)
