"""What a request asks of an engine's own sampler, which ours does not have: output held to a form
(JSON, a regular expression, a choice, a grammar) and some changes of the logits. It is passed to
that engine as vLLM's sampling parameters have it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from xgpt.core.errors import shorten
from xgpt.requests.chat import BadRecord, check_encodable

# OpenAI's key, vLLM's, and vLLM's older ones
_FORMS = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice",
          "guided_grammar")
# of the logits of a step, so that a query that comes back after an eviction goes on as it began;
# penalties of output tokens alone would not
_OF_LOGITS = ("min_p", "logit_bias")
_KINDS = ("json", "json_object", "regex", "choice", "grammar")
_FORM = "structured_outputs"


def passed_of(asked: Mapping[str, Any]) -> str:
    """vLLM's sampling parameters as JSON; "" where nothing is asked for. Raises BadRecord."""
    given = {key: asked[key] for key in _OF_LOGITS if asked.get(key)}
    forms = {key: form for key in _FORMS if key in asked and (form := _form(key, asked[key]))}
    if len(forms) > 1:
        raise BadRecord(f"{', '.join(forms)}: an answer has one form")
    for form in forms.values():
        given[_FORM] = form
    text = json.dumps(given, ensure_ascii=False) if given else ""
    check_encodable(text, ", ".join((*forms, *(key for key in given if key != _FORM))))
    return text


def has_form(passed: str) -> bool:
    """Whether the output is held to a form, which says itself where it ends."""
    return bool(passed) and _FORM in json.loads(passed)


def _form(key: str, value: object) -> dict[str, Any] | None:
    """As vLLM's `structured_outputs` says it; None where text is asked for."""
    if key == "response_format":
        return _of_response_format(value)
    if key == _FORM:
        if not isinstance(value, dict) or len(value) != 1 or next(iter(value)) not in _KINDS:
            raise BadRecord(f"{key} must be an object with one of {', '.join(_KINDS)}")
        (kind, held), = value.items()
        return _checked(kind, held, f"{key}.{kind}")
    return _checked(key.removeprefix("guided_"), value, key)


def _of_response_format(value: object) -> dict[str, Any] | None:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    if kind != "json_schema":
        raise BadRecord(f"response_format = {shorten(value)}: known types: text, json_object, "
                        "json_schema")
    assert isinstance(value, dict)
    named = value.get("json_schema")
    if not isinstance(named, dict) or not isinstance(named.get("name"), str) or (
            named.get("schema") is None):
        raise BadRecord("response_format.json_schema must be an object with name and schema")
    return _checked("json", named["schema"], "response_format.json_schema.schema")


def _checked(kind: str, value: Any, key: str) -> dict[str, Any]:
    if kind == "json_object":
        if value is not True:
            raise BadRecord(f"{key} must be true")
    elif kind == "choice":
        if not isinstance(value, list) or not value or not all(
                isinstance(one, str) and one for one in value):
            raise BadRecord(f"{key} must be a list of texts")
    elif kind == "json":
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError) as cause:
                raise BadRecord(f"{key} is not JSON: {cause}") from None
        if not isinstance(value, dict):
            raise BadRecord(f"{key} must be a JSON schema, which is an object")
    elif not isinstance(value, str) or not value:
        raise BadRecord(f"{key} must be text that is not empty")
    return {kind: value}
