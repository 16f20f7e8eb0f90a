"""Several answers to one OpenAI request (`n`, a list of prompts, a list of texts to embed): queries
of their own while a job runs, one response with as many choices in results.jsonl. Whoever counts or
reads queries there takes such a line apart."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

_PARTS = "choices"  # under `xgpt`: what is told of each of them


def merged(lines: Sequence[str]) -> str:
    """The lines of all answers to one request, as xrunner.files.result_line makes them, as one. A
    response has all of its choices: where one has no answer the request has none."""
    rows = [json.loads(line) for line in lines]
    first = rows[0]
    error = next((row["error"] for row in rows if row["error"] is not None), None)
    parts = [{**row["xgpt"], "output_tokens": len(row["xgpt"]["output_ids"])} for row in rows]
    whole = {**first, "error": error, "xgpt": {"index": parts[0]["index"], _PARTS: parts}}
    if error is not None:
        return json.dumps({**whole, "response": None}, ensure_ascii=False)
    body = first["response"]["body"]
    bodies, answers = [row["response"]["body"] for row in rows], _answers(body)
    # an input counts once, however many answers it has
    inputs = {own.get("input", 0): one["usage"]["prompt_tokens"]
              for own, one in zip(parts, bodies, strict=True)}
    body = {**body, "usage": _usage(body, sum(inputs.values()),
                                    sum(one["output_tokens"] for one in parts)),
            answers: [{**one[answers][0], "index": place} for place, one in enumerate(bodies)]}
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
            inputs = own.get("input_tokens", body["usage"]["prompt_tokens"])
            answers = _answers(body)
            response = {**response, "body": {
                **body, "usage": _usage(body, inputs, own["output_tokens"]),
                answers: [{**body[answers][place], "index": 0}]}}
        found.append({**row, "response": response, "xgpt": own})
    return found


def _told(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    own = row.get("xgpt")
    told = own.get(_PARTS) if isinstance(own, dict) else None
    return told if isinstance(told, list) else []


def _answers(body: Mapping[str, Any]) -> str:
    return "data" if "data" in body else "choices"


def _usage(body: Mapping[str, Any], inputs: int, outputs: int) -> dict[str, int]:
    """Embeddings have no output to count."""
    counts = {"prompt_tokens": inputs, "completion_tokens": outputs,
              "total_tokens": inputs + outputs}
    return {key: counts[key] for key in body["usage"]}
