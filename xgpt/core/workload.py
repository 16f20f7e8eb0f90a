"""Requests: reading a file of them, one JSON object a line, and making synthetic ones.

Forms of a line, OpenAI's batch and ours:
    {"custom_id", "method", "url", "body": {"messages" | "prompt", "max_tokens", ...}}
    {"id", "prompt" | "messages" | "tokens", "max_tokens", ...}
A line that cannot be used becomes a RequestError, never an exception: one bad line of 200,000 must
not cost the others. Keys that mean nothing to us are ignored (an OpenAI body has many, a data set
has columns of its own), except those that look like a misspelt option of ours: silently ignoring
`max_new_tokens` would cost cluster hours."""

import difflib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from xgpt.core.errors import wrong
from xgpt.core.length_file import MAX_LENGTH_TOKENS
from xgpt.core.lengths import IntArray, JointLengths

Message: TypeAlias = "dict[str, str]"  # role, content
ROLES = ("system", "developer", "user", "assistant", "tool")
URLS = ("/v1/chat/completions", "/v1/completions")
MAX_INT = 2**31 - 1

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_MISSPELT = {"max_new_tokens": "max_tokens"}
_GUARDED = ("max_tokens", "forced_tokens", "temperature", "messages")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One query. Exactly one of `prompt`, `messages` and `tokens` is there; None elsewhere leaves
    the choice to the job."""

    line: int  # in the file, from 1
    id: str
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

    def output_cap(self, default: int) -> int:
        """Most tokens this request may generate; `default` where it names no limit."""
        return self.forced_tokens or self.max_tokens or default


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestError:
    """A line that cannot be run (a line of errors.jsonl)."""

    line: int
    id: str | None
    error: str


class _BadLine(Exception):
    """Says why a line cannot be used."""


def read_requests(path: Path, see: Callable[[bytes], object] = lambda raw: None,
                  ) -> Iterator[Request | RequestError]:
    """Yields the usable requests of a file in its order, and the lines that are none. Blank lines
    are skipped; an id that is missing is the line's number. `see` is shown every line as it is.
    Raises InputError for an unreadable file."""
    try:
        with path.open("rb") as file:
            yield from _requests_of(file, see)
    except OSError as cause:
        raise wrong(path, "requests", None, f"cannot be read: {cause.strerror}") from None


def _requests_of(lines: Iterable[bytes], see: Callable[[bytes], object],
                 ) -> Iterator[Request | RequestError]:
    seen: dict[str, int] = {}
    for number, raw in enumerate(lines, start=1):
        see(raw)
        line = raw.removesuffix(b"\n").removeprefix(_BYTE_ORDER_MARK if number == 1 else b"")
        if not line.strip():
            continue
        name: str | None = None
        try:
            record = _decode(line)
            name = _read_id(record, number)
            if name in seen:
                raise _BadLine(f"id {name!r} is already that of line {seen[name]}")
            request = _read_request(record, number, name)
        except _BadLine as cause:
            yield RequestError(line=number, id=name, error=str(cause))
        else:
            seen[name] = number
            yield request


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


def _decode(raw: bytes) -> dict[str, Any]:
    try:
        record = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as cause:
        raise _BadLine(f"not UTF-8: {cause.reason} at byte {cause.start}") from None
    except ValueError as cause:  # JSONDecodeError, or a number of more than 4,300 digits
        raise _BadLine(f"not JSON: {cause}") from None
    except RecursionError:
        raise _BadLine("not usable: JSON nested too deeply") from None
    if not isinstance(record, dict):
        raise _BadLine("not a JSON object")
    return record


def _is_openai(record: Mapping[str, Any]) -> bool:
    return "body" in record or "custom_id" in record


def _read_id(record: Mapping[str, Any], line: int) -> str:
    key = "custom_id" if _is_openai(record) else "id"
    value = record.get(key)
    if value is None:
        return str(line)
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise _BadLine(f"{key} must be text")
    return _text(str(value), key)


def _read_request(record: Mapping[str, Any], line: int, name: str) -> Request:
    is_openai = _is_openai(record)
    body = _openai_body(record) if is_openai else record
    if not is_openai:
        _refuse_misspelt(record)
    # OpenAI's newer name wins where both are given
    has_new = body.get("max_completion_tokens") is not None
    max_tokens_key = "max_completion_tokens" if has_new else "max_tokens"
    request = Request(
        line=line, id=name, is_openai=is_openai,
        max_tokens=_integer(body, max_tokens_key, 1, MAX_INT),
        forced_tokens=_integer(body, "forced_tokens", 1, MAX_LENGTH_TOKENS),
        seed=_seed(body),
        temperature=_number(body, "temperature", lambda x: x >= 0, "a number >= 0"),
        top_k=_integer(body, "top_k", 1, MAX_INT),
        top_p=_number(body, "top_p", lambda x: 0 < x <= 1, "above 0 and at most 1"),
        stop=_stop(body))
    forced, limit = request.forced_tokens, request.max_tokens
    if forced is not None and limit is not None and forced > limit:
        raise _BadLine(f"forced_tokens = {forced} exceeds max_tokens = {limit}")
    return _with_content(request, body)


def _openai_body(record: Mapping[str, Any]) -> Mapping[str, Any]:
    body, url = record.get("body"), record.get("url")
    if not isinstance(body, dict):
        raise _BadLine("body must be an object")
    if record.get("method", "POST") != "POST":
        raise _BadLine(f"method = {record['method']!r}: only POST is known")
    if url is not None and url not in URLS:
        raise _BadLine(f"url = {url!r}: known: {', '.join(URLS)}")
    if body.get("n", 1) not in (1, None):
        raise _BadLine(f"n = {body['n']!r}: only one choice a request is supported")
    return body


def _with_content(request: Request, body: Mapping[str, Any]) -> Request:
    given = [key for key in ("prompt", "messages", "tokens") if body.get(key) is not None]
    if len(given) != 1:
        raise _BadLine("needs exactly one of prompt, messages, tokens"
                       + (f"; has {', '.join(given)}" if given else ""))
    value = body[given[0]]
    if given[0] == "messages":
        return replace(request, messages=_messages(value))
    if given[0] == "tokens" or (request.is_openai and isinstance(value, list)):
        return replace(request, tokens=_tokens(value, given[0]))
    return replace(request, prompt=_text(value, "prompt"))


def _messages(value: object) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise _BadLine("messages must be a list of at least one message")
    return tuple(_message(item) for item in value)


def _message(item: object) -> Message:
    if not isinstance(item, dict):
        raise _BadLine("a message must be an object with role and content")
    role, content = item.get("role"), item.get("content")
    if role not in ROLES:
        raise _BadLine(f"role = {role!r}: known: {', '.join(ROLES)}")
    if isinstance(content, list):  # OpenAI's list of parts, of which we know text
        if not all(isinstance(part, dict) and part.get("type") == "text" and isinstance(
                part.get("text"), str) for part in content):
            raise _BadLine("content parts other than text are not supported")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise _BadLine("content of a message must be text")
    _check_encodable(content, "content")
    return {"role": str(role), "content": content}


def _tokens(value: object, key: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not value:
        raise _BadLine(f"{key} must be a list of at least one token id")
    for item in value:
        if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item <= MAX_INT:
            raise _BadLine(f"{key} must hold token ids (whole numbers >= 0)")
    return tuple(value)


def _text(value: object, key: str) -> str:
    if not isinstance(value, str) or not value:
        raise _BadLine(f"{key} must be text that is not empty")
    _check_encodable(value, key)
    return value


def _check_encodable(value: str, key: str) -> None:
    # JSON's "\ud800" makes a lone surrogate, which no tokenizer and no file takes
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise _BadLine(f"{key} holds a lone surrogate, which is no character") from None


def _integer(body: Mapping[str, Any], key: str, minimum: int, maximum: int) -> int | None:
    value = body.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
        raise _BadLine(f"{key} must be a whole number from {minimum} to {maximum}")
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
        raise _BadLine(f"{key} must be {allowed}")
    return float(value)


def _stop(body: Mapping[str, Any]) -> tuple[str, ...]:
    value = body.get("stop")
    if value is None:
        return ()
    return tuple(_text(item, "stop") for item in (value if isinstance(value, list) else [value]))


def _refuse_misspelt(record: Mapping[str, Any]) -> None:
    known = set(Request.__dataclass_fields__) | {"max_completion_tokens"}
    for key in record:
        if key in known:
            continue
        close = difflib.get_close_matches(key, _GUARDED, n=1, cutoff=0.8)
        meant = _MISSPELT.get(key) or (close[0] if close else None)
        if meant is not None:
            raise _BadLine(f"unknown key {key!r}: did you mean {meant!r}?")
