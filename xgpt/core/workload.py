"""Requests: what a record of one says, whatever file it is in, and making synthetic ones.

Forms of a record, OpenAI's batch and ours:
    {"custom_id", "method", "url", "body": {"messages" | "prompt", "max_tokens", ...}}
    {"id", "prompt" | "messages" | "tokens", "max_tokens", ...}
    the same with "continuation" (or "continuation_tokens"), of a job that scores
    {"custom_id", ..., "body": {"input", ...}}, or ours with a content alone, of a job that embeds
A record that cannot be used becomes a RequestError: one bad line of 200,000 must not cost the
others. Of an OpenAI body every key counts: what it asks for and would not get is refused
(xgpt.core.openai_body). Elsewhere keys that mean nothing to us are ignored (a data set has columns
of its own), except those that look like a misspelt option of ours: silently ignoring
`max_new_tokens` would cost cluster hours."""

import difflib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from xgpt.core.chat import BadRecord, Message, check_encodable, messages_of, options_of, tools_of
from xgpt.core.engines import OWN_ENGINE, gives
from xgpt.core.errors import shorten
from xgpt.core.length_file import MAX_LENGTH_TOKENS
from xgpt.core.lengths import IntArray, JointLengths
from xgpt.core.openai_body import OF_EMBEDDINGS, not_honoured
from xgpt.core.passed import KEYS as PASSED_KEYS
from xgpt.core.passed import has_form, passed_of

URLS = ("/v1/chat/completions", "/v1/completions")
EMBEDDINGS = "/v1/embeddings"
MAX_INT = 2**31 - 1
MAX_ID_CHARS, MAX_STOPS, MAX_STOP_CHARS = 1024, 64, 1000
MAX_LOGPROBS, MAX_SAMPLES = 20, 128  # as OpenAI's
_FOREIGN = {"/v1/chat/completions": "prompt", "/v1/completions": "messages"}

_MISSPELT = {"max_new_tokens": "max_tokens"}
_OPTIONS = ("max_tokens", "forced_tokens", "temperature")  # missing one is dear


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One query. Exactly one of `prompt`, `messages` and `tokens` is there; None elsewhere leaves
    the choice to the job."""

    line: int  # in the file, from 1; of an array the item
    id: str
    file: int = 0  # which of the job's files, in their order
    prompt: str | None = None
    messages: tuple[Message, ...] | None = None
    tokens: tuple[int, ...] | None = None
    max_tokens: int | None = None
    forced_tokens: int | None = None  # exact output length; end-of-sequence is ignored
    seed: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    stop: tuple[str, ...] = ()
    is_openai: bool = False
    top_logprobs: int | None = None  # likeliest tokens told beside each chosen one; None: nothing
    min_tokens: int | None = None  # before them no end-of-sequence is chosen
    samples: int = 1  # answers to it
    tools: str = ""  # that a chat may call, as JSON
    chat_template_kwargs: str = ""  # what its template is told besides, as JSON
    passed: str = ""  # what the engine's own sampler is told, as JSON (xgpt.core.passed)
    continuation: str | None = None  # of the prompt, to be scored; or its tokens
    continuation_tokens: tuple[int, ...] | None = None
    pooled: str = ""  # its embedding is asked for, pooled so ("last", "mean"), and no answer

    def output_cap(self, default: int) -> int:
        """Most tokens this request may generate; `default` where it names no limit."""
        return self.forced_tokens or self.max_tokens or default


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestError:
    """A record that cannot be run (a line of errors.jsonl)."""

    line: int
    id: str | None
    error: str
    file: int = 0
    is_openai: bool | None = None  # None: nothing on the line tells
    code: str | None = None  # see BadRecord


_KNOWN = frozenset(Request.__dataclass_fields__) | {"max_completion_tokens", "logprobs"}


class Terms(NamedTuple):
    """What a job makes of its requests: whether they are scored, or how embedded, and by whom."""

    is_scored: bool = False
    engine: str | None = None  # None: ours
    pooled: str = ""  # see Request



def read_record(record: Mapping[str, Any], line: int, name: str, file: int = 0,
                terms: Terms = Terms()) -> Request:  # noqa: B008 (immutable)
    """The request that a record makes, called `name`. Raises BadRecord."""
    openai = is_openai(record)
    if terms.is_scored:
        return _scored(record, Request(line=line, id=name, file=file, max_tokens=1,
                                       forced_tokens=1))
    if terms.pooled:
        return _embedded(record, Request(line=line, id=name, file=file, max_tokens=1,
                                         forced_tokens=1, pooled=terms.pooled, is_openai=openai))
    body = _openai_body(record, terms.engine) if openai else record
    _check_engine(body, terms.engine)
    if not openai:
        refuse_misspelt(record)
    # OpenAI's newer name wins where both are given
    has_new = body.get("max_completion_tokens") is not None
    max_tokens_key = "max_completion_tokens" if has_new else "max_tokens"
    request = Request(
        line=line, id=name, file=file, is_openai=openai,
        max_tokens=_integer(body, max_tokens_key, 1, MAX_INT),
        forced_tokens=_integer(body, "forced_tokens", 1, MAX_LENGTH_TOKENS),
        seed=_seed(body),
        temperature=_number(body, "temperature", lambda x: x >= 0,
                            f"a number from 0 to {MAX_INT}"),
        top_k=_integer(body, "top_k", 1, MAX_INT),
        top_p=_number(body, "top_p", lambda x: 0 < x <= 1, "above 0 and at most 1"),
        stop=_stop(body), top_logprobs=_top_logprobs(body, is_chat=openai and (
            body.get("messages") is not None)),
        min_tokens=_integer(body, "min_tokens", 0, MAX_INT),
        samples=_integer(body, "n" if openai else "samples", 1, MAX_SAMPLES) or 1,
        tools=tools_of(body) if openai and body.get("messages") is not None else "",
        passed=passed_of(body) if gives(terms.engine, "passed") else "")
    forced, limit = request.forced_tokens, request.max_tokens
    if forced is not None and limit is not None and forced > limit:
        raise BadRecord(f"forced_tokens = {forced} exceeds max_tokens = {limit}")
    if limit is not None and (request.min_tokens or 0) > limit:
        raise BadRecord(f"min_tokens = {request.min_tokens} exceeds max_tokens = {limit}")
    if (forced or request.min_tokens) and has_form(request.passed):
        raise BadRecord(f"{'forced' if forced else 'min'}_tokens goes with no form of the output, "
                        "which says itself where it ends")
    return _with_content(request, body)


def _scored(record: Mapping[str, Any], request: Request) -> Request:
    if is_openai(record):
        raise BadRecord("OpenAI's batch format has no continuations to score: give "
                        '{"id", "prompt", "continuation"}')
    refuse_misspelt(record)
    given = [key for key in ("continuation", "continuation_tokens") if record.get(key) is not None]
    if len(given) != 1:
        raise BadRecord("needs exactly one of continuation, continuation_tokens: what is scored")
    if (given[0] == "continuation") == (record.get("tokens") is not None):
        raise BadRecord("continuation goes with a prompt or messages, continuation_tokens with "
                        "tokens")
    value = record[given[0]]
    request = replace(request, continuation=_text(value, given[0])) if (
        given[0] == "continuation") else replace(
            request, continuation_tokens=_tokens(value, given[0]))
    return _with_content(request, record)


def _embedded(record: Mapping[str, Any], request: Request) -> Request:
    """OpenAI's lines have their text under `input`, as a list of one, too."""
    if not request.is_openai:
        refuse_misspelt(record)
        return _with_content(request, record)
    body = _body_to((EMBEDDINGS,), record)
    _refuse(not_honoured(body, given=OF_EMBEDDINGS))
    value = body.get("input")
    if isinstance(value, list) and len(value) == 1 and not isinstance(value[0], int):
        value, = value
    if isinstance(value, str):
        return replace(request, prompt=_text(value, "input"))
    if not isinstance(value, list) or any(isinstance(one, (str, list)) for one in value):
        raise BadRecord("input must be one text, or the token ids of one: a line has one embedding")
    return replace(request, tokens=_tokens(value, "input"))


def _top_logprobs(body: Mapping[str, Any], *, is_chat: bool) -> int | None:
    """How many of the likeliest tokens are told beside each chosen one; None: nothing is. A chat of
    OpenAI's says `logprobs: true` and `top_logprobs`, others `logprobs` and the number."""
    value = body.get("logprobs")
    if is_chat:
        if value not in (None, True, False):
            raise BadRecord("logprobs of a chat must be true or false; how many likeliest tokens "
                            "is top_logprobs")
        top = _integer(body, "top_logprobs", 0, MAX_LOGPROBS)
        if top and not value:
            raise BadRecord("top_logprobs needs logprobs: true")
        return (top or 0) if value else None
    if value is None or isinstance(value, bool):
        return 0 if value else None
    return _integer(body, "logprobs", 0, MAX_LOGPROBS)


def id_of(record: Mapping[str, Any], default: str) -> str:
    """What a record is called. Raises BadRecord where that is no text."""
    key = "custom_id" if is_openai(record) else "id"
    value = record.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise BadRecord(f"{key} must be text")
    text = _text(str(value), key)
    if len(text) > MAX_ID_CHARS:
        raise BadRecord(f"{key} has {len(text)} characters, of at most {MAX_ID_CHARS}")
    return text


def is_openai(record: Mapping[str, Any]) -> bool:
    return "body" in record or "custom_id" in record


@lru_cache(1024)
def misspelt_option(key: str) -> str | None:
    """The option that a key which is none was meant to be; None where it looks like none."""
    close = difflib.get_close_matches(key, _OPTIONS, n=1, cutoff=0.8)
    return _MISSPELT.get(key) or (close[0] if close and key not in _KNOWN else None)


def refuse_misspelt(keys: Iterable[str]) -> None:
    for key in keys:
        if key in _KNOWN:
            continue
        meant = misspelt_option(key) or next(iter(
            difflib.get_close_matches(key, ("messages",), n=1, cutoff=0.8)), None)
        if meant is not None:
            raise BadRecord(f"unknown key {shorten(key)}: did you mean {meant!r}?")


def synthetic_lengths(lengths: JointLengths, count: int, seed: int) -> tuple[IntArray, IntArray]:
    """(input tokens, output tokens), both [count], of the requests made with this seed."""
    return lengths.sample(count, np.random.default_rng(seed))


def synthetic_requests(lengths: JointLengths, count: int, seed: int,
                       vocab_size: int) -> Iterator[tuple[IntArray, int]]:
    """(random tokens, number of output tokens) of each of `count` requests, whose lengths follow
    `lengths`."""
    rng = np.random.default_rng((seed, 1))
    for inputs, outputs in zip(*synthetic_lengths(lengths, count, seed), strict=True):
        yield rng.integers(vocab_size, size=int(inputs)), int(outputs)


def _check_engine(body: Mapping[str, Any], engine: str | None) -> None:
    """Raises BadRecord for what the engine's sampler does not give."""
    asked = [key for key in ("logprobs", "min_tokens") if body.get(key) and not gives(engine, key)]
    if not gives(engine, "passed") and passed_of(body):
        asked += sorted(key for key in body if key in PASSED_KEYS and body[key])
    if asked:
        raise BadRecord(f"{', '.join(asked)}: not supported with the engine "
                        f"{engine or OWN_ENGINE}")


def _openai_body(record: Mapping[str, Any], engine: str | None) -> Mapping[str, Any]:
    body, url = _body_to(URLS, record), record.get("url")
    foreign = _FOREIGN.get(str(url))
    if foreign is not None and body.get(foreign) is not None:
        raise BadRecord(f"url = {url!r} takes no {foreign}")
    _refuse(not_honoured(body, PASSED_KEYS if gives(engine, "passed") else ()))
    return body


def _body_to(urls: Collection[str], record: Mapping[str, Any]) -> Mapping[str, Any]:
    """The body of an OpenAI line that goes to one of these endpoints."""
    body, url = record.get("body"), record.get("url")
    if not isinstance(body, dict):
        raise BadRecord("body must be an object")
    if record.get("method", "POST") != "POST":
        raise BadRecord(f"method = {shorten(record['method'])}: only POST is known",
                        "invalid_method")
    if url is not None and url not in urls:
        others = (f"; a job that has `workload.embed` takes {EMBEDDINGS}, and no other"
                  if EMBEDDINGS in (url, *urls) else "")
        raise BadRecord(f"url = {shorten(url)}: known: {', '.join(urls)}{others}", "invalid_url")
    return body


def _refuse(asked: Iterable[str]) -> None:
    """Raises BadRecord where any key is asked for that is not honoured."""
    if found := sorted(asked):
        names = ", ".join(key if key.isidentifier() and len(key) < 60 else shorten(key)
                          for key in found[:20])
        raise BadRecord(f"{names}: not supported, and an answer without would look like "
                        "one with; leave it out to have the line answered")


def _with_content(request: Request, body: Mapping[str, Any]) -> Request:
    given = [key for key in ("prompt", "messages", "tokens") if body.get(key) is not None]
    if len(given) != 1:
        raise BadRecord("needs exactly one of prompt, messages, tokens"
                       + (f"; has {', '.join(given)}" if given else ""))
    value, request = body[given[0]], replace(request, chat_template_kwargs=options_of(body))
    if given[0] == "messages":
        return replace(request, messages=messages_of(value))
    if given[0] == "tokens" or (request.is_openai and isinstance(value, list)):
        return replace(request, tokens=_tokens(value, given[0]))
    return replace(request, prompt=_text(value, "prompt"))


def _tokens(value: object, key: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not value:
        raise BadRecord(f"{key} must be a list of at least one token id")
    for item in value:
        if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item <= MAX_INT:
            raise BadRecord(f"{key} must hold token ids (whole numbers >= 0)")
    return tuple(value)


def _text(value: object, key: str) -> str:
    if not isinstance(value, str) or not value:
        raise BadRecord(f"{key} must be text that is not empty")
    check_encodable(value, key)
    return value


def _integer(body: Mapping[str, Any], key: str, minimum: int, maximum: int) -> int | None:
    value = body.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
        raise BadRecord(f"{key} must be a whole number from {minimum} to {maximum}")
    return value


def _seed(body: Mapping[str, Any]) -> int | None:
    seed = _integer(body, "seed", -(2**63), 2**63 - 1)
    return None if seed is None else seed % 2**63  # generators take no negative seed


def _number(body: Mapping[str, Any], key: str, is_allowed: Callable[[float], bool],
            allowed: str) -> float | None:
    value = body.get(key)
    if value is None:
        return None
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or abs(value) > MAX_INT or not math.isfinite(value) or not is_allowed(value):
        raise BadRecord(f"{key} must be {allowed}")
    return float(value)


def _stop(body: Mapping[str, Any]) -> tuple[str, ...]:
    value = body.get("stop")
    if value is None:
        return ()
    texts = tuple(_text(item, "stop") for item in (value if isinstance(value, list) else [value]))
    if len(texts) > MAX_STOPS or any(len(text) > MAX_STOP_CHARS for text in texts):
        raise BadRecord(f"stop takes at most {MAX_STOPS} texts of {MAX_STOP_CHARS} characters")
    return texts
