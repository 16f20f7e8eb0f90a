"""Requests taken in: each line and each text once; numbers for the plan, records for the spool."""

import json
from collections.abc import Sequence
from typing import cast

import numpy as np
import pytest
from plans import plan_of, spooled
from toys import spec_of

from xgpt.core import catalog
from xgpt.core.lengths import JointLengths, truncated_normal
from xgpt.requests.request import Request, Requests
from xgpt.requests.request_files import RequestFiles
from xgpt.requests.spool import Spool, SpoolWriter
from xrunner.files import runnable as looked_at
from xrunner.files import spooled_requests
from xrunner.files.runnable import runnable
from xrunner.files.spooled_requests import (
    ModelTokeniser,
    SpooledQueries,
    Tokenised,
    make_synthetic,
    read_and_tokenise,
)
from xrunner.files.tokenizer import TextTokenizer
from xrunner.plan import load_plan

COUNT = 25


class Counting:
    """A tokeniser of ten characters, which remembers what it was asked for."""

    vocab_size = 10

    def __init__(self) -> None:
        self.asked: list[str] = []

    def tokenise(self, requests: Sequence[Request]) -> list[Tokenised]:
        self.asked += [request.id for request in requests]
        return [list(request.tokens or [ord(c) - ord("a") for c in request.prompt or ""])
                if request.prompt != "refused" else "no template" for request in requests]


class Unknown:
    """No model is at hand."""

    vocab_size = None

    def tokenise(self, requests: Sequence[Request]) -> None:
        return None


@pytest.fixture
def path(tmp_path):
    rows = [{"id": f"r{i}", "prompt": "abc" + "d" * i, "max_tokens": i + 1} for i in range(COUNT)]
    rows[3] = {"id": "r3", "prompt": "refused"}
    rows[4] = {"id": "r4", "prompt": "xyz"}
    rows[5] = {"id": "r5", "tokens": [1, 2], "forced_tokens": 8, "stop": ["a"]}
    (tmp_path / "r.jsonl").write_text("bad\n" + "".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "r.jsonl"


def test_every_request_is_tokenised_once_however_the_file_is_cut(path, monkeypatch, tmp_path):
    digests = set()
    for at_a_time in (1, 7, 4096):
        monkeypatch.setattr(spooled_requests, "_LINES_AT_A_TIME", at_a_time)
        tokeniser, spool = Counting(), SpoolWriter()
        requests = read_and_tokenise(RequestFiles(paths=(path,)), tokeniser, spool)
        digests.add(requests.digest)
        assert tokeniser.asked == [f"r{i}" for i in range(COUNT)]
        assert [error.line for error in requests.bad_lines] == [1]
        assert requests.unusable == {3: "no template",
                                     4: "token 23 is outside the vocabulary (0..9)"}
        assert requests.input_tokens is not None and requests.are_tokenised
        assert requests.input_tokens.tolist()[:7] == [3, 4, 5, 1, 3, 2, 9]
        assert requests.caps.tolist()[:7] == [1, 2, 3, 0, 0, 8, 7]
        assert (requests.forced > 0).nonzero()[0].tolist() == [5] and requests.may_stop[5]
        assert requests.output_caps(40).tolist()[3] == 40 and not requests.are_forced
        spool.save(tmp_path, np.array([(i, 1) for i in range(COUNT)]), 1)
        assert [*Spool(tmp_path).tokens(6)] == [0, 1, 2, 3, 3, 3, 3, 3, 3]
        assert Spool(tmp_path).prompts(2) == ["abc", "abcd"]
    assert len(digests) == 1
    path.write_text(path.read_text().replace("abc", "abd"))
    assert read_and_tokenise(RequestFiles(paths=(path,)), Counting()).digest not in digests


def test_without_a_model_only_given_tokens_have_lengths(path, tmp_path):
    assert read_and_tokenise(RequestFiles(paths=(path,)), Unknown()).input_tokens is None
    tokens = tmp_path / "tokens.jsonl"
    tokens.write_text('{"tokens": [1, 99]}\n{"tokens": [5], "forced_tokens": 2}\n')
    requests = read_and_tokenise(RequestFiles(paths=(tokens,)), Unknown())
    assert requests.input_tokens is not None and requests.input_tokens.tolist() == [2, 1]
    assert not requests.are_tokenised and not requests.unusable


def test_made_requests_have_the_lengths_that_are_planned_for(tmp_path):
    lengths = JointLengths(inputs=truncated_normal(9, 3, 20), outputs=truncated_normal(5, 2, 9))
    requests, writer = make_synthetic(lengths, 30, 4, 50)
    assert requests.input_tokens is not None and requests.are_forced and len(requests) == 30
    writer.save(tmp_path, np.stack([np.arange(30), requests.forced], axis=1), 0)
    spool = Spool(tmp_path)
    assert [len(spool.tokens(i)) for i in range(30)] == requests.input_tokens.tolist()
    assert [(record.id, record.line, record.is_forced) for record in spool.records(2)] == [
        ("0", 1, True), ("1", 2, True)]
    again, other = (make_synthetic(lengths, 30, seed, 50)[0].digest for seed in (4, 5))
    assert again == requests.digest != other


def test_a_prompt_of_openais_completions_never_gets_the_chat_template():
    class Templated:
        template, is_there = "chat", True

        def render_chat(self, messages: Sequence[dict[str, str]],
                        tools: object = None, options: object = None) -> str:
            return f"<{messages[0]['content']}>"

        def encode_many(self, texts: Sequence[str], *, special: bool) -> list[list[int]]:
            return [[ord(c) for c in text] for text in texts]

    tokeniser = ModelTokeniser(cast(TextTokenizer, Templated()), True, 256)
    asked = [Request(line=1, id="own", prompt="a"),
             Request(line=2, id="completion", prompt="a", is_openai=True),
             Request(line=3, id="chat", messages=({"role": "user", "content": "a"},),
                     is_openai=True)]
    assert ["".join(map(chr, ids)) for ids in tokeniser.tokenise(asked) or () if ids] == [
        "<a>", "a", "<a>"]


def test_without_a_tokenizer_a_text_is_an_error_record_and_tokens_run(tmp_path):
    (tmp_path / "model").mkdir()
    path = tmp_path / "r.jsonl"
    path.write_text('{"id": "a", "prompt": "Hi"}\n{"id": "b", "tokens": [1, 2]}\n'
                    '{"id": "c", "messages": [{"role": "user", "content": "Hi"}]}\n')
    tokeniser = ModelTokeniser(TextTokenizer(tmp_path / "model"), is_chat=True, vocab_size=9)
    requests = read_and_tokenise(RequestFiles(paths=(path,)), tokeniser)
    assert requests.unusable == {0: spooled_requests.NO_TOKENIZER, 2: spooled_requests.NO_TOKENIZER}
    assert requests.are_tokenised and requests.input_tokens is not None
    assert requests.input_tokens.tolist() == [1, 2, 1]


@pytest.mark.parametrize(("most", "fitting"), [(0, 4), (9, 4), (5, 3), (2, 2)])
def test_an_input_that_the_encode_pool_cannot_hold_becomes_an_error_record(
        llama, tmp_path, most, fitting):
    plan = plan_of(tmp_path, llama[0], most_input_tokens=most)
    spool, errors = spooled(plan, *({"id": f"q{n}", "tokens": [7] * n} for n in (1, 9, 5, 2)))
    queries = list(SpooledQueries(spool, plan))
    assert len(queries) == fitting and spool.num_errors == len(errors) == 4 - fitting
    assert [q.index for q in queries] == list(range(fitting))
    assert all(f"planned to encode {most}" in e["error"] for e in errors)


def test_a_query_is_what_its_request_and_the_job_say(llama, tmp_path):
    plan = plan_of(tmp_path, llama[0])
    spool, _ = spooled(plan, "", {"id": "plain", "tokens": [3, 4]}, {
        "id": "own", "tokens": [5], "forced_tokens": 6, "seed": 11, "temperature": 0, "top_k": 3,
        "top_p": 0.5, "stop": ["a", "b"]},
        {"custom_id": "c", "body": {"model": "m", "prompt": [9, 8, 7], "max_tokens": 3}})
    plain, own, openai = SpooledQueries(spool, plan)
    assert (plain.id, [*plain.input_ids], plain.max_new_tokens) == ("plain", [3, 4], 8)
    assert (plain.sampling.temperature, plain.sampling.seed) == (0.5, 2 * 1_000_003 + 2)
    assert (own.max_new_tokens, own.is_forced, own.stop) == (6, True, ("a", "b"))
    assert (own.sampling.seed, own.sampling.temperature) == (11, 0.0)
    assert (own.sampling.top_k, own.sampling.top_p) == (3, 0.5)
    assert (openai.is_openai, openai.max_new_tokens, openai.input_ids[-1]) == (True, 3, 7)
    assert len(openai.input_ids) == 3 and not openai.is_forced and not openai.is_chat


def test_the_jobs_stop_strings_are_those_of_requests_without_any(llama, tmp_path):
    plan = plan_of(tmp_path, llama[0], stop=("###", "\n\n"))
    spool, _ = spooled(plan, {"tokens": [3, 4]}, {"tokens": [5], "stop": "a"})
    assert [query.stop for query in SpooledQueries(spool, plan)] == [("###", "\n\n"), ("a",)]
    assert load_plan(plan.save()) == plan
    before = plan_of(tmp_path, llama[0])
    assert plan.fingerprint != before.fingerprint == load_plan(before.save()).fingerprint


@pytest.mark.parametrize(("request_", "why"), [
    ({"tokens": [1, 10**6]}, "token 1000000 is outside the vocabulary"),
    ({"tokens": [7] * 4000}, "4000 input tokens leave no room in the model's"),
    ({"tokens": [7] * 10, "forced_tokens": 4000}, "forced_tokens 4000 after 10 input tokens"),
    ({"tokens": [7] * 10, "max_tokens": 31}, "needs up to 41 tokens of KV cache (10 of input)"),
    ({"tokens": []}, "tokens must be a list of at least one token id"), ("{", "not JSON")])
def test_what_cannot_run_is_said_and_the_others_run(llama, tmp_path, request_, why):
    plan = plan_of(tmp_path, llama[0])
    spool, errors = spooled(plan, {"tokens": [1, 2]}, request_, {"id": "c", "tokens": [3, 4, 5]})
    (error,) = errors
    assert error["line"] == 2 and why in error["error"]
    assert [(q.index, q.id, [*q.input_ids]) for q in SpooledQueries(spool, plan)] == [
        (0, "1", [1, 2]), (1, "c", [3, 4, 5])]
    assert spec_of(llama[0]).max_positions is not None


def many(count: int) -> Requests:
    rng = np.random.default_rng(0)
    return Requests(input_tokens=rng.integers(1, 45, count),
                    caps=rng.integers(0, 9, count).astype(np.int32),
                    forced=np.zeros(count, np.int32), may_stop=np.zeros(count, bool),
                    unusable={3: "no tokens", count - 1: "no tokens"})


def test_which_can_run_does_not_depend_on_how_many_are_looked_at_together(monkeypatch, tmp_path):
    plan, spec, requests = plan_of(tmp_path, tmp_path), catalog.model("opt-125m"), many(200)
    whole, why = runnable(requests, plan, spec)
    assert 0 < len(whole) < 198 and len(whole) + len(why) == 200
    assert why[3] == why[199] == "no tokens" and not {3, 199} & set(whole[:, 0].tolist())
    for piece in (1, 7, 199):
        monkeypatch.setattr(looked_at, "_ROWS_AT_A_TIME", piece)
        pieces, said = runnable(requests, plan, spec)
        assert pieces.tolist() == whole.tolist() and said == why
