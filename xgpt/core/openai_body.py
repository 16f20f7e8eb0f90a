"""What an OpenAI batch line asks for that nothing here gives: refused by name, for an answer
without it would look like one with it. A value that asks for nothing (no tools, a penalty of 0) is
fine."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

# asked of the request, and given: see xgpt.core.workload
_GIVEN = frozenset({
    "messages", "prompt", "tokens", "max_tokens", "max_completion_tokens", "forced_tokens", "seed",
    "temperature", "top_k", "top_p", "stop", "n", "logprobs", "min_tokens"})
# asked of a text's embedding, and given
OF_EMBEDDINGS = frozenset({"input"})
# of a chat alone
_OF_CHATS = frozenset({"tools", "top_logprobs", "chat_template_kwargs"})
# of the service that would answer, not of the answer; `model` is that of the job
_ELSEWHERE = frozenset({
    "model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"})
# key -> values that ask for nothing; by null, false and what is empty no key asks for anything
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "frequency_penalty": (0,), "presence_penalty": (0,), "repetition_penalty": (1,),
    "top_logprobs": (0,), "best_of": (1,), "min_p": (0,), "encoding_format": ("float",),
    "response_format": ({"type": "text"},), "modalities": (["text"],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none",), "parallel_tool_calls": (True,), "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,), "length_penalty": (1,), "verbosity": ("medium",)}


def not_honoured(body: Mapping[str, Any], besides: Collection[str] = (),
                 given: Collection[str] = _GIVEN) -> Iterator[str]:
    """The keys of a request's body that ask for what it would not get. `besides`: keys that the
    engine itself honours; `given`: those that its endpoint does."""
    given = {*given, *_ELSEWHERE, *besides}
    if body.get("messages") is not None:
        given |= _OF_CHATS
    return (key for key in body if key not in given and _asks(body, key))


def _asks(body: Mapping[str, Any], key: str) -> bool:
    value = body[key]
    asks = value is not None and value is not False and value not in ("", [], {})
    return asks and value not in _NEUTRAL.get(key, ())
