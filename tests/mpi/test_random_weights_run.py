"""`weights: random` by the whole command: no model files, no network, no text."""

import json

import job_folder
import pytest
from job_folder import read_lines
from mpi_runs import call

from xgpt.requests.spool import Spool

JOB = """
model: {model}
cluster: local
workload:
  requests: {requests}
  input_tokens: {{mean: 12, std: 4, max: 24}}
  output_tokens: {{mean: 8, std: 3, max: 16}}
schedule: {{policy: rra, encode_batch: 4, decode_iterations: 4}}
run: {{ranks: 1, weights: random, threads_per_rank: 1}}
"""
SHAPE = {"model_type": "opt", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4,
         "ffn_dim": 128, "vocab_size": 120, "max_position_embeddings": 64,
         "eos_token_id": 3}  # a shape alone is taken of it: the end of sequence is not


@pytest.fixture
def offline(cache, monkeypatch):
    """An empty hub cache, and a hub that answers nothing."""
    own = {**cache, "HF_HUB_CACHE": cache["XDG_CACHE_HOME"] + "/hub", "HF_HUB_OFFLINE": "1"}
    for name in ("XDG_CACHE_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, own[name])
    return own


@pytest.mark.slow  # tests/xgpt/app/test_library.py runs such a job, test_second_job.py measures one
def test_a_shape_alone_runs(tmp_path, offline):
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    job, out = tmp_path / "job.yaml", tmp_path / "out"
    job.write_text(JOB.format(model=".", requests="{count: 20}"))
    metrics = json.loads(call("submit", job, "--json", env=offline).stdout)
    assert metrics["queries"] == 20 and metrics["model_source"] == "random weights of its shape"
    results, spool = read_lines(out / "results.jsonl"), Spool(out)
    assert [(r["input_tokens"], r["output_tokens"], r["text"]) for r in results] == [
        (len(spool.tokens(query)), spool.most_output_tokens(query), "") for query in range(20)]
    assert not list((out / "model").glob("*.safetensors"))
    again = json.loads(call("submit", job, "--json", env=offline).stdout)
    assert again["status"] == "already done" and again["date"] == metrics["date"]


@pytest.mark.parametrize(("model", "requests", "words"), [
    ("opt-125m", "texts.jsonl", ("run.weights = 'random'", "line 2")),
    ("some/model", "{count: 20}", ("give a catalog name, or a folder",))])
def test_requests_of_text_and_unknown_shapes_are_refused(tmp_path, offline, model, requests, words):
    (tmp_path / "texts.jsonl").write_text('{"tokens": [5]}\n{"prompt": "Hello"}\n')
    (tmp_path / "job.yaml").write_text(JOB.format(model=model, requests=requests))
    done = job_folder.xgpt("submit", tmp_path / "job.yaml")
    assert done.returncode == 2 and all(word in done.stderr for word in words), done.stderr
