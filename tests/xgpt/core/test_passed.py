"""What only another engine's sampler has is taken as that sampler is told it, or refused by key."""

from __future__ import annotations

import json
from typing import Any

import pytest

from xgpt.requests.chat import BadRecord, has_form, passed_of
from xgpt.requests.request import Terms, read_record

SCHEMA = {"type": "object"}


@pytest.mark.parametrize(("body", "told"), [
    ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
     {"structured_outputs": {"json": SCHEMA}}),
    ({"structured_outputs": {"regex": "a+"}}, {"structured_outputs": {"regex": "a+"}}),
    ({"guided_json": json.dumps(SCHEMA)}, {"structured_outputs": {"json": SCHEMA}}),
    ({"guided_choice": ["a", "b"]}, {"structured_outputs": {"choice": ["a", "b"]}}),
    ({"guided_grammar": "root ::= \"a\""}, {"structured_outputs": {"grammar": "root ::= \"a\""}}),
    ({"min_p": 0.1, "logit_bias": {"7": -100}}, {"min_p": 0.1, "logit_bias": {"7": -100}})])
def test_what_is_asked_is_told_in_vllms_words(body: dict[str, Any], told: dict[str, Any]) -> None:
    assert json.loads(passed_of(body)) == told
    assert has_form(passed_of(body)) == ("structured_outputs" in told)


def test_what_asks_for_nothing_tells_nothing() -> None:
    assert passed_of({"response_format": {"type": "text"}, "logit_bias": {}, "min_p": None}) == ""
    assert not has_form("")


@pytest.mark.parametrize(("body", "reason"), [
    ({"response_format": {"type": "xml"}}, "known types"), ({"response_format": "x"}, "an object"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "name and schema"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "one of json"),
    ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
    ({"guided_choice": []}, "guided_choice"), ({"guided_json": "{"}, "guided_json is not JSON"),
    ({"guided_json": [1]}, "a JSON schema"), ({"guided_regex": "\ud800"}, "lone surrogate"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "an answer has one form"),
    ({"logit_bias": {"the": 1}}, "logit_bias"), ({"logit_bias": {"7": 101}}, "-100 to 100"),
    ({"min_p": 2}, "min_p"), ({"repetition_penalty": 0}, "above 0"),
    ({"guided_regex": "a", "forced_tokens": 3}, "forced_tokens"),
    ({"guided_regex": "a", "min_tokens": 3}, "min_tokens")])
def test_what_no_sampler_takes_is_refused_by_its_key(body: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRecord, match=reason):
        read_record({"prompt": "x", **body}, 1, "a", terms=Terms(engine="vllm"))


@pytest.mark.parametrize("engine", [None, "deepspeed"])
def test_engines_without_such_a_sampler_refuse_it(engine: str | None) -> None:
    with pytest.raises(BadRecord, match="guided_regex: not supported"):
        read_record({"prompt": "x", "guided_regex": "a"}, 1, "a", terms=Terms(engine=engine))


def test_only_engines_that_have_them_give_likelihoods() -> None:
    record = {"prompt": "x", "logprobs": 2, "min_tokens": 1}
    for engine in (None, "vllm"):
        assert read_record(record, 1, "a", terms=Terms(engine=engine)).top_logprobs == 2
    with pytest.raises(BadRecord, match="logprobs, min_tokens: not supported"):
        read_record(record, 1, "a", terms=Terms(engine="deepspeed"))
