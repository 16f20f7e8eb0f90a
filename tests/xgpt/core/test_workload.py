"""Reading requests: what runs, what becomes an error record, and synthetic ones."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from examples import examples
from hypothesis import HealthCheck, assume, given
from hypothesis import strategies as st
from job_folder import xgpt

from xgpt.core.errors import InputError
from xgpt.core.lengths import JointLengths, joint_empirical, truncated_normal
from xgpt.requests.chat import BadRecord, has_form, passed_of
from xgpt.requests.reader import read_requests
from xgpt.requests.request import Request, RequestError, Terms, read_record, synthetic_requests
from xgpt.requests.request_files import RequestFiles
from xrunner.files.runnable import CharacterTokens


def _read(folder: Path, *lines: bytes | str | dict[str, Any]) -> tuple[
        list[Request], list[RequestError]]:
    raw = [line if isinstance(line, bytes) else (
        line if isinstance(line, str) else json.dumps(line)).encode() for line in lines]
    path = folder / "requests.jsonl"
    path.write_bytes(b"\n".join(raw) + b"\n")
    lines = list(read_requests(RequestFiles(paths=(path,))))
    return ([line for line in lines if isinstance(line, Request)],
            [line for line in lines if isinstance(line, RequestError)])


def _one(folder: Path, line: bytes | str | dict[str, Any]) -> Request:
    (request,), errors = _read(folder, line)
    assert not errors
    return request


def test_our_three_forms_are_read(tmp_path):
    requests, errors = _read(
        tmp_path, {"id": "a", "prompt": "Hi"}, {"id": 7, "tokens": [1, 2]},
        {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "stop": "."})
    assert not errors
    assert requests == [
        Request(line=1, id="a", prompt="Hi"),
        Request(line=2, id="7", tokens=(1, 2)),
        Request(line=3, id="3", messages=({"role": "user", "content": "Hi"},),
                max_tokens=5, stop=(".",))]


def test_openai_batch_lines_are_read_and_keys_that_ask_for_nothing_ignored(tmp_path):
    request = _one(tmp_path, {
        "custom_id": "r-1", "method": "POST", "url": "/v1/chat/completions", "body": {
            "model": "gpt-4o", "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "Hi "},
                                             {"type": "text", "text": "you"}]}],
            "max_tokens": 5, "max_completion_tokens": 9, "temperature": 0, "top_p": 1,
            "seed": -3, "stop": ["a", "b"], "logprobs": False, "n": 1, "user": "x"}})
    assert request.is_openai and request.id == "r-1" and request.messages is not None
    assert request.messages[1] == {"role": "user", "content": "Hi you"}
    assert (request.max_tokens, request.temperature, request.top_p) == (9, 0.0, 1.0)
    assert request.stop == ("a", "b") and request.seed is not None and request.seed >= 0


def test_an_openai_completion_takes_a_prompt_or_its_tokens(tmp_path):
    body = {"url": "/v1/completions", "custom_id": "x"}
    assert _one(tmp_path, {**body, "body": {"model": "m", "prompt": "Hi"}}).prompt == "Hi"
    assert _one(tmp_path, {**body, "body": {"model": "m", "prompt": [3, 4]}}).tokens == (3, 4)


def test_every_option_arrives(tmp_path):
    request = _one(tmp_path, {"prompt": "x", "forced_tokens": 4, "max_tokens": 4, "seed": 9,
                              "temperature": 0.5, "top_k": 3, "top_p": 0.2})
    assert (request.forced_tokens, request.max_tokens, request.seed) == (4, 4, 9)
    assert (request.temperature, request.top_k, request.top_p) == (0.5, 3, 0.2)


@pytest.mark.parametrize(("line", "reason"), [
    ("{", "not JSON"), ("[1]", "not a JSON object"), ("NaN", "not a JSON object"),
    (b'{"prompt": "\xff"}', "not UTF-8"), ("[" * 100_000, "nested too deeply"),
    ('{"prompt": "x", "seed": ' + "9" * 5000 + "}", "not JSON"),
    ('{"prompt": "\\ud800"}', "lone surrogate"), ('{"id": "\\ud800", "prompt": "x"}', "surrogate"),
    ({"id": "a"}, "exactly one of prompt, messages, tokens"),
    ({"prompt": "x", "tokens": [1]}, "has prompt, tokens"), ({"prompt": ""}, "not empty"),
    ({"prompt": ["x"]}, "prompt must be text"), ({"tokens": []}, "at least one token"),
    ({"tokens": [1, "2"]}, "token ids"), ({"tokens": [True]}, "token ids"),
    ({"tokens": [-1]}, "token ids"), ({"tokens": "12"}, "token"),
    ({"messages": []}, "at least one"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "role"),
    ({"messages": [{"role": "user"}]}, "content"), ({"messages": ["Hi"]}, "role and content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "other than text"),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens"), ({"prompt": "x", "max_tokens": 2.0}, "max"),
    ({"prompt": "x", "max_tokens": True}, "max_tokens"), ({"prompt": "x", "seed": "1"}, "seed"),
    ({"prompt": "x", "temperature": -1}, "temperature"),
    ('{"prompt": "x", "temperature": NaN}', "temperature"),
    ('{"prompt": "x", "temperature": 1' + "0" * 400 + "}", "temperature"),
    ({"prompt": "x", "temperature": 1e30}, "temperature must be a number from 0 to 2147483647"),
    ({"prompt": "x", "top_p": 0}, "top_p"), ({"prompt": "x", "top_k": -2}, "top_k"),
    ({"prompt": "x", "stop": [""]}, "stop"), ({"prompt": "x", "stop": 3}, "stop"),
    ({"prompt": "x", "forced_tokens": 9, "max_tokens": 8}, "exceeds max_tokens"),
    ({"id": True, "prompt": "x"}, "id must be text"), ({"id": "", "prompt": "x"}, "id"),
    ({"custom_id": "a"}, "body must be an object"),
    ({"custom_id": "a", "body": {"input": "x"}, "url": "/v1/embeddings"}, "url"),
    ({"custom_id": "a", "body": {"prompt": "x"}, "method": "GET"}, "method"),
    ({"custom_id": "a", "body": {"prompt": "x", "n": 0}}, "n must be"),
    ({"custom_id": "a", "body": {
        "model": "m", "prompt": "x", "tools": [{}], "echo": True}}, "echo, tools"),
    ({"custom_id": "a", "url": "/v1/completions", "body": {"messages": []}}, "messages: not"),
    ({"custom_id": "a", "url": "/v1/chat/completions", "body": {"prompt": "x"}}, "prompt: not"),
    ({"prompt": "x", "max_new_tokens": 5}, "did you mean 'max_tokens'"),
    ({"prompt": "x", "max_token": 5}, "did you mean 'max_tokens'"),
    ({"prompt": "x", "temprature": 5}, "did you mean 'temperature'")])
def test_a_bad_line_is_an_error_record_and_the_rest_runs(tmp_path, line, reason):
    requests, errors = _read(tmp_path, {"id": "x1", "prompt": "a"}, line,
                             {"id": "x3", "prompt": "b"})
    assert [(r.line, r.id) for r in requests] == [(1, "x1"), (3, "x3")]
    assert [error.line for error in errors] == [2] and reason in errors[0].error


def test_columns_of_a_data_set_are_ignored(tmp_path):
    request = _one(tmp_path, {"prompt": "x", "idx": 3, "source": "web", "label": None, "text": "y"})
    assert request.prompt == "x"


def test_a_repeated_id_is_an_error_of_the_later_line(tmp_path):
    requests, errors = _read(tmp_path, {"id": "2", "prompt": "x"}, {"prompt": "y"})
    assert [r.id for r in requests] == ["2"]
    assert errors == [RequestError(line=2, id="2", error="id '2' is already that of line 1",
                                   is_openai=False, code="duplicate_custom_id")]


def test_the_id_of_a_bad_line_is_free_again_and_named_in_its_record(tmp_path):
    requests, errors = _read(tmp_path, {"id": "a"}, {"id": "a", "prompt": "x"})
    assert [r.line for r in requests] == [2] and [e.id for e in errors] == ["a"]


def test_blank_lines_windows_ends_and_a_byte_order_mark_are_taken(tmp_path):
    requests, errors = _read(tmp_path, b'\xef\xbb\xbf{"prompt": "a"}\r', b"", b"  \r",
                             b'{"prompt": "b\xe2\x80\xa8c"}\r')
    assert not errors and [(r.line, r.id, r.prompt) for r in requests] == [
        (1, "1", "a"), (4, "4", "b\u2028c")]


def test_an_empty_file_has_no_requests_and_a_missing_one_is_wrong_input(tmp_path):
    assert _read(tmp_path, "") == ([], [])
    with pytest.raises(InputError, match="cannot be read"):
        list(read_requests(RequestFiles(paths=(tmp_path / "none.jsonl",))))


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["role", "content", "type", "text", "prompt", "messages"]), inner,
        max_size=3), max_leaves=6)
_RECORDS = st.dictionaries(st.sampled_from(
    ["id", "custom_id", "body", "url", "method", "prompt", "messages", "tokens", "max_tokens",
     "forced_tokens", "seed", "stop", "temperature", "top_k", "top_p", "n"]), _VALUES, max_size=5)


@given(st.lists(_RECORDS.map(lambda r: json.dumps(r).encode())
                | st.binary(max_size=20).filter(lambda b: b"\n" not in b), max_size=6))
@examples(150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_line_that_is_not_blank_becomes_a_request_or_an_error(tmp_path, lines):
    # what begins so is another kind of file, which is one error of its own
    assume(not b"\n".join(lines).startswith((b"\xff\xfe", b"\xfe\xff", b"\x1f\x8b")))
    requests, errors = _read(tmp_path, *lines)
    told = [r.line for r in requests] + [e.line for e in errors]
    whole = b"\n".join(lines).removeprefix(b"\xef\xbb\xbf").split(b"\n")
    assert sorted(told) == [n for n, line in enumerate(whole, start=1) if line.strip()]
    assert len({r.id for r in requests}) == len(requests)


def test_a_requests_own_limit_comes_before_the_jobs():
    base = Request(line=1, id="a", prompt="x")
    assert base.output_cap(50) == 50
    assert Request(line=1, id="a", prompt="x", max_tokens=7).output_cap(50) == 7
    assert Request(line=1, id="a", prompt="x", max_tokens=7,
                   forced_tokens=3).output_cap(50) == 3


def test_synthetic_requests_have_the_lengths_asked_for_and_repeat_with_the_seed():
    lengths = JointLengths(inputs=truncated_normal(20, 5, 40), outputs=truncated_normal(8, 3, 16))
    requests = list(synthetic_requests(lengths, 500, seed=3, vocab_size=100))
    inputs = np.array([len(tokens) for tokens, _ in requests])
    outputs = np.array([count for _, count in requests])
    assert inputs.mean() == pytest.approx(lengths.inputs.mean, rel=0.05) and inputs.max() <= 40
    assert outputs.mean() == pytest.approx(lengths.outputs.mean, rel=0.1) and outputs.min() >= 1
    assert all(0 <= token < 100 for tokens, _ in requests for token in tokens)
    again, other = (list(synthetic_requests(lengths, 500, seed=seed, vocab_size=100))
                    for seed in (3, 4))
    assert all((a == b).all() and n == m
               for (a, n), (b, m) in zip(requests, again, strict=True))
    assert [n for _, n in requests] != [n for _, n in other]
    pairs = joint_empirical(np.array([[3, 1], [9, 3]]))  # whose correlation is kept
    assert all(len(tokens) == 3 * count for tokens, count in synthetic_requests(
        pairs, 50, seed=0, vocab_size=10))


SCHEMA = {"type": "object"}


@pytest.mark.parametrize(("body", "told"), [
    ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
     {"structured_outputs": {"json": SCHEMA}}),
    ({"structured_outputs": {"regex": "a+"}}, {"structured_outputs": {"regex": "a+"}}),
    ({"guided_json": json.dumps(SCHEMA)}, {"structured_outputs": {"json": SCHEMA}}),
    ({"guided_choice": ["a", "b"]}, {"structured_outputs": {"choice": ["a", "b"]}}),
    ({"guided_grammar": "root ::= \"a\""}, {"structured_outputs": {"grammar": "root ::= \"a\""}}),
    ({"min_p": 0.1, "logit_bias": {"7": -100}}, {"min_p": 0.1, "logit_bias": {"7": -100}}),
    ({"response_format": {"type": "text"}, "logit_bias": {}, "min_p": None}, {})])
def test_what_is_asked_is_told_in_vllms_words(body, told):
    assert json.loads(passed_of(body) or "{}") == told and bool(passed_of(body)) == bool(told)
    assert has_form(passed_of(body)) == ("structured_outputs" in told)


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
def test_what_no_sampler_takes_is_refused_by_its_key(body, reason):
    with pytest.raises(BadRecord, match=reason):
        read_record({"prompt": "x", **body}, 1, "a", terms=Terms(engine="vllm"))


def test_engines_without_such_a_sampler_refuse_it_and_those_with_likelihoods_give_them():
    def read(engine, **keys):
        return read_record({"prompt": "x", **keys}, 1, "a", terms=Terms(engine=engine))

    for engine in (None, "deepspeed"):
        with pytest.raises(BadRecord, match="guided_regex: not supported"):
            read(engine, guided_regex="a")
    for engine in (None, "vllm"):
        assert read(engine, logprobs=2, min_tokens=1).top_logprobs == 2
    with pytest.raises(BadRecord, match="logprobs, min_tokens: not supported"):
        read("deepspeed", logprobs=2, min_tokens=1)


@pytest.mark.parametrize("is_openai", [True, False])
def test_a_line_keeps_all_that_its_messages_and_their_template_are_told(is_openai):
    call = {"id": "1", "type": "function", "function": {"name": "w", "arguments": '{"city": "B"}'}}
    body = {"messages": [
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "content": "rain", "tool_call_id": "1", "weight": {"a": [1]}}],
        "chat_template_kwargs": {"enable_thinking": False}}
    request = read_record(
        {"custom_id": "a", "body": {"model": "m", **body}} if is_openai else body, 1, "a")
    assert request.messages == (
        {"role": "assistant", "tool_calls": [{**call, "function": {
            "name": "w", "arguments": {"city": "B"}}}]},
        {"role": "tool", "content": "rain", "tool_call_id": "1", "weight": {"a": [1]}})
    assert json.loads(request.chat_template_kwargs) == {"enable_thinking": False}
    for wrong in ([], "x", {"a": "\ud800"}):
        with pytest.raises(BadRecord, match="chat_template_kwargs"):
            read_record({**body, "chat_template_kwargs": wrong}, 1, "a")


def test_a_message_of_calls_alone_is_counted_where_texts_are(tmp_path):
    """By who looks at a file of prompts, and where the model's tokenizer is not to be had."""
    call = {"id": "1", "type": "function", "function": {"name": "w", "arguments": "{}"}}
    line = {"messages": [{"role": "user", "content": "Weather in Bonn?"},
                         {"role": "assistant", "content": None, "tool_calls": [call]}]}
    (tmp_path / "r.jsonl").write_text(json.dumps(line) + "\n")
    request = read_record(line, 1, "a")
    assert len(CharacterTokens().tokenise([request])[0]) > 2
    assert xgpt("init", "--prompts", tmp_path / "r.jsonl", tmp_path / "job.yaml").returncode == 0
