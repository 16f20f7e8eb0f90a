"""Schemas of dataclasses and NamedTuples, from their annotations."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from xgpt.core.controls import Controls
from xgpt.core.policies import policies

Json = dict[str, Any]
NUMBER: Json = {"anyOf": [{"type": "number"}, {"enum": ["inf", "-inf", "nan"]}]}
_PLAIN: dict[Any, Json] = {str: {"type": "string"}, int: {"type": "integer"}, float: NUMBER,
                           bool: {"type": "boolean"}, type(None): {"type": "null"}, Any: {}}


def of_type(kind: Any) -> Json:
    """JSON has no infinity: it stands as the text "inf" where a number would."""
    if kind in _PLAIN:
        return _PLAIN[kind]
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return {"anyOf": [of_type(each) for each in arguments]}
    if origin is Literal:
        return {"enum": [*arguments]}
    if origin is tuple:
        if arguments[-1] is ...:
            return {"type": "array", "items": of_type(arguments[0])}
        return {"type": "array", "prefixItems": [of_type(each) for each in arguments],
                "minItems": len(arguments), "maxItems": len(arguments)}
    if origin is not None and issubclass(origin, Mapping):
        return {"type": "object"}
    if kind is Controls:
        rows = {row.load("controls") for row in policies()}
        return {"anyOf": [of_fields(each) for each in sorted(rows, key=lambda each: each.__name__)]}
    return of_fields(kind)


def of_fields(kind: Any, **others: Json) -> Json:
    """An object with all fields of a dataclass or NamedTuple, and `others`."""
    names = [each.name for each in fields(kind)] if is_dataclass(kind) else kind._fields
    hints, words = get_type_hints(kind), " ".join((kind.__doc__ or "").split())
    # those of its own kind, which have none
    inner = {name for name in names if hints[name] == tuple[kind, ...]}
    own = {name: of_type(hints[name]) for name in names if name not in inner}
    alone = {"type": "array", "items": of_keys(own)}
    return of_keys({**own, **dict.fromkeys(inner, alone), **others}, words=words,
                   without=("placement",))  # of a pool on its devices alone


def of_keys(properties: Mapping[str, Json], *, words: str = "", without: tuple[str, ...] = (),
            ) -> Json:
    """An object of these keys and no others; those in `without` need not be there."""
    return {**({"description": words} if words else {}), "type": "object",
            "additionalProperties": False, "properties": dict(properties),
            "required": [key for key in properties if key not in without]}
