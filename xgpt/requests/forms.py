"""Forms that an answer must have (a JSON schema, a list of choices, a regular expression), as
grammars of llguidance. That library is an extra: without it no form is checked here."""

import importlib.util
import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, cast

from xgpt.core.errors import MissingExtraError

# At most one space between the parts of a JSON text: a model could write blanks without end.
_JSON_RULES = {"whitespace_pattern": " ?"}
_DEFINITIONS = ("$defs", "definitions")
_BY_NAME = (*_DEFINITIONS, "properties", "patternProperties")
_SCHEMAS = (*_BY_NAME, "anyOf", "oneOf", "allOf", "prefixItems", "items", "additionalProperties")


def library() -> Any:
    """The module llguidance. Raises MissingExtraError."""
    try:
        import llguidance
    except ImportError:
        raise MissingExtraError("llguidance", "structured", "answers held to a form") from None
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
    """The reason why a form is refused, after its path in a JSON schema (".items: ..."). It is ""
    for a good form, and if llguidance is not installed."""
    is_there = importlib.util.find_spec("llguidance") is not None
    return _why_wrong(json.dumps({kind: value})) if is_there else ""


@lru_cache(256)
def _why_wrong(text: str) -> str:
    form = json.loads(text)
    if "json" in form:
        return _wrong_part(form["json"], {
            key: form["json"][key] for key in _DEFINITIONS if key in form["json"]})
    return f": {why}" if (why := _error_of(form)) else ""


def _wrong_part(schema: Mapping[str, Any], definitions: Mapping[str, Any], path: str = "") -> str:
    """"PATH: REASON" of the smallest schema within that is wrong by itself; "" if none is."""
    if not (why := _error_of({"json": {**definitions, **schema}})):
        return ""
    within = (_wrong_part(part, definitions, f"{path}.{key}") for key, part in _parts(schema)
              if isinstance(part, dict))
    return next(filter(None, within), f"{path}: {why}")


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the schemas within a schema, each with its path there; the definitions first, which
    the others may refer to."""
    for key in _SCHEMAS:
        value = schema.get(key)
        if isinstance(value, list):
            yield from ((f"{key}[{place}]", part) for place, part in enumerate(value))
        elif key in _BY_NAME and isinstance(value, dict):
            yield from ((f"{key}.{name}", part) for name, part in value.items())
        else:
            yield key, value


def _error_of(form: Mapping[str, Any]) -> str:
    """llguidance's objection to a form, in a line; "" for none."""
    try:
        why = str(library().LLMatcher.validate_grammar(grammar_of(form)))
    except ValueError as cause:
        why = str(cause)
    # the first line on a regular expression says only that it cannot be read
    return why.rpartition("\nerror: ")[2].partition("\n")[0]
