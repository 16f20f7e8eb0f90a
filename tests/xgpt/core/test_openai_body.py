"""An OpenAI line that asks for what is not given is refused by the key that asks."""

from __future__ import annotations

import pytest

from xgpt.core.openai_body import not_honoured


@pytest.mark.parametrize(("key", "value"), [
    ("response_format", {"type": "json_object"}), ("tool_choice", "required"),
    ("frequency_penalty", 0.5), ("presence_penalty", -1),
    ("logit_bias", {"50256": -100}), ("stream", True), ("echo", True), ("best_of", 3),
    ("reasoning_effort", "high"), ("a_key_of_tomorrow", 1)])
def test_what_is_asked_for_and_not_given_is_named(key: str, value: object) -> None:
    assert list(not_honoured({"messages": [], key: value})) == [key]


def test_values_that_ask_for_nothing_pass() -> None:
    body = {"model": "gpt-4o", "messages": [], "max_completion_tokens": 5, "n": 1, "user": "me",
            "metadata": {"a": "b"}, "tools": [], "tool_choice": "none", "logprobs": False,
            "top_logprobs": None, "frequency_penalty": 0, "presence_penalty": 0.0, "stream": False,
            "response_format": {"type": "text"}, "logit_bias": {}, "suffix": "", "best_of": 1,
            "parallel_tool_calls": True, "echo": False}
    assert list(not_honoured(body)) == []
