"""OpenAI's lines: a list of prompts, or of texts to embed, and `n` answers are one line of results,
as OpenAI answers it, also where a run is killed in between; what a request says of a penalty counts
before what the model's files say; of a whole file every line is answered or refused by name."""

import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import openai_batch
import pytest
import toy_runs
import toys
from given_runs import given, toy_plan
from job_folder import read_lines
from plans import open_writer, plan_of, spooled, written
from replayed import problem_of
from replays import answers_of, estimated
from schemas import faults

from xgpt.report.output import read_output
from xgpt.requests.choices import merged, num_parts, parts
from xgpt.requests.reader import read_requests
from xgpt.requests.request import Terms
from xgpt.requests.request_files import RequestFiles
from xgpt.requests.spool import Spool, SpoolWriter
from xrunner.files.generation import generation_rules
from xrunner.files.result_line import result_line
from xrunner.files.results import HELD_FILE, Answered, answered, count_results
from xrunner.files.runnable import save_runnable
from xrunner.files.spooled_requests import SpooledQueries, read_and_tokenise
from xrunner.query import FinishedQuery, PreparedQuery
from xrunner.rank.loading import KeptWeights, load
from xrunner.rank.worker import work
from xrunner.rank.world import connect

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
        line("b2", prompt=B, **drawn), line("both2", prompt=[A, B], **drawn),
        line("none", prompt=A, n=0), line("many", prompt=A, n=129), line("late", prompt=A, n=None))
    assert [error["custom_id"] for error in errors] == ["none", "many"]
    assert all("n must be a whole number from 1 to 128" in str(error["response"])
               for error in errors)
    found = answers(tmp_path, llama[0], list(SpooledQueries(spool, plan)))
    texts = {name: [choice["text"] for choice in body["choices"]] for name, body in found.items()}
    assert texts["both"] == texts["a"] + texts["b"] and texts["one"] == texts["a"] == texts["late"]
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
    assert output.queries.counts("input_tokens").tolist() == [
        3, 2, 3, 2, 3, 3, 3, 2, 2, 3, 3, 2, 2, 3]


def test_a_chat_with_several_choices_is_of_openais_type(llama, tmp_path):
    plan = plan_of(tmp_path, llama[0], temperature=0.0)
    spool, _ = spooled(plan, line("a", prompt=A, n=2), line("b", prompt=A))
    found = answers(tmp_path, llama[0], [replace(query, is_chat=True)
                                         for query in SpooledQueries(spool, plan)])
    from openai.types.chat import ChatCompletion

    for body in found.values():
        ChatCompletion.model_validate(body, strict=True)
        assert body["created"] > 1.7e9


def test_one_prompt_that_cannot_run_leaves_its_line_without_an_answer(llama, tmp_path):
    plan = plan_of(tmp_path, llama[0], temperature=0.0)
    spool, errors = spooled(
        plan, line("a", prompt=A), line("long", prompt=[A, [5] * 90, B], n=2),
        line("outside", prompt=[[99_999], A]), line("b", prompt=[B, A]))
    assert [query.id for query in SpooledQueries(spool, plan)] == ["a", "b", "b"]
    assert spool.num_errors == 2
    said = {error["custom_id"]: error["response"]["body"]["error"]["message"] for error in errors}
    assert said["long"].startswith("input 2 of the line: ") and "KV cache" in said["long"]
    assert "outside the vocabulary" in said["outside"]
    assert [*answers(tmp_path, llama[0], list(SpooledQueries(spool, plan)))] == ["a", "b"]


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

    save_runnable(read_and_tokenise(files, Tokens(), spool), spool, plan, toys.spec_of(llama[0]))
    found = answers(tmp_path, llama[0], list(SpooledQueries(Spool(tmp_path), plan)))
    for body in found.values():
        types.CreateEmbeddingResponse.model_validate(body, strict=True)
        assert [one["index"] for one in body["data"]] == [*range(len(body["data"]))]
    vectors = {name: [one["embedding"] for one in body["data"]] for name, body in found.items()}
    assert all(sum(x * x for x in own) == pytest.approx(1) for own in vectors["both"])
    assert list(itertools.chain(*vectors["both"])) == pytest.approx(
        [*vectors["a"][0], *vectors["b"][0]], abs=1e-5)
    assert found["both"]["usage"] == {"prompt_tokens": 5, "total_tokens": 5}
    assert read_output(tmp_path).queries.counts("output_tokens").tolist() == [0] * 4


def test_a_requests_own_penalty_is_generates_and_1_is_none_whatever_the_model_says(tmp_path):
    model = toys.make_model("llama", tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({
        "repetition_penalty": 1.3, "eos_token_id": toys.EOS, "pad_token_id": 0}))
    generation_rules.cache_clear()
    plan = plan_of(tmp_path, tmp_path, temperature=0.0)
    asked = (None, 1, 1.6)
    spool, errors = spooled(plan, *({"tokens": A, "repetition_penalty": penalty, "max_tokens": 20}
                                    for penalty in asked))
    assert not errors
    sink, _ = toy_runs.run_in_process(tmp_path, list(SpooledQueries(spool, plan)), degrees=(1,))
    found = answers_of(sink)
    generation_rules.cache_clear()
    for index, penalty in enumerate((1.3, 1.0, 1.6)):
        assert found[index] == toys.greedily(model, A, 20, repetition_penalty=penalty)
    assert found[0] != found[1] != found[2]


pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
# (custom_id, its answers): indices 0, 1 to 3, 4, 5 and 6
REQUESTS = (("a", 1), ("b", 3), ("c", 1), ("d", 2))


def finished() -> list[FinishedQuery]:
    found: list[FinishedQuery] = []
    for name, choices in REQUESTS:
        for sample in range(choices):
            index = len(found)
            query = PreparedQuery(index=index, id=name, input_ids=(1, 2, 3), max_new_tokens=9,
                                  is_openai=True, is_chat=name == "b", sample=sample,
                                  choices=choices)
            found.append(FinishedQuery(
                query=query, output_ids=tuple(range(index + 1)), finish_reason="stop",
                text=f"täxt {index}", encode_start_s=index, first_token_s=index + 0.5,
                last_token_s=2.0 * index + 1))
    return found


def test_the_choices_of_a_request_are_one_response(tmp_path):
    path = tmp_path / "results.jsonl"
    rows = written(path, finished())
    assert [row["custom_id"] for row in rows] == ["a", "b", "c", "d"]
    body = rows[1]["response"]["body"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert [choice["message"]["content"] for choice in body["choices"]] == [
        "täxt 1", "täxt 2", "täxt 3"]
    # the prompt once, outputs of 2, 3 and 4 tokens
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 9, "total_tokens": 12}
    assert [choice["text"] for choice in rows[3]["response"]["body"]["choices"]] == [
        "täxt 5", "täxt 6"]
    assert list(map(num_parts, rows)) == [1, 3, 1, 2]
    assert answered(path) == Answered(7, frozenset()) and count_results(path) == 7


def test_taken_apart_it_is_what_each_answer_alone_would_be():
    own = [result for result in finished() if result.query.id == "b"]
    alone = [result_line(result, "toy", str) for result in own]
    (whole,) = [json.loads(merged([json.dumps(line) for line in alone]))]
    for part, line, result in zip(parts(whole), alone, own, strict=True):
        assert part["response"]["body"]["choices"] == line["response"]["body"]["choices"]
        assert part["response"]["body"]["usage"] == line["response"]["body"]["usage"]
        assert part["xgpt"] == {**line["xgpt"], "output_tokens": len(result.output_ids)}
    assert parts(alone[0]) == [alone[0]]


@pytest.mark.parametrize("order", [
    (0, 1, 2, 3, 4, 5, 6), (6, 5, 4, 3, 2, 1, 0), (3, 0, 5, 1, 4, 6, 2), (1, 3, 2, 6, 0, 5, 4)])
def test_whenever_a_run_is_killed_the_next_one_ends_with_the_same_lines(
        tmp_path, order, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1.8e9)  # each response says when it was made
    results = finished()
    whole = tmp_path / "whole.jsonl"
    written(whole, results)
    for killed_after in range(len(order) + 1):
        folder = tmp_path / str(killed_after)
        folder.mkdir()
        path = folder / "results.jsonl"
        killed = open_writer(path)
        for index in order[:killed_after]:
            killed.write(results[index])
        before = answered(path)
        if (folder / HELD_FILE).exists():
            assert not [fault for row in read_lines(folder / HELD_FILE)
                        for fault in faults("results-line", row)]
        done = set(range(before.written)) | before.held
        assert done == set(order[:killed_after]), "nothing is lost, or answered twice"
        written(path, (results[index] for index in order if index not in done))
        assert path.read_text() == whole.read_text()
        assert not (folder / HELD_FILE).exists()


def test_what_is_answered_keeps_the_second_in_which_it_was(tmp_path, monkeypatch):
    path, results = tmp_path / "results.jsonl", finished()
    monkeypatch.setattr(time, "time", lambda: 1_800_000_000.9)
    killed = open_writer(path)
    for index in (0, 4, 5):
        killed.write(results[index])
    monkeypatch.setattr(time, "time", lambda: 1_800_000_123.0)
    created = [row["response"]["body"]["created"] - 1_800_000_000
               for row in written(path, (results[index] for index in (1, 2, 3, 6)))]
    assert created == [0, 123, 0, 0]


def test_one_without_an_answer_leaves_the_request_without(tmp_path):
    path = tmp_path / "results.jsonl"
    row = written(path, (replace(result, finish_reason="error", error="logits")
                         if result.query.index == 2 else result for result in finished()))[1]
    assert row["response"] is None
    assert row["error"] == {"code": "no_answer", "message": "logits"}
    assert [part["xgpt"]["index"] for part in parts(row)] == [1, 2, 3]
    assert answered(path) == Answered(7, frozenset())


pytest.importorskip("openai", reason="its types are in the extra `dev`")


def test_every_line_is_what_openai_promises(tmp_path):
    model, out, requests = tmp_path / "model", tmp_path / "out", tmp_path / "requests.jsonl"
    out.mkdir()
    openai_batch.write_model(model)
    openai_batch.write_lines(requests)
    problem = problem_of(model, np.array([[30, 12], [60, 60]]), 1)
    estimate = estimated("rra", problem, encode_batch=3, decode_iterations=4)
    given(estimate.changed(kv_tokens=20_000), problem, out / "schedule.json")
    plan = toy_plan(model, out, query_kv_tokens=256, is_chat=True)
    toys.write_spool(plan, requests)
    work(plan, connect("cpu"), partial(load, kept_weights=KeptWeights()))
    by_name = openai_batch.checked(out)
    openai_batch.check_plain(by_name)
    told = {name: openai_batch.choice_of(by_name[name]) for name in ("choice", "pattern", "call")}
    assert told["choice"]["message"]["content"] in ("yes", "no")
    head, _, tail = told["pattern"]["message"]["content"].partition("-")
    assert head.isdecimal() and tail.isdecimal() and (len(head), len(tail)) == (3, 4)
    assert {one["finish_reason"] for one in told.values()} == {"stop"}
    for name, key in {"schema": "logit_bias", "bias": "logit_bias",
                      "no schema": "response_format.json_schema.schema: "}.items():
        assert key in openai_batch.why_not(by_name[name])
    # calls are not looked for: the answer is what the model wrote
    assert "<tool_call>" in told["call"]["message"]["content"]
    assert "tool_calls" not in openai_batch.choice_of(by_name["tools"])["message"]
