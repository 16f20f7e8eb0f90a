"""Whole commands with real ranks. A file of requests, here a CSV file, is opened by the launcher,
once, and by nobody else; its results are a CSV file too, and the run says whether it kept its
bounds. `xgpt score` finds continuations as likely as transformers does. `weights: random` needs no
model files, no network, no text."""

import csv
import json
from collections import Counter

import job_folder
import numpy as np
import pytest
import torch
import toys
from by_data_sheets import COMMAND
from job_folder import as_requests, read_lines, write_job
from mpi_runs import answered, call, injected, json_of, said

from xgpt.requests.spool import Spool

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
BOUNDS = "constraint: {ttft_s: {limit_s: 2, quantile: 0.9}, tpot_s: 0.5, makespan_s: 10 min}\n"


def test_requests_are_opened_once_and_the_spool_by_those_who_need_it(tmp_path, llama, cache):
    (directory, reference), out, opened = llama, tmp_path / "out", tmp_path / "opened"
    queries = toys.random_queries(12)
    requests = [*as_requests(queries), {"id": "bad"}]
    job = write_job(tmp_path, directory, requests, ranks=2,
                    schedule="policy: rra, encode_batch: 3, decode_iterations: 4, tp_degree: 1, "
                             "replicas: 1")
    job.write_text(job.read_text().replace("requests.jsonl", "requests.csv") + BOUNDS)
    with (tmp_path / "requests.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, ["id", "tokens", "max_tokens", "topic, in words"])
        table.writeheader()
        table.writerows({"topic, in words": f"\"{r['id']}\",\n", **r} for r in requests)
    env = injected(tmp_path / "hook", HOOK, **{**cache, "OPENED": str(opened)})
    done = call("submit", job, "--strict", env=env, xgpt=COMMAND)

    names = Counter(line.split()[1] for line in opened.read_text().splitlines())
    pids = Counter(line.split()[0] for line in opened.read_text().splitlines())
    assert names["requests.csv"] == 1, opened.read_text()
    assert not names["compiler"], "torch's own takes a rank a second to import"
    assert len(pids) == 2, "the launcher and rank 0, and no other rank"
    results = answered(out, queries, reference)
    assert all(r["ttft_s"] > 0 and r["ttft_s"] <= r["encode_start_s"] + r["latency_s"] + 1e-6
               for r in results)
    assert [e["id"] for e in read_lines(out / "errors.jsonl")] == ["bad"]
    with (out / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["id"], row["topic, in words"]) for row in rows] == [
        (r["id"], f"\"{r['id']}\",\n") for r in requests]
    assert [int(row["output_tokens"]) for row in rows[:-1]] == [
        len(r["output_ids"]) for r in results]
    assert rows[-1]["error"] == "tokens is null: the cell is empty" and not rows[-1]["answer"]
    metrics = json_of(out / "metrics.json")
    assert 0 < metrics["ttft_p50_s"]["measured"] <= metrics["ttft_p99_s"]["measured"]
    assert metrics["tpot_p50_s"]["measured"] > 0

    assert metrics["bound_kept"] is True
    ttft, tpot, makespan = metrics["bounds"]
    first_s = np.array([one["ttft_s"] - one["encode_start_s"] for one in results])
    assert ttft["worst_s"] == pytest.approx(first_s.max()) and first_s.min() >= 0
    assert tpot["worst_s"] == max(one["tpot_s"] or 0 for one in results)
    assert makespan["worst_s"] == metrics["wall_s"]["measured"]
    assert "limit of 2.00 s on the time to the first token met: 100 % of the requests" in said(done)
    assert "limit of 10 min on the time of the whole job met: it took" in said(done)
    schedule = json_of(out / "schedule.json")
    assert [one["metric"] for one in schedule["prospects"]] == ["ttft", "tpot", "makespan"]
    schedule["bounds"][2]["limit_s"] = 1e-6  # nothing keeps that
    tight = tmp_path / "tight.json"
    tight.write_text(json.dumps(schedule))
    missed = call("run", job, "--schedule", tight, "--strict", "--json", env=cache, code=4,
                  xgpt=COMMAND)
    told = json.loads(missed.stdout)
    assert told["bound_kept"] is False and "time per output token missed: 0 %" in told["error"]
    assert told["bounds"][1]["over"] == told["bounds"][1]["of"] > 0


COUNT = 60
OUTPUTS = "  output_tokens: {mean: 15, std: 8, max: 40}\n"


def test_continuations_are_as_likely_as_transformers_finds_them(tmp_path, llama, cache):
    folder, model = llama
    texts = [[*query.input_ids, 7, 11, 3] for query in toys.random_queries(COUNT, seed=3)]
    requests = []
    for i, ids in enumerate(texts):
        own = min(1 + i % 6, len(ids) - 1)
        requests.append({"id": f"q{i}", "tokens": ids[:-own], "continuation_tokens": ids[-own:]})
    requests.insert(5, {"id": "bad", "tokens": [4]})
    job = write_job(tmp_path, folder, requests, ranks=2,
                    schedule="policy: rra, tp_degree: 1, encode_batch: 16, decode_iterations: 1")
    job.write_text(job.read_text().replace(OUTPUTS, ""))
    metrics = json.loads(call("score", job, "--json", env=cache, xgpt=COMMAND).stdout)
    assert metrics["status"] == "done" and metrics["ranks"] == 2
    assert metrics["throughput_qps"]["predicted"] > 0
    assert [error["id"] for error in read_lines(tmp_path / "out" / "errors.jsonl")] == ["bad"]
    results = read_lines(tmp_path / "out" / "results.jsonl")
    assert [result["id"] for result in results] == [f"q{i}" for i in range(COUNT)]
    for ids, result in zip(texts, results, strict=True):
        targets = result["continuation_ids"]
        assert targets == ids[-len(targets):]
        with torch.no_grad():
            rows = torch.log_softmax(model(torch.tensor([ids])).logits[0], dim=-1)
        rows = rows[-len(targets) - 1:-1]
        expected = rows.gather(1, torch.tensor(targets)[:, None])[:, 0].tolist()
        assert result["logprobs"] == pytest.approx(expected, abs=1e-4)
        assert result["log_likelihood"] == pytest.approx(sum(expected), abs=1e-3)
        assert result["is_greedy"] == (rows.argmax(dim=1).tolist() == targets)


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


@pytest.mark.slow  # tests/xgpt/app/test_library.py runs such a job
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
