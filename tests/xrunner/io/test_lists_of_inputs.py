"""A list of prompts, or of texts to embed, is one line of results with an answer to each, as OpenAI
answers it; and what a request says of a penalty counts before what the model's files say."""

import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_runs
import toys
from plans import plan_of, spooled, written
from replays import answers_of
from schemas import faults

from xgpt.report.output import read_output
from xgpt.requests.reader import read_requests
from xgpt.requests.request import Terms
from xgpt.requests.request_files import RequestFiles
from xgpt.requests.spool import Spool, SpoolWriter
from xrunner.files.generation import given_tokens
from xrunner.files.intake import hand_on, queries_of, take_in
from xrunner.query import PreparedQuery

types = pytest.importorskip("openai.types", reason="its types are in the extra `dev`")
A, B = [7, 8, 9], [20, 21]


def line(name: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": name, "url": "/v1/completions",
            "body": {"model": "m", "max_tokens": 6, **body}}


def answers(output: Path, model: Path, queries: Sequence[PreparedQuery]) -> dict[str, Any]:
    """The bodies of a run's responses by their custom_id."""
    sink, _ = toy_runs.run_in_process(model, queries, degrees=(1,))
    rows = written(output / "results.jsonl", sink.results)
    assert not [fault for row in rows for fault in faults("results-line", row)]
    assert all(row["error"] is None and row["response"]["status_code"] == 200 for row in rows)
    return {row["custom_id"]: row["response"]["body"] for row in rows}


def test_each_prompt_of_a_list_has_its_choices_as_if_it_were_alone(llama, tmp_path):
    plan = plan_of(tmp_path, llama[0], temperature=0.0)
    drawn = {"temperature": 1.5, "seed": 3, "n": 2}
    before = int(time.time())
    spool, errors = spooled(
        plan, line("a", prompt=A), line("b", prompt=B), line("both", prompt=[A, B]),
        line("one", prompt=[A], logprobs=1), line("a2", prompt=A, **drawn),
        line("b2", prompt=B, **drawn), line("both2", prompt=[A, B], **drawn))
    assert not errors
    found = answers(tmp_path, llama[0], list(queries_of(spool, plan)))
    texts = {name: [choice["text"] for choice in body["choices"]] for name, body in found.items()}
    assert texts["both"] == texts["a"] + texts["b"] and texts["one"] == texts["a"]
    assert texts["both2"] == texts["a2"] + texts["b2"] and len({*texts["both2"]}) == 4
    for name, body in found.items():
        types.Completion.model_validate(body, strict=True)
        assert before <= body["created"] <= time.time()
        assert [choice["index"] for choice in body["choices"]] == [*range(len(texts[name]))]
    for suffix in ("", "2"):  # a prompt counts once, however many answers it has
        whole, parts = (found[f"both{suffix}"]["usage"],
                        [found[f"{name}{suffix}"]["usage"] for name in "ab"])
        assert whole == {key: sum(part[key] for part in parts) for key in whole}
        assert whole["prompt_tokens"] == 5
    output = read_output(tmp_path)  # each answer is a query to who counts and reads them
    assert output.queries.counts("input_tokens").tolist() == [3, 2, 3, 2, 3, 3, 3, 2, 2, 3, 3, 2, 2]


def test_a_chat_with_several_choices_is_of_openais_type(llama, tmp_path):
    plan = plan_of(tmp_path, llama[0], temperature=0.0)
    spool, _ = spooled(plan, line("a", prompt=A, n=2), line("b", prompt=A))
    found = answers(tmp_path, llama[0], [replace(query, is_chat=True)
                                         for query in queries_of(spool, plan)])
    from openai.types.chat import ChatCompletion

    for body in found.values():
        ChatCompletion.model_validate(body, strict=True)
        assert body["created"] > 1.7e9


def test_one_prompt_that_cannot_run_leaves_its_line_without_an_answer(llama, tmp_path):
    plan = plan_of(tmp_path, llama[0], temperature=0.0)
    spool, errors = spooled(
        plan, line("a", prompt=A), line("long", prompt=[A, [5] * 90, B], n=2),
        line("outside", prompt=[[99_999], A]), line("b", prompt=[B, A]))
    assert [query.id for query in queries_of(spool, plan)] == ["a", "b", "b"]
    assert spool.num_errors == 2
    said = {error["custom_id"]: error["response"]["body"]["error"]["message"] for error in errors}
    assert said["long"].startswith("input 2 of the line: ") and "KV cache" in said["long"]
    assert "outside the vocabulary" in said["outside"]
    assert [*answers(tmp_path, llama[0], list(queries_of(spool, plan)))] == ["a", "b"]


def test_each_text_of_a_list_has_its_embedding(llama, tmp_path):
    plan = plan_of(tmp_path, llama[0])
    path = tmp_path / "requests.jsonl"
    path.write_text("".join(json.dumps({
        "custom_id": name, "url": "/v1/embeddings", "body": {"model": "m", "input": value}}) + "\n"
        for name, value in (("a", A), ("both", [A, B]), ("b", [B]))))
    files, spool = RequestFiles(paths=(path,), terms=Terms(pooled="last")), SpoolWriter()
    assert [one.pooled for one in read_requests(files)] == ["last"] * 4

    class Tokens:
        vocab_size = 97

        def tokenise(self, requests: Sequence[Any]) -> list[Any]:
            return [request.tokens for request in requests]

    hand_on(take_in(files, Tokens(), spool), spool, plan, toys.spec_of(llama[0]))
    found = answers(tmp_path, llama[0], list(queries_of(Spool(tmp_path), plan)))
    for body in found.values():
        types.CreateEmbeddingResponse.model_validate(body, strict=True)
        assert [one["index"] for one in body["data"]] == [*range(len(body["data"]))]
    vectors = {name: [one["embedding"] for one in body["data"]] for name, body in found.items()}
    assert list(itertools.chain(*vectors["both"])) == pytest.approx(
        [*vectors["a"][0], *vectors["b"][0]], abs=1e-5)
    assert found["both"]["usage"] == {"prompt_tokens": 5, "total_tokens": 5}
    assert read_output(tmp_path).queries.counts("output_tokens").tolist() == [0] * 4


def test_a_requests_own_penalty_is_generates_and_1_is_none_whatever_the_model_says(tmp_path):
    model = toys.make_model("llama", tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({
        "repetition_penalty": 1.3, "eos_token_id": toys.EOS, "pad_token_id": 0}))
    given_tokens.cache_clear()
    plan = plan_of(tmp_path, tmp_path, temperature=0.0)
    asked = (None, 1, 1.6)
    spool, errors = spooled(plan, *({"tokens": A, "repetition_penalty": penalty, "max_tokens": 20}
                                    for penalty in asked))
    assert not errors
    sink, _ = toy_runs.run_in_process(tmp_path, list(queries_of(spool, plan)), degrees=(1,))
    found = answers_of(sink)
    given_tokens.cache_clear()
    inputs = torch.tensor([A])
    for index, penalty in enumerate((1.3, 1.0, 1.6)):
        with torch.no_grad():
            out = model.generate(inputs, attention_mask=torch.ones_like(inputs), do_sample=False,
                                 max_new_tokens=20, repetition_penalty=penalty)
        assert found[index] == out[0, 3:].tolist()
    assert found[0] != found[1] != found[2]
