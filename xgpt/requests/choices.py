"""Several answers to one OpenAI request (`n`, a list of prompts, a list of texts to embed). They
are requests of their own while a job runs, and one response with as many choices in results.jsonl.
Code that counts or reads requests there splits such lines by `parts`."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

_PARTS = "choices"  # key under `xgpt` with an entry for each of them


def merged(lines: Sequence[str]) -> str:
    """One result line made of the lines of all answers to a request, as xrunner.files.result_line
    makes them. If one of them failed, the whole request has an error and no response."""
    rows = [json.loads(line) for line in lines]
    first = rows[0]
    error = next((row["error"] for row in rows if row["error"] is not None), None)
    parts = [{**row["xgpt"], "output_tokens": len(row["xgpt"]["output_ids"])} for row in rows]
    whole = {**first, "error": error, "xgpt": {"index": parts[0]["index"], _PARTS: parts}}
    if error is not None:
        return json.dumps({**whole, "response": None}, ensure_ascii=False)
    body = first["response"]["body"]
    bodies, answers = [row["response"]["body"] for row in rows], _answers(body)
    # inputs count once, however many answers they have
    inputs = {own.get("input", 0): one["usage"]["prompt_tokens"]
              for own, one in zip(parts, bodies, strict=True)}
    body = {**body, "usage": _usage(body, sum(inputs.values()),
                                    sum(one["output_tokens"] for one in parts)),
            answers: [{**one[answers][0], "index": place} for place, one in enumerate(bodies)]}
    return json.dumps({**whole, "response": {**first["response"], "body": body}},
                      ensure_ascii=False)


def num_parts(row: Mapping[str, Any]) -> int:
    """Number of answers in a line of results.jsonl."""
    return len(_told(row)) or 1


def parts(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The lines of single answers that `merged` made a line of; the line itself if it has one."""
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
    """Token counts with the keys of the body's own usage (embeddings count no output)."""
    counts = {"prompt_tokens": inputs, "completion_tokens": outputs,
              "total_tokens": inputs + outputs}
    return {key: counts[key] for key in body["usage"]}
