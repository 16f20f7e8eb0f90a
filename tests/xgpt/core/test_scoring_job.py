"""A job that scores continuations or embeds texts, as its file says it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from xgpt.core.errors import InputError
from xgpt.job.job_file import load_job
from xgpt.requests.reader import read_requests
from xgpt.requests.request import Request


def test_a_job_that_scores_encodes_whole_inputs_by_our_own_engine(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text('{"prompt": "a", "continuation": " b"}\n')
    path = tmp_path / "job.yaml"
    path.write_text("model: opt-13b\ncluster: a40-4\nworkload: {requests: r.jsonl, score: true}\n")
    job = load_job(path)
    assert job.schedule.policies == ("rra",) and job.schedule.encode_chunk == 0
    assert not job.workload.chat and job.workload.output_tokens.maximum == 1
    for override, key in (("schedule.policy=waa-c", "schedule.policy"),
                          ("workload.max_tokens=3", "workload.max_tokens"),
                          ("run.engine=vllm", "run"),
                          ("workload.requests={count: 3}", "workload.requests")):
        with pytest.raises(InputError) as caught:
            load_job(path, (override,))
        assert key in [mistake.key for mistake in caught.value.mistakes], override


def test_a_job_that_embeds_takes_texts_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text('{"prompt": "a"}\n')
    path = tmp_path / "job.yaml"
    path.write_text("model: opt-13b\ncluster: a40-4\nworkload: {requests: r.jsonl, embed: mean}\n")
    job = load_job(path)
    assert job.workload.embed == "mean" and job.workload.only_encodes and not job.workload.chat
    assert job.schedule.policies == ("rra",) and job.schedule.encode_chunk == 0
    for override, key in (("schedule.policy=sarathi", "schedule.policy"),
                          ("workload.embed=cls", "workload.embed"),
                          ("workload.score=true", "workload.embed"),
                          ("run.engine=vllm", "run")):
        with pytest.raises(InputError) as caught:
            load_job(path, (override,))
        assert key in [mistake.key for mistake in caught.value.mistakes], override


@pytest.mark.parametrize(("body", "content"), [
    ({"input": "a text"}, "a text"), ({"input": ["a text"]}, "a text"), ({"input": [4, 5]}, (4, 5)),
    ({"input": [[4, 5]], "encoding_format": "float", "model": "m", "user": "u"}, (4, 5)),
    ({"input": []}, "input"), ({}, "input"), ({"input": ["a", 3]}, "input"),
    ({"input": "a", "dimensions": 8}, "dimensions"),
    ({"input": "a", "encoding_format": "base64"}, "encoding_format"),
    ({"messages": [{"role": "user", "content": "a"}]}, "messages")])
def test_openais_lines_of_embeddings(tmp_path: Path, body: dict[str, Any], content: Any) -> None:
    path = tmp_path / "r.jsonl"
    line = {"custom_id": "x", "method": "POST", "url": "/v1/embeddings",
            "body": {"model": "m", **body}}
    path.write_text(json.dumps(line) + "\n")
    job = tmp_path / "job.yaml"
    job.write_text("model: opt-13b\ncluster: a40-4\nworkload: {requests: r.jsonl, embed: last}\n")
    files = load_job(job).workload.requests
    assert files is not None
    found, = read_requests(files)
    if isinstance(found, Request):
        assert (found.prompt or found.tokens) == content and found.pooled == "last"
    else:
        assert content in found.error and found.is_openai


def test_a_chat_in_a_job_that_embeds_says_what_the_job_takes(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text(json.dumps({
        "custom_id": "x", "url": "/v1/chat/completions", "body": {"input": "a"}}) + "\n")
    job = tmp_path / "job.yaml"
    job.write_text("model: opt-13b\ncluster: a40-4\nworkload: {requests: r.jsonl, embed: last}\n")
    files = load_job(job).workload.requests
    assert files is not None
    found, = read_requests(files)
    assert not isinstance(found, Request) and found.code == "invalid_url"
    assert "workload.embed" in found.error
