"""Several answers to one OpenAI request (`n`): queries of their own while a job runs, one response
with as many choices in results.jsonl. Whoever counts or reads queries there takes such a line
apart."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

_PARTS = "choices"  # under `xgpt`: what is told of each of them


def merged(lines: Sequence[str]) -> str:
    """The lines of all answers to one request, as xrunner.io.result_line makes them, as one. A
    response has all of its choices: where one has no answer the request has none."""
    rows = [json.loads(line) for line in lines]
    first = rows[0]
    error = next((row["error"] for row in rows if row["error"] is not None), None)
    parts = [{**row["xgpt"], "output_tokens": len(row["xgpt"]["output_ids"])} for row in rows]
    whole = {**first, "error": error, "xgpt": {"index": parts[0]["index"], _PARTS: parts}}
    if error is not None:
        return json.dumps({**whole, "response": None}, ensure_ascii=False)
    body = first["response"]["body"]
    inputs, outputs = body["usage"]["prompt_tokens"], sum(one["output_tokens"] for one in parts)
    body = {**body, "usage": _usage(inputs, outputs), "choices": [
        {**row["response"]["body"]["choices"][0], "index": place}
        for place, row in enumerate(rows)]}
    return json.dumps({**whole, "response": {**first["response"], "body": body}},
                      ensure_ascii=False)


def num_parts(row: Mapping[str, Any]) -> int:
    """How many queries a line of results.jsonl is of."""
    return len(_told(row)) or 1


def parts(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The lines of single answers that this one was made of; itself, where it is one."""
    told = _told(row)
    if not told:
        return [row]
    found: list[Mapping[str, Any]] = []
    for place, own in enumerate(told):
        response = row.get("response")
        if response is not None:
            body = response["body"]
            response = {**response, "body": {
                **body, "usage": _usage(body["usage"]["prompt_tokens"], own["output_tokens"]),
                "choices": [{**body["choices"][place], "index": 0}]}}
        found.append({**row, "response": response, "xgpt": own})
    return found


def _told(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    own = row.get("xgpt")
    told = own.get(_PARTS) if isinstance(own, dict) else None
    return told if isinstance(told, list) else []


def _usage(inputs: int, outputs: int) -> dict[str, int]:
    return {"prompt_tokens": inputs, "completion_tokens": outputs,
            "total_tokens": inputs + outputs}
