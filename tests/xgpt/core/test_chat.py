"""The messages of a line, with all that they say, and what their template is told besides."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from job_folder import xgpt

from xgpt.core.chat import BadRecord
from xgpt.core.workload import read_record
from xrunner.io.estimated import CharacterTokens


@pytest.mark.parametrize("is_openai", [True, False])
def test_a_line_keeps_all_that_its_messages_and_their_template_are_told(is_openai: bool) -> None:
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


def test_a_message_of_calls_alone_is_counted_where_texts_are(tmp_path: Path) -> None:
    """By who looks at a file of prompts, and where the model's tokenizer is not to be had."""
    call = {"id": "1", "type": "function", "function": {"name": "w", "arguments": "{}"}}
    line = {"messages": [{"role": "user", "content": "Weather in Bonn?"},
                         {"role": "assistant", "content": None, "tool_calls": [call]}]}
    (tmp_path / "r.jsonl").write_text(json.dumps(line) + "\n")
    request = read_record(line, 1, "a")
    assert len(CharacterTokens().tokenise([request])[0]) > 2
    assert xgpt("init", "--prompts", tmp_path / "r.jsonl", tmp_path / "job.yaml").returncode == 0
