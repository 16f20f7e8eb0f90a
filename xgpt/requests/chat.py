"""The messages of a chat and the tools that it may call, as requests give them and as templates
take them: OpenAI's forms, of which we know text. `passed_of`: what a request asks of an engine's
own sampler, which ours does not have (output held to a form, some changes of the logits)."""

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from xgpt.core.errors import shorten
from xgpt.requests.forms import why_wrong

Message: TypeAlias = "dict[str, Any]"  # role, content, which is text, if any; what else is said
ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_TOOLS = 128  # as OpenAI's


class BadRecord(Exception):
    """A record that cannot be used, and the reason."""

    def __init__(self, why: str, code: str | None = None) -> None:
        """`code`: error code of OpenAI's batch service for a line that is no request; None: its
        endpoint would refuse the request."""
        super().__init__(why)
        self.code = code


def check_encodable(value: str, key: str) -> None:
    """Raises BadRecord for half of a surrogate pair (JSON's "\\ud800"), which tokenizers and files
    refuse."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise BadRecord(f"{key} holds a lone surrogate, which is no character") from None


def messages_of(value: object) -> tuple[Message, ...]:
    """The messages of a request. Raises BadRecord."""
    if not isinstance(value, list) or not value:
        raise BadRecord("messages must be a list of at least one message")
    return tuple(_message(item) for item in value)


def tools_of(body: Mapping[str, Any]) -> str:
    """The functions that an answer may call, as JSON; "" if there are none, or `tool_choice` rules
    them out. Raises BadRecord."""
    value = body.get("tools")
    if value in (None, []) or body.get("tool_choice") == "none":
        return ""
    if not isinstance(value, list) or len(value) > MAX_TOOLS or not all(map(_is_function, value)):
        raise BadRecord(f"tools must be a list of at most {MAX_TOOLS} functions: "
                        '{"type": "function", "function": {"name": ..., "parameters": {...}}}')
    text = json.dumps(value)
    check_encodable(json.dumps(value, ensure_ascii=False), "tools")
    return text


def options_of(body: Mapping[str, Any]) -> str:
    """A request's arguments of the chat template (`enable_thinking`), as JSON; "" for none. Raises
    BadRecord."""
    value = body.get("chat_template_kwargs")
    if not isinstance(value, (dict, type(None))):
        raise BadRecord("chat_template_kwargs must be an object of names and values")
    check_encodable(json.dumps(value, ensure_ascii=False), "chat_template_kwargs")
    return json.dumps(value) if value else ""


def _is_function(item: object) -> bool:
    function = item.get("function") if isinstance(item, dict) else None
    return (isinstance(item, dict) and item.get("type") == "function"
            and isinstance(function, dict) and isinstance(function.get("name"), str)
            and isinstance(function.get("parameters", {}), dict))


def _message(item: object) -> Message:
    if not isinstance(item, dict):
        raise BadRecord("a message must be an object with role and content")
    role, content = item.get("role"), item.get("content")
    if role not in ROLES:
        raise BadRecord(f"role = {shorten(role)}: known: {', '.join(ROLES)}")
    more = {key: value for key, value in item.items()
            if key not in ("role", "content") and value is not None}
    if isinstance(content, list):  # OpenAI's list of parts, of which we know text
        if not all(isinstance(part, dict) and part.get("type") == "text" and isinstance(
                part.get("text"), str) for part in content):
            raise BadRecord("content parts other than text are not supported")
        content = "".join(part["text"] for part in content)
    if content is not None or not more.get("tool_calls"):
        if not isinstance(content, str):
            raise BadRecord("content of a message must be text")
        check_encodable(content, "content")
        more = {"content": content, **more}
    if more.get("tool_calls"):
        more["tool_calls"] = _calls(more["tool_calls"])
    for key in more.keys() - {"content"}:  # a cell of a table may be no JSON
        more[key] = json.loads(text := json.dumps(more[key], ensure_ascii=False, default=str))
        check_encodable(text, f"{shorten(key)} of a message")
    return {"role": str(role), **more}


def _calls(value: object) -> list[dict[str, Any]]:
    """Earlier tool calls with arguments as objects, which templates write as JSON themselves.
    Raises BadRecord."""
    if not isinstance(value, list):
        raise BadRecord("tool_calls must be a list")
    calls = []
    for item in value:
        function = item.get("function") if isinstance(item, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRecord("a tool call must have a function with a name")
        arguments = function.get("arguments", {})
        try:
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except ValueError as cause:
            raise BadRecord(f"arguments of a tool call are no JSON: {cause}") from None
        calls.append({"type": "function", **item, "id": str(item.get("id", "")),
                      "function": {**function, "arguments": arguments}})
    return calls


# of the logits of a step, so that a query that comes back after an eviction goes on as it began;
# penalties of output tokens alone would not
_OF_LOGITS = ("min_p", "logit_bias")
_TEXT: tuple[str, Callable[[Any], object]] = (
    "text that is not empty", lambda value: isinstance(value, str) and value)
_KINDS: dict[str, tuple[str, Callable[[Any], object]]] = {
    "json": ("a JSON schema, which is an object", lambda value: isinstance(value, dict)),
    "json_object": ("true", lambda value: value is True), "regex": _TEXT, "grammar": _TEXT,
    "choice": ("a list of texts", lambda value: isinstance(value, list) and value and all(
        isinstance(one, str) and one for one in value))}
_FORM = "structured_outputs"


def passed_of(asked: Mapping[str, Any], usual: str = "", *, checks_form: bool = False) -> str:
    """vLLM's sampling parameters of a request, as JSON; `usual` without any. `checks_form`: checks
    that our own engine can keep the answer's form. Raises BadRecord."""
    given = {key: asked[key] for key in _OF_LOGITS if asked.get(key)}
    form = _of_response_format(asked["response_format"]) if "response_format" in asked else None
    where = "response_format.json_schema.schema"
    if _FORM in asked:
        if form is not None:
            raise BadRecord(f"response_format, {_FORM}: an answer has one form")
        value = asked[_FORM]
        if not isinstance(value, dict) or len(value) != 1 or next(iter(value)) not in _KINDS:
            raise BadRecord(f"{_FORM} must be an object with one of {', '.join(_KINDS)}")
        (kind, held), = value.items()
        form, where = _checked(kind, held, f"{_FORM}.{kind}"), f"{_FORM}.{kind}"
    if form is not None:
        if checks_form and (why := why_wrong(*next(iter(form.items())))):
            raise BadRecord(where + why)
        given[_FORM] = form
    elif usual:
        given |= json.loads(usual)
    text = json.dumps(given, ensure_ascii=False) if given else ""
    check_encodable(text, ", ".join(given))
    return text


def has_form(passed: str) -> bool:
    """Whether the request restricts its output to choices or a schema, which also decide its end.
    """
    return bool(form_of(passed))


def form_of(passed: str) -> dict[str, Any]:
    """The form among what is passed to a sampler, such as {"choice": [...]}; {} where none is."""
    return dict(json.loads(passed).get(_FORM, {})) if passed else {}


def form_text(kind: str, value: Any) -> str:
    """The form as `passed_of` returns it."""
    return json.dumps({_FORM: {kind: value}}, ensure_ascii=False)


def _of_response_format(value: object) -> dict[str, Any] | None:
    """A response_format as vLLM's `structured_outputs`; None for plain text. Raises BadRecord."""
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
    if kind == "json" and isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as cause:
            raise BadRecord(f"{key} is not JSON: {cause}") from None
    words, is_one = _KINDS[kind]
    if not is_one(value):
        raise BadRecord(f"{key} must be {words}")
    return {kind: value}
