"""Requests taken in: each line and each text once; numbers for the plan, records for the spool."""

import json
from collections.abc import Sequence
from typing import cast

import numpy as np
import pytest

from xgpt.core.lengths import JointLengths, truncated_normal
from xgpt.requests.request import Request
from xgpt.requests.request_files import RequestFiles
from xgpt.requests.spool import Spool, SpoolWriter
from xrunner.files import intake
from xrunner.files.intake import ModelTokeniser, Tokenised, make, take_in
from xrunner.files.tokenizer import TextTokenizer

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
        monkeypatch.setattr(intake, "_LINES_AT_A_TIME", at_a_time)
        tokeniser, spool = Counting(), SpoolWriter()
        requests = take_in(RequestFiles(paths=(path,)), tokeniser, spool)
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
    assert take_in(RequestFiles(paths=(path,)), Counting()).digest not in digests


def test_without_a_model_only_given_tokens_have_lengths(path, tmp_path):
    assert take_in(RequestFiles(paths=(path,)), Unknown()).input_tokens is None
    tokens = tmp_path / "tokens.jsonl"
    tokens.write_text('{"tokens": [1, 99]}\n{"tokens": [5], "forced_tokens": 2}\n')
    requests = take_in(RequestFiles(paths=(tokens,)), Unknown())
    assert requests.input_tokens is not None and requests.input_tokens.tolist() == [2, 1]
    assert not requests.are_tokenised and not requests.unusable


def test_made_requests_have_the_lengths_that_are_planned_for(tmp_path):
    lengths = JointLengths(inputs=truncated_normal(9, 3, 20), outputs=truncated_normal(5, 2, 9))
    requests, writer = make(lengths, 30, 4, 50)
    assert requests.input_tokens is not None and requests.are_forced and len(requests) == 30
    writer.save(tmp_path, np.stack([np.arange(30), requests.forced], axis=1), 0)
    spool = Spool(tmp_path)
    assert [len(spool.tokens(i)) for i in range(30)] == requests.input_tokens.tolist()
    assert [(record.id, record.line, record.is_forced) for record in spool.records(2)] == [
        ("0", 1, True), ("1", 2, True)]
    again, other = (make(lengths, 30, seed, 50)[0].digest for seed in (4, 5))
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
    requests = take_in(RequestFiles(paths=(path,)), tokeniser)
    assert requests.unusable == {0: intake.NO_TOKENIZER, 2: intake.NO_TOKENIZER}
    assert requests.are_tokenised and requests.input_tokens is not None
    assert requests.input_tokens.tolist() == [1, 2, 1]
