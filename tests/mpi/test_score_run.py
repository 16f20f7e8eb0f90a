"""On two real ranks `xgpt score` finds continuations as likely as transformers does, and a job that
embeds gives its last hidden states."""

import json

import pytest
import torch
import toys
from by_data_sheets import COMMAND
from job_folder import read_lines, write_job
from mpi_runs import call

pytestmark = pytest.mark.mpi
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


@pytest.mark.slow  # tests/xrunner/engine/test_embeddings.py has every policy and layout on threads
def test_texts_are_embedded_by_transformers_last_hidden_states(tmp_path, llama, cache):
    folder, model = llama
    texts = [list(query.input_ids) for query in toys.random_queries(40, seed=4)]
    requests = [{"id": f"q{i}", "tokens": ids} if i % 2 else
                {"custom_id": f"q{i}", "method": "POST", "url": "/v1/embeddings", "body": {
                    "model": "toy", "input": ids}} for i, ids in enumerate(texts)]
    job = write_job(tmp_path, folder, requests, ranks=2,
                    schedule="policy: rra, tp_degree: 1, encode_batch: 8, decode_iterations: 1")
    job.write_text(job.read_text().replace(OUTPUTS, "  embed: mean\n"))
    metrics = json.loads(call("submit", job, "--json", env=cache, xgpt=COMMAND).stdout)
    assert metrics["status"] == "done" and metrics["throughput_qps"]["predicted"] > 0
    results = read_lines(tmp_path / "out" / "results.jsonl")
    assert (tmp_path / "out" / "report.html").is_file() and len(results) == len(texts)
    for i, (ids, result) in enumerate(zip(texts, results, strict=True)):
        with torch.no_grad():
            expected = model.model(torch.tensor([ids])).last_hidden_state[0].mean(dim=0)
        found = result["embedding"] if i % 2 else (
            result["response"]["body"]["data"][0]["embedding"])
        if not i % 2:
            expected = expected / expected.norm()
        assert found == pytest.approx(expected.tolist(), abs=2e-4)
