"""Forms that an answer must have (a JSON schema, a list of choices, a regular expression), as
grammars of llguidance. That library is an extra: without it no form is checked here."""

import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, cast

from xgpt.core.errors import MissingExtraError

EXTRA = "structured"
# At most one space between the parts of a JSON text: a model could write blanks without end.
_JSON_RULES = {"whitespace_pattern": " ?"}
_DEFINITIONS = ("$defs", "definitions")
_SCHEMAS_BY_NAME = (*_DEFINITIONS, "properties", "patternProperties")
_LISTS_OF_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties")


def library() -> Any:
    """The module llguidance. Raises MissingExtraError."""
    try:
        import llguidance
    except ImportError:
        raise MissingExtraError("llguidance", EXTRA, "answers held to a form") from None
    return llguidance


def grammar_of(form: Mapping[str, Any]) -> str:
    """The grammar of a form with one key, such as {"choice": ["yes", "no"]}. Raises ValueError for
    a text that is no grammar."""
    (kind, value), = form.items()
    if kind == "json_object":
        kind, value = "json", {"type": "object"}
    if kind == "json":
        return cast(str, library().LLMatcher.grammar_from_json_schema(
            value, overrides=_JSON_RULES))
    text = json.dumps(value) if kind == "choice" else value
    return cast(str, library().grammar_from(kind, text))


def why_wrong(kind: str, value: Any) -> str:
    """The reason why a form is refused, after its path in a JSON schema (".items.type: ..."). It is
    "" for a good form, and if llguidance is not installed."""
    try:
        library()
    except MissingExtraError:
        return ""
    return _why_wrong(json.dumps({kind: value}))


@lru_cache(256)
def _why_wrong(text: str) -> str:
    (kind, value), = json.loads(text).items()
    if kind == "json":
        return ": ".join(_wrong_part(value, {
            key: value[key] for key in _DEFINITIONS if key in value}, ""))
    why = _error_of({kind: value})
    return f": {why}" if why else ""


def _wrong_part(schema: Mapping[str, Any], definitions: Mapping[str, Any],
                path: str) -> tuple[str, ...]:
    """(path, reason) of the smallest part that is wrong by itself; () if none is."""
    if not (why := _error_of({"json": {**definitions, **schema}})):
        return ()
    for key, part in _parts(schema):
        if isinstance(part, dict) and (found := _wrong_part(part, definitions, f"{path}.{key}")):
            return found
    for key, value in schema.items():
        if key not in _DEFINITIONS and (own := _error_of({"json": {**definitions, key: value}})):
            return f"{path}.{key}", own
    return path, why


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the schemas within a schema, each with its path there; the definitions first, which
    the others may refer to."""
    for key in _SCHEMAS_BY_NAME:
        named = schema.get(key)
        yield from ((f"{key}.{name}", part) for name, part in (
            named.items() if isinstance(named, dict) else ()))
    for key in _LISTS_OF_SCHEMAS:
        listed = schema.get(key)
        yield from ((f"{key}[{place}]", part) for place, part in enumerate(
            listed if isinstance(listed, list) else ()))
    yield from ((key, schema[key]) for key in _SCHEMAS if key in schema)


def _error_of(form: Mapping[str, Any]) -> str:
    """llguidance's objection to a form, in a line; "" for none."""
    try:
        why = library().LLMatcher.validate_grammar(grammar_of(form))
    except ValueError as cause:
        why = str(cause)
    lines = str(why).splitlines() or [""]
    # of a regular expression the first line says only that it cannot be read
    return next((line for line in lines if line.startswith("error: ")), lines[0]).removeprefix(
        "error: ")
