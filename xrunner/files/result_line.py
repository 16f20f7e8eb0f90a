"""Lines of results.jsonl and errors.jsonl, and which of them are valid.

A result is in our form, that of a scored continuation, or OpenAI's batch response object. A
log-likelihood that is not finite is null, in OpenAI's form a number of its own.

The n-th line belongs to the n-th request of the spool. The file may have been edited or damaged
between a stop and the next start, so lines are checked."""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from operator import index as whole_number
from pathlib import Path
from typing import Any, NamedTuple

from pydantic_core import from_json

from xgpt.requests.choices import num_parts, parts
from xgpt.requests.request import RequestError
from xgpt.requests.spool import Spool
from xrunner.query import EXPIRED, FinishedQuery

TokenText = Callable[[int], str]
_VERY_UNLIKELY = -9999.0  # OpenAI's number for a likelihood that is not finite


def result_line(result: FinishedQuery, model: str, token_text: TokenText) -> dict[str, Any]:
    """The result as a line's JSON object. `model`: name in OpenAI's responses. `token_text`: text
    of a single token."""
    query, tpot_s = result.query, result.tpot_s
    times: dict[str, float | None] = {
        "latency_s": round(result.latency_s, 6), "encode_start_s": round(result.encode_start_s, 6),
        "ttft_s": round(result.ttft_s, 6), "tpot_s": None if tpot_s is None else round(tpot_s, 6)}
    if result.arrival_s is not None:
        times["arrival_s"] = round(result.arrival_s, 6)
    if result.replica is not None:
        times["replica"] = result.replica
    if query.is_openai:
        return _openai_line(result, model, times, token_text)
    if query.sampling.pooled:
        vector = [_short(value) for value in result.embedding] if result.error is None else []
        return {"id": query.id, "index": query.index, "text": "", "output_ids": [],
                "input_tokens": len(query.input_ids), "output_tokens": 0,
                "finish_reason": result.finish_reason, **times, "embedding": vector,
                **({} if result.error is None else {"error": result.error})}
    return {"id": query.id, "index": query.index, "text": result.text,
            "output_ids": list(result.output_ids), "input_tokens": len(query.input_ids),
            "output_tokens": len(result.output_ids), "finish_reason": result.finish_reason, **times,
            **({"sample": query.sample} if query.sample else {}), **_likelihoods(result),
            **({} if result.error is None else {"error": result.error})}


def error_line(error: RequestError, file: str | None) -> dict[str, Any]:
    """JSON object of a line that cannot run. `file`: its file's label, if there are several.
    OpenAI's lines are as in the service's error file: a response of status 400 for a refused
    request, else an error."""
    place: dict[str, Any] = {**({} if file is None else {"file": file}), "line": error.line}
    if not error.is_openai:
        code = {"code": error.code} if error.code == EXPIRED else {}
        return {**place, "id": error.id, "error": error.error, **code}
    name = f"{'' if file is None else file + ':'}{error.line}"
    answer: dict[str, Any] = {"response": None, "error": {"code": error.code,
                                                          "message": error.error}}
    if error.code is None:
        answer = {"response": {
            "status_code": 400, "request_id": f"xgpt-error-{name}", "body": {"error": {
                "message": error.error, "type": "invalid_request_error", "param": None,
                "code": None}}}, "error": None}
    return {"id": f"batch_req_error_{name}", "custom_id": error.id, **answer, "xgpt": place}


def _likelihoods(result: FinishedQuery) -> dict[str, Any]:
    """Log-likelihoods of chosen tokens or of a continuation; empty if not asked for."""
    sampling, told = result.query.sampling, result.likelihoods
    logprobs = [_number(one.logprob) for one in told]
    if sampling.targets:
        is_whole = result.error is None and None not in logprobs
        return {"continuation_ids": list(sampling.targets), "logprobs": logprobs,
                "log_likelihood": math.fsum(one.logprob for one in told) if is_whole else None,
                "is_greedy": is_whole and all(
                    one.top[0][0] == target
                    for one, target in zip(told, sampling.targets, strict=True))}
    if sampling.top_logprobs is None:
        return {}
    return {"logprobs": logprobs,
            "top_logprobs": [[[token, _number(value)] for token, value in one.top] for one in told]}


def _openai_line(result: FinishedQuery, model: str, times: Mapping[str, float | None],
                 token_text: TokenText) -> dict[str, Any]:
    """A response object of OpenAI's batch format, with our figures under `xgpt`. Each of several
    choices is written as if alone (xgpt.requests.choices merges them)."""
    query, request = result.query, f"xgpt-{result.query.index}"
    answer: dict[str, Any] = {"error": None, "response": {
        "status_code": 200, "request_id": request, "body": _embedding_body(result, model)
        if query.sampling.pooled else _body(result, model, token_text)}}
    if result.error is not None:
        answer = {"error": {"code": "no_answer", "message": result.error}, "response": None}
    own = {"index": query.index, "output_ids": list(result.output_ids), **times}
    if query.sampling.pooled:
        own["output_ids"] = []
    if query.choices > 1:
        own |= {"sample": query.sample, "of": query.choices, "input": query.asked,
                "input_tokens": len(query.input_ids)}
    return {"id": f"batch_req_{query.index}", "custom_id": query.id, **answer, "xgpt": own}


def _body(result: FinishedQuery, model: str, token_text: TokenText) -> dict[str, Any]:
    query = result.query
    input_tokens, output_tokens = len(query.input_ids), len(result.output_ids)
    choice: dict[str, Any] = {"index": 0, "finish_reason": result.finish_reason, "logprobs": None}
    is_told = query.sampling.top_logprobs is not None
    if query.is_chat:
        choice["message"] = {"role": "assistant", "content": result.text, "refusal": None}
        if result.tool_calls:
            choice["message"] |= {"content": result.text or None, "tool_calls": [
                {"id": f"call_{query.index}_{place}", "type": "function",
                 "function": call._asdict()} for place, call in enumerate(result.tool_calls)]}
            choice["finish_reason"] = "tool_calls"
        if is_told:
            choice["logprobs"] = {"content": list(_of_chat(result, token_text)), "refusal": None}
    else:
        choice["text"] = result.text
        if is_told:
            choice["logprobs"] = _of_completion(result, token_text)
    return {"id": f"xgpt-{query.index}", "created": int(time.time()), "model": model,
            "system_fingerprint": None, "choices": [choice],
            "object": "chat.completion" if query.is_chat else "text_completion",
            "usage": {"prompt_tokens": input_tokens, "completion_tokens": output_tokens,
                      "total_tokens": input_tokens + output_tokens}}


def _embedding_body(result: FinishedQuery, model: str) -> dict[str, Any]:
    """Body of an embedding response, whose vector has length 1 as the service's."""
    length = math.hypot(*result.embedding) or 1.0
    tokens = len(result.query.input_ids)
    return {"object": "list", "model": model, "data": [{
        "object": "embedding", "index": 0, "embedding": [
            _short(value / length) for value in result.embedding]}],
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}


def _short(value: float) -> float:
    """The number with the digits of a float32."""
    return float(f"{value:.9g}")


def _of_chat(result: FinishedQuery, token_text: TokenText) -> Iterator[dict[str, Any]]:
    """Yields a chat response's logprobs of each token."""
    for token, told in zip(result.output_ids, result.likelihoods, strict=False):
        yield {**_named(token_text(token), told.logprob), "top_logprobs": [
            _named(token_text(other), value) for other, value in told.top]}


def _named(text: str, logprob: float) -> dict[str, Any]:
    # part of a character has no bytes that the text shows
    has_bytes = "\ufffd" not in text
    return {"token": text, "logprob": _openai_number(logprob),
            "bytes": list(text.encode()) if has_bytes else None}


def _of_completion(result: FinishedQuery, token_text: TokenText) -> dict[str, Any]:
    texts = [token_text(token) for token in result.output_ids]
    offsets = [sum(map(len, texts[:place])) for place in range(len(texts))]
    return {"tokens": texts, "text_offset": offsets,
            "token_logprobs": [_openai_number(one.logprob) for one in result.likelihoods],
            "top_logprobs": [{token_text(token): _openai_number(value) for token, value in one.top}
                             for one in result.likelihoods]}


def _openai_number(value: float) -> float:
    return value if math.isfinite(value) else _VERY_UNLIKELY


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


class Line(NamedTuple):
    """A line with the results of `parts` requests from `query` on."""

    query: int
    parts: int


class CheckedResults(NamedTuple):
    """State of a results file. `good_bytes`: length of its valid start, with the first
    `num_queries` results. `behind`: offset and line of valid results that follow, by first request.
    `fault`: why the valid start ends there; empty if nothing or a torn line follows."""

    good_bytes: int = 0
    num_queries: int = 0
    behind: Mapping[int, tuple[int, Line]] = {}
    fault: str = ""

    @property
    def held(self) -> frozenset[int]:
        """Indices of the requests whose valid results follow the valid start of the file."""
        return frozenset(query for _, line in self.behind.values()
                         for query in range(line.query, line.query + line.parts))


def checked_results(path: Path) -> CheckedResults:
    """Checks all of a results file; cached until it changes. A run may be writing it."""
    spool = path.parent / "spool" / "spool.json"
    stamps = [(found.st_ino, found.st_size, found.st_mtime_ns)
              for found in (file.stat() for file in (path, spool) if file.is_file())]
    return _checked(path, *stamps) if path.is_file() else CheckedResults()


@lru_cache(4)
def _checked(path: Path, *stamps: tuple[int, int, int]) -> CheckedResults:
    good_bytes = count = offset = 0
    fault, is_over, behind = "", False, dict[int, tuple[int, Line]]()
    spool = spool_of(path.parent)
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            line, is_whole = line_of(text, spool), text.endswith(b"\n")
            if not is_over and is_whole and line is not None and line.query == count:
                good_bytes, count = good_bytes + len(text), count + line.parts
            else:
                if not is_over and is_whole:
                    what = "no result of this job" if line is None else (
                        f"the result of request {line.query}")
                    fault = f"line {number} of {path.name} is {what}, where request {count} belongs"
                is_over = True
                if line is not None and line.query >= count:
                    behind.setdefault(line.query, (offset, line))
            offset += len(text)
    return CheckedResults(good_bytes, count, behind, fault)


def drop_cached_checks() -> None:
    """Drops cached checks."""
    _checked.cache_clear()


def line_of(text: bytes, spool: Spool | None) -> Line | None:
    """The requests of a line; None if it is no result of the spool's job."""
    try:
        try:
            row = from_json(text)  # twice as fast as json's
        except ValueError:
            row = json.loads(text)  # an id may contain half of a surrogate pair
        line = Line(whole_number(row.get("xgpt", row)["index"]), num_parts(row))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    name = json.dumps(row.get("custom_id", row.get("id"))).encode()
    is_own = spool is None or (0 <= line.query < len(spool) and spool.is_named(line.query, name))
    return line if is_own else None


def spool_of(output: Path) -> Spool | None:
    """The spool of an output folder; None if it cannot be read."""
    try:
        return Spool(output)
    except (OSError, ValueError, LookupError, TypeError, EOFError):
        return None


def lines_behind(path: Path, found: CheckedResults) -> dict[int, str]:
    """Lines that `checked` found `behind`, by request, in the form of held.jsonl."""
    lines = dict[int, str]()
    with path.open("rb") as file:
        for index, (offset, line) in found.behind.items():
            file.seek(offset)
            text = file.readline().decode().removesuffix("\n")
            lines |= {index: text} if line.parts == 1 else {
                index + place: json.dumps(part, ensure_ascii=False)
                for place, part in enumerate(parts(json.loads(text)))}
    return lines
