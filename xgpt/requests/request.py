"""Reads a request from its record, whatever file it comes from, and makes synthetic requests.

Forms of a record, OpenAI's batch format and our own:

    `{"custom_id", "method", "url", "body": {"messages" | "prompt", "max_tokens", ...}}`.
    `{"id", "prompt" | "messages" | "tokens", "max_tokens", ...}`.
    For a job that scores: our own with "continuation" (or "continuation_tokens").
    For a job that embeds: `{"custom_id", ..., "body": {"input", ...}}`, or our own.

A record that cannot be used becomes a RequestError: one bad line of 200,000 must not cost the
others. xgpt.requests.keys lists the options of a request. Other keys in our own forms are ignored
(a data set has columns of its own), except those that look like a misspelt option: silently
ignoring `max_new_tokens` would cost cluster hours."""

import difflib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xgpt.core.errors import shorten
from xgpt.core.lengths import FloatArray, IntArray, JointLengths, synthetic_lengths
from xgpt.core.prefixes import Prefixes
from xgpt.requests.arrival_times import arrival_of
from xgpt.requests.chat import (
    BadRecord,
    Message,
    check_encodable,
    has_form,
    messages_of,
    options_of,
    passed_of,
    tools_of,
)
from xgpt.requests.deadlines import deadline_of
from xgpt.requests.keys import CHAT, COMPLETION, EMBEDDINGS, KEYS, MAX_INT, OWN, READ, asked_of

URLS = (CHAT, COMPLETION)
MAX_ID_CHARS = 1024
MAX_CHOICES = 2048  # per line, as OpenAI's embeddings: inputs times answers to each

_MISSPELT = {"max_new_tokens": "max_tokens"}
_OPTIONS = ("max_tokens", "forced_tokens", "forecast_tokens", "temperature")  # dear to misspell


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Options of a request beside its content; None leaves the choice to the job."""

    id: str
    line: int  # in the file, from 1; in an array the item
    file: int = 0  # index of the job's file
    prompt: str | None = None
    seed: int | None = None
    temperature: float | None = None
    top_k: int | None = None  # 0: all tokens
    top_p: float | None = None
    repetition_penalty: float | None = None
    stop: tuple[str, ...] = ()
    is_openai: bool = False
    top_logprobs: int | None = None  # likeliest tokens reported beside each chosen one; None: off
    min_tokens: int | None = None  # tokens before which no end-of-sequence is chosen
    tools: str = ""  # tools that a chat may call, as JSON
    passed: str = ""  # options of the engine's own sampler, as JSON (xgpt.requests.chat)
    pooled: str = ""  # "last" or "mean": how to pool its embedding, instead of an answer
    asked: int = 0  # index among the inputs of its line
    choices: int = 1  # answers in its line of results (OpenAI's `n`, and its lists)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request(Asked):
    """A request. Exactly one of `prompt`, `messages` and `tokens` is set."""

    messages: tuple[Message, ...] | None = None
    tokens: tuple[int, ...] | None = None
    max_tokens: int | None = None
    forced_tokens: int | None = None  # exact output length; end-of-sequence is ignored
    deadline_s: float = math.inf  # as xgpt.requests.deadlines has it
    forecast_tokens: int | None = None  # output length that the user expects
    arrival_s: float | None = None  # as xgpt.requests.arrival_times has it
    samples: int = 1  # number of answers to it
    chat_template_kwargs: str = ""  # arguments of its chat template, as JSON
    continuation: str | None = None  # of the prompt, to be scored; or as tokens
    continuation_tokens: tuple[int, ...] | None = None
    others: tuple["Request", ...] = ()  # the other inputs of its line

    @property
    def text(self) -> str | None:
        """Its prompt, or the contents of its messages, and its continuation; None for tokens."""
        text = self.prompt
        if self.messages is not None:
            text = "\n\n".join(message.get("content", "") for message in self.messages)
        return text if text is None else text + (self.continuation or "")

    def output_cap(self, default: int) -> int:
        """Most output tokens of this request; `default` if it has no limit of its own."""
        return self.forced_tokens or self.max_tokens or default


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestError:
    """A record that cannot be run, for a line of errors.jsonl."""

    line: int
    id: str | None
    error: str
    file: int = 0
    is_openai: bool | None = None  # None: unknown
    code: str | None = None  # see BadRecord


_KNOWN = Request.__dataclass_fields__.keys() | KEYS.keys()


class Terms(NamedTuple):
    """How a job uses its requests: to score, to embed (`pooled`), or to answer; and what it adds to
    them."""

    is_scored: bool = False
    engine: str | None = None  # engine that answers, which supports other keys; None: our own
    pooled: str = ""  # see Asked
    template: str = ""  # template that makes a prompt of a row's columns (xgpt.requests.template)
    system: str = ""  # system message, for requests without one
    form: str = ""  # form of answers, for requests without one (see Asked.passed)


def read_record(record: Mapping[str, Any], line: int, name: str, file: int = 0,
                terms: Terms = Terms()) -> Request:  # noqa: B008 (immutable)
    """The request of a record, with the id `name`. Raises BadRecord."""
    openai = is_openai(record)
    if openai and terms.is_scored:
        raise BadRecord("OpenAI's batch format has no continuations to score: give "
                        '{"id", "prompt", "continuation"}')
    if openai:
        body, place = _body_of(record, (EMBEDDINGS,) if terms.pooled else URLS)
    else:
        refuse_misspelt(record)
        body, place = record, READ if terms.is_scored or terms.pooled else OWN
    asked = asked_of(body, place, terms.engine)
    if openai and not asked.get("model"):
        raise BadRecord("model is missing: OpenAI's endpoints require it, and it may be any name")
    if terms.is_scored or terms.pooled:
        request = Request(line=line, id=name, file=file, max_tokens=1, forced_tokens=1,
                          pooled=terms.pooled, is_openai=openai,
                          deadline_s=deadline_of(asked.get("deadline_s")),
                          arrival_s=arrival_of(asked.get("arrival_s")))
        return _scored(body, request) if terms.is_scored else _with_content(request, body, place)
    seed, top_k, stop, told = (asked.get(key) for key in ("seed", "top_k", "stop", "logprobs"))
    if place == CHAT:  # chats have `logprobs: true`, and the number in another key
        if asked.get("top_logprobs") and not told:
            raise BadRecord("top_logprobs needs logprobs: true")
        told = asked.get("top_logprobs", 0) if told else None
    # OpenAI's newer name wins where both are given
    limit = asked.get("max_completion_tokens", asked.get("max_tokens"))
    forced = asked.get("forced_tokens")
    request = Request(
        line=line, id=name, file=file, is_openai=openai, max_tokens=limit, forced_tokens=forced,
        deadline_s=deadline_of(asked.get("deadline_s")),
        forecast_tokens=asked.get("forecast_tokens"), arrival_s=arrival_of(asked.get("arrival_s")),
        seed=None if seed is None else seed % 2**63,  # generators take no negative seed
        temperature=asked.get("temperature"), top_k=None if top_k is None else max(top_k, 0),
        top_p=asked.get("top_p"), repetition_penalty=asked.get("repetition_penalty"),
        stop=tuple(_text(one, "stop") for one in ([stop] if isinstance(stop, str) else stop or ())),
        top_logprobs=told, min_tokens=asked.get("min_tokens"),
        passed=passed_of(asked, terms.form, checks_form=terms.engine is None),
        samples=asked.get("n", asked.get("samples", 1)),
        tools=tools_of(body) if place == CHAT else "")
    if forced is not None and limit is not None and forced > limit:
        raise BadRecord(f"forced_tokens = {forced} exceeds max_tokens = {limit}")
    if limit is not None and (request.min_tokens or 0) > limit:
        raise BadRecord(f"min_tokens = {request.min_tokens} exceeds max_tokens = {limit}")
    if (forced or request.min_tokens) and has_form(request.passed):
        raise BadRecord(f"{'forced' if forced else 'min'}_tokens goes with no form of the output, "
                        "which says itself where it ends")
    return _with_content(request, body, place, terms.system)


def _scored(record: Mapping[str, Any], request: Request) -> Request:
    given = [key for key in ("continuation", "continuation_tokens") if record.get(key) is not None]
    if len(given) != 1:
        raise BadRecord("needs exactly one of continuation, continuation_tokens: what is scored")
    key, value = given[0], record[given[0]]
    if (key == "continuation") == (record.get("tokens") is not None):
        raise BadRecord("continuation goes with a prompt or messages, continuation_tokens with "
                        "tokens")
    said: dict[str, Any] = {key: (_text if key == "continuation" else _tokens)(value, key)}
    return _with_content(replace(request, **said), record, READ)


def id_of(record: Mapping[str, Any], default: str) -> str:
    """The id of a record; `default` if it has none. Raises BadRecord for one that is no text."""
    key = "custom_id" if is_openai(record) else "id"
    value = record.get(key)
    if key == "custom_id" and not isinstance(value, str):
        raise BadRecord("custom_id must be text, and is required of a line in OpenAI's format",
                        "missing_required_parameter" if value is None else "invalid_type")
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise BadRecord(f"{key} must be text")
    text = _text(str(value), key)
    if len(text) > MAX_ID_CHARS:
        raise BadRecord(f"{key} has {len(text)} characters, of at most {MAX_ID_CHARS}")
    return text


def is_openai(record: Mapping[str, Any]) -> bool:
    """Whether a record has OpenAI's batch format."""
    return "body" in record or "custom_id" in record


@lru_cache(1024)
def misspelt_option(key: str) -> str | None:
    """The option that an unknown key seems to misspell; None if it looks like none."""
    close = difflib.get_close_matches(key, _OPTIONS, n=1, cutoff=0.8)
    return _MISSPELT.get(key) or (close[0] if close and key not in _KNOWN else None)


def refuse_misspelt(keys: Iterable[str]) -> None:
    """Raises BadRecord for a key that seems to misspell an option."""
    for key in keys:
        if key in _KNOWN:
            continue
        meant = misspelt_option(key) or next(iter(
            difflib.get_close_matches(key, ("messages",), n=1, cutoff=0.8)), None)
        if meant is not None:
            raise BadRecord(f"unknown key {shorten(key)}: did you mean {meant!r}?")


def synthetic_requests(lengths: JointLengths, count: int, seed: int, vocab_size: int,
                       prefixes: Prefixes | None = None) -> Iterator[tuple[IntArray, int]]:
    """Yields (random token ids, number of output tokens) of `count` requests, with lengths drawn
    from `lengths`. `prefixes`: what they share, none of which continues another."""
    rng = np.random.default_rng((seed, 1))
    heads = [] if prefixes is None else [
        np.random.default_rng((seed, 3, node)).integers(vocab_size, size=end)
        for node, end in enumerate(prefixes.ends.tolist())]
    for query, (inputs, outputs) in enumerate(zip(
            *synthetic_lengths(lengths, count, seed), strict=True)):
        ids = rng.integers(vocab_size, size=int(inputs))
        if prefixes is not None and (node := prefixes.nodes[query]) >= 0:
            ids[:len(heads[node])] = heads[node]
        yield ids, int(outputs)


def _body_of(record: Mapping[str, Any], urls: Sequence[str]) -> tuple[Mapping[str, Any], str]:
    """(body of an OpenAI line, its endpoint, which must be one of `urls`). Raises BadRecord."""
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
    usual = urls[0] if len(urls) == 1 or body.get("messages") is not None else COMPLETION
    return body, usual if url is None else str(url)


def _with_content(request: Request, body: Mapping[str, Any], place: str,
                  system: str = "") -> Request:
    keys = ("input",) if place == EMBEDDINGS else ("prompt", "messages", "tokens")
    given = [key for key in keys if body.get(key) is not None]
    if len(given) != 1:
        why = "needs input" if len(keys) == 1 else "needs exactly one of prompt, messages, tokens"
        raise BadRecord(why + (f"; has {', '.join(given)}" if given else ""))
    key, value = given[0], body[given[0]]
    request = replace(request, chat_template_kwargs=options_of(body))
    if system and (key == "tokens" or place == COMPLETION):
        raise BadRecord(f"workload.system goes before a chat; this {key} goes into none")
    if system and key == "prompt":
        key, value = "messages", [{"role": "user", "content": _text(value, key)}]
    if key == "messages":
        messages = messages_of(value)
        if system and messages[0]["role"] not in ("system", "developer"):
            messages = ({"role": "system", "content": system}, *messages)
        inputs = [replace(request, messages=messages)]
    elif key == "tokens":
        inputs = [replace(request, tokens=_tokens(value, key))]
    elif request.is_openai and isinstance(value, list):
        # a list of texts, or of lists of token ids; or the token ids of a single input
        inputs = [replace(request, prompt=_text(one, key)) if isinstance(one, str) else replace(
            request, tokens=_tokens(one, key)) for one in (
                value if value and isinstance(value[0], (str, list)) else [value])]
    else:
        inputs = [replace(request, prompt=_text(value, key))]
    choices = len(inputs) * request.samples if request.is_openai else 1
    if choices > MAX_CHOICES:
        raise BadRecord(f"{key} asks for {choices} answers, of at most {MAX_CHOICES} in a line")
    first, *others = [replace(one, asked=at, choices=choices)
                      for at, one in enumerate(inputs)] if choices > 1 else inputs
    return replace(first, others=tuple(others)) if others else first


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


IN_TURN = "arrival_s not before that of the request above"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Requests:
    """The usable requests of a job, in the order of its file. Arrays are [requests]; those that are
    never summed may have 4 bytes per element, as there may be ten million of them."""

    input_tokens: IntArray | None  # None if texts were not tokenised
    caps: IntArray  # most output tokens that a request sets; 0: left to the job
    forced: IntArray  # exact number of its output tokens; 0: the model decides
    may_stop: NDArray[np.bool_]  # whether it sets strings that end its output
    # as xgpt.requests.deadlines has them; None: no request has one
    deadlines_s: FloatArray | None = None
    arrival_s: FloatArray | None = None  # as in a line; None: not all requests have one
    # [requests, 3] least, expected and most output tokens that requests bring with them
    forecasts: IntArray | None = None
    # option (or IN_TURN) -> (requests without it, file and line of the first)
    lacking: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)
    bad_lines: tuple[RequestError, ...] = ()  # lines that are no usable request
    are_tokenised: bool = True  # whether the model's tokenizer counted all inputs
    # standard deviation of the logarithm of the error of all inputs; 0: they were counted
    input_error: float = 0.0
    # index of a request -> reason why it cannot run with any schedule
    unusable: Mapping[int, str] = field(default_factory=dict)
    mean_targets: float = 0.0  # mean tokens to score, in a job that scores
    digest: str = ""  # of all bytes read, and of the rules of reading
    file_digests: tuple[str, ...] = ()  # of the bytes of each file
    labels: tuple[str, ...] = ()  # names of the files, if there are several
    prefixes: Prefixes | None = None  # that they share; None: none, or not looked for

    def __len__(self) -> int:
        return len(self.caps)

    def output_caps(self, default: int) -> IntArray:
        """Most output tokens of each request, [requests]; `default` where it sets no limit."""
        return np.where(self.caps > 0, self.caps, np.int64(default))

    @property
    def are_forced(self) -> bool:
        """Whether all output lengths are known."""
        return bool((self.forced > 0).all()) and not self.may_stop.any()
